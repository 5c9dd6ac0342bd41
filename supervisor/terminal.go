package supervisor

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/nsenter"
)

// drainQuiet is how long a pseudo-terminal stays silent before its output counts as complete. The kernel moves bytes
// from one side to the other in the background, so there is no better sign while a process still holds it.
const drainQuiet = 50 * time.Millisecond

// terminal carries a session on the developer's terminal, which it puts into raw mode. The session's own terminal is the
// pseudo-terminal whose master we hold: bytes go between the two unchanged (FR-8).
type terminal struct {
	term    Terminal
	master  *os.File
	done    chan struct{} // closed when all output has been passed on
	prompts prompter
	notices chan string

	tty   sync.Mutex   // held while the developer's terminal is read or written, and by a prompt for as long as it is up
	modes prompt.Modes // guarded by tty
	over  bool         // the terminal is the caller's again; guarded by tty

	mu    sync.Mutex
	saved *term.State // the caller's modes; nil when they are in force
	moved time.Time   // of the last output
}

func (t *terminal) open(req *enterRequest) ([]*os.File, error) {
	ws, err := pty.GetsizeFull(t.term.In)
	if err != nil {
		return nil, fmt.Errorf("ask the size of the terminal: %w", err)
	}
	req.Rows, req.Cols = ws.Rows, ws.Cols
	return nil, nil
}

func (t *terminal) entered(files []*os.File) {
	if len(files) != 1 {
		nsenter.CloseAll(files)
		return
	}
	t.notices = make(chan string, 16)
	t.mu.Lock()
	t.master, t.done = files[0], make(chan struct{})
	t.saved, _ = term.MakeRaw(int(t.term.In.Fd())) // on failure the session works without
	t.mu.Unlock()
	t.resize() // it may have changed since we asked
	go t.tell()
	go t.typed()
	go t.carry()
}

// carry passes output on, and remembers which modes it leaves on.
func (t *terminal) carry() {
	defer close(t.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := t.master.Read(buf)
		if n > 0 {
			t.tty.Lock()
			t.modes.Feed(buf[:n])
			_, werr := t.term.Out.Write(buf[:n])
			t.tty.Unlock()
			if werr != nil {
				return
			}
			t.mu.Lock()
			t.moved = time.Now()
			t.mu.Unlock()
		}
		if err != nil {
			return // EIO: every process has closed the other side
		}
	}
}

func (t *terminal) resize() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.master == nil {
		return
	}
	if ws, err := pty.GetsizeFull(t.term.In); err == nil {
		_ = pty.Setsize(t.master, ws)
	}
}

// signal handles what reaches us although the terminal is raw: signals sent by name, and the resize.
func (t *terminal) signal(_ *nsenter.Conn, sig os.Signal) bool {
	switch sig {
	case unix.SIGWINCH:
		t.resize()
	case unix.SIGTERM, unix.SIGHUP:
		return true
	}
	return false
}

func (t *terminal) prompt(conn *nsenter.Conn, ev promptEvent) { t.prompts.take(conn, ev, t.ask) }

func (t *terminal) drain() {
	t.prompts.close()
	if t.done == nil {
		return
	}
	start := time.Now()
	for {
		select {
		case <-t.done:
			return
		case <-time.After(drainQuiet / 2):
		}
		t.mu.Lock()
		quiet := time.Since(later(t.moved, start))
		t.mu.Unlock()
		if quiet >= drainQuiet {
			return
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// notice writes a line of its own, also while the terminal is raw and the cursor anywhere.
func (t *terminal) notice(text string) {
	t.mu.Lock()
	raw := t.saved != nil
	t.mu.Unlock()
	if !raw {
		t.term.Warn("%s", text)
		return
	}
	select {
	case t.notices <- text:
	default: // more than anybody reads
	}
}

// tell writes notices, when no prompt is up.
func (t *terminal) tell() {
	for text := range t.notices {
		t.tty.Lock()
		if t.over {
			t.term.Warn("%s", text)
		} else {
			fmt.Fprintf(t.term.Err, "\r\nlazaret: warning: %s\r\n", text)
		}
		t.tty.Unlock()
	}
}

// restore puts back the terminal's modes, those of the kernel and those that the sandbox's output has set.
func (t *terminal) restore() {
	t.prompts.close()
	t.tty.Lock()
	defer t.tty.Unlock()
	t.over = true
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.saved == nil {
		return
	}
	_, _ = t.term.Out.WriteString(t.modes.Reset())
	// Answers of the terminal to queries of the sandbox are still on their way; nobody must read them as typed.
	if err := term.Restore(int(t.term.In.Fd()), t.saved); err != nil && !errors.Is(err, unix.EIO) {
		t.term.Warn("restore the terminal: %v; type: stty sane", err)
	}
	_ = unix.IoctlSetInt(int(t.term.In.Fd()), unix.TCFLSH, unix.TCIFLUSH)
	t.saved = nil
}
