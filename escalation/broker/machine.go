package broker

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Limits bound what peers can make the machine hold. The zero value of a field means its default.
type Limits struct {
	PerSession int           // open requests of one session; default 64
	Total      int           // open requests of the Domain; default 1024
	Remembered int           // finished requests whose IDs stay refused; default 65536
	MaxWait    time.Duration // upper bound of, and default for, the wait for an answer; default 10 minutes
	MaxRun     time.Duration // upper bound of, and default for, a command's time; default 1 hour
}

func (l Limits) withDefaults() Limits {
	if l.PerSession <= 0 {
		l.PerSession = 64
	}
	if l.Total <= 0 {
		l.Total = 1024
	}
	if l.Remembered <= 0 {
		l.Remembered = 1 << 16
	}
	if l.MaxWait <= 0 {
		l.MaxWait = 10 * time.Minute
	}
	if l.MaxRun <= 0 {
		l.MaxRun = time.Hour
	}
	return l
}

type session struct {
	hasTerminal bool
	screen      *RequestID  // request that owns the terminal; nil: the sandbox does
	queue       []RequestID // requests in phase Queued, oldest first
	open        int         // requests of this session that are not terminal
}

type request struct {
	session  SessionID
	owner    *session // of that ID; kept, as a request may outlive its session while it is killed
	conn     ConnID
	phase    Phase
	outcome  Outcome // fixed once, when phase becomes Killing or Decided
	digest   Digest
	edited   bool
	shown    bool // false only between Edit and Show
	connOpen bool
	run      time.Duration
	deadline time.Time // of waiting, then of running
}

// Machine decides Host Escalations. The zero value is not usable; call [New]. Not safe for concurrent use.
type Machine struct {
	limits   Limits
	sessions map[SessionID]*session
	conns    map[ConnID]connection
	open     map[RequestID]*request // an entry leaves once, with one Finish
	done     map[RequestID]struct{} // IDs of ring
	ring     []RequestID            // finished requests; oldest at next once it is full
	next     int
}

type connection struct {
	session SessionID
	used    bool // has submitted
	request RequestID
}

// New returns a machine without sessions.
func New(l Limits) *Machine {
	return &Machine{
		limits:   l.withDefaults(),
		sessions: map[SessionID]*session{},
		conns:    map[ConnID]connection{},
		open:     map[RequestID]*request{},
		done:     map[RequestID]struct{}{},
	}
}

// Phase returns the phase of an open request, and Idle for any other.
func (m *Machine) Phase(id RequestID) Phase {
	if r := m.open[id]; r != nil {
		return r.phase
	}
	return Idle
}

// Deadline returns when an open request times out; ok is false if it does not, or is not open.
func (m *Machine) Deadline(id RequestID) (at time.Time, ok bool) {
	if r := m.open[id]; r != nil && r.timed() {
		return r.deadline, true
	}
	return at, false
}

// Waiting returns how many requests of s wait behind the one on its terminal.
func (m *Machine) Waiting(s SessionID) int {
	if x := m.sessions[s]; x != nil {
		return len(x.queue)
	}
	return 0
}

// Open returns the number of requests that are not terminal.
func (m *Machine) Open() int { return len(m.open) }

