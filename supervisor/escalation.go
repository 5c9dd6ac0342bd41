package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
	"lazaret.dev/lazaret/escalation/trust"
	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes/link"
)

// escalateProgram is the name of the Escalation Client.
const escalateProgram = "lazaret-escalate"

// certificateLife outlasts every Domain; a certificate ends with its session, and the authority with the coordinator.
const certificateLife = 10 * 365 * 24 * time.Hour

// escalationPlan is what a Domain's processes are told about Host Escalation.
type escalationPlan struct {
	Env      []string // from the client, for the coordinator alone: the developer's variables that commands get
	Endpoint string   // from the coordinator: where the sandbox finds it
	CA       []byte   // the same: its Trust Anchor, PEM
}

// sessionKeys authenticate a session's Escalation Clients; PEM.
type sessionKeys struct{ Cert, Key []byte }

// desk is Host Escalation as the coordinator has it: the server, and the way to the terminals of the sessions. It is the
// server's Prompter.
//
// Start: newDesk (rules, Trust Anchor), open (the Domain's network stands). End, by close: the server, which kills what runs
// and closes prompts; the host's runners; the workspace. All of it before the network and the domain process end.
type desk struct {
	c       *coordinator
	anchor  *trust.Anchor
	res     rules.Resolver
	set     *rules.Set
	ws      runner.Workspace
	host    *runner.Host
	server  *escalation.Server
	entries chan escalation.Entry // to the journal
	stop    chan struct{}         // closed when the server has ended
	done    chan struct{}         // closed when the journal has all entries
	once    sync.Once
	peers   *rate.Limiter // of entries that anybody inside can cause without a request

	remembering sync.Mutex // held while the profile's file is replaced

	mu    sync.Mutex
	lines map[string]*line // by Session ID
}

// line is a session's connection, for prompts.
type line struct {
	conn     *nsenter.Conn
	terminal bool
	replies  chan promptReply // of the prompt that is up
	over     chan struct{}    // closed when the session has left
	told     time.Time        // when it was told last that a request waits; guarded by desk.mu
	seq      int              // of the last prompt; used by its one Prompt
}

// newDesk compiles the rules and makes the Domain's Trust Anchor. It pushes what it makes on u.
func newDesk(c *coordinator, u *undo) (*desk, error) {
	d := &desk{c: c, lines: map[string]*line{}, entries: make(chan escalation.Entry, 1024), stop: make(chan struct{}), done: make(chan struct{}),
		peers: rate.NewLimiter(1, 20)}
	d.res = resolverOf(c.plan)
	var notes []string
	var err error
	if d.set, notes, err = c.plan.Profile.Escalation.compile(d.res); err != nil {
		return nil, err
	}
	for _, n := range notes {
		c.notes = append(c.notes, "escalation: "+n)
	}
	if d.anchor, err = trust.New(c.plan.DomainID, certificateLife, time.Now); err != nil {
		return nil, err
	}
	if d.ws, err = runner.OpenWorkspace(c.plan.Workspace.Path); err != nil {
		return nil, err
	}
	u.push(func() { d.ws.Root.Close() })
	return d, nil
}

// resolverOf finds programs as the developer's shell would, but never in a directory that the sandbox can write.
func resolverOf(p Plan) rules.Resolver {
	r := rules.Resolver{Writable: []string{p.Workspace.Path, p.Dirs.Storage}}
	for _, s := range p.Served {
		r.Writable = append(r.Writable, s.Path)
	}
	for _, v := range p.Volumes {
		if v.Writable {
			r.Writable = append(r.Writable, v.Host)
		}
	}
	for _, kv := range runner.Env(p.Escalation.Env, []string{"PATH"}) {
		r.Path = rules.SearchPath(kv[len("PATH="):])
	}
	return r
}

// domainPlan adds to p what the domain process needs, and takes away what it does not.
func (d *desk) domainPlan(p Plan) Plan {
	p.Escalation = escalationPlan{CA: d.anchor.CA(), Endpoint: netip.AddrPortFrom(link.Sidecar4.Addr(), escalationPort).String()}
	return p
}

// open starts to serve the sandbox on ln, which it owns from here on.
func (d *desk) open(ln net.Listener, j *journal) error {
	if ln == nil {
		return errors.New("escalation: the network has no listener")
	}
	d.host = runner.NewHost(runner.Config{Args: []string{nsenter.RoleName("runner")}})
	var err error
	d.server, err = escalation.New(escalation.Config{
		Domain: d.c.plan.DomainID, Profile: d.c.plan.Profile.Name, Listener: ln, Anchor: d.anchor, Rules: d.set, Resolver: d.res,
		Workspace: d.ws, Host: d.host, Environ: d.c.plan.Escalation.Env, Prompter: d, Remember: d.remember, Journal: d.note,
		Limits: broker.Limits{MaxWait: time.Duration(d.c.plan.Profile.Escalation.Wait), MaxRun: rules.MaxTime},
	})
	if err != nil {
		d.host.Close()
		return err
	}
	go d.keepJournal(j)
	go func() {
		if err := d.server.Serve(); err != nil {
			d.c.notify("escalation: " + err.Error() + "; nothing can be asked for until all sessions are left")
		}
	}()
	return nil
}

