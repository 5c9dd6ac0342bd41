package broker

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func rid(r int) RequestID { return RequestID{byte(r + 1)} }
func sid(s int) SessionID { return SessionID(fmt.Sprintf("s%d", s+1)) }
func cid(r int) ConnID    { return ConnID(r + 1) }

// world is a machine with the model's history variables, which the code has no need for. They are computed from effects
// alone, so they check the effects too.
type world struct {
	m    *Machine
	hist modelState // conn, owner, phase and outcome of finished requests; edit; alive, consent, runs, results
}

func newWorld() world { return world{New(Limits{}), modelInit()} }

func (w world) clone() world {
	c := *w.m
	c.sessions = maps.Clone(w.m.sessions)
	for id, s := range c.sessions {
		n := *s
		n.queue = slices.Clone(s.queue)
		c.sessions[id] = &n
	}
	c.conns = maps.Clone(w.m.conns)
	c.done = maps.Clone(w.m.done)
	c.ring = slices.Clone(w.m.ring)
	c.open = map[RequestID]*request{}
	for id, r := range w.m.open {
		n := *r
		if s := c.sessions[r.session]; s != nil {
			n.owner = s
		}
		c.open[id] = &n
	}
	return world{&c, w.hist}
}

// event makes the code's event of an action. Every digest is the version, so that a stale consent is seen.
func (w world) event(a action) Event {
	id := rid(a.r)
	now := Digest{w.hist.edit[a.r]}
	switch a.name {
	case "Join":
		return Join{sid(a.s), true}
	case "Leave":
		return Leave{sid(a.s)}
	case "Authenticate":
		return Authenticate{cid(a.r), sid(a.s)}
	case "Disconnect":
		return Disconnect{cid(a.r)}
	case "Submit":
		return Submit{cid(a.r), id, time.Minute}
	case "AutoApprove":
		return AutoApprove{id, Digest{}, time.Minute}
	case "Enqueue":
		return Enqueue{id, Digest{}, time.Minute}
	case "RuleDeny":
		return RuleDeny{id}
	case "Prompt":
		return Prompt{sid(a.s)}
	case "Edit":
		return Edit{id, Digest{eSeen}, time.Minute}
	case "Show":
		return Show{id}
	case "Approve":
		if w.hist.edit[a.r] == eUnseen {
			now = Digest{eSeen} // even with the right digest, what was not shown cannot be approved
		}
		return Approve{id, now}
	case "Deny":
		return Deny{id}
	case "Return":
		return Return{sid(a.s)}
	case "TimeOut":
		return TimeOut{id}
	case "Cancel":
		return Cancel{id}
	case "Exceed":
		return Exceed{id}
	case "Execute":
		return Execute{id}
	case "Exit":
		return Exit{id}
	case "Kill":
		return Kill{id}
	case "Fail":
		return Fail{id}
	case "Deliver":
		return Deliver{id}
	}
	return nil
}

// step applies an action to the code and keeps the history from its effects.
func (w *world) step(t *testing.T, a action) {
	wasPhase := w.m.Phase(rid(a.r))
	wasShown := wasPhase != Idle && w.m.open[rid(a.r)].shown
	now := t0
	if a.name == "TimeOut" {
		now = t0.Add(time.Hour) // past every deadline; the model has no clock
	}
	eff := w.m.Step(now, w.event(a))
	h := &w.hist
	switch a.name {
	case "Join":
		h.session[a.s] = sLive
	case "Leave":
		if h.session[a.s] == sLive {
			h.session[a.s] = sGone
		}
	case "Authenticate":
		h.conn[a.r], h.owner[a.r] = cOpen, uint8(a.s)
	case "Disconnect":
		h.conn[a.r] = cClosed
	case "Edit":
		if wasPhase == Prompted && wasShown {
			h.edit[a.r] = eUnseen
		}
	case "Show":
		if wasPhase == Prompted && !wasShown {
			h.edit[a.r] = eSeen
		}
	case "AutoApprove", "Approve":
		h.consent[a.r] = h.consent[a.r] || w.m.Phase(rid(a.r)) == Approved && wasPhase != Approved
	case "Exit", "Kill", "Fail":
		if wasPhase == Running || wasPhase == Killing {
			h.alive[a.r] = h.alive[a.r] && w.m.Phase(rid(a.r)) == wasPhase
		}
	}
	for _, e := range eff {
		switch e := e.(type) {
		case Start:
			r := int(e.ID[0]) - 1
			h.alive[r] = true
			h.runs[r]++
		case CloseConn:
			h.conn[int(e.Conn)-1] = cClosed
		case Finish:
			r := int(e.ID[0]) - 1
			h.phase[r], h.outcome[r] = Dropped, e.Outcome
			if e.Delivered {
				h.phase[r] = Delivered
				h.results[r]++
			}
		case RefuseConn:
			t.Fatalf("%v refused", a)
		}
	}
}

