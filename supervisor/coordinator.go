package supervisor

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/nsenter"
)

// hangupGrace is the time from SIGHUP to SIGKILL for a process whose client has gone.
const hangupGrace = 2 * time.Second

// undo is the stack of what a Domain holds on the host, newest last. It is the one list of a Domain's resources (OR-1):
// everything else lives in the Domain's namespaces and goes with them.
type undo []func()

func (u *undo) push(f func()) { *u = append(*u, f) }

func (u *undo) run() {
	for _, f := range slices.Backward(*u) {
		f()
	}
	*u = nil
}

// coordinator owns a running Domain.
type coordinator struct {
	plan   Plan
	domain *nsenter.Process // set before started is closed, nil if the start failed
	net    *network         // the same
	base   baseReport       // the same
	desk   *desk            // the same

	// escalation is the listener on the sidecar's address, where only the Domain's sandbox can connect. Set before started is
	// closed; it is closed with the network.
	escalation net.Listener

	started chan struct{} // closed when the Domain runs, or cannot
	startup error         // why it cannot; read after started
	notes   []string      // for the developer who started it; read after started
	before  *remembered   // the workspace as the Domain found it; read after started, nil if it could not be looked at

	mu       sync.Mutex
	sessions map[string]*session
	joined   bool      // there was a session
	closing  bool      // the last session has left: no new one
	left     time.Time // when the last session left

	released chan struct{} // closed when the domain process has given up the image

	idle chan struct{} // receives when the last session has left
	gone chan string   // receives the reason when the sandbox ended by itself
}

// session is a Client Session.
type session struct {
	id    string
	first bool          // it started the Domain
	ended bool          // its process has; guarded by coordinator.mu
	exit  chan execExit // one value
	tell  chan string   // notices for the developer; what does not fit is dropped
}

// CoordinatorMain is the role "coordinator". The connection that it is started with is that of its first client.
func CoordinatorMain(self nsenter.Self) int {
	var plan Plan
	if _, err := self.Control.Recv(&plan); err != nil {
		_ = self.Control.Send(event{Failed: asFailure(fmt.Errorf("read the plan: %w", err))})
		return 1
	}
	var u undo
	defer u.run()
	ln, err := claim(plan, &u)
	if err != nil {
		_ = self.Control.Send(event{Busy: errors.Is(err, errBusy), Failed: asFailure(err)})
		return 1
	}
	c := &coordinator{plan: plan, started: make(chan struct{}), sessions: map[string]*session{},
		released: make(chan struct{}), idle: make(chan struct{}, 1), gone: make(chan string, 1)}
	go c.accept(ln)
	go c.serve(self.Control)
	c.startup = c.startDomain(&u)
	close(c.started)
	c.wait(c.startup == nil)
	return 0
}

var errBusy = errors.New("another coordinator has the Domain")

// claim takes the Domain for this process: its lock, its socket, its directories. Remains of a coordinator that was killed
// are removed here; the lock tells that none lives (FR-7).
func claim(plan Plan, u *undo) (*net.UnixListener, error) {
	for _, p := range []string{plan.Dirs.Runtime, plan.Dirs.Storage} {
		d, err := PrivateDir(p)
		if err != nil {
			return nil, err
		}
		d.Close()
	}
	dir, err := PrivateDir(filepath.Join(plan.Dirs.Runtime, plan.DomainID))
	if err != nil {
		return nil, err
	}
	u.push(func() { dir.Close() })
	lock, err := takeLock(dir)
	if err != nil {
		return nil, err
	}
	u.push(func() {
		_ = os.Remove(filepath.Join(dir.Name(), "lock"))
		_ = os.Remove(dir.Name())
		lock.Close() // last: whoever waits for it finds nothing else
	})
	stage := filepath.Join(dir.Name(), "stage")
	if err := os.Mkdir(stage, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	u.push(func() { _ = os.Remove(stage) })
	transient := transientDir(plan)
	for _, dir := range []string{filepath.Dir(transient), domainRoot(plan)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.RemoveAll(transient); err != nil {
		return nil, fmt.Errorf("remove what an interrupted run left: %w", err)
	}
	if err := os.Mkdir(transient, 0o700); err != nil {
		return nil, err
	}
	u.push(func() { _ = os.RemoveAll(transient) })
	if err := keepDomainRecord(plan); err != nil {
		return nil, err
	}
	_ = os.Remove(filepath.Join(dir.Name(), socketName))
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: socketPath(dir)})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", dir.Name(), err)
	}
	ln.SetUnlinkOnClose(false) // its name is that of a descriptor
	u.push(func() { ln.Close(); _ = os.Remove(filepath.Join(dir.Name(), socketName)) })
	return ln, nil
}

