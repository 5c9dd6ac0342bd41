package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// RoleArg is argv[0] of a runner process.
const RoleArg = "lazaret [runner]"

// Config configures a [Host].
type Config struct {
	Exe    string   // binary whose main calls [Main] for this role; empty: /proc/self/exe
	Args   []string // its arguments, argv[0] included; nil: RoleArg alone
	Env    []string // environment of the runner itself, which clears it; the command never sees it
	Cgroup string   // delegated cgroup v2 directory, in which each command gets its own; empty: none
}

// Host runs plans on the host. Use [NewHost]; methods may be called from any goroutine.
type Host struct {
	cfg    Config
	starts chan chan started // to the starter's thread
	spare  chan *process     // one runner that has started already, to hide its start-up
	quit   chan struct{}
	once   sync.Once
	seq    atomic.Uint64
	wg     sync.WaitGroup
}

type started struct {
	p   *process
	err error
}

// NewHost returns a host; Close ends its runners and waits for them.
func NewHost(cfg Config) *Host {
	if cfg.Exe == "" {
		cfg.Exe = "/proc/self/exe"
	}
	if cfg.Args == nil {
		cfg.Args = []string{RoleArg}
	}
	h := &Host{cfg: cfg, starts: make(chan chan started), spare: make(chan *process, 1), quit: make(chan struct{})}
	h.wg.Add(1)
	go h.starter()
	h.refill()
	return h
}

// Close ends the host: commands are killed. It is idempotent.
func (h *Host) Close() {
	h.once.Do(func() { close(h.quit) })
	h.wg.Wait()
	select {
	case p := <-h.spare:
		p.discard()
	default:
	}
}

// starter starts runners from one thread that lives as long as the host: a death signal follows the thread that started
// the child, not the process.
func (h *Host) starter() {
	defer h.wg.Done()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		select {
		case <-h.quit:
			return
		case reply := <-h.starts:
			p, err := h.start()
			reply <- started{p, err}
		}
	}
}

// process is a runner process, from its start to its end.
type process struct {
	cmd     *exec.Cmd
	control *net.UnixConn
	once    sync.Once // for reap
}

func (h *Host) start() (*process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("start runner: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "runner"), os.NewFile(uintptr(fds[1]), "control")
	defer theirs.Close() // a copy kept here would hide the runner's death
	c, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		return nil, fmt.Errorf("start runner: %w", err)
	}
	cmd := &exec.Cmd{
		Path:        h.cfg.Exe,
		Args:        h.cfg.Args,
		Env:         append([]string{}, h.cfg.Env...),
		Dir:         "/",
		ExtraFiles:  []*os.File{theirs},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		c.Close()
		return nil, fmt.Errorf("start runner: %w", err)
	}
	return &process{cmd: cmd, control: c.(*net.UnixConn)}, nil
}

// get returns a runner, the spare one if there is one.
func (h *Host) get() (*process, error) {
	select {
	case p := <-h.spare:
		return p, nil
	default:
	}
	reply := make(chan started, 1)
	select {
	case h.starts <- reply:
		s := <-reply
		return s.p, s.err
	case <-h.quit:
		return nil, errors.New("start runner: the host is closed")
	}
}

func (h *Host) refill() {
	h.wg.Add(1)
	go func() {
		defer h.wg.Done()
		reply := make(chan started, 1)
		select {
		case h.starts <- reply:
		case <-h.quit:
			return
		}
		s := <-reply
		if s.err != nil {
			return // get will try again, and report it
		}
		select {
		case h.spare <- s.p:
		default:
			s.p.discard()
		}
	}()
}

// discard ends a runner that has no order, and reaps it.
func (p *process) discard() {
	p.control.Close()
	p.reap()
}

func (p *process) reap() { p.once.Do(func() { _ = p.cmd.Wait() }) }

// Run is one command's run. Its methods may be called from any goroutine.
type Run struct {
	proc   *process
	cgroup string
	ready  chan error // one value: nil when prepared
	done   chan struct{}
	quit   chan struct{}

	mu  sync.Mutex // guards writes to the control socket
	out *json.Encoder

	exit Exit  // valid after done
	err  error // valid after done: the command was not executed, or its end is not known
}

