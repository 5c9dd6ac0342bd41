package tests

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// screen is a developer's terminal: the master of a PTY, and all that came out of it.
type screen struct {
	t      testing.TB
	master *os.File
	tty    *os.File // kept open, so that its modes can be asked after the end

	mu  sync.Mutex
	out bytes.Buffer
}

// onTerminal starts cmd on a terminal of its own.
func (b *box) onTerminal(cmd *exec.Cmd) (*screen, *proc) {
	b.t.Helper()
	master, tty, err := pty.Open()
	if err != nil {
		b.t.Fatal(err)
	}
	s := &screen{t: b.t, master: master, tty: tty}
	b.t.Cleanup(func() { master.Close(); tty.Close() })
	_ = pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80})
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	p := b.start(cmd)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			s.mu.Lock()
			s.out.Write(buf[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s, p
}

func (s *screen) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.String()
}

func (s *screen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Reset()
}

func (s *screen) typeIn(text string) {
	s.t.Helper()
	if _, err := s.master.WriteString(text); err != nil {
		s.t.Fatal(err)
	}
}

// wait waits until text is on the screen.
func (s *screen) wait(text string) {
	s.t.Helper()
	for end := time.Now().Add(patience); !strings.Contains(s.text(), text); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("the terminal does not show %q but %q", text, clip(s.text()))
		}
	}
}

func (s *screen) modes() unix.Termios {
	s.t.Helper()
	m, err := unix.IoctlGetTermios(int(s.tty.Fd()), unix.TCGETS)
	if err != nil {
		s.t.Fatal(err)
	}
	return *m
}

func TestTerminalSession(t *testing.T) {
	b := newBox(t)
	cmd := b.enter("sh")
	cmd.Env = append(cmd.Env, "PS1=ignored")
	s, p := b.onTerminal(cmd)
	before := s.modes()
	s.wait("$ ")
	s.typeIn("tty; stty size; test -t 0 && test -t 1 && test -t 2 && echo all-$((1+1))\n")
	s.wait("24 80")
	s.wait("all-2")
	if s.modes() == before {
		t.Error("the developer's terminal is not raw during the session")
	}
	if err := pty.Setsize(s.master, &pty.Winsize{Rows: 37, Cols: 111}); err != nil {
		t.Fatal(err)
	}
	s.clear()
	s.typeIn("sleep 0.3; stty size\n")
	s.wait("37 111")
	s.clear()
	s.typeIn("sleep 1000\n")
	time.Sleep(300 * time.Millisecond)
	s.typeIn("\x03")
	s.typeIn("echo after-$((1+1))-$?\n")
	s.wait("after-2-130")
	s.typeIn("exit 5\n")
	if r := p.wait(patience); r.status != 5 {
		t.Errorf("want the shell's status: %v", r)
	}
	if s.modes() != before {
		t.Error("DX-5: the terminal's modes are not restored")
	}
}

func TestTerminalJobControl(t *testing.T) {
	b := newBox(t)
	s, p := b.onTerminal(b.enter("bash", "--norc", "-i"))
	s.wait("$ ")
	s.typeIn("sleep 1000\n")
	time.Sleep(500 * time.Millisecond)
	s.typeIn("\x1a")
	s.wait("Stopped")
	s.clear()
	s.typeIn("jobs; fg\n")
	s.wait("sleep 1000")
	time.Sleep(300 * time.Millisecond)
	s.typeIn("\x03")
	s.typeIn("echo status-$?\n")
	s.wait("status-130")
	s.typeIn("exit\n")
	p.wait(patience)
}

// TestTerminalIsByteExact sends all byte values both ways, twice in both halves of a pair.
func TestTerminalIsByteExact(t *testing.T) {
	b := newBox(t)
	s, p := b.onTerminal(b.shell("stty raw -echo; echo rea''dy; head -c 65536"))
	s.wait("ready")
	time.Sleep(200 * time.Millisecond)
	s.clear()
	var want []byte
	for i := range 256 {
		for j := range 128 {
			want = append(want, byte(i), byte(j*2+i))
		}
	}
	go func() {
		for i := 0; i < len(want); i += 1024 { // what a terminal buffers at once is less than that
			_, _ = s.master.Write(want[i : i+1024])
		}
	}()
	p.wait(patience)
	eventually(t, 5*time.Second, "all output", func() bool { return len(s.text()) >= len(want) })
	got := []byte(s.text())
	if !bytes.HasPrefix(got, want) {
		i := 0
		for i < len(got) && got[i] == want[i] {
			i++
		}
		t.Errorf("byte %d of %d differs: %q, want %q", i, len(want), got[i:min(i+16, len(got))], want[i:min(i+16, len(want))])
	}
	if rest := got[len(want):]; len(rest) > 0 && bytes.ContainsAny(rest, "lazaret") {
		t.Logf("after the session: %q", rest)
	}
}

// TestDX5TerminalAfterKill has a program set all kinds of modes, and kills what serves it.
func TestDX5TerminalAfterKill(t *testing.T) {
	for _, title := range []string{sandbox, domain, coordinator} {
		t.Run(strings.Trim(strings.TrimPrefix(title, "lazaret "), "[]"), func(t *testing.T) {
			b := newBox(t)
			s, p := b.onTerminal(b.shell(`printf '\033[?1049h\033[?25l\033[?1000h\033[?1006h\033[?2004h\033[>1u\033=\033[31mdrawn'; stty raw -echo; sleep 1000`))
			before := s.modes()
			s.wait("drawn")
			s.clear()
			if err := kill(b, b.theOne(title).pid); err != nil {
				t.Fatal(err)
			}
			if r := p.wait(patience); r.status != 125 {
				t.Errorf("want an error: %v", r)
			}
			if s.modes() != before {
				t.Error("DX-5: the terminal's modes are not restored")
			}
			s.wait("lazaret: error:")
			undone, _, _ := strings.Cut(s.text(), "lazaret: error:")
			for _, mode := range []string{"\x1b[?1049l", "\x1b[?25h", "\x1b[?1000l", "\x1b[?1006l", "\x1b[?2004l", "\x1b[<1u", "\x1b>", "\x1b[0m"} {
				if !strings.Contains(undone, mode) {
					t.Errorf("DX-5: %q is not sent before the message: %q", mode, undone)
				}
			}
			b.wantNoProcess(5 * time.Second)
			if title == coordinator {
				b.ok(b.enter("true")) // clears what it left
			}
		})
	}
}

