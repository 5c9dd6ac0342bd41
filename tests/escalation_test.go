package tests

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const autoRules = `
[[escalation.rule]]
argv = ["printf"]
trailing = "any"
auto = true

[[escalation.rule]]
argv = ["ls"]
trailing = "any"
auto = true

[[escalation.rule]]
argv = ["pwd"]
auto = true

[[escalation.rule]]
argv = ["wc", "-c"]
auto = true
stdin = true

[[escalation.rule]]
argv = ["cat"]
auto = true

[[escalation.rule]]
argv = ["printenv"]
auto = true
env = ["NAMED"]

[[escalation.rule]]
argv = ["sleep", "54321"]
auto = true

[[escalation.rule]]
argv = ["reboot"]
trailing = "any"
deny = true
`

// TestFR5AutoApproved runs commands that rules approve: output, status, standard input, directory, environment.
func TestFR5AutoApproved(t *testing.T) {
	b := newBox(t)
	b.profile("default", autoRules)
	b.extra = []string{"NAMED=by the rule", "UNNAMED=" + canary}
	sub := filepath.Join(b.ws, "a b", "c")
	if err := os.MkdirAll(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	_, release := b.hold()
	for _, tc := range []struct {
		script   string
		status   int
		out, err string
	}{
		{`lazaret-escalate -- printf '%s\n' 'a  b' '$HOME' '*'`, 0, "a  b\n$HOME\n*\n", ""},
		{`cd 'a b/c'; lazaret-escalate -- pwd`, 0, sub + "\n", ""},
		{`cd /tmp; lazaret-escalate -- pwd`, 204, "", "the working directory is not a directory of the workspace"},
		{`lazaret-escalate -- ls /nonexistent`, 2, "", "/nonexistent"},
		{`echo secret | lazaret-escalate -- cat`, 0, "", ""},
		{`echo secret | lazaret-escalate --stdin -- cat`, 204, "", "standard input is not allowed"},
		{`printf 12345 | lazaret-escalate --stdin -- wc -c`, 0, "5\n", ""},
		{`lazaret-escalate -- reboot -f`, 201, "", "denied by a rule"},
		{`lazaret-escalate -- no-such-program`, 204, "", "no such program on the host"},
		{`lazaret-escalate --timeout 300ms -- true`, 202, "", "nobody answered"},
		{`lazaret-escalate true`, 206, "", "after --"},
		{`bash -lc 'command -v lazaret-escalate; lazaret-escalate --help | head -1; head -1 /run/lazaret/ESCALATE.md'`, 0,
			"/run/lazaret/bin/lazaret-escalate\nUsage:\n# Running a command on the host\n", ""},
	} {
		if r := b.run(b.shell(tc.script)); r.status != tc.status || r.out != tc.out || !strings.Contains(r.err, tc.err) {
			t.Errorf("%s: want %d %q %q: %v", tc.script, tc.status, tc.out, tc.err, r)
		}
	}
	env := b.ok(b.shell(`export FROM_INSIDE=x LD_PRELOAD=; lazaret-escalate -- printenv`))
	if !strings.Contains(env, "NAMED=by the rule\n") || !strings.Contains(env, "HOME="+b.home+"\n") || strings.Contains(env, canary) || strings.Contains(env, "FROM_INSIDE") ||
		strings.Contains(env, "LAZARET") {
		t.Errorf("the command's environment:\n%s", env)
	}
	release()
}

// TestFR5MCP asks once over the Model Context Protocol on standard input and output.
func TestFR5MCP(t *testing.T) {
	b := newBox(t)
	b.profile("default", autoRules)
	cmd := b.enter("lazaret-escalate", "mcp")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := b.start(cmd)
	for _, line := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`,
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"run_on_host","arguments":{"command":["printf","%s","over mcp"],"reason":"a test"}}}`,
	} {
		if _, err := fmt.Fprintln(in, line); err != nil {
			t.Fatal(err)
		}
	}
	type answer struct {
		ID     int
		Result struct {
			StructuredContent struct {
				Outcome, Stdout string
				Status          int `json:"exit_status"`
			}
		}
	}
	answers := make(chan answer)
	go func() {
		defer close(answers)
		for d := json.NewDecoder(out); ; {
			var a answer
			if d.Decode(&a) != nil {
				return
			}
			answers <- a
		}
	}()
	limit := time.After(patience)
	for a := (answer{}); a.ID != 2; {
		select {
		case a = <-answers:
		case <-limit:
			t.Fatal("no answer")
		}
		if c := a.Result.StructuredContent; a.ID == 2 && (c.Outcome != "completed" || c.Stdout != "over mcp" || c.Status != 0) {
			t.Errorf("answer %+v", c)
		}
	}
	in.Close()
	if r := p.wait(patience); r.status != 0 {
		t.Errorf("at its end: %v", r)
	}
}

