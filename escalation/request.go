package escalation

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
	"lazaret.dev/lazaret/escalation/wire"
)

// What a client is told about a failure: categories. The detail goes to the journal.
const (
	detailDir      = "the working directory is not a directory of the workspace on the host"
	detailProgram  = "there is no such program on the host"
	detailLarge    = "the program is too large to be checked"
	detailPin      = "the command could not be checked"
	detailStdin    = "standard input is not allowed for this command"
	detailChanged  = "something changed after it was approved; ask again"
	detailStart    = "the command could not be started"
	detailOutput   = "the command wrote more than it may"
	detailRule     = "denied by a rule"
	detailPerson   = "denied by the developer"
	detailNoPrompt = "the developer's terminal could not show the request"
	detailWait     = "nobody answered in time"
	detailTime     = "the command ran longer than it may"
)

// request is what the driver holds for an open request.
type request struct {
	id       broker.RequestID
	session  string
	conn     *conn
	submit   wire.Submit
	stdin    *stdin
	accepted chan struct{}   // closed when the client has been told so
	finished chan struct{}   // closed when the request is terminal
	ctx      context.Context // ends when the request is stopped before it runs, or finished
	cancel   context.CancelFunc
	work     sync.WaitGroup // check, prompt, prepare: users of plan
	pumps    sync.WaitGroup // output under way

	// Guarded by Server.mu.
	plan        *runner.Plan
	command     rules.Command
	verdict     rules.Verdict
	edited      bool
	closePrompt context.CancelFunc
	run         *runner.Run
	stopped     bool
	exceeded    bool
	started     time.Time
	output      int64
	detail      string // for the client
	log         string // for the developer
}

func newRequest(ctx context.Context, id broker.RequestID, c *conn, sub wire.Submit) (*request, error) {
	in, err := newStdin(c, sub.Stdin)
	if err != nil {
		return nil, err
	}
	r := &request{id: id, session: c.session, conn: c, submit: sub, stdin: in, accepted: make(chan struct{}), finished: make(chan struct{}), closePrompt: func() {}}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r, nil
}

// pinned is a command that was resolved, matched against the rules, and pinned.
type pinned struct {
	command rules.Command
	verdict rules.Verdict
	plan    *runner.Plan // nil if it is denied
}

// pin resolves argv as the sandbox's command in dir. detail is for the client if it fails.
func (s *Server) pin(argv []string, sandboxDir string) (p pinned, detail string, err error) {
	dir, dirErr := s.cfg.Workspace.PinDir(sandboxDir)
	defer func() {
		if dir != nil && p.plan == nil {
			dir.File.Close()
		}
	}()
	if dirErr != nil && strings.Contains(argv[0], "/") && !strings.HasPrefix(argv[0], "/") {
		return p, detailDir, dirErr
	}
	prog, err := s.cfg.Resolver.Resolve(argv[0], sandboxDir)
	p.command = rules.Command{Argv: argv, Program: prog}
	if err != nil {
		return p, detailProgram, err
	}
	p.verdict = s.rules.Load().Decide(p.command)
	if p.verdict.Action == rules.Deny {
		return p, detailRule, nil
	}
	switch {
	case p.verdict.Dir != "":
		fixed, err := s.cfg.Workspace.PinFixedDir(p.verdict.Dir)
		if err != nil {
			return p, detailDir, err
		}
		if dir != nil {
			dir.File.Close()
		}
		dir = fixed
	case dirErr != nil:
		return p, detailDir, dirErr
	}
	program, err := runner.PinProgram(prog.Path, prog.Ours)
	if errors.Is(err, runner.ErrTooLarge) {
		return p, detailLarge, err
	}
	if err != nil {
		return p, detailPin, err
	}
	code := false
	for _, n := range prog.Names {
		code = code || rules.TakesCode(n)
	}
	plan, err := runner.New(argv, runner.Env(s.cfg.Environ, p.verdict.Env), dir, program, code)
	if err != nil {
		dir = nil // closed with the plan
		return p, detailPin, err
	}
	plan.ByPath, plan.Time, plan.Output = p.verdict.ByPath, p.verdict.Time, p.verdict.Output
	p.plan = plan
	return p, "", nil
}

