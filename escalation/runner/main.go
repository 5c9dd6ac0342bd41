package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Main is the runner role. Its control socket is descriptor 3; it takes one order, runs one command, and returns the
// process's exit status. It must be called before any other goroutine was started.
func Main() int {
	// The command's Pdeathsig follows this thread, so it has to last as long as the process.
	runtime.LockOSThread()
	os.Clearenv()
	defaultSignals()
	if err := isolate(); err != nil {
		return 2
	}
	f := os.NewFile(fdControl, "control")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return 2
	}
	control, ok := c.(*net.UnixConn)
	if !ok {
		return 2
	}
	r := runner{control: control, out: json.NewEncoder(control), last: make(chan os.Signal, 4)}
	// Caught, not ignored: an ignored signal would stay ignored in the command.
	signal.Notify(r.last, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	if err := r.serve(); err != nil {
		_ = r.out.Encode(message{Failed: err.Error(), Changed: errors.Is(err, ErrChanged)})
		return 1
	}
	return 0
}

// isolate detaches the runner from its parent's session and makes it the one that orphans of the command come back to.
func isolate() error {
	_, _ = unix.Setsid() // fails only for a group leader, which has no terminal of ours either
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0); err != nil {
		return fmt.Errorf("set death signal: %w", err)
	}
	if err := unix.CloseRange(fdControl+1, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close descriptors: %w", err)
	}
	unix.CloseOnExec(fdControl)
	return unix.Chdir("/")
}

type runner struct {
	control *net.UnixConn
	out     *json.Encoder
	last    chan os.Signal // the coordinator died, or somebody wants us to
}

func (r *runner) serve() error {
	o, files, err := receiveOrder(r.control)
	if errors.Is(err, io.EOF) {
		return nil // a spare that was never needed
	}
	if err != nil {
		return err
	}
	p := o.plan(files)
	exe, inherit, err := p.executable()
	if err != nil {
		return err
	}
	if err := r.out.Encode(message{Ready: true}); err != nil {
		return err
	}
	in := json.NewDecoder(r.control)
	var m message
	if err := in.Decode(&m); err != nil || !m.Go {
		return nil // called off
	}
	if err := p.verify(); err != nil {
		return err
	}
	attr := &syscall.ProcAttr{
		Env:   p.Env,
		Files: append([]uintptr{files[0].Fd(), files[1].Fd(), files[2].Fd()}, inherit...),
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	if o.Cgroup {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(files[len(files)-1].Fd())
	}
	if err := unix.Fchdir(int(p.Dir.File.Fd())); err != nil {
		return fmt.Errorf("enter %q: %w", p.Dir.Path, err)
	}
	pid, err := syscall.ForkExec(exe, p.Argv, attr)
	_ = unix.Chdir("/")
	for _, f := range files[:3] {
		f.Close() // a copy kept here would hide the end of the command's output
	}
	if err != nil {
		return fmt.Errorf("execute %s: %w", p.Program.Path, err)
	}
	exit := r.supervise(newFamily(pid), in)
	return r.out.Encode(message{Ended: &exit})
}

// executable returns the path to execute and descriptors that the command must inherit from number 3 on.
func (p *Plan) executable() (path string, inherit []uintptr, err error) {
	if !p.Program.Ours || p.ByPath {
		return p.Program.Path, nil, nil
	}
	sealed, err := p.Program.seal()
	if err != nil {
		return "", nil, err
	}
	if !p.Program.Script {
		return fmt.Sprintf("/proc/self/fd/%d", sealed.Fd()), nil, nil // closed by the execution itself
	}
	return "/proc/self/fd/3", []uintptr{sealed.Fd()}, nil // the interpreter opens it again
}

// supervise returns when nothing of the command is left.
func (r *runner) supervise(f *family, in *json.Decoder) Exit {
	orders := make(chan message)
	go func() {
		for {
			var m message
			if err := in.Decode(&m); err != nil {
				m = message{Kill: true} // the coordinator is gone
			}
			select {
			case orders <- m:
			case <-f.gone:
				return
			}
			if m.Kill && m.Grace == 0 {
				return
			}
		}
	}()
	for {
		select {
		case <-f.ended:
			return f.result()
		case <-r.last:
			f.killAll()
		case m := <-orders:
			switch {
			case m.Kill && m.Grace > 0:
				f.signalGroup(unix.SIGTERM)
				time.AfterFunc(m.Grace, func() { f.signalGroup(unix.SIGKILL) })
			case m.Kill:
				f.killAll()
			}
		}
	}
}

// family is the command and all its descendants.
type family struct {
	leader int           // pid, and ID of the process group
	ended  chan struct{} // closed when the leader has ended
	gone   chan struct{} // closed when there is no child left

	mu     sync.Mutex // held while a child is reaped or signalled: a pid under it is still the child's
	reaped bool       // the leader's pid is free
	status unix.WaitStatus
}

func newFamily(leader int) *family {
	f := &family{leader: leader, ended: make(chan struct{}), gone: make(chan struct{})}
	go f.reap()
	return f
}

func (f *family) reap() {
	defer close(f.gone)
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return // ECHILD
		}
		f.mu.Lock()
		var st unix.WaitStatus
		pid, err := unix.Wait4(-1, &st, unix.WNOHANG, nil)
		if err == nil && pid == f.leader {
			f.reaped, f.status = true, st
			close(f.ended)
		}
		f.mu.Unlock()
	}
}

func (f *family) signalGroup(s unix.Signal) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.reaped {
		_ = unix.Kill(-f.leader, s)
	}
}

// killAll kills the command; result then kills what it leaves.
func (f *family) killAll() { f.signalGroup(unix.SIGKILL) }

// result kills everything that the ended command left behind, and returns how it ended.
func (f *family) result() Exit {
	left := f.killRest()
	e := Exit{Status: f.status.ExitStatus(), Left: left}
	if f.status.Signaled() {
		e.Status, e.Signal = -1, int(f.status.Signal())
	}
	return e
}

// killRest kills our children until there are none: the children of a killed process become ours. It returns how many
// are left after a while, as some cannot be killed by the developer.
func (f *family) killRest() int {
	wait := 200 * time.Microsecond // long enough for the reaper to see that there are none, as a rule
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); wait = min(2*wait, 20*time.Millisecond) {
		select {
		case <-f.gone:
			return 0
		case <-time.After(wait):
		}
		f.mu.Lock()
		for _, pid := range children() {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		f.mu.Unlock()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(children())
}
