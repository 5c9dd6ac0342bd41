package confine

import "golang.org/x/sys/unix"

var archRuntime = []uintptr{unix.SYS_PIPE2}