// Step applies ev at time now, as one action, and returns what the caller must do, in order.
func (m *Machine) Step(now time.Time, ev Event) []Effect {
	switch ev := ev.(type) {
	case Join: // Lazaret.tla: Join(s)
		if m.sessions[ev.Session] == nil {
			m.sessions[ev.Session] = &session{hasTerminal: ev.HasTerminal}
		}
		return nil
	case Leave: // Lazaret.tla: Leave(s)
		return m.leave(ev.Session)
	case Authenticate: // Lazaret.tla: Authenticate(r, s)
		if m.sessions[ev.Session] == nil {
			return []Effect{RefuseConn{ev.Conn, RefusedSession}}
		}
		m.conns[ev.Conn] = connection{session: ev.Session}
		return nil
	case Submit: // Lazaret.tla: Submit(r)
		return m.submit(now, ev)
	case AutoApprove: // Lazaret.tla: AutoApprove(r)
		if r := m.in(ev.ID, Checking); r != nil {
			r.phase, r.digest, r.run = Approved, ev.Digest, ev.Run
			return []Effect{Prepare{ev.ID}}
		}
	case Enqueue: // Lazaret.tla: Enqueue(r)
		if r := m.in(ev.ID, Checking); r != nil {
			r.phase, r.digest, r.run = Queued, ev.Digest, ev.Run
			r.owner.queue = append(r.owner.queue, ev.ID)
		}
	case RuleDeny: // Lazaret.tla: RuleDeny(r)
		if r := m.in(ev.ID, Checking); r != nil {
			return m.decide(ev.ID, r, Denied)
		}
	case Prompt: // Lazaret.tla: Prompt(s)
		return m.prompt(ev.Session)
	case Edit: // Lazaret.tla: Edit(r)
		if r := m.in(ev.ID, Prompted); r != nil && r.shown {
			r.edited, r.shown, r.digest, r.run = true, false, ev.Digest, ev.Run
		}
	case Show: // Lazaret.tla: Show(r)
		if r := m.in(ev.ID, Prompted); r != nil {
			r.shown = true
		}
	case Approve: // Lazaret.tla: Approve(r)
		// The digest ties the consent to what was on the screen: a form that was edited meanwhile needs a new one.
		if r := m.in(ev.ID, Queued, Prompted); r != nil && r.shown && r.digest == ev.Digest {
			eff := m.unask(ev.ID, r)
			r.phase = Approved
			return append(eff, Prepare{ev.ID})
		}
	case Deny: // Lazaret.tla: Deny(r)
		if r := m.in(ev.ID, Queued, Prompted); r != nil {
			return m.decide(ev.ID, r, Denied)
		}
	case TimeOut: // Lazaret.tla: TimeOut(r)
		if r := m.in(ev.ID, Checking, Queued, Prompted, Approved, Running); r != nil && !now.Before(r.deadline) {
			return m.end(ev.ID, r, TimedOut)
		}
	case Cancel: // Lazaret.tla: Cancel(r)
		if r := m.in(ev.ID, Checking, Queued, Prompted, Approved, Running); r != nil {
			return m.end(ev.ID, r, Cancelled)
		}
	case Exceed: // Lazaret.tla: Exceed(r)
		if r := m.in(ev.ID, Running); r != nil {
			return m.end(ev.ID, r, Failed)
		}
	case Execute: // Lazaret.tla: Execute(r)
		if r := m.in(ev.ID, Approved); r != nil {
			r.phase, r.deadline = Running, now.Add(bounded(r.run, m.limits.MaxRun))
			return []Effect{Start(ev)}
		}
	case Exit: // Lazaret.tla: Exit(r)
		if r := m.in(ev.ID, Running); r != nil {
			return m.settle(ev.ID, r, Completed)
		}
	case Kill: // Lazaret.tla: Kill(r)
		if r := m.in(ev.ID, Killing); r != nil {
			return m.settle(ev.ID, r, r.outcome)
		}
	case Fail: // Lazaret.tla: Fail(r)
		if r := m.in(ev.ID, Checking, Approved, Running); r != nil {
			return m.settle(ev.ID, r, Failed)
		}
	case Deliver: // Lazaret.tla: Deliver(r)
		if r := m.in(ev.ID, Decided); r != nil {
			return m.finish(ev.ID, r, Delivered)
		}
	case Disconnect: // Lazaret.tla: Disconnect(r)
		return m.disconnect(ev.Conn)
	case Return: // Lazaret.tla: Return(s)
		return m.giveBack(ev.Session)
	default:
		panic(fmt.Sprintf("broker: unknown event %T", ev)) // our bug: peers cannot make events
	}
	return nil // late or out of place: the event changes nothing
}

// Due returns the events that the machine itself has become ready for at time now: Prompt for free terminals with a
// queue, and TimeOut for passed deadlines. Step them all, then ask again.
func (m *Machine) Due(now time.Time) []Event {
	var evs []Event
	for _, id := range m.expired(now) {
		evs = append(evs, TimeOut{id})
	}
	for _, s := range slices.Sorted(maps.Keys(m.sessions)) {
		if m.promptable(s) {
			evs = append(evs, Prompt{s})
		}
	}
	return evs
}

// NextDeadline returns the earliest time at which Due would return a TimeOut; ok is false if there is none.
func (m *Machine) NextDeadline() (at time.Time, ok bool) {
	for _, r := range m.open {
		if r.timed() && (!ok || r.deadline.Before(at)) {
			at, ok = r.deadline, true
		}
	}
	return at, ok
}

func (r *request) timed() bool { return r.phase >= Checking && r.phase <= Running }

// expired returns the requests past their deadline in a fixed order, so that equal histories give equal effects.
func (m *Machine) expired(now time.Time) []RequestID {
	var ids []RequestID
	for id, r := range m.open {
		if r.timed() && !now.Before(r.deadline) {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b RequestID) int { return bytes.Compare(a[:], b[:]) })
	return ids
}

// in returns the open request id if it is in one of the phases.
func (m *Machine) in(id RequestID, phases ...Phase) *request {
	if r := m.open[id]; r != nil && slices.Contains(phases, r.phase) {
		return r
	}
	return nil
}