const socketName = "coordinator.sock"

// socketPath names the socket through the directory's descriptor: an address holds 108 bytes only (unix(7)).
func socketPath(dir *os.File) string { return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socketName) }

// takeLock takes the Domain's exclusive lock. A coordinator that ends unlinks the file while it holds it, so the lock
// counts only if the name still leads to it.
func takeLock(dir *os.File) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(dir.Fd()), "lock", unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			if errors.Is(err, unix.ENOENT) {
				return nil, errBusy // the directory itself was removed just now; the client tries again
			}
			return nil, fmt.Errorf("open lock in %s: %w", dir.Name(), err)
		}
		lock := os.NewFile(uintptr(fd), "lock")
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
			lock.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, errBusy
			}
			return nil, fmt.Errorf("lock %s: %w", dir.Name(), err)
		}
		var held, named unix.Stat_t
		if err := unix.Fstat(fd, &held); err != nil {
			lock.Close()
			return nil, err
		}
		if err := unix.Fstatat(int(dir.Fd()), "lock", &named, unix.AT_SYMLINK_NOFOLLOW); err == nil && named.Ino == held.Ino {
			return lock, nil
		}
		lock.Close()
	}
}

// startDomain makes the namespaces and everything in them.
func (c *coordinator) startDomain(u *undo) error {
	runtime := filepath.Join(c.plan.Dirs.Runtime, c.plan.DomainID)
	u.push(func() {
		for _, name := range []string{workspacePlanFile, gitConfigFile, excludesFile} {
			_ = os.Remove(filepath.Join(runtime, name))
		}
	})
	setup, err := prepareWorkspace(c.plan)
	if err != nil {
		return err
	}
	c.notes = setup.notes
	looked := make(chan struct{})
	go func() { // meanwhile; no process of the agent runs before it is done
		defer close(looked)
		c.before = remember(c.plan, setup)
	}()
	defer func() { <-looked }()
	nw, err := newNetwork(c, u)
	if err != nil {
		return err
	}
	desk, err := newDesk(c, u)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(domainRoot(c.plan), "domain.log"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p, err := nsenter.Child{Role: "domain", Namespaces: nsenter.DomainNamespaces, IDs: &c.plan.IDs, Stderr: log}.Start()
	if err != nil {
		if errors.Is(err, nsenter.ErrUserNS) {
			err = hint(err, "%s", nsenter.UserNSHint(nsenter.Sysctl))
		}
		return err
	}
	u.push(func() { c.releaseBase(); p.End() })
	u.push(nw.close) // before the domain process: the way out is closed first
	u.push(desk.close)
	var files []*os.File
	if c.plan.IDs.Kind == nsenter.MapRoot {
		if files, err = usrOfRoot(); err != nil {
			return err
		}
		defer nsenter.CloseAll(files)
	}
	if err := p.Control.Send(desk.domainPlan(nw.domainPlan()), files...); err != nil {
		return fmt.Errorf("start domain process: %w", err)
	}
	for ready := false; !ready; {
		var ev domainEvent
		files, err := p.Control.Recv(&ev)
		switch {
		case err != nil:
			return fmt.Errorf("start domain process: %w%s", errGone, tail(log.Name()))
		case ev.Changed != nil:
			return &changedBase{*ev.Changed, ev.Failed}
		case ev.Failed != nil:
			return ev.Failed
		case ev.Base != nil:
			c.base = *ev.Base
			c.notes = append(c.notes, c.base.Notes...)
		case ev.Network != nil:
			nw.connect(p.Control, *ev.Network, files)
		}
		ready = ev.Ready
	}
	if err := nw.serve(); err != nil {
		return err
	}
	if err := desk.open(c.escalation, nw.journal); err != nil {
		return err
	}
	c.domain, c.net, c.desk = p, nw, desk
	go c.follow()
	return nil
}

// tail quotes the last line that a role wrote to its standard error before it ended.
func tail(log string) string {
	b, _ := os.ReadFile(log)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return ": " + last
	}
	return ""
}

