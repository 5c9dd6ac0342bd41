package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay"
)

// EnterOptions are those of lazaret enter.
type EnterOptions struct {
	Profile   string
	Workspace string   // a directory; empty: the work tree around the current directory
	Argv      []string // empty: the profile's command
	FailAt    string   // tests: the step of the start that fails
}

// Terminal is the caller's side of a session.
type Terminal struct {
	In, Out, Err *os.File
	Warn         func(format string, args ...any) // a line for the developer: something is not as it should be
	Note         func(format string, args ...any) // a line for the developer
}

// Enter starts or joins a Domain and runs one Client Session in it. It returns the exit status of the session's process
// as a shell would give it. An error means that Lazaret failed, or that the process never ran.
func Enter(ctx context.Context, opt EnterOptions, t Terminal) (int, error) {
	plan, err := MakePlan(opt)
	if err != nil {
		return 0, err
	}
	warnAbout(plan.IDs, t.Warn)
	for {
		conn, joined, err := reach(ctx, plan)
		if err != nil {
			return 0, err
		}
		status, err := runClient(conn, plan, opt, t)
		conn.Close()
		switch {
		case errors.Is(err, errNoAnswer) && !joined:
			return 0, cutOff() // the one that we started has failed: another would too
		case changedIn(err) != nil && canAsk(t):
			if err := askAboutBase(&plan, *changedIn(err), t); err != nil {
				return 0, err
			}
		case errors.Is(err, errNoAnswer), errors.Is(err, errBusy):
			// It was just ending, or another client's was first.
		default:
			return status, err
		}
	}
}

// MakePlan decides everything that a Domain needs, and starts nothing.
func MakePlan(opt EnterOptions) (Plan, error) {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return Plan{}, err
	}
	profile, err := LoadProfile(dirs, opt.Profile)
	if err != nil {
		return Plan{}, err
	}
	dir, exact := ".", false
	if opt.Workspace != "" {
		dir, exact = opt.Workspace, true
	}
	ws, err := FindWorkspace(dir, exact)
	if err != nil {
		return Plan{}, err
	}
	ws.Cwd = ws.CwdOf(".")
	ids := nsenter.PlanIDs(uint32(os.Getuid()), uint32(os.Getgid()), userName(), nsenter.ReadSubordinate())
	trees, err := findServed(ws)
	if err != nil {
		return Plan{}, err
	}
	for _, s := range trees {
		if err := s.Check(dirs, ids); err != nil {
			return Plan{}, err
		}
	}
	runsc, err := nsenter.FindProgram("lazaret-runsc")
	if err != nil {
		return Plan{}, hint(err, "build it with: make; or install both with: make install")
	}
	init, err := nsenter.FindProgram("lazaret-init")
	if err != nil {
		return Plan{}, hint(err, "build it with: make; or install both with: make install")
	}
	escalate, err := nsenter.FindProgram(escalateProgram)
	if err != nil {
		return Plan{}, hint(err, "build it with: make; or install both with: make install")
	}
	shell := overlay.HasShell("/bin/bash", "/bin/sh")
	if shell == "" && profile.Image == hostImage {
		return Plan{}, refusal("find a shell: the host has neither /bin/bash nor /bin/sh in /usr", "install bash")
	}
	proxy, err := profile.Network.proxyOf(os.Getenv)
	if err != nil {
		return Plan{}, err
	}
	if err := profile.checkImage(ids); err != nil {
		return Plan{}, err
	}
	volumes, err := findVolumes(profile, dirs, trees)
	if err != nil {
		return Plan{}, err
	}
	return Plan{
		Volumes: volumes, OnChange: map[string]string{}, UID: uint32(os.Getuid()), GID: uint32(os.Getgid()),
		Network: networkPlan{Places: profile.Network.Places, Proxy: proxy},
		Version: nsenter.Version, DomainID: DomainID(profile.Name, ws.Path), Profile: profile, Workspace: ws, Dirs: dirs,
		IDs: ids, Runsc: runsc, Init: init, Escalate: escalate, Escalation: escalationPlan{Env: profile.Escalation.environ()}, Shell: shell, Served: trees, FailAt: opt.FailAt,
	}, nil
}

func userName() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return strconv.Itoa(os.Getuid())
}

func warnAbout(ids nsenter.IDMap, warn func(string, ...any)) {
	switch ids.Kind {
	case nsenter.MapSingle:
		warn("only your own id is mapped into the sandbox (%s); the agent is uid 0 there, some tools refuse that; see 'lazaret doctor'", ids.Why)
	case nsenter.MapRoot:
		warn("you are root: files that the agent makes in the workspace belong to root; run Lazaret as an ordinary user if you can")
	}
}

