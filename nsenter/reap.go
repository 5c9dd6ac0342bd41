package nsenter

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reaper is the duty of pid 1: it waits for every child, its own and those that others left behind (pid_namespaces(7)).
// A process that has one starts its children through it. With os/exec, whose Wait then only tells that the child has ended
// but not how, it can start those whose status does not matter.
type Reaper struct {
	mu    sync.Mutex
	mine  map[int]chan unix.WaitStatus // children started here and not yet reaped
	begun sync.Cond                    // a child was added to mine
}

// NewReaper starts to reap. It goes on for the life of the process.
func NewReaper() *Reaper {
	r := &Reaper{mine: map[int]chan unix.WaitStatus{}}
	r.begun.L = &r.mu
	// os tries once whether it can use pidfds, with a child of its own: before we take its children from it. Without pidfds
	// it would signal a process by its number after it was reaped here.
	_, _ = os.FindProcess(os.Getpid())
	go r.run()
	return r
}

func (r *Reaper) run() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WALL, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			r.mu.Lock() // no child is left, so none can be orphaned either until one is started
			for len(r.mine) == 0 {
				r.begun.Wait()
			}
			r.mu.Unlock()
		case err == nil:
			r.mu.Lock() // a child that ends at once is registered before the lock is given back
			if c := r.mine[pid]; c != nil {
				c <- ws
				delete(r.mine, pid)
			}
			r.mu.Unlock()
		}
	}
}

// Command is a program to start in the namespaces of this process.
type Command struct {
	Path  string
	Args  []string // with the name
	Env   []string
	Files []*os.File // descriptors 0, 1, 2, …; the caller keeps its copies; nil entries are closed
	TTY   bool       // Files[0] becomes the controlling terminal of a new session
}

// Started is a child of a [Reaper].
type Started struct {
	Pid    int
	status chan unix.WaitStatus // one value
}

// Wait returns how the child ended. It may be called once.
func (s *Started) Wait() unix.WaitStatus { return <-s.status }

// Signal sends a signal to the child; it must not have been waited for.
func (s *Started) Signal(sig unix.Signal) error { return unix.Kill(s.Pid, sig) }

// Start starts c in a session of its own.
func (r *Reaper) Start(c Command) (*Started, error) {
	files := make([]uintptr, len(c.Files))
	for i, f := range c.Files {
		files[i] = ^uintptr(0)
		if f != nil {
			files[i] = f.Fd()
		}
	}
	attr := &syscall.ProcAttr{Dir: "/", Env: c.Env, Files: files, Sys: &syscall.SysProcAttr{Setsid: true, Setctty: c.TTY}}
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(c.Path, c.Args, attr)
	runtime.KeepAlive(c.Files)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	s := &Started{Pid: pid, status: make(chan unix.WaitStatus, 1)}
	r.mine[pid] = s.status
	r.begun.Signal()
	return s, nil
}

// ExitStatus is a shell's view of ws: the exit code, or 128 and the signal's number.
func ExitStatus(ws unix.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}