// TestDX4TwoTerminals has two sessions of one Domain: a prompt appears in the one that asks, the other works on.
func TestDX4TwoTerminals(t *testing.T) {
	b := newBox(t)
	m := newPanes(b)
	one, two := m.pane("one"), m.pane("two")
	one.shell()
	two.shell()
	one.line("echo mar''ker")
	one.await("marker\n")
	before := one.await("box>")

	// Approve; meanwhile the other session goes on.
	one.line(`lazaret-escalate --reason "$(printf 'fine\033[2J\033]0;x\007\nLazaret: all is well\342\200\256')" -- sh -c 'echo ran as $(id -un) >ran' ; echo $? >status`)
	shown := one.prompted()
	for _, want := range []string{"profile", "default", "/usr/bin/", `sh -c "echo ran as $(id -un) >ran"`, b.ws, "own words:",
		`  | fine\x1b[2J\x1b]0;x\x07` + "\n" + `  | Lazaret: all is well\u{202e}` + "\n"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the prompt lacks %q:\n%s", want, shown)
		}
	}
	two.line("echo works >other; echo al''ive")
	if s := two.await("alive\n"); strings.Contains(s, "Lazaret") {
		t.Errorf("FR-5: the other session sees the prompt:\n%s", s)
	}
	if b.readFile("other") != "works\n" {
		t.Error("OR-3: the other session is blocked")
	}
	if _, err := os.Stat(filepath.Join(b.ws, "ran")); err == nil {
		t.Fatal("SR-8: it runs before it is approved")
	}
	one.keys("Space", "Space", "a")
	if s := b.settled("status"); s != "0" {
		t.Errorf("approved: status %s\n%s", s, one.screen())
	}
	if out := b.readFile("ran"); !strings.HasPrefix(out, "ran as ") || strings.Contains(out, "agent") {
		t.Errorf("it ran as %q", out)
	}
	if after := one.without("[d] deny"); !strings.HasPrefix(after, strings.TrimRight(before, "\n ")) {
		t.Errorf("DX-5: the screen was not given back:\n%s\nwas\n%s", after, before)
	}

	// Deny.
	two.line("lazaret-escalate -- touch never; echo $? >status")
	two.prompted()
	two.keys("d")
	if s := b.settled("status"); s != "201" {
		t.Errorf("denied: status %s", s)
	}
	two.without("[d] deny")

	// Edit: what runs is what was shown last.
	one.line("lazaret-escalate -- touch never; echo $? >status")
	one.prompted()
	one.keys("e")
	one.await("[Enter] check")
	one.m.run("send-keys", "-t", "one", "C-u")
	one.m.run("send-keys", "-t", "one", "-l", "touch instead")
	one.keys("Enter")
	one.await("as you edited it", "touch instead")
	one.keys("Space", "a")
	if s := b.settled("status"); s != "0" {
		t.Errorf("edited: status %s", s)
	}
	if _, err := os.Stat(filepath.Join(b.ws, "instead")); err != nil {
		t.Error(err)
	}

	// Time-out: nobody answers.
	two.line("lazaret-escalate --timeout 2s -- touch never; echo $? >status")
	two.prompted()
	if s := b.settled("status"); s != "202" {
		t.Errorf("timed out: status %s", s)
	}
	two.without("[d] deny")

	// Type-ahead: a key that was pressed before the prompt decides nothing, and does not reach the shell afterwards.
	one.line("clear; sleep 1; lazaret-escalate -- touch never; echo $? >status")
	for range 15 {
		one.m.run("send-keys", "-t", "one", "-l", "a")
		time.Sleep(80 * time.Millisecond)
	}
	one.prompted()
	time.Sleep(keyPause)
	one.m.run("send-keys", "-t", "one", "-l", "aaaa")
	time.Sleep(keyPause)
	one.prompted()
	one.keys("d")
	if s := b.settled("status"); s != "201" {
		t.Errorf("type-ahead: status %s", s)
	}

	// Remember: the same command runs without being asked about, and sessions still join.
	two.line("clear; lazaret-escalate -- touch remembered; echo $? >status")
	two.prompted()
	two.keys("Space", "r")
	two.await("[y] run and remember", "[[escalation.rule]]", "auto = true")
	two.keys("y")
	if s := b.settled("status"); s != "0" {
		t.Errorf("remembered: status %s", s)
	}
	eventually(t, patience, "a rule in the profile", func() bool {
		text, _ := os.ReadFile(filepath.Join(b.config(), "profiles/default.toml"))
		return strings.Contains(string(text), `argv = ["/usr/bin/touch", "remembered"]`)
	})
	one.line("clear; lazaret-escalate -- touch remembered; echo $? >status")
	if s := b.settled("status"); s != "0" {
		t.Errorf("second time: status %s", s)
	}
	if r := b.run(b.shell("lazaret-escalate -- touch remembered")); r.status != 0 {
		t.Errorf("a session that joins later: %v", r)
	}
	if _, err := os.Stat(filepath.Join(b.ws, "never")); err == nil {
		t.Error("SR-8: something ran that was not approved")
	}
	one.leave()
	two.leave()
}