// follow takes the domain process's messages to the sessions they are for.
func (c *coordinator) follow() {
	for {
		var ev domainEvent
		files, err := c.domain.Control.Recv(&ev)
		if err == nil && ev.Network != nil {
			c.net.answer(*ev.Network, files)
			continue
		}
		nsenter.CloseAll(files)
		switch {
		case err != nil:
			c.gone <- "the domain process ended"
			return
		case ev.Gone != "":
			c.gone <- ev.Gone
			return
		case ev.Notice != "":
			c.notify(ev.Notice)
		case ev.Released:
			close(c.released)
		case ev.Exit != nil:
			c.mu.Lock()
			s := c.sessions[ev.Exit.Session]
			c.mu.Unlock()
			if s != nil {
				s.exit <- *ev.Exit
			}
		}
	}
}

// wait returns when the Domain is to end: after the last session and the linger time, with the sandbox, or on a signal.
func (c *coordinator) wait(running bool) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT)
	defer signal.Stop(stop)
	linger := time.Duration(c.plan.Profile.Linger)
	var lingering <-chan time.Time
	for {
		select {
		case <-lingering:
		case <-c.idle:
		case why := <-c.gone:
			running = false
			c.fail(why)
		case sig := <-stop:
			running = false
			c.fail(fmt.Sprintf("the coordinator got %v", sig))
		}
		c.mu.Lock()
		alone, rest := len(c.sessions) == 0, linger-time.Since(c.left)
		c.closing = c.closing || alone && (!running || rest <= 0)
		ends := c.closing && alone
		c.mu.Unlock()
		if ends {
			return
		}
		lingering = nil
		if alone {
			lingering = time.After(rest)
		}
	}
}

// fail ends all sessions, because the sandbox has.
func (c *coordinator) fail(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closing = true
	for _, s := range c.sessions {
		f := &Failure{What: "the sandbox ended: " + why, Hint: "what was written outside of workspace and persistent paths is lost; enter again"}
		select {
		case s.exit <- execExit{Session: s.id, Failed: f}:
		default: // it has its end already
		}
	}
	if len(c.sessions) == 0 {
		c.signalIdle()
	}
}

func (c *coordinator) signalIdle() {
	select {
	case c.idle <- struct{}{}:
	default:
	}
}

func (c *coordinator) accept(ln *net.UnixListener) {
	for {
		uc, err := ln.AcceptUnix()
		if err != nil {
			return // closed: the Domain ends
		}
		go c.serve(nsenter.FromUnix(uc))
	}
}

// serve answers one client to the end of its session, and owns conn.
func (c *coordinator) serve(conn *nsenter.Conn) {
	defer conn.Close()
	if uid, err := conn.PeerUID(); err != nil || uid != uint32(os.Getuid()) {
		return // the directory is ours alone: this cannot be a mistake
	}
	var req request
	files, err := conn.Recv(&req)
	if err != nil {
		c.signalIdle() // the client that started us may be gone before it had a session
		return
	}
	defer func() { nsenter.CloseAll(files) }()
	switch {
	case req.Proto != protocolVersion:
		_ = conn.Send(event{Failed: &Failure{What: fmt.Sprintf("join the running Domain: it speaks protocol %d, this lazaret %d", protocolVersion, req.Proto),
			Hint: "it was started by another version of Lazaret; leave its sessions, then enter again"}})
	case req.Op == "enter" && req.Enter != nil:
		var ev event
		s, err := c.join(*req.Enter)
		if err == nil {
			ev, err = c.runSession(conn, s, *req.Enter, &files)
			defer c.leave(s) // after the client has its answer
		}
		if err != nil {
			changed := changedIn(err)
			ev = event{Failed: asFailure(err), Changed: changed, Busy: errors.Is(err, errBusy), Diagnose: changed == nil && c.startFailed()}
		}
		_ = conn.Send(ev)
	case req.Op == "network" && req.Network != nil:
		_ = conn.Send(c.serveNetwork(*req.Network))
	case req.Op == "requests" && req.Requests != nil:
		c.serveRequests(conn, *req.Requests)
	default:
		_ = conn.Send(event{Failed: &Failure{What: fmt.Sprintf("this coordinator has no operation %q", req.Op)}})
	}
}