// Prepare hands the plan to a runner, which makes everything ready and waits for [Run.Start]. stdio is the run's from here
// on, also when Prepare fails; the plan stays the caller's until Done.
func (h *Host) Prepare(p *Plan, stdio Stdio) (*Run, error) {
	defer stdio.close()
	proc, err := h.get()
	if err != nil {
		return nil, err
	}
	o := newOrder(p)
	files := []*os.File{stdio.In, stdio.Out, stdio.Err, p.Dir.File, p.Program.File}
	if p.Dir.in != nil {
		files = append(files, p.Dir.in.Root)
	}
	r := &Run{proc: proc, ready: make(chan error, 1), done: make(chan struct{}),
		quit: h.quit, out: json.NewEncoder(proc.control)}
	if h.cfg.Cgroup != "" {
		g, err := r.makeCgroup(h.cfg.Cgroup, h.seq.Add(1))
		if err != nil {
			proc.discard()
			return nil, err
		}
		defer g.Close()
		o.Cgroup = true
		files = append(files, g)
	}
	if err := sendOrder(proc.control, o, files); err != nil {
		proc.discard()
		r.removeCgroup()
		return nil, err
	}
	h.wg.Add(1)
	go func() {
		defer h.wg.Done()
		r.watch()
		h.refill() // not before, as it would compete with the command for its start
		proc.reap()
	}()
	return r, nil
}

// watch follows the runner to its end.
func (r *Run) watch() {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		select {
		case <-r.quit:
			_ = r.proc.control.CloseWrite() // the runner reads EOF and kills
		case <-stop:
		}
	}()
	in := json.NewDecoder(r.proc.control)
	ended := false
	for !ended {
		var m message
		if err := in.Decode(&m); err != nil {
			if !errors.Is(err, io.EOF) {
				err = fmt.Errorf("runner: %w", err)
			} else {
				err = errors.New("runner ended early")
			}
			r.err = err
			break
		}
		switch {
		case m.Ready:
			r.ready <- nil
		case m.Failed != "":
			r.err, ended = errors.New(m.Failed), true
			if m.Changed {
				r.err = fmt.Errorf("%w: %s", ErrChanged, m.Failed)
			}
		case m.Ended != nil:
			r.exit, ended = *m.Ended, true
		}
	}
	close(stop)
	wg.Wait()
	r.proc.control.Close() // a runner that still lives kills and ends now
	if r.err != nil {
		r.killCgroup() // it may not have been able to
		r.proc.reap()
	}
	r.removeCgroup()
	select {
	case r.ready <- r.failure():
	default:
	}
	close(r.done)
}

func (r *Run) failure() error {
	if r.err == nil {
		return errors.New("runner ended early")
	}
	return r.err
}

// Ready gives one value: nil when the command is prepared, else why it is not. Then the run is over.
func (r *Run) Ready() <-chan error { return r.ready }

// Done is closed when nothing of the command is left.
func (r *Run) Done() <-chan struct{} { return r.done }

// Exit returns how the command ended; it must be called after Done. The error is not nil if it was not executed, and
// wraps [ErrChanged] if that is because something is not what was approved.
func (r *Run) Exit() (Exit, error) { return r.exit, r.err }

// Start verifies the plan again and executes the command.
func (r *Run) Start() { r.send(message{Go: true}) }

// Kill ends the command as a whole: SIGTERM to its group, then SIGKILL after grace; at once if grace is 0. Before Start it
// calls the run off. Done follows.
func (r *Run) Kill(grace time.Duration) { r.send(message{Kill: true, Grace: grace}) }

func (r *Run) send(m message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.out.Encode(m) // a runner that is gone is noticed by watch
}

func (r *Run) makeCgroup(parent string, n uint64) (*os.File, error) {
	dir := filepath.Join(parent, "run-"+strconv.FormatUint(n, 10))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make cgroup of command: %w", err)
	}
	r.cgroup = dir
	g, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		r.removeCgroup()
		return nil, fmt.Errorf("open cgroup of command: %w", err)
	}
	return g, nil
}

// killCgroup kills what may be left if the runner itself was killed.
func (r *Run) killCgroup() {
	if r.cgroup != "" {
		_ = os.WriteFile(filepath.Join(r.cgroup, "cgroup.kill"), []byte("1"), 0)
	}
}

func (r *Run) removeCgroup() {
	if r.cgroup == "" {
		return
	}
	for range 50 { // EBUSY until the kernel has buried the last process
		if os.Remove(r.cgroup) == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
