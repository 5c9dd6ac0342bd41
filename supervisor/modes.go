package supervisor

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

// modeTracker reads a terminal's output and remembers which of the modes that outlive a program it leaves on: alternate
// screen, mouse, bracketed paste, hidden cursor, keyboard protocols. It changes nothing and holds no more than one
// control sequence (ECMA-48; ctlseqs of xterm).
type modeTracker struct {
	state    trackState
	params   []byte       // of the control sequence being read, bounded
	on       map[int]bool // DEC private modes that differ from their default, by number; true: set
	keypad   bool         // application keypad (DECKPAM)
	kitty    int          // depth of the kitty keyboard stack
	kittySet bool         // kitty flags were set without a push
	styled   bool         // colours or attributes are on
}

type trackState uint8

const (
	inText trackState = iota
	inEscape
	inCSI
)

const maxTracked = 64 // parameter bytes of one sequence; a longer one sets no mode that we know

// undoneModes are the private modes that we undo, with what is their default.
var undoneModes = map[int]bool{
	1: false, 5: false, 6: false, 7: true, 9: false, 25: true, 47: false, 66: false, 1000: false, 1001: false, 1002: false, 1003: false,
	1004: false, 1005: false, 1006: false, 1015: false, 1016: false, 1047: false, 1049: false, 2004: false, 2026: false, 2031: false, 2048: false,
}

// Write reads output of the sandbox; it never fails.
func (m *modeTracker) Write(b []byte) {
	for len(b) > 0 {
		if m.state == inText {
			i := bytes.IndexByte(b, 0x1b)
			if i < 0 {
				return
			}
			m.state, b = inEscape, b[i+1:]
			continue
		}
		c := b[0]
		b = b[1:]
		switch {
		case c == 0x1b:
			m.state = inEscape
		case m.state == inEscape:
			m.escape(c)
		case c >= 0x40 && c <= 0x7e: // the final byte
			m.csi(c)
			m.state = inText
		case c == 0x18 || c == 0x1a: // cancelled
			m.state = inText
		case len(m.params) < maxTracked:
			m.params = append(m.params, c)
		}
	}
}

func (m *modeTracker) escape(c byte) {
	m.state = inText
	switch c {
	case '[':
		m.state, m.params = inCSI, m.params[:0]
	case '=':
		m.keypad = true
	case '>':
		m.keypad = false
	case 'c': // full reset
		*m = modeTracker{params: m.params[:0]}
	}
}

func (m *modeTracker) csi(final byte) {
	p := string(m.params)
	switch {
	case final == 'm' && !strings.ContainsAny(p, "<>?"):
		m.styled = p != "" && p != "0"
	case (final == 'h' || final == 'l') && strings.HasPrefix(p, "?"):
		for _, f := range strings.Split(p[1:], ";") {
			n, err := strconv.Atoi(f)
			def, known := undoneModes[n]
			if err != nil || !known {
				continue
			}
			if m.on == nil {
				m.on = map[int]bool{}
			}
			if set := final == 'h'; set == def {
				delete(m.on, n)
			} else {
				m.on[n] = set
			}
		}
	case final == 'u' && strings.HasPrefix(p, ">"):
		m.kitty++
	case final == 'u' && strings.HasPrefix(p, "<"):
		n, err := strconv.Atoi(p[1:])
		if err != nil {
			n = 1
		}
		m.kitty = max(0, m.kitty-n)
	case final == 'u' && strings.HasPrefix(p, "="):
		m.kittySet = true
	}
}

// Undo returns what puts the terminal back, "" if nothing was left on.
func (m *modeTracker) Undo() string {
	var b strings.Builder
	if m.state != inText {
		b.WriteString("\x18") // ends a sequence that was cut off
	}
	if m.kitty > 0 {
		b.WriteString("\x1b[<" + strconv.Itoa(m.kitty) + "u")
	}
	if m.kittySet {
		b.WriteString("\x1b[=0u")
	}
	modes := make([]int, 0, len(m.on))
	for n := range m.on {
		modes = append(modes, n)
	}
	slices.Sort(modes)
	slices.Reverse(modes) // the alternate screen before the cursor, which it saves
	for _, n := range modes {
		final := "h"
		if m.on[n] {
			final = "l"
		}
		b.WriteString("\x1b[?" + strconv.Itoa(n) + final)
	}
	if m.keypad {
		b.WriteString("\x1b>")
	}
	if m.styled {
		b.WriteString("\x1b[0m")
	}
	return b.String()
}
