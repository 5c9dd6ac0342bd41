package broker

// This file is protocol/Lazaret.tla written again in Go, action by action, for 2 sessions and 2 requests. It shares no
// code with the machine. reachable_test.go explores both and compares them.

const (
	nSess = 2
	nReq  = 2
)

const (
	sNew uint8 = iota
	sLive
	sGone
)

const (
	cNone uint8 = iota
	cOpen
	cClosed
)

const (
	eNo uint8 = iota
	eUnseen
	eSeen
)

const lost Phase = 100 // a phase of the model alone: the coordinator is gone

const nobody = 9 // NoSession, Sandbox, and "no request" in a queue

type modelState struct {
	up      bool
	session [nSess]uint8
	conn    [nReq]uint8
	owner   [nReq]uint8
	phase   [nReq]Phase
	outcome [nReq]Outcome
	edit    [nReq]uint8
	queue   [nSess][nReq]uint8
	term    [nSess]uint8
	alive   [nReq]bool
	consent [nReq]bool
	runs    [nReq]uint8
	results [nReq]uint8
}

func modelInit() modelState {
	m := modelState{up: true}
	for r := range nReq {
		m.owner[r] = nobody
	}
	for s := range nSess {
		m.term[s] = nobody
		m.queue[s] = [nReq]uint8{nobody, nobody}
	}
	return m
}

func terminal(p Phase) bool { return p == Delivered || p == Dropped || p == lost }
func timed(p Phase) bool {
	return p == Checking || p == Queued || p == Prompted || p == Approved || p == Running
}

func (m *modelState) unqueue(r int) {
	for s := range nSess {
		out := [nReq]uint8{nobody, nobody}
		n := 0
		for _, q := range m.queue[s] {
			if q != nobody && q != uint8(r) {
				out[n] = q
				n++
			}
		}
		m.queue[s] = out
	}
}

func (m *modelState) push(s, r int) {
	for i := range m.queue[s] {
		if m.queue[s][i] == nobody {
			m.queue[s][i] = uint8(r)
			return
		}
	}
}

func (m *modelState) settleModel(r int, o Outcome) {
	m.outcome[r] = o
	m.phase[r] = Dropped
	if m.conn[r] == cOpen {
		m.phase[r] = Decided
	}
}

func (m *modelState) endModel(r int, o Outcome) {
	if m.phase[r] == Running {
		m.outcome[r], m.phase[r] = o, Killing
		return
	}
	m.settleModel(r, o)
}

func (m *modelState) lose(r int) {
	m.conn[r] = cClosed
	if timed(m.phase[r]) {
		m.outcome[r] = Cancelled
	}
	switch m.phase[r] {
	case Checking, Queued, Prompted, Approved, Decided:
		m.phase[r] = Dropped
	case Running:
		m.phase[r] = Killing
	}
}

// action is one instance of an action: its name and its parameters.
type action struct {
	name string
	r, s int
}

// apply returns the state after a, and whether a is enabled in m.
func (m modelState) apply(a action) (modelState, bool) {
	r, s := a.r, a.s
	if a.name == "Reap" {
		ok := !m.up && m.alive[r]
		m.alive[r] = false
		return m, ok
	}
	if !m.up {
		return m, false
	}
	was := m.phase[r]
	ok := false
	switch a.name {
	case "Join":
		ok = m.session[s] == sNew
		m.session[s] = sLive
	case "Leave":
		ok = m.session[s] == sLive
		m.session[s] = sGone
		for q := range nReq {
			if m.owner[q] == uint8(s) && m.conn[q] == cOpen {
				m.lose(q)
			}
		}
		m.queue[s] = [nReq]uint8{nobody, nobody}
		m.term[s] = nobody
	case "Authenticate":
		ok = m.session[s] == sLive && m.conn[r] == cNone
		m.conn[r], m.owner[r] = cOpen, uint8(s)
	case "Disconnect":
		ok = m.conn[r] == cOpen
		m.lose(r)
		m.unqueue(r)
	case "Submit":
		ok = m.conn[r] == cOpen && was == Idle
		m.phase[r] = Checking
	case "AutoApprove":
		ok = was == Checking
		m.phase[r], m.consent[r] = Approved, true
	case "Enqueue":
		if ok = was == Checking; ok {
			m.phase[r] = Queued
			m.push(int(m.owner[r]), r)
		}
	case "RuleDeny":
		ok = was == Checking
		m.settleModel(r, Denied)
	case "Prompt":
		head := m.queue[s][0]
		if ok = m.session[s] == sLive && m.term[s] == nobody && head != nobody; ok {
			m.term[s] = head
			m.phase[head] = Prompted
			m.unqueue(int(head))
		}
	case "Edit":
		ok = was == Prompted && m.edit[r] != eUnseen
		m.edit[r] = eUnseen
	case "Show":
		ok = was == Prompted && m.edit[r] == eUnseen
		m.edit[r] = eSeen
	case "Approve":
		ok = (was == Queued || was == Prompted) && m.edit[r] != eUnseen
		m.phase[r], m.consent[r] = Approved, true
		m.unqueue(r)
	case "Deny":
		ok = was == Queued || was == Prompted
		m.settleModel(r, Denied)
		m.unqueue(r)
	case "Return":
		ok = m.term[s] != nobody && m.phase[m.term[s]] != Prompted
		m.term[s] = nobody
	case "TimeOut":
		ok = timed(was)
		m.endModel(r, TimedOut)
		m.unqueue(r)
	case "Cancel":
		ok = timed(was)
		m.endModel(r, Cancelled)
		m.unqueue(r)
	case "Exceed":
		ok = was == Running
		m.endModel(r, Failed)
	case "Execute":
		ok = was == Approved
		m.phase[r], m.alive[r] = Running, true
		m.runs[r]++
	case "Exit":
		ok = was == Running
		m.settleModel(r, Completed)
		m.alive[r] = false
	case "Kill":
		ok = was == Killing
		m.settleModel(r, m.outcome[r])
		m.alive[r] = false
	case "Fail":
		ok = was == Checking || was == Approved || was == Running
		m.settleModel(r, Failed)
		m.alive[r] = false
	case "Deliver":
		ok = was == Decided
		m.phase[r] = Delivered
		m.results[r]++
	case "Crash":
		ok = true
		m.up = false
		for s := range nSess {
			m.session[s], m.term[s] = sGone, nobody
			m.queue[s] = [nReq]uint8{nobody, nobody}
		}
		for r := range nReq {
			m.conn[r] = cClosed
			if !terminal(m.phase[r]) {
				m.phase[r] = lost
			}
		}
	default:
		panic("unknown action " + a.name)
	}
	return m, ok
}

// actions lists every action instance within the bounds.
func actions() []action {
	var as []action
	for s := range nSess {
		for _, n := range []string{"Join", "Leave", "Prompt", "Return"} {
			as = append(as, action{n, 0, s})
		}
		for r := range nReq {
			as = append(as, action{"Authenticate", r, s})
		}
	}
	for r := range nReq {
		for _, n := range []string{"Disconnect", "Submit", "AutoApprove", "Enqueue", "RuleDeny", "Edit", "Show", "Approve",
			"Deny", "TimeOut", "Cancel", "Exceed", "Execute", "Exit", "Kill", "Fail", "Deliver", "Reap"} {
			as = append(as, action{n, r, 0})
		}
	}
	return append(as, action{name: "Crash"})
}