func (m *Machine) submit(now time.Time, ev Submit) []Effect {
	c, ok := m.conns[ev.Conn]
	s := m.sessions[c.session]
	_, seen := m.done[ev.ID]
	switch {
	case !ok:
		return []Effect{RefuseConn{ev.Conn, RefusedSession}}
	case c.used:
		return []Effect{RefuseConn{ev.Conn, RefusedProtocol}}
	case seen || m.open[ev.ID] != nil:
		return []Effect{RefuseConn{ev.Conn, RefusedDuplicate}}
	case s.open >= m.limits.PerSession || len(m.open) >= m.limits.Total:
		return []Effect{RefuseConn{ev.Conn, RefusedBusy}}
	}
	m.conns[ev.Conn] = connection{session: c.session, used: true, request: ev.ID}
	m.open[ev.ID] = &request{session: c.session, conn: ev.Conn, owner: s, phase: Checking, shown: true, connOpen: true, deadline: now.Add(bounded(ev.Wait, m.limits.MaxWait))}
	s.open++
	return []Effect{Check{ev.ID}}
}

// bounded returns d, or limit if d is not a positive duration below it.
func bounded(d, limit time.Duration) time.Duration {
	if d <= 0 || d > limit {
		return limit
	}
	return d
}

// promptable reports whether Prompt(s) is enabled.
func (m *Machine) promptable(id SessionID) bool {
	s := m.sessions[id]
	return s != nil && s.hasTerminal && s.screen == nil && len(s.queue) > 0
}

func (m *Machine) prompt(id SessionID) []Effect {
	if !m.promptable(id) {
		return nil
	}
	s := m.sessions[id]
	r := s.queue[0]
	s.queue = slices.Delete(s.queue, 0, 1)
	s.screen = &r
	m.open[r].phase = Prompted
	return []Effect{OpenPrompt{id, r}}
}

// giveBack returns the terminal to the sandbox, once the prompt on it is over.
func (m *Machine) giveBack(id SessionID) []Effect {
	if s := m.sessions[id]; s != nil && s.screen != nil && m.in(*s.screen, Prompted) == nil {
		s.screen = nil
	}
	return nil
}

// unask takes a request out of its queue, or its prompt off the screen.
func (m *Machine) unask(id RequestID, r *request) []Effect {
	switch r.phase {
	case Queued:
		r.owner.queue = slices.DeleteFunc(r.owner.queue, func(q RequestID) bool { return q == id })
	case Prompted:
		return []Effect{ClosePrompt{r.session, id}}
	}
	return nil
}

// end gives a request its outcome; a running command has to die first.
func (m *Machine) end(id RequestID, r *request, o Outcome) []Effect {
	if r.phase != Running {
		return m.decide(id, r, o)
	}
	r.phase, r.outcome = Killing, o
	return []Effect{Stop{id, true}}
}

// decide fixes the outcome of a request of which nothing runs.
func (m *Machine) decide(id RequestID, r *request, o Outcome) []Effect {
	eff := m.unask(id, r)
	if r.phase == Checking || r.phase == Approved {
		eff = append(eff, Stop{id, false})
	}
	return append(eff, m.settle(id, r, o)...)
}

// settle sends the result, or drops it if nobody is there to take it.
func (m *Machine) settle(id RequestID, r *request, o Outcome) []Effect {
	r.phase, r.outcome = Decided, o
	if !r.connOpen {
		return m.finish(id, r, Dropped)
	}
	return []Effect{Reply{id, o}}
}

func (m *Machine) finish(id RequestID, r *request, p Phase) []Effect {
	r.phase = p
	delete(m.open, id)
	r.owner.open--
	m.remember(id)
	return []Effect{Finish{id, r.outcome, p == Delivered}}
}

func (m *Machine) remember(id RequestID) {
	m.done[id] = struct{}{}
	if len(m.ring) < m.limits.Remembered {
		m.ring = append(m.ring, id)
		return
	}
	delete(m.done, m.ring[m.next])
	m.ring[m.next] = id
	m.next = (m.next + 1) % len(m.ring)
}

// hangUp ends the request of a connection that is gone, with the outcome Cancelled unless it has one.
func (m *Machine) hangUp(id RequestID) []Effect {
	r := m.open[id]
	if r == nil {
		return nil
	}
	r.connOpen = false
	switch r.phase {
	case Killing:
		return nil // Kill will drop it
	case Decided:
		return m.finish(id, r, Dropped)
	}
	return m.end(id, r, Cancelled)
}

func (m *Machine) disconnect(id ConnID) []Effect {
	c, ok := m.conns[id]
	if !ok {
		return nil
	}
	delete(m.conns, id)
	if !c.used {
		return nil
	}
	return m.hangUp(c.request)
}

func (m *Machine) leave(id SessionID) []Effect {
	if m.sessions[id] == nil {
		return nil
	}
	var eff []Effect
	for _, c := range slices.Sorted(maps.Keys(m.conns)) {
		if m.conns[c].session == id {
			eff = append(eff, m.disconnect(c)...)
			eff = append(eff, CloseConn{c})
		}
	}
	delete(m.sessions, id)
	return eff
}
