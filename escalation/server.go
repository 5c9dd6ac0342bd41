package escalation

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/wire"
)

const (
	maxStrangers = 64 // connections that are not authenticated yet; the oldest makes room
	maxChecks    = 4  // requests that are resolved and hashed at the same time
)

// Server is the coordinator's side of Host Escalation.
type Server struct {
	cfg    Config
	tls    *tls.Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	rules  atomic.Pointer[rules.Set]
	checks chan struct{} // a slot for each running check
	wg     sync.WaitGroup
	once   sync.Once

	mu        sync.Mutex
	m         *broker.Machine
	closed    bool
	timer     *time.Timer                   // for m.NextDeadline
	conns     map[broker.ConnID]*conn       // authenticated
	peers     map[broker.SessionID]int      // connections of each session
	strangers []*stranger                   // oldest first
	live      map[broker.RequestID]*request // an entry lives as long as the machine's
	nextConn  broker.ConnID
}

// stranger is a connection that is not authenticated yet.
type stranger struct{ net.Conn }

// New returns a server that is not serving yet. It owns cfg.Listener from here on, also when it fails.
func New(cfg Config) (*Server, error) {
	if err := cfg.complete(); err != nil {
		if cfg.Listener != nil {
			cfg.Listener.Close()
		}
		return nil, err
	}
	if cfg.Silence <= 0 {
		cfg.Silence = wire.Silence
	}
	t := cfg.Anchor.ServerConfig()
	t.DynamicRecordSizingDisabled = true // output is bulk
	s := &Server{
		cfg:    cfg,
		tls:    t,
		checks: make(chan struct{}, maxChecks),
		m:      broker.New(cfg.Limits),
		conns:  map[broker.ConnID]*conn{},
		peers:  map[broker.SessionID]int{},
		live:   map[broker.RequestID]*request{},
	}
	s.rules.Store(cfg.Rules)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.timer = time.AfterFunc(time.Hour, s.tick)
	return s, nil
}

// Serve accepts peers until Close. It returns nil after Close, otherwise why it cannot go on.
func (s *Server) Serve() error {
	for {
		c, err := s.cfg.Listener.Accept()
		if err == nil {
			s.meet(c)
			continue
		}
		if s.isClosed() {
			return nil
		}
		var ne net.Error
		if errors.Is(err, net.ErrClosed) || !errors.As(err, &ne) {
			return fmt.Errorf("accept escalation peer: %w", err)
		}
		select { // out of descriptors, or a peer that gave up: neither is for ever
		case <-time.After(50 * time.Millisecond):
		case <-s.ctx.Done():
			return nil
		}
	}
}

// SetRules puts other rules in force, for requests that are not checked yet.
func (s *Server) SetRules(set *rules.Set) { s.rules.Store(set) }

// Close ends the server: connections are cut, prompts closed, commands killed. It returns when nothing of it is left.
func (s *Server) Close() error {
	var err error
	s.once.Do(func() {
		s.mu.Lock()
		s.closed = true
		err = s.cfg.Listener.Close() // no new peers
		for _, x := range s.strangers {
			x.Close()
		}
		for _, c := range s.conns {
			c.Close() // its reader reports Disconnect, which stops its request
		}
		s.mu.Unlock()
		s.cancel()
		s.wg.Wait()
		s.timer.Stop()
	})
	return err
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Join registers a Client Session and returns its certificate and key in PEM. Session IDs must never be used again.
func (s *Server) Join(session string, hasTerminal bool) (cert, key []byte, err error) {
	if cert, key, err = s.cfg.Anchor.Issue(session); err != nil {
		return nil, nil, err
	}
	s.step(broker.Join{Session: broker.SessionID(session), HasTerminal: hasTerminal})
	return cert, key, nil
}

// Leave ends a session: its certificate is void, its connections are cut, its commands killed. It does not wait for the
// kill.
func (s *Server) Leave(session string) {
	s.cfg.Anchor.Revoke(session)
	s.step(broker.Leave{Session: broker.SessionID(session)})
}

// tick steps what time alone has made due.
func (s *Server) tick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked()
}

func (s *Server) step(ev broker.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stepLocked(ev)
}

func (s *Server) stepLocked(ev broker.Event) {
	s.applyLocked(s.m.Step(s.cfg.Now(), ev))
	s.settleLocked()
}

// settleLocked steps everything that is due, and sets the timer for what will be.
func (s *Server) settleLocked() {
	for {
		now := s.cfg.Now()
		evs := s.m.Due(now)
		if len(evs) == 0 {
			break
		}
		for _, ev := range evs {
			s.applyLocked(s.m.Step(now, ev))
		}
	}
	if at, ok := s.m.NextDeadline(); ok {
		s.timer.Reset(max(at.Sub(s.cfg.Now()), time.Millisecond))
	}
}

// applyLocked carries out effects. Nothing here blocks.
func (s *Server) applyLocked(effects []broker.Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case broker.RefuseConn:
			if c := s.conns[e.Conn]; c != nil {
				c.refused = e.Why
			}
		case broker.Check:
			s.goLocked(e.ID, s.check)
		case broker.OpenPrompt:
			r := s.live[e.ID]
			ctx, cancel := context.WithCancel(r.ctx)
			r.closePrompt = cancel
			s.goLocked(e.ID, func(r *request) { s.prompt(ctx, r) })
		case broker.ClosePrompt:
			s.live[e.ID].closePrompt()
		case broker.Prepare:
			s.goLocked(e.ID, s.prepare)
		case broker.Start:
			r := s.live[e.ID]
			r.started = s.cfg.Now()
			r.run.Start()
			s.journal(r, "started", "", "")
		case broker.Stop:
			r := s.live[e.ID]
			r.stopped = true
			if r.run != nil {
				grace := s.cfg.Grace
				if !e.Running || s.closed {
					grace = 0
				}
				r.run.Kill(grace)
			}
			if !e.Running {
				r.cancel()
			}
		case broker.Reply:
			r, o := s.live[e.ID], e.Outcome
			s.goLocked(e.ID, func(*request) { s.reply(r, o) })
		case broker.CloseConn:
			if c := s.conns[e.Conn]; c != nil {
				c.Close()
			}
		case broker.Finish:
			r := s.live[e.ID]
			delete(s.live, e.ID)
			r.cancel()
			close(r.finished)
			detail := r.log
			if !e.Delivered {
				detail = join(detail, "the client was gone")
			}
			s.journal(r, "finished", e.Outcome.String(), detail)
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				r.work.Wait()
				if r.plan != nil {
					r.plan.Close()
				}
			}()
		}
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// goLocked starts f as a user of the request's plan.
func (s *Server) goLocked(id broker.RequestID, f func(*request)) {
	r := s.live[id]
	s.wg.Add(1)
	r.work.Add(1)
	go func() {
		defer s.wg.Done()
		defer r.work.Done()
		f(r)
	}()
}

func (s *Server) journal(r *request, event, outcome, detail string) {
	e := Entry{Time: s.cfg.Now(), Session: r.session, Request: hex.EncodeToString(r.id[:]), Event: event,
		Argv: r.submit.Argv, Dir: r.submit.Dir, Outcome: outcome, Detail: detail}
	if r.plan != nil {
		e.Argv, e.Program, e.Dir = r.plan.Argv, r.plan.Program.Path, r.plan.Dir.Path
	}
	s.cfg.Journal(e)
}

// failed reports that a request cannot go on: detail is one of our fixed sentences for the client, err is for us.
func (s *Server) failed(r *request, detail string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.detail = detail
	if err != nil {
		r.log = err.Error()
	}
	s.stepLocked(broker.Fail{ID: r.id})
}