// encode is the refinement map: the model's state that this world stands for.
func (w world) encode() modelState {
	e := w.hist
	for r := range nReq {
		if q := w.m.open[rid(r)]; q != nil {
			e.phase[r], e.outcome[r] = q.phase, q.outcome
		}
	}
	for s := range nSess {
		x := w.m.sessions[sid(s)]
		e.term[s], e.queue[s] = nobody, [nReq]uint8{nobody, nobody}
		if x == nil {
			continue
		}
		if x.screen != nil {
			e.term[s] = x.screen[0] - 1
		}
		for i, q := range x.queue {
			e.queue[s][i] = q[0] - 1
		}
	}
	return e
}

// TestOR2ReachableStates explores every state of the model and of the code, and demands that they are the same, with the
// same successors, and that the model's invariants hold in each.
func TestOR2ReachableStates(t *testing.T) {
	as := actions()
	seen := map[modelState]bool{modelInit(): true}
	type pair struct {
		m modelState
		w world
	}
	work := []pair{{modelInit(), newWorld()}}
	up := 0
	for len(work) > 0 {
		p := work[len(work)-1]
		work = work[:len(work)-1]
		checkInvariants(t, p.m)
		if p.m.up {
			up++
		}
		for _, a := range as {
			next, ok := p.m.apply(a)
			if ok {
				checkStep(t, a, p.m, next)
			}
			isNew := ok && !seen[next]
			if isNew {
				seen[next] = true
			}
			if a.name == "Crash" || a.name == "Reap" { // the code is gone
				if isNew {
					work = append(work, pair{m: next})
				}
				continue
			}
			if !p.m.up || !ok && outside(a) {
				continue
			}
			w := p.w.clone()
			w.step(t, a)
			got := w.encode()
			if ok && got != next {
				t.Fatalf("%v\nfrom  %+v\nmodel %+v\ncode  %+v", a, p.m, next, got)
			}
			if !ok && got != p.m {
				t.Fatalf("%v is not enabled in the model\nfrom %+v\ncode %+v", a, p.m, got)
			}
			if isNew {
				work = append(work, pair{next, w})
			}
		}
	}
	fmt.Printf("Lazaret.tla, %d sessions x %d requests: %d distinct states, %d of them with a coordinator\n", nSess, nReq, len(seen), up)
	if len(seen) < 10000 {
		t.Errorf("only %d states: the exploration is broken", len(seen))
	}
}

// outside reports actions that the driver cannot make: a session or connection number is never used twice, and a
// refusal (which the histories show) is no state of the model.
func outside(a action) bool {
	return a.name == "Join" || a.name == "Authenticate" || a.name == "Submit" || a.name == "Disconnect"
}

