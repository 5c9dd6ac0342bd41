package confine

import "golang.org/x/sys/unix"

var archRuntime = []uintptr{unix.SYS_EPOLL_WAIT, unix.SYS_ARCH_PRCTL, unix.SYS_PIPE2}