// TestTerminalCloses hangs up: the session must not stay.
func TestTerminalCloses(t *testing.T) {
	b := newBox(t)
	s, p := b.onTerminal(b.shell("trap '' HUP; echo run''ning; sleep 1000"))
	s.wait("running")
	_ = p.Process.Signal(syscall.SIGHUP)
	if r := p.wait(patience); r.status != 128+1 {
		t.Errorf("want the end by SIGHUP: %v", r)
	}
	b.wantNothingLeft()
}

// tmux is a terminal emulator that a test can look at.
type tmux struct {
	b    *box
	sock string
}

func (b *box) tmux(command string) *tmux {
	b.t.Helper()
	needsProgram(b.t, "tmux")
	m := &tmux{b: b, sock: filepath.Join(b.dir, "tmux")}
	b.t.Cleanup(func() { b.run(b.command("tmux", "-S", m.sock, "kill-server")) })
	m.do("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "-c", b.ws, "sh")
	m.do("set", "-g", "window-size", "manual")
	m.do("set", "-g", "default-terminal", "screen-256color")
	m.keys("PS1='host> '", "Enter")
	m.show("host>")
	m.keys("clear; "+command, "Enter")
	return m
}

func (m *tmux) do(args ...string) string {
	m.b.t.Helper()
	return m.b.ok(m.b.command(append([]string{"tmux", "-S", m.sock}, args...)...))
}

func (m *tmux) keys(keys ...string) {
	m.b.t.Helper()
	m.do(append([]string{"send-keys"}, keys...)...)
}

func (m *tmux) pane() string { return m.do("capture-pane", "-p") }

// show waits until text is shown.
func (m *tmux) show(text string) {
	m.b.t.Helper()
	var last string
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		if last = m.pane(); strings.Contains(last, text) {
			return
		}
		if time.Now().After(end) {
			m.b.t.Fatalf("tmux does not show %q but:\n%s", text, last)
		}
	}
}

// TestInteractive is a developer's session in tmux: prompt, resize, Ctrl-C, Ctrl-Z, an editor, exit; then a kill.
func TestInteractive(t *testing.T) {
	b := newBox(t)
	if out := b.run(b.shell("command -v vim.tiny vim vi nano | head -1")); strings.TrimSpace(out.out) == "" {
		needs(t, "an editor in /usr", fmt.Errorf("none of vim.tiny, vim, vi and nano"))
	}
	lz := filepath.Join(b.bin, "lazaret")
	m := b.tmux(lz + " enter")
	m.show("agent@default")
	m.keys("stty size", "Enter")
	m.show("24 80")
	m.do("resize-window", "-x", "100", "-y", "30")
	m.keys("clear; stty size", "Enter")
	m.show("30 100")
	m.keys("sleep 1000", "Enter")
	time.Sleep(300 * time.Millisecond)
	m.keys("C-c")
	m.keys("echo interrupted-$?", "Enter")
	m.show("interrupted-130")
	m.keys("sleep 1000", "Enter")
	time.Sleep(300 * time.Millisecond)
	m.keys("C-z")
	m.show("Stopped")
	m.keys("clear; fg", "Enter")
	m.show("sleep 1000")
	time.Sleep(500 * time.Millisecond)
	m.keys("C-c")
	m.keys("echo resumed-$?", "Enter")
	m.show("resumed-130")

	m.keys("clear; vim.tiny -u NONE letter || vi letter", "Enter")
	m.show("~")
	if !strings.Contains(m.do("display-message", "-p", "#{alternate_on}"), "1") {
		t.Log("the editor uses no alternate screen here")
	}
	m.keys("i", "dear sir", "Escape")
	m.keys(":wq", "Enter")
	b.waitFile("letter")
	m.keys("clear; cat letter", "Enter")
	m.show("dear sir")
	m.keys("exit", "Enter")
	m.show("host>")
	m.keys("clear; echo r''aw-$(stty -a | tr ';' '\\n' | grep -c -e '-icanon' -e '-echo ')-$(stty size)", "Enter")
	m.show("raw-0-30 100")

	m.keys("clear; "+lz+" enter", "Enter")
	m.show("agent@default")
	m.keys("vim.tiny -u NONE letter || vi letter", "Enter")
	m.show("~")
	if err := kill(b, b.theOne(sandbox).pid); err != nil {
		t.Fatal(err)
	}
	m.show("lazaret: error: the sandbox ended")
	m.keys("clear; echo r''aw-$(stty -a | tr ';' '\\n' | grep -c -e '-icanon' -e '-echo ')", "Enter")
	m.show("raw-0")
	if on := m.do("display-message", "-p", "#{alternate_on} #{cursor_flag} #{mouse_any_flag}"); on != "0 1 0\n" {
		t.Errorf("DX-5: alternate screen, cursor and mouse are %q after a kill, want \"0 1 0\"", on)
	}
	m.keys("exit", "Enter")
	b.run(b.command("tmux", "-S", m.sock, "kill-server"))
	b.wantNoProcess(10 * time.Second)
}
