package nsenter

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// DomainNamespaces are the namespaces that a Domain has of its own (SR-12).
const DomainNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS |
	unix.CLONE_NEWCGROUP | unix.CLONE_NEWNET

// ErrUserNS is returned by [Child.Start] when the system refuses to make the namespaces; the hint is in the doctor.
var ErrUserNS = errors.New("this system does not let an ordinary user make namespaces")

// Child describes a role to start.
type Child struct {
	Role       string
	Namespaces uintptr    // CLONE_NEW… flags, 0 for none
	IDs        *IDMap     // required when Namespaces has CLONE_NEWUSER
	Files      []*os.File // passed on; the caller keeps its copies
	Stderr     *os.File   // nil: /dev/null
	Cgroup     *os.File   // cgroup v2 directory to start in; nil: the parent's
	Outlives   bool       // it may live on when the parent ends; it still sees the end of its control connection
}

// Process is a started role. Its owner must Wait for it.
type Process struct {
	*os.Process
	Control *Conn
}

// Start starts the role. On success the caller owes a Kill and Wait, and owns Control.
func (c Child) Start() (p *Process, err error) {
	control, theirs, err := Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close() // a copy kept here would hide our own death from the child
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		control.Close()
		return nil, err
	}
	defer null.Close()
	stderr := c.Stderr
	if stderr == nil {
		stderr = null
	}
	id := 0
	attr := &syscall.SysProcAttr{Setsid: true, Cloneflags: c.Namespaces}
	if !c.Outlives {
		attr.Pdeathsig = syscall.SIGKILL
	}
	if c.IDs != nil {
		id = int(c.IDs.Kind) + 1
		// Ambient capabilities survive the exec although the uid is not mapped yet (capabilities(7)).
		attr.AmbientCaps = allCapabilities()
	}
	if c.Cgroup != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(c.Cgroup.Fd())
	}
	var proc *os.Process
	onLastingThread(func() {
		proc, err = os.StartProcess("/proc/self/exe", []string{RoleName(c.Role), fmt.Sprintf("%d,%d", id, len(c.Files))},
			&os.ProcAttr{Dir: "/", Env: []string{}, Files: append([]*os.File{null, null, stderr, theirs}, c.Files...), Sys: attr})
	})
	if err != nil {
		control.Close()
		return nil, explainClone(c.Role, err)
	}
	p = &Process{Process: proc, Control: control}
	if c.IDs != nil {
		err = c.IDs.write(proc.Pid)
		if err == nil {
			err = control.Send("mapped")
		}
		if err != nil {
			p.End()
			return nil, fmt.Errorf("map ids of %q: %w", c.Role, err)
		}
	}
	return p, nil
}

// End kills the process, waits until it is gone, and with it, if it is pid 1 of a namespace, all others there
// (pid_namespaces(7)).
func (p *Process) End() {
	p.Control.Close()
	_ = p.Kill()
	_, _ = p.Wait()
}

// explainClone translates the errnos of clone(2) that mislead.
func explainClone(role string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("start %q: the limit on namespaces is used up (/proc/sys/user/max_*_namespaces): %w: %w", role, ErrUserNS, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("start %q: %w: %w", role, ErrUserNS, err)
	}
	return fmt.Errorf("start %q: %w", role, err)
}

// holdRole is a role that only exists: [UserNamespace] takes its namespace.
const holdRole = "hold"

// UserNamespace makes a user namespace with the given id map and returns it; no process remains in it. Its caller is real
// root.
func UserNamespace(ids *IDMap) (*os.File, error) {
	p, err := Child{Role: holdRole, Namespaces: unix.CLONE_NEWUSER, IDs: ids}.Start()
	if err != nil {
		return nil, err
	}
	defer p.End()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
}

var (
	lastingOnce sync.Once
	lastingWork chan func()
)

// onLastingThread runs f on a thread that lives as long as this process: PR_SET_PDEATHSIG fires when the *thread* that
// forked ends (prctl(2)), and Go ends threads as it likes.
func onLastingThread(f func()) {
	lastingOnce.Do(func() {
		lastingWork = make(chan func())
		go func() {
			runtime.LockOSThread()
			for f := range lastingWork {
				f()
			}
		}()
	})
	done := make(chan struct{})
	lastingWork <- func() { defer close(done); f() }
	<-done
}

// allCapabilities lists what this kernel knows (/proc/sys/kernel/cap_last_cap); raising an unknown one would fail.
func allCapabilities() []uintptr {
	last := unix.CAP_LAST_CAP
	if b, err := os.ReadFile("/proc/sys/kernel/cap_last_cap"); err == nil {
		if n, err := strconv.Atoi(string(bytes.TrimSpace(b))); err == nil {
			last = n
		}
	}
	caps := make([]uintptr, last+1)
	for i := range caps {
		caps[i] = uintptr(i)
	}
	return caps
}

// becomeRoot waits for the id map and takes uid 0 of the namespace, keeping the capabilities that the creator has there.
func becomeRoot(control *Conn, kind MapKind) error {
	var word string
	if _, err := control.Recv(&word); err != nil || word != "mapped" {
		return fmt.Errorf("wait for the id map: %q, %w", word, err)
	}
	if kind != MapSingle {
		// The developer's supplementary groups are not the agent's.
		if err := syscall.Setgroups(nil); err != nil {
			return fmt.Errorf("drop supplementary groups: %w", err)
		}
	}
	if err := syscall.Setresgid(0, 0, 0); err != nil {
		return fmt.Errorf("become group 0: %w", err)
	}
	if err := syscall.Setresuid(0, 0, 0); err != nil {
		return fmt.Errorf("become user 0: %w", err)
	}
	// A change of ids clears both: dumpable decides who owns /proc/self.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("stay dumpable: %w", err)
	}
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("clear ambient capabilities: %w", e)
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("die with the parent: %w", err)
	}
	return nil
}

// UserNSHint is what to type when [ErrUserNS] is met; sysctl reads a file below /proc/sys.
func UserNSHint(sysctl func(name string) string) string {
	switch {
	case sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
		return "AppArmor restricts user namespaces here (Ubuntu 24.04 and later); allow lazaret with the profile in docs/apparmor.md, or: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
	case sysctl("kernel/unprivileged_userns_clone") == "0":
		return "sudo sysctl kernel.unprivileged_userns_clone=1"
	case sysctl("user/max_user_namespaces") == "0":
		return "sudo sysctl user.max_user_namespaces=28633"
	}
	return "a container or a security module denies it: run outside of the container, or see 'lazaret doctor'"
}

// Sysctl reads a kernel setting, "" if it is not there.
func Sysctl(name string) string {
	b, _ := os.ReadFile("/proc/sys/" + name)
	return strings.TrimSpace(string(b))
}
