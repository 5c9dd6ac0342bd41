package runner

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigaction is the kernel's struct for rt_sigaction(2); its zero value is the default action.
type sigaction struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

const (
	sigIgnore  = 1  // SIG_IGN
	lastSignal = 64 // _NSIG
)

// defaultSignals gives every ignored signal its default action again: an ignored one would stay so in the command
// (signal(7)). Besides nohup, whatever is started by glibc's posix_spawn ignores two of glibc's own. The Go runtime's handlers
// are left alone.
func defaultSignals() {
	for sig := uintptr(1); sig <= lastSignal; sig++ {
		var now, reset sigaction
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, 0, uintptr(unsafe.Pointer(&now)), 8, 0, 0); e == 0 && now.handler == sigIgnore {
			unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&reset)), 0, 8, 0, 0)
		}
	}
}