// claimPatience is how long a client waits for a coordinator that lives but does not answer.
const claimPatience = 30 * time.Second

// errNoAnswer is returned when a coordinator went away before it took the session.
var errNoAnswer = errors.New("the coordinator ended")

func cutOff() error {
	return refusal("the session was cut off: its coordinator ended", "what was written outside of workspace and persistent paths is lost; enter again")
}

// reach connects to the Domain's coordinator, and starts it if there is none; joined tells that it ran before.
func reach(ctx context.Context, plan Plan) (conn *nsenter.Conn, joined bool, err error) {
	parent, err := PrivateDir(plan.Dirs.Runtime)
	if err != nil {
		return nil, false, err
	}
	parent.Close()
	for deadline := time.Now().Add(claimPatience); time.Now().Before(deadline); {
		dir, err := PrivateDir(filepath.Join(plan.Dirs.Runtime, plan.DomainID))
		if err != nil {
			return nil, false, err
		}
		uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: socketPath(dir)})
		free := err != nil && lockIsFree(dir)
		dir.Close()
		if err == nil {
			return nsenter.FromUnix(uc), true, nil
		}
		if free {
			conn, err := startCoordinator(plan)
			return conn, false, err
		}
		select {
		case <-ctx.Done():
			return nil, false, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil, false, refusal(fmt.Sprintf("join the Domain of %s: its coordinator holds the lock and does not answer", plan.Workspace.Path),
		"it may be stopping; if this stays, end the process 'lazaret [coordinator]' of this workspace")
}

// lockIsFree reports whether no coordinator lives. It may be wrong for a moment; the coordinator's own lock decides.
func lockIsFree(dir *os.File) bool {
	fd, err := unix.Openat(int(dir.Fd()), "lock", unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return errors.Is(err, unix.ENOENT)
	}
	defer unix.Close(fd)
	return unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB) == nil
}

func startCoordinator(plan Plan) (*nsenter.Conn, error) {
	p, err := nsenter.Child{Role: "coordinator", Outlives: true}.Start()
	if err != nil {
		return nil, err
	}
	go func() { _, _ = p.Wait() }() // if it ends before we do
	if err := p.Control.Send(plan); err != nil {
		return nil, fmt.Errorf("start coordinator: %w", err)
	}
	return p.Control, nil
}

// runClient runs the session on an established connection.
func runClient(conn *nsenter.Conn, plan Plan, opt EnterOptions, t Terminal) (int, error) {
	req := enterRequest{Profile: plan.Profile, Argv: opt.Argv, Cwd: plan.Workspace.Cwd, Env: plan.Profile.Environment(os.Environ())}
	req.TTY = term.IsTerminal(int(t.In.Fd())) && term.IsTerminal(int(t.Out.Fd()))
	var s stream = &pipes{term: t}
	if req.TTY {
		s = &terminal{term: t}
	}
	defer s.restore()
	theirs, err := s.open(&req)
	if err != nil {
		return 0, err
	}
	err = conn.Send(request{Proto: protocolVersion, Op: "enter", Enter: &req}, theirs...)
	nsenter.CloseAll(theirs) // a copy kept here would hide the end of output
	if err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
			return 0, errNoAnswer
		}
		return 0, fmt.Errorf("ask the coordinator: %w", err)
	}
	// From here on, a signal to us is one for the session.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE, unix.SIGWINCH)
	defer signal.Stop(signals)
	events := make(chan event)
	taken := false
	stop := make(chan struct{})
	defer close(stop)
	go receive(conn, s, events, stop)
	var report []string
	for {
		select {
		case sig := <-signals:
			if done := s.signal(conn, sig); done {
				return 128 + int(sig.(unix.Signal)), nil
			}
		case ev, ok := <-events:
			switch {
			case !ok && taken:
				return 0, cutOff()
			case !ok:
				return 0, errNoAnswer
			case ev.Entered != nil:
				taken = true
			case ev.Busy:
				return 0, errBusy
			case ev.Failed != nil:
				s.drain()
				s.restore()
				if ev.Diagnose {
					diagnose(t.Warn)
				}
				if ev.Changed != nil {
					return 0, &changedBase{*ev.Changed, ev.Failed}
				}
				return 0, ev.Failed
			case ev.Prompt != nil:
				s.prompt(conn, *ev.Prompt)
			case ev.Notice != "":
				s.notice(ev.Notice)
			case ev.Report != nil:
				report = ev.Report
			case ev.Exit != nil:
				s.drain()
				s.restore()
				for _, line := range report {
					t.Note("%s", line)
				}
				return *ev.Exit, nil
			}
		}
	}
}

