package broker

import (
	"bufio"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Rewriting the expectations is legitimate once every line of the diff can be explained.
var update = flag.Bool("update", false, "rewrite the expectations in testdata")

// TestHistories replays testdata/*.txt: lines of commands, "----", and the effects that they must have.
func TestHistories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no histories: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			got := replay(t, string(want))
			if *update {
				if err := os.WriteFile(f, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("effects differ; got:\n%s", got)
			}
		})
	}
}

type player struct {
	m   *Machine
	now time.Time
}

// replay runs the commands of a history and returns it with the effects that they really had.
func replay(t *testing.T, text string) string {
	p := player{m: New(Limits{PerSession: 3, Total: 4, Remembered: 4}), now: t0}
	var out strings.Builder
	var eff []string
	expecting := false
	sc := bufio.NewScanner(strings.NewReader(text))
	for sc.Scan() {
		line := sc.Text()
		command := line != "" && line[0] != '#' && line != "----"
		if expecting && line != "" {
			continue // an old expectation
		}
		if expecting {
			expecting = false
		}
		out.WriteString(line + "\n")
		switch {
		case line == "----":
			for _, e := range eff {
				out.WriteString(e + "\n")
			}
			eff, expecting = nil, true
		case command:
			eff = append(eff, p.run(t, line)...)
		}
	}
	return out.String()
}

func (p *player) run(t *testing.T, line string) []string {
	f := strings.Fields(line)
	args := map[string]string{}
	for _, a := range f[1:] {
		k, v, ok := strings.Cut(a, "=")
		if !ok {
			k, v = "id", a
		}
		args[k] = v
	}
	id := RequestID{}
	copy(id[:], args["id"])
	dig := Digest{}
	copy(dig[:], args["form"])
	dur := func(k string) time.Duration {
		if args[k] == "" {
			return 0
		}
		d, err := time.ParseDuration(args[k])
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return d
	}
	var conn ConnID
	_, _ = fmt.Sscan(args["conn"], &conn)
	sess := SessionID(args["id"])
	var ev Event
	switch f[0] {
	case "join":
		ev = Join{sess, args["terminal"] != "no"}
	case "leave":
		ev = Leave{sess}
	case "authenticate":
		ev = Authenticate{conn, SessionID(args["session"])}
	case "submit":
		ev = Submit{conn, id, dur("wait")}
	case "auto-approve":
		ev = AutoApprove{id, dig, dur("run")}
	case "enqueue":
		ev = Enqueue{id, dig, dur("run")}
	case "rule-deny":
		ev = RuleDeny{id}
	case "edit":
		ev = Edit{id, dig, dur("run")}
	case "show":
		ev = Show{id}
	case "approve":
		ev = Approve{id, dig}
	case "deny":
		ev = Deny{id}
	case "cancel":
		ev = Cancel{id}
	case "exceed":
		ev = Exceed{id}
	case "execute":
		ev = Execute{id}
	case "exit":
		ev = Exit{id}
	case "kill":
		ev = Kill{id}
	case "fail":
		ev = Fail{id}
	case "deliver":
		ev = Deliver{id}
	case "disconnect":
		ev = Disconnect{conn}
	case "return":
		ev = Return{sess}
	case "elapse":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		p.now = p.now.Add(d)
	default:
		t.Fatalf("unknown command %q", line)
	}
	var out []string
	if ev != nil {
		out = show(p.m.Step(p.now, ev))
	}
	for evs := p.m.Due(p.now); len(evs) > 0; evs = p.m.Due(p.now) {
		for _, ev := range evs {
			out = append(out, show(p.m.Step(p.now, ev))...)
		}
	}
	return out
}

func name(id RequestID) string { return strings.TrimRight(string(id[:]), "\x00") }

func show(eff []Effect) []string {
	var out []string
	for _, e := range eff {
		var s string
		switch e := e.(type) {
		case RefuseConn:
			s = fmt.Sprintf("refuse conn=%d %s", e.Conn, e.Why)
		case Check:
			s = "check " + name(e.ID)
		case OpenPrompt:
			s = fmt.Sprintf("open-prompt %s session=%s", name(e.ID), e.Session)
		case ClosePrompt:
			s = fmt.Sprintf("close-prompt %s session=%s", name(e.ID), e.Session)
		case Prepare:
			s = "prepare " + name(e.ID)
		case Start:
			s = "start " + name(e.ID)
		case Stop:
			s = fmt.Sprintf("stop %s running=%t", name(e.ID), e.Running)
		case Reply:
			s = fmt.Sprintf("reply %s %s", name(e.ID), e.Outcome)
		case CloseConn:
			s = fmt.Sprintf("close conn=%d", e.Conn)
		case Finish:
			s = fmt.Sprintf("finish %s %s delivered=%t", name(e.ID), e.Outcome, e.Delivered)
		}
		out = append(out, s)
	}
	return out
}

