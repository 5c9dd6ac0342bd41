package routes

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/sidecar"
)

// A sidecarProcess is a running sidecar and the goroutine that waits for it.
type sidecarProcess struct {
	cmd   *exec.Cmd
	ready *os.File      // read end
	done  chan struct{} // closed once it is reaped and, if it was the present one, forwarding is off
	dead  bool          // guarded by Topology.mu; set before done is closed
}

// startSidecar starts a sidecar in the namespace. Its death at any later time switches forwarding
// off before anyone is told.
func (t *Topology) startSidecar() (*sidecarProcess, *os.File, error) {
	ours, theirs, err := control.Pair()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	readyR, readyW, err := os.Pipe()
	if err != nil {
		ours.Close()
		return nil, nil, err
	}
	defer readyW.Close()
	p := &sidecarProcess{ready: readyR, done: make(chan struct{})}
	p.cmd = &exec.Cmd{
		Path: t.exe, Args: t.argv, Env: []string{"GOMAXPROCS=1", "GOTRACEBACK=none"}, Dir: "/",
		ExtraFiles:  []*os.File{theirs, readyW},
		SysProcAttr: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	// Pdeathsig follows the thread, and this one lives as long as the topology.
	if err := t.sidecar.do(p.cmd.Start); err != nil {
		ours.Close()
		readyR.Close()
		return nil, nil, fmt.Errorf("start the sidecar: %w", err)
	}
	go func() {
		_ = p.cmd.Wait()
		t.mu.Lock()
		p.dead = true
		if t.proc == p && !t.closed {
			_ = t.sidecar.do(func() error { return forwarding(false, t.ipv6) })
		}
		t.mu.Unlock()
		close(p.done)
	}()
	return p, ours, nil
}

// waitReady waits until the sidecar is confined and serves.
func (p *sidecarProcess) waitReady() error {
	defer p.ready.Close()
	text, err := io.ReadAll(io.LimitReader(p.ready, 4096))
	switch {
	case err != nil:
		return fmt.Errorf("sidecar: %w", err)
	case string(text) == sidecar.Ready:
		return nil
	case len(text) > 0:
		return fmt.Errorf("sidecar: %s", text)
	}
	<-p.done
	return fmt.Errorf("sidecar: %s", p.cmd.ProcessState)
}

func (p *sidecarProcess) kill() error {
	_ = p.cmd.Process.Kill() // it may be gone already
	<-p.done
	return nil
}
