package prompt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if file := os.Getenv("TEST_AS_PROMPT"); file != "" {
		os.Exit(asPrompt(file))
	}
	os.Exit(m.Run())
}

// asPrompt plays the session's client in a real terminal: the sandbox has just left the screen in a bad state.
func asPrompt(file string) int {
	dirty := os.Getenv("TEST_DIRTY")
	var m Modes
	m.Feed([]byte(dirty))
	_, _ = os.Stdout.WriteString(dirty)
	q := hostile()
	q.Expires = time.Time{}
	edit := func(_ context.Context, argv []string) (Request, error) {
		if argv[0] == "bad" {
			return Request{}, errors.New("there is no such program\x1b[2J on the host")
		}
		return Request{Argv: argv, Edited: true, Program: "/bin/x", Dir: "/", Profile: "p", Session: "s"}, nil
	}
	a, err := Ask(context.Background(), Terminal{In: os.Stdin, Out: os.Stdout, Modes: &m, Pause: 150 * time.Millisecond}, q, edit)
	_ = os.WriteFile(file, []byte(fmt.Sprintf("%+v %v\n", a.Kind, err)), 0o644)
	return 0
}

// console is a PTY with a prompt on it.
type console struct {
	t      *testing.T
	master *os.File
	slave  *os.File
	done   chan Answer
	out    chan []byte
	cancel context.CancelFunc
}