// TestOR2RandomHistories drives a larger machine with random events and looks for what must never happen.
func TestOR2RandomHistories(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		randomHistory(t, rng)
	}
}

func randomHistory(t *testing.T, rng *rand.Rand) {
	m := New(Limits{PerSession: 4, Total: 10, Remembered: 1000})
	now := t0
	nextSession, nextConn := 0, 0
	approved, started, finished, replied := map[RequestID]bool{}, map[RequestID]bool{}, map[RequestID]bool{}, map[RequestID]bool{}
	accepted, screens := map[RequestID]bool{}, map[SessionID]int{}
	id := func() RequestID { return RequestID{byte(rng.IntN(40)), 1} }
	session := func() SessionID { return sid(rng.IntN(nextSession + 1)) }
	conn := func() ConnID { return ConnID(rng.IntN(nextConn + 1)) }
	step := func(ev Event) {
		for _, e := range m.Step(now, ev) {
			switch e := e.(type) {
			case Check:
				if accepted[e.ID] {
					t.Fatalf("%x accepted twice", e.ID)
				}
				accepted[e.ID] = true
			case Prepare:
				approved[e.ID] = true
			case Start:
				if !approved[e.ID] || started[e.ID] || finished[e.ID] || replied[e.ID] {
					t.Fatalf("%x must not start", e.ID)
				}
				started[e.ID] = true
			case Reply:
				if replied[e.ID] {
					t.Fatalf("%x answered twice", e.ID)
				}
				replied[e.ID] = true
			case Finish:
				if finished[e.ID] {
					t.Fatalf("%x finished twice", e.ID)
				}
				finished[e.ID] = true
			case OpenPrompt:
				if screens[e.Session]++; screens[e.Session] > 1 {
					t.Fatalf("two prompts on the terminal of %s", e.Session)
				}
			}
		}
		switch ev := ev.(type) {
		case Return:
			if m.sessions[ev.Session] == nil || m.sessions[ev.Session].screen == nil {
				screens[ev.Session] = 0
			}
		case Leave:
			screens[ev.Session] = 0
		}
	}
	for range 400 {
		now = now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
		switch rng.IntN(24) {
		case 0:
			nextSession++
			step(Join{sid(nextSession), rng.IntN(2) == 0})
		case 1:
			if rng.IntN(8) == 0 {
				step(Leave{session()})
			}
		case 2, 3, 4:
			nextConn++
			step(Authenticate{ConnID(nextConn), session()})
		case 5, 6, 7:
			step(Submit{conn(), id(), time.Duration(rng.IntN(60)) * time.Second})
		case 8:
			step(AutoApprove{id(), Digest{}, time.Second})
		case 9, 10, 11:
			step(Enqueue{id(), Digest{}, time.Minute})
		case 12:
			step(RuleDeny{id()})
		case 13:
			step(Edit{id(), Digest{byte(rng.IntN(2))}, time.Minute})
		case 14:
			step(Show{id()})
		case 15:
			step(Approve{id(), Digest{byte(rng.IntN(2))}})
		case 16:
			step(Deny{id()})
		case 17:
			step(Execute{id()})
		case 18:
			step(Exit{id()})
		case 19:
			step(Kill{id()})
		case 20:
			step(Fail{id()})
		case 21:
			step(Deliver{id()})
		case 22:
			step(Disconnect{conn()})
		case 23:
			step(Return{session()})
		}
		for _, ev := range m.Due(now) {
			step(ev)
		}
		if m.Open() > 10 {
			t.Fatalf("%d open requests", m.Open())
		}
	}
	// Fair scheduling from here on: everything resolves.
	now = now.Add(time.Hour)
	for range 3 {
		for _, ev := range m.Due(now) {
			step(ev)
		}
		for id := range accepted {
			step(Kill{id})
			step(Deliver{id})
		}
	}
	if m.Open() != 0 || len(finished) != len(accepted) {
		t.Fatalf("%d open, %d of %d finished", m.Open(), len(finished), len(accepted))
	}
	for _, s := range m.sessions {
		if s.open != 0 || len(s.queue) != 0 {
			t.Fatalf("a session is left with %d open requests and a queue of %d", s.open, len(s.queue))
		}
	}
}
