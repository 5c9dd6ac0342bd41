package routes

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A place is a network namespace with a thread that stays in it.
type place struct {
	ns   *os.File // immutable
	jobs chan func()
}

// newPlace makes a network namespace and a thread inside.
func newPlace() (*place, error) {
	p := &place{jobs: make(chan func())}
	errc := make(chan error, 1)
	onOwnThread(func() {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("make network namespace: %w", err)
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			errc <- fmt.Errorf("open network namespace: %w", err)
			return
		}
		p.ns = ns
		errc <- nil
		for job := range p.jobs {
			job()
		}
	})
	if err := <-errc; err != nil {
		return nil, err
	}
	return p, nil
}

// onOwnThread runs f on a thread that ends with it, so no later work lands in f's namespace and the
// thread does not keep the namespace. The process's first thread never ends: a goroutine that finds
// itself there holds it until f has another.
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread() // unlocked on the first thread only
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		elsewhere := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(elsewhere)
			f()
		}()
		<-elsewhere
		runtime.UnlockOSThread()
	}()
}

// do runs f on the thread in the namespace. f must not start goroutines that rely on it.
func (p *place) do(f func() error) error {
	errc := make(chan error, 1)
	p.jobs <- func() { errc <- f() }
	return <-errc
}

// leaveThread ends the thread; ns stays open.
func (p *place) leaveThread() { close(p.jobs) }

// leave ends the thread and drops the reference; it does not wait for the kernel.
func (p *place) leave() error {
	p.leaveThread()
	return p.ns.Close()
}

// undo is a stack of steps that take back what was made; newest last.
type undo []func() error

func (u *undo) run() (err error) {
	steps := *u
	*u = nil
	for i := len(steps) - 1; i >= 0; i-- {
		err = errors.Join(err, steps[i]())
	}
	return err
}