// check resolves a request and reports the verdict of the rules.
func (s *Server) check(r *request) {
	select {
	case s.checks <- struct{}{}:
		defer func() { <-s.checks }()
	case <-r.ctx.Done():
		return
	}
	p, detail, err := s.pin(r.submit.Argv, r.submit.Dir)
	if err == nil && p.plan != nil && r.submit.Stdin && !p.verdict.Stdin {
		p.plan.Close()
		p.plan, detail, err = nil, detailStdin, errors.New("standard input is off")
	}
	if err != nil {
		s.failed(r, detail, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.command, r.verdict, r.plan = p.command, p.verdict, p.plan
	why := strings.Join(p.verdict.Why, "; ")
	switch p.verdict.Action {
	case rules.Deny:
		r.detail, r.log = detail, why
		s.journal(r, "denied", "", why)
		s.stepLocked(broker.RuleDeny{ID: r.id})
	case rules.Auto:
		s.journal(r, "auto-approved", "", why)
		s.stepLocked(broker.AutoApprove{ID: r.id, Digest: p.plan.Digest(), Run: p.plan.Time})
	default:
		s.journal(r, "queued", "", why)
		s.stepLocked(broker.Enqueue{ID: r.id, Digest: p.plan.Digest(), Run: p.plan.Time})
	}
}

// viewLocked is what the developer sees of a request.
func (s *Server) viewLocked(r *request) prompt.Request {
	q := prompt.Request{
		ID: hex.EncodeToString(r.id[:]), Profile: s.cfg.Profile, Session: r.session,
		Program: r.plan.Program.Path, Argv: r.plan.Argv, Dir: r.plan.Dir.Path, Reason: r.submit.Reason,
		Waiting: s.m.Waiting(broker.SessionID(r.session)), Time: r.plan.Time, Digest: r.plan.Digest(), Edited: r.edited,
	}
	q.Expires, _ = s.m.Deadline(r.id)
	for _, kv := range r.plan.Env {
		name, _, _ := strings.Cut(kv, "=")
		q.Env = append(q.Env, name)
	}
	for _, n := range r.command.Program.Names {
		if why := rules.NeverAuto(n); why != "" {
			q.Notes = append(q.Notes, fmt.Sprintf("%q %s: it can do anything that you can do.", n, why))
			break
		}
	}
	if r.plan.Program.Ours {
		q.Notes = append(q.Notes, "The program lies in the workspace: the agent may have written it.")
	}
	for _, f := range r.plan.Files {
		q.Notes = append(q.Notes, fmt.Sprintf("Argument %d names a file; its content is part of what you approve.", f.Arg))
	}
	if r.submit.Stdin {
		q.Notes = append(q.Notes, "The agent sends standard input to it.")
	}
	if rule, ok, _ := rules.Narrow(r.command); ok && s.cfg.Remember != nil && !r.submit.Stdin {
		q.Remember = rule.String()
	}
	return q
}

// prompt asks on the session's terminal, and reports the answer and the terminal's return.
func (s *Server) prompt(ctx context.Context, r *request) {
	s.mu.Lock()
	q := s.viewLocked(r)
	s.mu.Unlock()
	a, err := s.cfg.Prompter.Prompt(ctx, r.session, q, func(argv []string) (prompt.Request, error) { return s.edit(r, argv) })
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		if ctx.Err() == nil {
			r.detail, r.log = detailNoPrompt, err.Error()
			s.stepLocked(broker.Deny{ID: r.id})
		}
	case a.Kind == prompt.Approved:
		s.approveLocked(r, a)
	case a.Kind == prompt.Denied:
		s.denyLocked(r)
	}
	// A prompt that is over without an answer that counts must not keep the terminal, nor run anything.
	if s.m.Phase(r.id) == broker.Prompted {
		r.detail = detailNoPrompt
		s.stepLocked(broker.Deny{ID: r.id})
	}
	s.stepLocked(broker.Return{Session: broker.SessionID(r.session)})
}

func (s *Server) approveLocked(r *request, a prompt.Answer) bool {
	s.stepLocked(broker.Approve{ID: r.id, Digest: a.Digest})
	if p := s.m.Phase(r.id); p != broker.Approved && p != broker.Running {
		return false // late, or not for what was shown
	}
	s.journal(r, "approved", "", "")
	if rule, ok, _ := rules.Narrow(r.command); ok && a.Remember && s.cfg.Remember != nil {
		session := r.session
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			if err := s.cfg.Remember(session, rule); err != nil {
				s.cfg.Journal(Entry{Time: s.cfg.Now(), Session: session, Event: "peer", Detail: "remember rule: " + err.Error()})
			}
		}()
	}
	return true
}