// join registers a session, if it fits the running Domain.
func (c *coordinator) join(req enterRequest) (*session, error) {
	c.mu.Lock()
	diff := c.plan.Profile.difference(req.Profile)
	c.mu.Unlock()
	if diff != "" {
		return nil, refusal(fmt.Sprintf("join the running Domain of profile %q: it was started with another configuration: %s", c.plan.Profile.Name, diff),
			"leave its other sessions first, or undo the change")
	}
	id := make([]byte, 8)
	_, _ = rand.Read(id) // never fails (crypto/rand)
	s := &session{id: hex.EncodeToString(id), exit: make(chan execExit, 1), tell: make(chan string, 16)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return nil, errBusy
	}
	s.first = !c.joined
	c.joined = true
	c.sessions[s.id] = s
	return s, nil
}

// leave forgets a session; the last one to leave ends the Domain (FR-6).
func (c *coordinator) leave(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sessions, s.id)
	if len(c.sessions) == 0 {
		c.left = time.Now()
		c.signalIdle()
	}
}

// sameJSON compares what of two settings is a setting.
func sameJSON(a, b any) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}

// difference names the settings in which two profiles differ, "" if in none.
func (p Profile) difference(o Profile) string {
	if p.Fingerprint() == o.Fingerprint() {
		return ""
	}
	var out []string
	a, b := reflect.ValueOf(p), reflect.ValueOf(o)
	for i := range a.NumField() {
		if !sameJSON(a.Field(i).Interface(), b.Field(i).Interface()) {
			key, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("toml"), ",")
			out = append(out, fmt.Sprintf("%s is %v, now %v", key, a.Field(i).Interface(), b.Field(i).Interface()))
		}
	}
	return strings.Join(out, "; ")
}

// runSession runs one process in the sandbox and returns how it ended. It takes files, and leaves none open.
func (c *coordinator) runSession(conn *nsenter.Conn, s *session, req enterRequest, files *[]*os.File) (event, error) {
	<-c.started
	if c.startup != nil {
		return event{}, c.startup
	}
	var master *os.File
	if req.TTY {
		m, tty, err := pty.Open()
		if err != nil {
			return event{}, fmt.Errorf("make a pseudo-terminal: %w", err)
		}
		defer m.Close()
		nsenter.CloseAll(*files)
		master, *files = m, []*os.File{tty, tty, tty}
		if err := pty.Setsize(m, &pty.Winsize{Rows: req.Rows, Cols: req.Cols}); err != nil {
			return event{}, fmt.Errorf("set the size of a pseudo-terminal: %w", err)
		}
	}
	if len(*files) != 3 {
		return event{}, fmt.Errorf("start session: %d descriptors in place of 3", len(*files))
	}
	var extra []*os.File
	if master != nil {
		extra = []*os.File{master}
	}
	if s.first {
		for _, note := range c.notes {
			_ = conn.Send(event{Notice: note})
		}
	}
	if err := conn.Send(event{Entered: &entered{Session: s.id}}, extra...); err != nil {
		return event{}, err
	}
	argv := c.command(req.Argv)
	if len(argv) == 0 {
		return event{}, refusal(fmt.Sprintf("start session: the image %s has no shell", c.plan.Profile.Image), "name a program of the image: lazaret enter -- COMMAND")
	}
	keys, err := c.desk.join(s.id, conn, master != nil)
	if err != nil {
		return event{}, fmt.Errorf("start session: %w", err)
	}
	defer c.desk.leave(s.id)
	exec := &execRequest{Session: s.id, Argv: argv, Env: c.environment(s, req), Cwd: req.Cwd, TTY: req.TTY, Keys: *keys}
	err = c.domain.Control.Send(domainRequest{Exec: exec}, *files...)
	nsenter.CloseAll(*files)
	*files = nil
	if err != nil {
		return event{}, fmt.Errorf("start session: %w", err)
	}
	left, over := make(chan struct{}), make(chan struct{})
	defer close(over)
	go c.listen(conn, s, left)
	go passOn(conn, s, over)
	select {
	case x := <-s.exit:
		if c.lastToEnd(s) {
			if lines := c.report(time.Now()); len(lines) > 0 {
				_ = conn.Send(event{Report: lines})
			}
		}
		if x.Failed != nil {
			return event{}, x.Failed
		}
		return event{Exit: &x.Status}, nil
	case <-left:
	}
	if master != nil {
		master.Close() // the terminal hangs up
	}
	c.hangUp(s)
	return event{}, errGone
}