// close ends Host Escalation; nothing that it started is left then. It is idempotent.
func (d *desk) close() {
	if d.server == nil {
		return
	}
	d.once.Do(func() {
		_ = d.server.Close()
		d.host.Close()
		close(d.stop)
		<-d.done
	})
}

// join registers a session and returns what its clients need. conn is where its prompts go.
func (d *desk) join(session string, conn *nsenter.Conn, terminal bool) (*sessionKeys, error) {
	d.mu.Lock()
	d.lines[session] = &line{conn: conn, terminal: terminal, replies: make(chan promptReply), over: make(chan struct{})}
	d.mu.Unlock()
	cert, key, err := d.server.Join(session, terminal)
	if err != nil {
		d.hangUp(session)
		return nil, err
	}
	return &sessionKeys{cert, key}, nil
}

// leave ends a session: its certificate is void from here on, its prompt closes, its commands are killed.
func (d *desk) leave(session string) {
	d.server.Leave(session)
	d.hangUp(session)
}

func (d *desk) hangUp(session string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.lines[session]; l != nil {
		close(l.over)
		delete(d.lines, session)
	}
}

func (d *desk) line(session string) *line {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lines[session]
}

// Prompt asks on the terminal of a session; see [escalation.Prompter].
func (d *desk) Prompt(ctx context.Context, session string, q prompt.Request, edit func([]string) (prompt.Request, error)) (prompt.Answer, error) {
	l := d.line(session)
	if l == nil {
		return prompt.Answer{}, errGone
	}
	l.seq++
	seq := l.seq
	if err := sendPrompt(l.conn, promptEvent{Seq: seq, Op: promptOpen}, q); err != nil {
		return prompt.Answer{}, err
	}
	ended := ctx.Done()
	for {
		select {
		case <-ended:
			ended = nil // the terminal is the sandbox's again when the client says so
			_ = l.conn.Send(event{Prompt: &promptEvent{Seq: seq, Op: promptClose}})
		case <-l.over:
			return prompt.Answer{}, errGone
		case r := <-l.replies:
			switch {
			case r.Seq != seq: // late
			case r.Op == replyAnswer:
				return r.Answer, nil
			case r.Op == replyFailed:
				return prompt.Answer{}, fmt.Errorf("show the request: %s", r.Text)
			case r.Op == replyEdit:
				if q, err := edit(r.argv); err != nil {
					_ = l.conn.Send(event{Prompt: &promptEvent{Seq: seq, Op: promptRefused, Text: err.Error()}})
				} else if err := sendPrompt(l.conn, promptEvent{Seq: seq, Op: promptEdited}, q); err != nil {
					return prompt.Answer{}, err
				}
			}
		}
	}
}

// reply takes what a session's client says about its prompt.
// It owns files.
func (d *desk) reply(session string, r promptReply, files []*os.File) {
	if r.Op == replyEdit {
		var argv [][]byte
		if err := unpack(files, &argv); err != nil {
			r.Op, r.Text = replyFailed, err.Error()
		}
		r.argv = asStrings(argv)
	} else {
		nsenter.CloseAll(files)
	}
	l := d.line(session)
	if l == nil {
		return
	}
	select {
	case l.replies <- r:
	case <-l.over:
	case <-time.After(time.Second): // nobody asks any more
	}
}

// note takes an entry for the journal, without waiting for the disk.
func (d *desk) note(e escalation.Entry) {
	if e.Event == "peer" && !d.peers.Allow() {
		return
	}
	if e.Event == "queued" {
		d.tell(e.Session)
	}
	select {
	case d.entries <- e:
	default: // the disk is slower than the requests; their number is bounded, so this ends
	}
}

// tell lets a developer without a prompt know that a request waits; not for each of many.
func (d *desk) tell(session string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lines[session]
	if l == nil || l.terminal || time.Since(l.told) < time.Minute {
		return
	}
	l.told = time.Now()
	go func() {
		_ = l.conn.Send(event{Notice: "the agent asks for a command on the host; answer in another terminal with: lazaret requests"})
	}()
}

func (d *desk) keepJournal(j *journal) {
	defer close(d.done)
	for {
		var e escalation.Entry
		select {
		case e = <-d.entries:
		default:
			select {
			case e = <-d.entries:
			case <-d.stop:
				return
			}
		}
		fields := map[string]any{"session": e.Session}
		for name, v := range map[string]string{"request": e.Request, "program": shown(e.Program), "dir": shown(e.Dir), "outcome": e.Outcome, "detail": e.Detail} {
			if v != "" {
				fields[name] = v
			}
		}
		if len(e.Argv) > 0 {
			fields["argv"] = prompt.Join(e.Argv) // it can be read back without the loss of a byte; JSON alone could not
		}
		j.write("escalation."+e.Event, fields)
	}
}

// shown escapes s if it is anything but plain text.
func shown(s string) string {
	if s == "" {
		return ""
	}
	return prompt.Quote(s)
}
