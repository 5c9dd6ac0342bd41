// Package confine takes away from a helper process what it does not need: the file tree,
// capabilities, and system calls. Each step is for good.
package confine

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/seccomp"
)

// EmptyRoot replaces the file tree of the calling process by an empty read-only directory. The
// caller is alone in its mount namespace and no longer needs /proc. Its working directory becomes
// the new root.
func EmptyRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Any directory will do as the place to mount on; /proc is one that is always there.
	const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("tmpfs", "/proc", "tmpfs", flags, "size=4k,mode=0555"); err != nil {
		return fmt.Errorf("mount the empty root: %w", err)
	}
	if err := unix.Chdir("/proc"); err != nil {
		return fmt.Errorf("enter the empty root: %w", err)
	}
	// With both arguments the same, the old root ends up on top of the new one, from where it is
	// taken off at once.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot to the empty root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach the old root: %w", err)
	}
	return unix.Chdir("/")
}

// KeepCapabilities drops all capabilities but those given, in all sets and all threads, and
// forbids to gain any. It needs a binary without cgo.
func KeepCapabilities(keep ...uintptr) error {
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("set no_new_privs: %w", e)
	}
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("clear ambient capabilities: %w", e)
	}
	var mask uint64
	for _, c := range keep {
		mask |= 1 << c
	}
	// The bounding set can be reduced only by who has CAP_SETPCAP; an unprivileged process has
	// nothing that no_new_privs does not stop already.
	if hasCapability(unix.CAP_SETPCAP) {
		for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
			if mask&(1<<c) != 0 {
				continue
			}
			_, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0)
			if e != 0 && e != syscall.EINVAL { // EINVAL: a capability that this kernel does not have
				return fmt.Errorf("drop capability %d from the bounding set: %w", c, e)
			}
		}
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	data[0].Effective, data[1].Effective = uint32(mask), uint32(mask>>32)
	data[0].Permitted, data[1].Permitted = data[0].Effective, data[1].Effective
	_, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0)
	if e != 0 {
		return fmt.Errorf("reduce capabilities: %w", e)
	}
	return nil
}

func hasCapability(c uint) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[c/32].Effective&(1<<(c%32)) != 0
}

// goRuntime is what a running Go program calls without being asked to.
var goRuntime = []uintptr{
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_GETTIMEOFDAY,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MINCORE, unix.SYS_BRK,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
	unix.SYS_TGKILL, unix.SYS_GETTID, unix.SYS_GETPID, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_MEMBARRIER, unix.SYS_GETRANDOM,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2,
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_PREAD64, unix.SYS_CLOSE, unix.SYS_FSTAT,
	unix.SYS_GETRLIMIT, unix.SYS_PRLIMIT64, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE,
}

// cloneThread are the flags with which a Go program starts a thread. A new process has none of them.
const cloneThread = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_THREAD

// Syscalls installs a filter for all threads: what a Go program needs, the calls allowed here, and
// the rules, which look at arguments. Every other call fails with EPERM, save the ones that start a
// program or touch another process, which kill: those are never a mistake.
func Syscalls(allow []uintptr, rules map[uintptr]seccomp.SyscallRule) error {
	allowed := seccomp.NewSyscallRules()
	for _, nr := range append(goRuntime, archRuntime...) {
		allowed.Set(nr, seccomp.MatchAll{})
	}
	for _, nr := range allow {
		allowed.Set(nr, seccomp.MatchAll{})
	}
	for nr, r := range rules {
		allowed.Set(nr, r)
	}
	allowed.Set(unix.SYS_CLONE, seccomp.PerArg{seccomp.MaskedEqual(cloneThread, cloneThread)})

	fatal := seccomp.NewSyscallRules()
	for _, nr := range []uintptr{
		unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV,
		unix.SYS_SETNS, unix.SYS_UNSHARE, unix.SYS_MOUNT, unix.SYS_BPF, unix.SYS_INIT_MODULE, unix.SYS_KEXEC_LOAD,
	} {
		fatal.Set(nr, seccomp.MatchAll{})
	}
	p := seccomp.Program{
		RuleSets: []seccomp.RuleSet{{Rules: fatal, Action: seccomp.KillProcess}, {Rules: allowed, Action: seccomp.Allow}},
		Options: seccomp.ProgramOptions{
			DefaultAction: seccomp.ReturnError.Code(uint16(unix.EPERM)),
			BadArchAction: seccomp.KillProcess,
			// The optimizer takes longer than all of a Domain's network; the program is a search tree
			// without it too.
			SkipOptimizations: true,
		},
	}
	prog, _, err := p.Build()
	if err != nil {
		return fmt.Errorf("build the system call filter: %w", err)
	}
	if err := seccomp.SetFilter(prog); err != nil {
		return fmt.Errorf("install the system call filter: %w", err)
	}
	return nil
}
