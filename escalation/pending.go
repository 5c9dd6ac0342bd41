package escalation

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/prompt"
)

// ErrNotPending means that a request is not waiting for an answer (any more), or that it is not what was shown.
var ErrNotPending = errors.New("request is not waiting for this answer")

// Pending is an open request, for "lazaret requests".
type Pending struct {
	Request prompt.Request
	Phase   string // "checking", "queued", "prompted", "approved", "running", "killing", "decided"
}

// Pending returns the open requests, ordered by ID. Requests that are still being checked have no program.
func (s *Server) Pending() []Pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ps []Pending
	for _, r := range s.live {
		p := Pending{Phase: s.m.Phase(r.id).String()}
		if r.plan != nil {
			p.Request = s.viewLocked(r)
		} else {
			p.Request = prompt.Request{ID: hex.EncodeToString(r.id[:]), Profile: s.cfg.Profile, Session: r.session,
				Argv: r.submit.Argv, Dir: r.submit.Dir, Reason: r.submit.Reason}
		}
		ps = append(ps, p)
	}
	slices.SortFunc(ps, func(a, b Pending) int { return strings.Compare(a.Request.ID, b.Request.ID) })
	return ps
}

// Answer answers a queued or prompted request from another terminal of the developer. An approval must carry the digest
// of what was shown there. A prompt that is up is closed.
func (s *Server) Answer(id string, a prompt.Answer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.findLocked(id)
	if err != nil {
		return err
	}
	p := s.m.Phase(r.id)
	if p != broker.Queued && p != broker.Prompted {
		return fmt.Errorf("answer request %s: %w", id, ErrNotPending)
	}
	switch a.Kind {
	case prompt.Approved:
		if !s.approveLocked(r, a) {
			return fmt.Errorf("answer request %s: %w", id, ErrNotPending)
		}
	case prompt.Denied:
		s.denyLocked(r)
	default:
		return fmt.Errorf("answer request %s: no answer", id)
	}
	return nil
}

// Cancel stops a request, whatever it is doing.
func (s *Server) Cancel(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.findLocked(id)
	if err != nil {
		return err
	}
	r.detail = "cancelled by the developer"
	s.stepLocked(broker.Cancel{ID: r.id})
	return nil
}

func (s *Server) findLocked(id string) (*request, error) {
	b, err := hex.DecodeString(id)
	if err != nil || len(b) != len(broker.RequestID{}) || s.live[broker.RequestID(b)] == nil {
		return nil, fmt.Errorf("request %.64q: %w", id, ErrNotPending)
	}
	return s.live[broker.RequestID(b)], nil
}