func (s *Server) denyLocked(r *request) {
	switch s.m.Phase(r.id) {
	case broker.Queued, broker.Prompted:
		r.detail = detailPerson
		s.journal(r, "denied", "", "by the developer")
		s.stepLocked(broker.Deny{ID: r.id})
	}
}

// edit replaces what would run by the developer's argument vector, in the same directory.
func (s *Server) edit(r *request, argv []string) (prompt.Request, error) {
	sub := wire.Submit{Argv: argv, Dir: "/"}
	if err := sub.Check(); err != nil {
		return prompt.Request{}, err
	}
	p, detail, err := s.pin(argv, r.submit.Dir)
	if err != nil {
		return prompt.Request{}, fmt.Errorf("%s (%w)", detail, err)
	}
	if p.plan == nil {
		return prompt.Request{}, errors.New(strings.Join(p.verdict.Why, "; "))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m.Phase(r.id) != broker.Prompted {
		p.plan.Close()
		return prompt.Request{}, errors.New("the request has ended")
	}
	old := r.plan
	r.command, r.verdict, r.plan, r.edited = p.command, p.verdict, p.plan, true
	old.Close() // only a prompted request is edited, so nobody else uses the plan
	s.journal(r, "edited", "", "")
	s.stepLocked(broker.Edit{ID: r.id, Digest: p.plan.Digest(), Run: p.plan.Time})
	s.stepLocked(broker.Show{ID: r.id}) // the caller shows what this returns; consent needs its digest
	return s.viewLocked(r), nil
}

// prepare readies an approved command; the machine says when it starts.
func (s *Server) prepare(r *request) {
	outR, errR, stdio, err := r.stdio()
	if err != nil {
		s.failed(r, detailStart, err)
		return
	}
	s.mu.Lock()
	plan := r.plan
	s.mu.Unlock()
	run, err := s.cfg.Host.Prepare(plan, stdio)
	if err != nil {
		outR.Close()
		errR.Close()
		s.failed(r, detailStart, err)
		return
	}
	s.mu.Lock()
	r.run = run
	stopped := r.stopped
	s.mu.Unlock()
	r.pumps.Add(2)
	s.wg.Add(3)
	go s.pump(r, wire.KindStdout, outR)
	go s.pump(r, wire.KindStderr, errR)
	go s.follow(r, run)
	if stopped {
		run.Kill(0)
		return
	}
	if err := <-run.Ready(); err == nil {
		s.step(broker.Execute{ID: r.id})
	} // otherwise follow reports it
}

// stdio makes a command's standard descriptors and returns our ends of the output.
func (r *request) stdio() (outR, errR *os.File, stdio runner.Stdio, err error) {
	in := r.stdin.take()
	if in == nil {
		if in, err = os.Open(os.DevNull); err != nil {
			return nil, nil, stdio, fmt.Errorf("open standard input: %w", err)
		}
	}
	outR, outW, err := bigPipe()
	if err != nil {
		in.Close()
		return nil, nil, stdio, err
	}
	errR, errW, err := bigPipe()
	if err != nil {
		in.Close()
		outR.Close()
		outW.Close()
		return nil, nil, stdio, err
	}
	return outR, errR, runner.Stdio{In: in, Out: outW, Err: errW}, nil
}

// follow reports the end of a run.
func (s *Server) follow(r *request, run *runner.Run) {
	defer s.wg.Done()
	<-run.Done()
	exit, err := run.Exit()
	s.mu.Lock()
	defer s.mu.Unlock()
	if exit.Left > 0 {
		r.log = join(r.log, fmt.Sprintf("%d processes of it could not be killed", exit.Left))
	}
	switch {
	case s.m.Phase(r.id) == broker.Killing:
		s.stepLocked(broker.Kill{ID: r.id})
	case errors.Is(err, runner.ErrChanged):
		r.detail, r.log = detailChanged, err.Error()
		s.stepLocked(broker.Fail{ID: r.id})
	case err != nil:
		r.detail, r.log = detailStart, err.Error()
		s.stepLocked(broker.Fail{ID: r.id})
	default:
		s.stepLocked(broker.Exit{ID: r.id})
	}
}

// pump sends output to the client, which may slow it down, up to the command's limit. It reads to the end in any case.
func (s *Server) pump(r *request, k wire.Kind, from *os.File) {
	defer s.wg.Done()
	defer r.pumps.Done()
	defer from.Close()
	<-r.accepted
	buf := make([]byte, wire.HeaderLen+wire.MaxChunk)
	open := true
	for {
		n, err := from.Read(buf[wire.HeaderLen:])
		if n > 0 && open {
			if n = s.allow(r, n); n > 0 {
				frame := wire.AppendFrame(buf[:0], k, buf[wire.HeaderLen:wire.HeaderLen+n])
				open = r.conn.write(frame) == nil
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				s.cfg.Journal(Entry{Time: s.cfg.Now(), Session: r.session, Event: "peer", Detail: "read output: " + err.Error()})
			}
			return
		}
	}
}

// allow counts n bytes of output and returns how many of them may pass.
func (s *Server) allow(r *request, n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := max(r.plan.Output-r.output, 0)
	r.output += int64(n)
	if int64(n) <= left {
		return n
	}
	if !r.exceeded {
		r.exceeded = true
		r.detail = detailOutput
		s.stepLocked(broker.Exceed{ID: r.id})
	}
	return int(left)
}

// reply sends the result, after all output, and waits for the client to confirm it.
func (s *Server) reply(r *request, o broker.Outcome) {
	r.pumps.Wait()
	s.mu.Lock()
	res := wire.Result{Outcome: wire.Outcome(o), Started: !r.started.IsZero(), Detail: r.detail}
	if res.Started {
		res.Duration = s.cfg.Now().Sub(r.started)
	}
	switch o {
	case broker.Completed:
		e, _ := r.run.Exit()
		res.Status, res.Signal, res.Detail = int32(e.Status), uint32(e.Signal), ""
	case broker.TimedOut:
		res.Detail = detailWait
		if res.Started {
			res.Detail = detailTime
		}
	}
	s.mu.Unlock()
	select {
	case <-r.accepted:
	case <-r.finished:
	}
	// A client that does not take or confirm its result is cut off; its reader reports that.
	_ = r.conn.SetWriteDeadline(time.Now().Add(s.cfg.Delivery))
	if r.conn.send(wire.KindResult, res.Append(nil)) != nil {
		r.conn.Close()
		return
	}
	select {
	case <-r.finished:
	case <-time.After(s.cfg.Delivery):
		r.conn.Close()
	}
}
