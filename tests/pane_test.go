package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// panes is a private tmux server of a box: terminals that a test types on and looks at.
type panes struct {
	b      *box
	socket string
}

// keyPause is longer than what a prompt wants before a key that decides.
const keyPause = 600 * time.Millisecond

func newPanes(b *box) *panes {
	b.t.Helper()
	needsProgram(b.t, "tmux")
	m := &panes{b, filepath.Join(b.dir, "tmux")}
	b.t.Cleanup(func() {
		m.b.run(m.tmux("kill-server"))
		b.wantNothingLeft()
	})
	return m
}

func (m *panes) run(args ...string) string {
	m.b.t.Helper()
	return m.b.ok(m.tmux(args...))
}

func (m *panes) tmux(args ...string) *exec.Cmd {
	return m.b.command(append([]string{"tmux", "-S", m.socket, "-f", "/dev/null"}, args...)...)
}

// pane is one terminal, in which a shell of the host runs first.
type pane struct {
	m    *panes
	name string
}

func (m *panes) pane(name string) *pane {
	m.b.t.Helper()
	m.run("new-session", "-d", "-s", name, "-x", "100", "-y", "30", "env", "PS1=host> ", "sh")
	p := &pane{m, name}
	p.await("host>")
	return p
}

func (p *pane) screen() string {
	p.m.b.t.Helper()
	return p.m.run("capture-pane", "-p", "-t", p.name)
}

// keys sends keys by their tmux names, each after a pause.
func (p *pane) keys(keys ...string) {
	p.m.b.t.Helper()
	for _, k := range keys {
		time.Sleep(keyPause)
		p.m.run("send-keys", "-t", p.name, k)
	}
}

// line types a line.
func (p *pane) line(text string) {
	p.m.b.t.Helper()
	p.m.run("send-keys", "-t", p.name, "-l", text)
	p.m.run("send-keys", "-t", p.name, "Enter")
}

func (p *pane) await(texts ...string) string {
	p.m.b.t.Helper()
	got := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(25 * time.Millisecond) {
		got = p.screen()
		missing := false
		for _, text := range texts {
			missing = missing || !strings.Contains(got, text)
		}
		if !missing {
			return got
		}
	}
	p.m.b.t.Fatalf("%q are not on the screen of %s:\n%s", texts, p.name, got)
	return ""
}

func (p *pane) without(text string) string {
	p.m.b.t.Helper()
	got := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(25 * time.Millisecond) {
		if got = p.screen(); !strings.Contains(got, text) {
			return got
		}
	}
	p.m.b.t.Fatalf("%q stays on the screen of %s:\n%s", text, p.name, got)
	return ""
}

// shell enters the sandbox with a shell whose prompt is "box> ".
func (p *pane) shell() {
	p.m.b.t.Helper()
	p.line("stty -g >" + p.state("before"))
	p.line("clear; " + filepath.Join(p.m.b.bin, "lazaret") + " enter -- env PS1='box> ' sh")
	p.await("box>")
}

func (p *pane) state(when string) string { return filepath.Join(p.m.b.dir, p.name+"-"+when) }

// leave ends the shell, and checks that the terminal is as it was.
func (p *pane) leave() {
	p.m.b.t.Helper()
	p.line("exit")
	p.await("host>")
	p.leaveHost()
}

// leaveHost checks that the host's shell has the terminal as it was.
func (p *pane) leaveHost() {
	p.m.b.t.Helper()
	p.line("clear; stty -g >" + p.state("after") + "; echo fin''ished")
	p.await("finished")
	before, _ := os.ReadFile(p.state("before"))
	after, _ := os.ReadFile(p.state("after"))
	if len(before) == 0 || string(before) != string(after) {
		p.m.b.t.Errorf("DX-5: the terminal's state was %q, is %q", before, after)
	}
	modes := p.m.run("display-message", "-p", "-t", p.name, "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{keypad_flag} #{insert_flag} #{origin_flag} #{wrap_flag}")
	if strings.TrimSpace(modes) != "0 1 0 0 0 0 1" {
		p.m.b.t.Errorf("DX-5: modes of the terminal afterwards: %s", modes)
	}
}

// prompted waits for the prompt, and returns the screen.
func (p *pane) prompted() string {
	p.m.b.t.Helper()
	return p.await("Lazaret: run this", "[d] deny")
}

// settled waits until a file holds an exit status, and returns it.
func (b *box) settled(name string) string {
	b.t.Helper()
	eventually(b.t, patience, "a result in "+name, func() bool {
		text, _ := os.ReadFile(filepath.Join(b.ws, name))
		return strings.HasSuffix(string(text), "\n")
	})
	text := strings.TrimSpace(b.readFile(name))
	if err := os.Remove(filepath.Join(b.ws, name)); err != nil {
		b.t.Fatal(err)
	}
	return text
}

// onHost tells whether a process with this command line runs below the test, outside of any sandbox.
func onHost(title string) bool {
	for _, p := range find(title) {
		if p.title == title {
			return true
		}
	}
	return false
}

// goesFromHost waits until no process with this command line is left.
func goesFromHost(t testing.TB, limit time.Duration, title string) {
	t.Helper()
	eventually(t, limit, fmt.Sprintf("the end of %q on the host", title), func() bool { return !onHost(title) })
}