func checkInvariants(t *testing.T, m modelState) {
	bad := func(name string) { t.Fatalf("%s is violated in %+v", name, m) }
	for r := range nReq {
		p := m.phase[r]
		if m.results[r] > 1 || (m.results[r] == 1) != (p == Delivered) {
			bad("OneResult")
		}
		if m.runs[r] > 0 && !m.consent[r] {
			bad("NothingUnapproved")
		}
		if m.runs[r] > 1 {
			bad("NothingTwice")
		}
		if timed(p) && (m.session[m.owner[r]] != sLive || m.conn[r] != cOpen) {
			bad("OnlyRegistered")
		}
		live := p == Running || p == Killing
		if m.up && m.alive[r] != live {
			bad("AliveIsKnown")
		}
		settled := p == Killing || p == Decided || p == Delivered || p == Dropped
		if settled && m.outcome[r] == None || m.outcome[r] == Completed && m.runs[r] != 1 || m.outcome[r] == Denied && m.runs[r] != 0 {
			bad("OutcomeFits")
		}
		n, owners := 0, 0
		for s := range nSess {
			for _, q := range m.queue[s] {
				if q == uint8(r) {
					n++
				}
			}
			if m.term[s] == uint8(r) {
				owners++
				if m.owner[r] != uint8(s) || m.session[s] != sLive {
					bad("PromptIsOwners")
				}
			}
		}
		if (p == Queued) != (n == 1) || n > 1 {
			bad("QueuedOnce")
		}
		if owners > 1 || p == Prompted && owners != 1 {
			bad("OneOwner")
		}
	}
}

func checkStep(t *testing.T, a action, from, to modelState) {
	for r := range nReq {
		switch {
		case terminal(from.phase[r]) && to.phase[r] != from.phase[r]:
			t.Fatalf("TerminalIsTerminal: %v from %+v", a, from)
		case from.outcome[r] != None && to.outcome[r] != from.outcome[r]:
			t.Fatalf("OutcomeIsFixed: %v from %+v", a, from)
		case (terminal(from.phase[r]) || from.outcome[r] != None || !from.up) && to.runs[r] != from.runs[r]:
			t.Fatalf("NothingAfterTheEnd: %v from %+v", a, from)
		}
	}
}

// TestOR2EveryRequestResolves checks liveness: the fair actions alone bring every reachable state, within a bounded number
// of steps and whatever their order, to one where nothing is pending, and no other action can lead away for ever, as each
// lowers or keeps the measure that the fair ones lower.
func TestOR2EveryRequestResolves(t *testing.T) {
	fair := func(n string) bool {
		return n == "TimeOut" || n == "Kill" || n == "Deliver" || n == "Disconnect" || n == "Reap" || n == "Return"
	}
	rank := func(p Phase) int { // how far a request is from its end
		switch p {
		case Checking, Queued, Prompted, Approved, Running:
			return 3
		case Killing:
			return 2
		case Decided:
			return 1
		}
		return 0
	}
	as := actions()
	seen := map[modelState]bool{modelInit(): true}
	work := []modelState{modelInit()}
	for len(work) > 0 {
		m := work[len(work)-1]
		work = work[:len(work)-1]
		var helped [nReq]bool // a fair action is enabled that brings r closer to its end
		var freed [nSess]bool
		for _, a := range as {
			next, ok := m.apply(a)
			if !ok {
				continue
			}
			for r := range nReq {
				was, is := rank(m.phase[r]), rank(next.phase[r])
				if is > was && m.phase[r] != Idle {
					t.Fatalf("%v moves request %d away from its end: %+v", a, r+1, m)
				}
				helped[r] = helped[r] || fair(a.name) && a.r == r && is < was
			}
			if a.name == "Return" {
				freed[a.s] = true
			}
			if !seen[next] {
				seen[next] = true
				work = append(work, next)
			}
		}
		for r := range nReq {
			if rank(m.phase[r]) > 0 && !helped[r] {
				t.Fatalf("nothing fair ends request %d in %+v", r+1, m)
			}
			if !m.up && m.alive[r] {
				if next, ok := m.apply(action{"Reap", r, 0}); !ok || next.alive[r] {
					t.Fatalf("request %d outlives the coordinator in %+v", r+1, m)
				}
			}
		}
		for s := range nSess {
			if q := m.term[s]; q != nobody && m.phase[q] != Prompted && !freed[s] {
				t.Fatalf("terminal %d never returns in %+v", s+1, m)
			}
		}
	}
}