// TestDX5PromptOverFullScreenProgram: a program on the alternate screen is there again after the prompt.
func TestDX5PromptOverFullScreenProgram(t *testing.T) {
	needsProgram(t, "less")
	b := newBox(t)
	m := newPanes(b)
	p := m.pane("full")
	p.shell()
	var text strings.Builder
	for i := range 200 {
		fmt.Fprintf(&text, "line %d of the file\n", i)
	}
	b.write(filepath.Join(b.ws, "text"), text.String())
	p.line("(sleep 2; lazaret-escalate -- touch ran; echo $? >status) & less text")
	// The last line is less's own status, which a change of size turns from the name into a colon.
	withoutStatus := func(screen string) string { return strings.Join(strings.Split(screen, "\n")[:29], "\n") }
	before := withoutStatus(p.await("line 1 of", "line 20 of"))
	p.prompted()
	p.keys("Space", "a")
	if s := b.settled("status"); s != "0" {
		t.Errorf("status %s", s)
	}
	after := ""
	for end := time.Now().Add(5 * time.Second); after != before && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		after = withoutStatus(p.screen())
	}
	if after != before {
		t.Errorf("DX-5: the screen is\n%s\nand was\n%s", after, before)
	}
	p.keys("q")
	p.await("box>")
	p.leave()
}

// TestOR2OtherTerminal lists and answers requests of a session that has no terminal.
func TestOR2OtherTerminal(t *testing.T) {
	b := newBox(t)
	ask := func() (p *proc, id, digest string) {
		p = b.start(b.shell(`lazaret-escalate --reason "$(printf 'why\033[31m')" -- touch made; exit $?`))
		eventually(t, patience, "a request", func() bool {
			var list []struct{ ID, Digest, Phase, Reason string }
			if err := json.Unmarshal([]byte(b.ok(b.lazaret("requests", "list", "--json"))), &list); err != nil {
				t.Fatal(err)
			}
			if len(list) != 1 || list[0].Phase != "queued" {
				return false
			}
			id, digest = list[0].ID, list[0].Digest
			if list[0].Reason != `"why\x1b[31m"` {
				t.Errorf("reason %q", list[0].Reason)
			}
			return true
		})
		return p, id, digest
	}
	p, id, digest := ask()
	if out := b.ok(b.lazaret("requests")); !strings.Contains(out, "touch made") || strings.Contains(out, "\x1b") {
		t.Errorf("the list:\n%q", out)
	}
	b.refused(b.lazaret("requests", "approve", id), "no terminal")
	wrong := strings.Map(func(r rune) rune { return map[bool]rune{true: '1', false: '0'}[r == '0'] }, digest)
	b.refused(b.lazaret("requests", "approve", id, "--digest", wrong), "not waiting for this answer")
	b.ok(b.lazaret("requests", "approve", id[:8], "--digest", digest))
	if r := p.wait(patience); r.status != 0 {
		t.Errorf("approved: %v", r)
	}
	if _, err := os.Stat(filepath.Join(b.ws, "made")); err != nil {
		t.Error(err)
	}
	p, id, _ = ask()
	b.ok(b.lazaret("requests", "deny", id))
	if r := p.wait(patience); r.status != 201 {
		t.Errorf("denied: %v", r)
	}
	b.refused(b.lazaret("requests", "deny", id), "none with this ID")
	m := newPanes(b)
	there := m.pane("there")
	p, id, _ = ask()
	there.line(filepath.Join(b.bin, "lazaret") + " requests approve " + id + "; echo st''atus $?")
	there.prompted()
	there.keys("Space", "a")
	there.await("status 0")
	if r := p.wait(patience); r.status != 0 {
		t.Errorf("approved on another terminal: %v", r)
	}
}