func startConsole(t *testing.T, q Request, ahead string, edit Edit) *console {
	t.Helper()
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &console{t, master, slave, make(chan Answer, 1), make(chan []byte, 1000), cancel}
	t.Cleanup(func() {
		cancel()
		<-c.done
		master.Close()
		slave.Close()
	})
	go func() {
		buf := make([]byte, 8192)
		for {
			n, err := master.Read(buf)
			if n > 0 {
				c.out <- bytes.Clone(buf[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	if ahead != "" {
		_, _ = master.WriteString(ahead)
		time.Sleep(20 * time.Millisecond)
	}
	go func() {
		a, err := Ask(ctx, Terminal{In: slave, Out: slave, Pause: 150 * time.Millisecond}, q, edit)
		if err != nil {
			t.Error(err)
		}
		c.done <- a
		close(c.done)
	}()
	c.expect("[a] approve")
	return c
}

func (c *console) expect(text string) {
	c.t.Helper()
	var got []byte
	deadline := time.After(5 * time.Second)
	for !bytes.Contains(got, []byte(text)) {
		select {
		case b := <-c.out:
			got = append(got, b...)
		case <-deadline:
			c.t.Fatalf("%q was not written; got %q", text, got)
		}
	}
}

func (c *console) press(keys ...string) {
	c.t.Helper()
	for _, k := range keys {
		time.Sleep(200 * time.Millisecond)
		if _, err := c.master.WriteString(k); err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c *console) open() bool {
	select {
	case a := <-c.done:
		c.t.Errorf("answered: %+v", a)
		return false
	case <-time.After(300 * time.Millisecond):
		return true
	}
}

func (c *console) answer() Answer {
	c.t.Helper()
	select {
	case a := <-c.done:
		return a
	case <-time.After(5 * time.Second):
		c.t.Fatal("no answer")
		return Answer{}
	}
}

var small = Request{Argv: []string{"git", "push"}, Program: "/usr/bin/git", Dir: "/w", Profile: "p", Session: "s", Digest: [32]byte{9}, Remember: "rule"}

func TestSR8TypeAheadIsThrownAway(t *testing.T) {
	c := startConsole(t, small, "aaaa\r", nil)
	c.open()
	_, _ = c.master.WriteString("a") // within the pause
	c = startConsole(t, small, "", nil)
	_, _ = c.master.WriteString("a")
	c.open()
	c.press("aa", "\x1b[200~a", "ya", "\r", "y", "A", " ", "\n", "\x03", "\x1b")
	c.open()
	c.press("a")
	if a := c.answer(); a.Kind != Approved || a.Digest != small.Digest || a.Remember {
		t.Errorf("%+v", a)
	}
}

func TestDX4DenyEditRemember(t *testing.T) {
	c := startConsole(t, small, "", nil)
	c.press("d")
	if a := c.answer(); a.Kind != Denied {
		t.Errorf("%+v", a)
	}
	c = startConsole(t, small, "", nil)
	c.press("r")
	c.expect("run and remember")
	c.press("y")
	if a := c.answer(); a.Kind != Approved || !a.Remember {
		t.Errorf("%+v", a)
	}
	c = startConsole(t, small, "", func(_ context.Context, argv []string) (Request, error) {
		q := small
		q.Argv, q.Edited, q.Digest = argv, true, [32]byte{8}
		if argv[0] == "bad" {
			return q, errors.New("no such program")
		}
		return q, nil
	})
	c.press("e", "\x15", "bad", "\r")
	c.expect("no such program")
	c.press("\x15", "git", " pull\r")
	c.expect("as you edited it")
	c.open()
	c.press("a")
	if a := c.answer(); a.Kind != Approved || a.Digest != [32]byte{8} {
		t.Errorf("%+v", a)
	}
}

func TestDX5TerminalIsGivenBack(t *testing.T) {
	c := startConsole(t, small, "", nil)
	c.cancel()
	if a := c.answer(); a.Kind != Unanswered {
		t.Errorf("%+v", a)
	}
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := Ask(ctx, Terminal{In: slave, Out: slave}, small, nil); err != nil {
		t.Fatal(err)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil || *before != *after {
		t.Errorf("%+v\n%+v %v", before, after, err)
	}
	// A terminal that goes away is an error, not an answer.
	done := make(chan error, 1)
	go func() {
		_, err := Ask(context.Background(), Terminal{In: slave, Out: slave}, small, nil)
		done <- err
	}()
	time.Sleep(100 * time.Millisecond)
	master.Close()
	if err := <-done; err == nil {
		t.Error("no error")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := Ask(context.Background(), Terminal{In: r, Out: w}, small, nil); err == nil {
		t.Error("a pipe was taken for a terminal")
	}
}

func needs(t *testing.T, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("%s is required here: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}

// mux is a private tmux server with one window.
type mux struct {
	t      *testing.T
	socket string
}

func (m mux) run(args ...string) string {
	m.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-S", m.socket, "-f", "/dev/null"}, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("tmux %q: %v: %s", args, err, out)
	}
	return string(out)
}

func (m mux) capture() string { return m.run("capture-pane", "-p", "-t", "w") }

func (m mux) await(text string) string {
	m.t.Helper()
	var got string
	for range 200 {
		if got = m.capture(); strings.Contains(got, text) {
			return got
		}
		time.Sleep(25 * time.Millisecond)
	}
	m.t.Fatalf("%q is not on the screen:\n%s", text, got)
	return ""
}

// The real screens of a real terminal, after a hostile sandbox has prepared it.
func TestSR8TmuxScreens(t *testing.T) {
	_, err := exec.LookPath("tmux")
	needs(t, "tmux", err)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Origin mode, a scroll region, no wrap, line drawing, invisible text, a hidden cursor, and an unfinished title.
	const dirty = "\x1b[?6h\x1b[5;8r\x1b[?7l\x1b(0\x1b[8m\x1b[?25l\x1b[?2004h\x1b]0;unfinished"
	for _, size := range [][2]int{{40, 14}, {80, 24}, {200, 50}} {
		name := fmt.Sprintf("tmux-%dx%d", size[0], size[1])
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			m := mux{t, filepath.Join(dir, "s")}
			file := filepath.Join(dir, "answer")
			m.run("new-session", "-d", "-s", "w", "-x", fmt.Sprint(size[0]), "-y", fmt.Sprint(size[1]), "env", "PS1=shell> ", "sh")
			defer m.run("kill-server")
			m.await("shell>")
			m.run("send-keys", "-t", "w", "-l", "clear; stty -g >"+dir+"/before; echo mar''ker")
			m.run("send-keys", "-t", "w", "Enter")
			m.await("marker\n")
			m.run("send-keys", "-t", "w", "-l", "TEST_DIRTY='' TEST_AS_PROMPT="+file+" "+exe)
			m.run("send-keys", "-t", "w", "Enter")
			m.await("[a] approve")
			before := m.capture()
			checkCapture(t, name, before)
			for range 30 {
				if !strings.Contains(m.capture(), "More: down") {
					break
				}
				time.Sleep(200 * time.Millisecond)
				m.run("send-keys", "-t", "w", "Space")
			}
			time.Sleep(300 * time.Millisecond)
			m.run("send-keys", "-t", "w", "a")
			text := ""
			for range 100 {
				b, _ := os.ReadFile(file)
				if text = string(b); text != "" {
					break
				}
				time.Sleep(25 * time.Millisecond)
			}
			if text != fmt.Sprintf("%+v <nil>\n", Approved) {
				t.Errorf("answer %q\n%s", text, m.capture())
			}
			m.run("send-keys", "-t", "w", "-l", "stty -g >"+dir+"/after; echo do''ne")
			m.run("send-keys", "-t", "w", "Enter")
			after := m.await("done\n")
			if !strings.Contains(after, "marker\n") || strings.Contains(after, "Lazaret") {
				t.Errorf("the screen was not given back:\n%s", after)
			}
			b, _ := os.ReadFile(dir + "/before")
			a, _ := os.ReadFile(dir + "/after")
			if len(a) == 0 || !bytes.Equal(a, b) {
				t.Errorf("terminal state %q became %q", b, a)
			}
			// The same after the sandbox has done its worst.
			os.Remove(file)
			m.run("send-keys", "-t", "w", "-l", "TEST_DIRTY=$(printf '"+strings.ReplaceAll(dirty, "\x1b", `\033`)+"') TEST_AS_PROMPT="+file+" "+exe)
			m.run("send-keys", "-t", "w", "Enter")
			m.await("[a] approve")
			time.Sleep(200 * time.Millisecond)
			if got := m.capture(); got != before {
				t.Errorf("a prepared terminal shows something else:\n%s\nnot\n%s", got, before)
			}
			time.Sleep(300 * time.Millisecond)
			m.run("send-keys", "-t", "w", "d")
			for range 100 {
				if b, _ := os.ReadFile(file); string(b) == fmt.Sprintf("%+v <nil>\n", Denied) {
					return
				}
				time.Sleep(25 * time.Millisecond)
			}
			t.Error("not denied")
		})
	}
}

func checkCapture(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; got:\n%s", file, got)
	}
}