// diagnose names the prerequisites that are not met, after a start has failed (DX-5).
func diagnose(warn func(string, ...any)) {
	for _, c := range Doctor() {
		if c.Verdict == Bad {
			warn("%s: %s; to mend it: %s", c.Name, c.Found, c.Fix)
		}
	}
}

// receive takes events off the connection; it hands the descriptors of the first one to the stream.
func receive(conn *nsenter.Conn, s stream, events chan<- event, stop <-chan struct{}) {
	defer close(events)
	for {
		var ev event
		files, err := conn.Recv(&ev)
		if err != nil {
			return
		}
		switch {
		case ev.Entered != nil:
			s.entered(files)
		case ev.Prompt != nil && len(files) > 0:
			if unpack(files, &ev.Prompt.request) != nil {
				continue // a request that cannot be read is not answered
			}
		default:
			nsenter.CloseAll(files)
		}
		select {
		case events <- ev:
		case <-stop:
			return
		}
	}
}

// stream is how a session's bytes travel: through a pseudo-terminal or through pipes.
type stream interface {
	open(*enterRequest) (theirs []*os.File, err error) // fills the request; theirs are the sandbox's ends
	entered(files []*os.File)                          // the session runs; owns files
	signal(conn *nsenter.Conn, sig os.Signal) (leave bool)
	prompt(conn *nsenter.Conn, ev promptEvent)
	notice(text string) // tells the developer something
	drain()             // passes on what the sandbox has written before its process ended
	restore()           // puts the caller's terminal back; idempotent
}

// pipes carry a session without a terminal: binary-safe, separate, with back-pressure.
type pipes struct {
	term     Terminal
	in       *os.File // write end
	out, err *os.File // read ends
	done     chan struct{}
}

func (p *pipes) open(*enterRequest) ([]*os.File, error) {
	var theirs []*os.File
	for _, end := range []**os.File{&p.in, &p.out, &p.err} {
		r, w, err := os.Pipe()
		if err != nil {
			nsenter.CloseAll(theirs)
			return nil, err
		}
		if end == &p.in {
			*end, theirs = w, append(theirs, r)
		} else {
			*end, theirs = r, append(theirs, w)
		}
	}
	return theirs, nil
}

func (p *pipes) entered(files []*os.File) {
	nsenter.CloseAll(files)
	p.done = make(chan struct{}, 2)
	go func() {
		_, _ = io.Copy(p.in, p.term.In) // EPIPE: the process does not read on
		p.in.Close()
	}()
	carry := func(to, from *os.File) {
		_, err := io.Copy(to, from)
		if err != nil {
			from.Close() // our reader is gone: let the sandbox's writer know
		}
		p.done <- struct{}{}
	}
	go carry(p.term.Out, p.out)
	go carry(p.term.Err, p.err)
}

func (p *pipes) signal(conn *nsenter.Conn, sig os.Signal) bool {
	if sig != unix.SIGPIPE && sig != unix.SIGWINCH {
		_ = conn.Send(clientMessage{Signal: int(sig.(unix.Signal))}) // its end is seen by receive
	}
	return false
}

// prompt: the coordinator asks only on terminals.
func (p *pipes) prompt(conn *nsenter.Conn, ev promptEvent) {
	_ = conn.Send(clientMessage{Prompt: &promptReply{Seq: ev.Seq, Op: replyFailed, Text: "the session has no terminal"}})
}

// drain waits until what the process wrote has been passed on. A process that it left behind may hold the pipes open, so
// that the end of the file does not come; an empty pipe ends the wait then.
func (p *pipes) drain() {
	if p.done == nil {
		return
	}
	for left := 2; left > 0; {
		select {
		case <-p.done:
			left--
		case <-time.After(20 * time.Millisecond):
			if isEmpty(p.out) && isEmpty(p.err) {
				return
			}
		}
	}
}

func (p *pipes) notice(text string) { p.term.Warn("%s", text) }

func (p *pipes) restore() {
	for _, f := range []*os.File{p.in, p.out, p.err} {
		if f != nil {
			f.Close()
		}
	}
}

// isEmpty reports whether nothing is waiting to be read (TIOCINQ is FIONREAD, ioctl_tty(2)).
func isEmpty(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return true
	}
	n := 0
	if cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); cerr != nil || err != nil {
		return true
	}
	return n == 0
}