// TestSR8SwapBetweenApprovalAndRun changes things after they are shown, and looks at the host.
func TestSR8SwapBetweenApprovalAndRun(t *testing.T) {
	b := newBox(t)
	outside := filepath.Join(b.dir, "outside")
	for _, d := range []string{outside, filepath.Join(b.ws, "dir")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m := newPanes(b)
	p := m.pane("p")
	p.shell()
	_, release := b.hold()
	dir, old := filepath.Join(b.ws, "dir"), filepath.Join(b.ws, "old")
	for name, swap := range map[string]func() error{
		"a link that leads outside":  func() error { return os.Symlink(outside, dir) },
		"a link to what it was":      func() error { return os.Symlink("old", dir) },
		"another directory":          func() error { return os.Mkdir(dir, 0o755) },
		"nothing":                    func() error { return nil },
		"a file that can be written": func() error { return os.WriteFile(dir, nil, 0o644) },
	} {
		p.line("clear; (cd dir; exec lazaret-escalate -- touch swapped); echo $? >status")
		p.prompted()
		if err := os.Rename(dir, old); err != nil {
			t.Fatal(err)
		}
		if err := swap(); err != nil {
			t.Fatal(err)
		}
		p.keys("Space", "a")
		if s := b.settled("status"); s != "204" {
			t.Errorf("SR-8: the directory became %s: status %s", name, s)
		}
		p.without("[d] deny")
		for _, f := range []string{outside + "/swapped", dir + "/swapped", old + "/swapped"} {
			if _, err := os.Lstat(f); err == nil {
				t.Errorf("SR-8: the directory became %s: %s was made", name, f)
			}
		}
		_ = os.Remove(dir)
		if err := os.Rename(old, dir); err != nil {
			t.Fatal(err)
		}
	}
	// A script: what runs is what was there when it was shown, or nothing.
	b.ok(b.shell("printf '#!/bin/sh\necho good >made\n' >script; chmod +x script"))
	p.line("clear; lazaret-escalate -- ./script; echo $? >status")
	if s := p.prompted(); !strings.Contains(s, "may have written it") {
		t.Errorf("no warning:\n%s", s)
	}
	b.ok(b.shell("printf '#!/bin/sh\necho evil >made\n' >script"))
	p.keys("Space", "a")
	s := b.settled("status")
	if text, _ := os.ReadFile(filepath.Join(b.ws, "made")); strings.Contains(string(text), "evil") || s == "0" && string(text) != "good\n" {
		t.Errorf("SR-8: the script was swapped: status %s, made %q", s, text)
	}
	p.without("[d] deny")
	release()
	p.leave()
}

// TestSR9Certificates uses keys of other sessions, of sessions that have left and of another Domain.
func TestSR9Certificates(t *testing.T) {
	c := newBox(t)
	c.profile("default", autoRules)
	c.ok(c.shell("cp -r $LAZARET_SESSION_DIR stolen; chmod -R u+w stolen"))
	b := newBox(t)
	b.profile("default", autoRules)
	// A process that outlives its session, in a sandbox that does not: it has left, and asks for something.
	_, release := b.hold()
	b.ok(b.shell(`cp -r $LAZARET_SESSION_DIR /tmp/stolen; lazaret-escalate -- printf x
		(sleep 2; LAZARET_SESSION_DIR=/tmp/stolen lazaret-escalate -- touch evil; echo $? >stolen-status) >/dev/null 2>&1 &
		(sleep 2; lazaret-escalate -- touch evil; echo $? >own-status) >/dev/null 2>&1 &`))
	for _, f := range []string{"stolen-status", "own-status"} {
		if s := b.settled(f); s != "205" {
			t.Errorf("SR-9: %s after its session has left: %s", f, s)
		}
	}
	if out := b.ok(b.shell("ls /run/lazaret/sessions | wc -l; ls /run/lazaret/escalate; for f in $(find /run/lazaret) /run/lazaret/x; do echo x 2>/dev/null >>$f && echo wrote $f; done; touch /run/lazaret/sessions/y 2>/dev/null && echo made; true")); out != "2\nca.pem\nendpoint\n" {
		t.Errorf("SR-5: in /run/lazaret:\n%s", out)
	}
	// The verified session is that of the certificate: it has no terminal, so the request waits there, whoever sends it.
	m := newPanes(b)
	p := m.pane("p")
	p.shell()
	p.line("echo $LAZARET_SESSION_DIR >dir; cp -r $LAZARET_SESSION_DIR /tmp/ps; touch copied")
	b.waitFile("copied")
	other := b.start(b.shell("LAZARET_SESSION_DIR=/tmp/ps lazaret-escalate -- touch made; exit $?"))
	p.prompted()
	p.keys("d")
	if r := other.wait(patience); r.status != 201 {
		t.Errorf("another session's certificate: %v", r)
	}
	// Another Domain's keys.
	if err := os.CopyFS(filepath.Join(b.ws, "stolen"), os.DirFS(filepath.Join(c.ws, "stolen"))); err != nil {
		t.Fatal(err)
	}
	if r := b.run(b.shell(`LAZARET_SESSION_DIR=$PWD/stolen lazaret-escalate -- printf x`)); r.status != 205 || r.out != "" {
		t.Errorf("SR-9: another Domain's certificate: %v", r)
	}
	p.without("[d] deny")
	p.leave()
	release()
}

// TestOR3Kill kills client, session and coordinator at a prompt and while a command runs: nothing of it stays on the host.
func TestOR3Kill(t *testing.T) {
	kills := map[string]func(b *box, client *proc) bool{
		"escalation client": func(b *box, _ *proc) bool { b.ok(b.shell("pkill -KILL lazaret-escalat")); return false },
		"interrupt":         func(b *box, _ *proc) bool { b.ok(b.shell("pkill -INT lazaret-escalat")); return false },
		"session's client":  func(b *box, c *proc) bool { _ = c.Process.Kill(); return true },
		"coordinator":       func(b *box, _ *proc) bool { _ = syscall.Kill(b.theOne(coordinator).pid, syscall.SIGKILL); return true },
		"sandbox":           func(b *box, _ *proc) bool { _ = syscall.Kill(b.theOne(sandbox).pid, syscall.SIGKILL); return true },
	}
	for name, kill := range kills {
		t.Run(name, func(t *testing.T) {
			for _, state := range []string{"running", "asking"} {
				b := newBox(t)
				b.profile("default", autoRules)
				p := b.start(b.shell("lazaret-escalate -- sleep " + map[string]string{"running": "54321", "asking": "12345"}[state] + "; echo $? >status; exec sleep 1000"))
				if state == "running" {
					eventually(t, patience, "the command on the host", func() bool { return onHost("sleep 54321") })
				} else {
					eventually(t, patience, "a request", func() bool { return strings.Contains(b.ok(b.lazaret("requests")), "sleep 12345") })
				}
				ends := kill(b, p)
				goesFromHost(t, 5*time.Second, "sleep 54321")
				if !ends {
					if s := b.settled("status"); s != "137" && s != "203" {
						t.Errorf("%s: status %s", state, s)
					}
					if out := b.ok(b.lazaret("requests")); !strings.Contains(out, "no agent asks") {
						t.Errorf("%s: left:\n%s", state, out)
					}
					_ = p.Process.Signal(syscall.SIGTERM)
				}
				p.wait(patience)
				b.wantNoProcess(gone)
				b.ok(b.enter("true")) // clears what a coordinator that was killed has left
				b.wantNothingLeft()
			}
		})
	}
}

// TestOR3KillAtPrompt ends the client of a session while its prompt is up.
func TestOR3KillAtPrompt(t *testing.T) {
	b := newBox(t)
	m := newPanes(b)
	_, release := b.hold()
	p := m.pane("p")
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		p.shell()
		p.line("lazaret-escalate -- touch never; echo $? >status")
		p.prompted()
		for _, c := range find("lazaret enter -- env PS1") {
			_ = syscall.Kill(c.pid, sig)
		}
		eventually(t, 5*time.Second, "the end of the request", func() bool { return strings.Contains(b.ok(b.lazaret("requests")), "no agent asks") })
		if sig == syscall.SIGTERM { // it gives the terminal back; killed, it cannot
			p.without("[d] deny")
			p.await("host>")
			p.leaveHost()
		}
	}
	if _, err := os.Stat(filepath.Join(b.ws, "never")); err == nil {
		t.Error("SR-8: it ran")
	}
	b.ok(b.enter("true")) // the others of the Domain go on
	release()
}