// lastToEnd notes that the session's process has ended, and reports whether every other one has too: one session of them
// tells the developer what waits for him.
func (c *coordinator) lastToEnd(s *session) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.ended = true
	for _, other := range c.sessions {
		if !other.ended {
			return false
		}
	}
	return true
}

// passOn sends notices to the client until its session is over. A client that does not read holds up nobody else.
func passOn(conn *nsenter.Conn, s *session, over <-chan struct{}) {
	for {
		select {
		case text := <-s.tell:
			_ = conn.Send(event{Notice: text})
		case <-over:
			return
		}
	}
}

// notify tells all sessions something.
func (c *coordinator) notify(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sessions {
		select {
		case s.tell <- text:
		default:
		}
	}
}

// listen passes on what the client says until it is gone.
func (c *coordinator) listen(conn *nsenter.Conn, s *session, left chan<- struct{}) {
	for {
		var m clientMessage
		files, err := conn.Recv(&m)
		if err != nil {
			close(left)
			return
		}
		if m.Prompt != nil {
			c.desk.reply(s.id, *m.Prompt, files)
			continue
		}
		nsenter.CloseAll(files)
		c.signal(s, m.Signal)
	}
}

func (c *coordinator) signal(s *session, sig int) {
	_ = c.domain.Control.Send(domainRequest{Signal: &execSignal{Session: s.id, Signal: sig}}) // a dead domain is seen by follow
}

// hangUp ends the process of a session whose client has gone, and returns when it has ended.
func (c *coordinator) hangUp(s *session) {
	c.signal(s, int(unix.SIGHUP))
	select {
	case <-s.exit:
		return
	case <-time.After(hangupGrace):
	}
	c.signal(s, int(unix.SIGKILL))
	select {
	case <-s.exit:
	case <-time.After(hangupGrace): // a sandbox that does not answer does not keep the session
	}
}

// command is what a session runs; empty: the image has no shell.
func (c *coordinator) command(argv []string) []string {
	switch {
	case len(argv) > 0:
		return argv
	case len(c.plan.Profile.Command) > 0:
		return c.plan.Profile.Command
	case c.base.Shell == "":
		return nil
	}
	return []string{c.base.Shell, "-l"}
}

// environment is the whole environment of a session's process (SR-3).
func (c *coordinator) environment(s *session, req enterRequest) []string {
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	var env []string
	for _, kv := range c.base.Env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		} else {
			env = append(env, kv)
		}
	}
	env = append(env, "PATH="+agentHome+"/.local/bin:"+insideBin+":"+path, "HOME="+agentHome, "USER="+c.base.User, "LOGNAME="+c.base.User,
		"SHELL="+cmp.Or(c.base.Shell, "/bin/sh"), "PWD="+req.Cwd,
		"LAZARET_PROFILE="+c.plan.Profile.Name, "LAZARET_DOMAIN="+c.plan.DomainID, "LAZARET_SESSION="+s.id,
		client.SessionEnv+"="+keysInside(s.id))
	return lastOfEach(append(env, req.Env...))
}

// lastOfEach drops the earlier ones of variables that are set twice.
func lastOfEach(env []string) []string {
	seen := map[string]bool{}
	var out []string
	for _, kv := range slices.Backward(env) {
		if name, _, _ := strings.Cut(kv, "="); !seen[name] {
			seen[name] = true
			out = append(out, kv)
		}
	}
	slices.Reverse(out)
	return out
}

// startFailed reports whether the Domain could not be started.
func (c *coordinator) startFailed() bool {
	select {
	case <-c.started:
		return c.startup != nil
	default:
		return false
	}
}
