package prompt

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// Modes follows a terminal's output and knows the modes that a prompt changes, so that they can be set again. Feed it
// everything that the sandbox writes to the terminal. The zero value is a terminal after reset. Not safe for concurrent
// use; its memory is bounded.
type Modes struct {
	private map[int]bool // DEC private modes that differ from the terminal's start
	keypad  bool         // application keypad
	kitty   [2][]int     // keyboard flags pushed, on the main and the alternate screen
	flags   bool         // keyboard flags were set without a push
	other   int          // modifyOtherKeys
	styled  bool         // colours or attributes are on
	region  string       // scroll region, parameters of DECSTBM
	charset [2]bool      // G0, G1 hold line-drawing
	shifted bool         // G1 is in use

	seq  []byte // the escape sequence that is being read; nil: none
	text bool   // inside a string sequence (OSC, DCS, APC, PM, SOS)
	esc  bool   // an escape was read inside of it
}

// tracked are the private modes that enter changes, with their state at a terminal's start.
var tracked = map[int]bool{1: false, 5: false, 6: false, 7: true, 25: true, 47: false, 69: false, 1000: false, 1001: false, 1002: false,
	1003: false, 1004: false, 1005: false, 1006: false, 1015: false, 1016: false, 1047: false, 1049: false, 2004: false, 2026: false,
	9: false, 66: false, 2031: false, 2048: false}

// Feed takes output.
func (m *Modes) Feed(p []byte) {
	for _, c := range p {
		switch {
		case c >= 0x20 && m.seq == nil && !m.text: // nearly all
		case m.text:
			if c == 0x07 || c == 0x18 || c == 0x1a || m.esc && c == '\\' {
				m.text = false
			}
			m.esc = c == 0x1b
		case c == 0x1b:
			m.seq = append(m.seq[:0], c)
		case c == 0x18 || c == 0x1a:
			m.seq = nil
		case c == 0x0e || c == 0x0f:
			m.shifted = c == 0x0e
		case len(m.seq) > 0 && c >= 0x20:
			m.sequence(c)
		}
	}
}

// sequence takes one more byte of an escape sequence.
func (m *Modes) sequence(c byte) {
	m.seq = append(m.seq, c)
	s := m.seq[1:]
	switch {
	case len(s) == 1 && bytes.IndexByte([]byte("]PX^_"), c) >= 0:
		m.text, m.esc, m.seq = true, false, nil
	case len(s) == 1 && (c == '[' || c == '(' || c == ')' || c >= 0x20 && c < 0x30):
	case s[0] == '[' && c < 0x40:
		if len(s) > 64 {
			m.seq = nil
		}
	case s[0] == '[':
		m.csi(string(s[1:len(s)-1]), c)
		m.seq = nil
	case s[0] == '(' || s[0] == ')':
		m.charset[s[0]-'('] = c == '0'
		m.seq = nil
	default:
		switch {
		case len(s) == 1 && (c == '=' || c == '>'):
			m.keypad = c == '='
		case len(s) == 1 && c == 'c':
			*m = Modes{}
		}
		m.seq = nil
	}
}

func (m *Modes) csi(params string, final byte) {
	n := func(s string, def int) int {
		if v, err := strconv.Atoi(s); err == nil && v >= 0 && v < 1<<16 {
			return v
		}
		return def
	}
	screen := 0
	if m.Alternate() {
		screen = 1
	}
	stack := &m.kitty[screen]
	switch {
	case len(params) > 0 && params[0] == '?' && (final == 'h' || final == 'l'):
		for _, p := range bytes.Split([]byte(params[1:]), []byte(";")) {
			m.set(n(string(p), -1), final == 'h')
		}
	case len(params) > 0 && params[0] == '>' && final == 'u' && len(*stack) < 16:
		*stack = append(*stack, n(params[1:], 0))
	case len(params) > 0 && params[0] == '<' && final == 'u':
		*stack = (*stack)[:max(0, len(*stack)-n(params[1:], 1))]
	case len(params) > 0 && params[0] == '=' && final == 'u':
		m.flags = true
	case final == 'm' && (params == "" || params[0] >= '0' && params[0] <= ';'):
		m.styled = params != "" && params != "0"
	case len(params) > 1 && params[:2] == ">4" && final == 'm':
		m.other = 0
		if len(params) > 3 {
			m.other = n(params[3:], 0)
		}
	case final == 'r' && (params == "" || params[0] >= '0' && params[0] <= ';'):
		m.region = params
	case params == "!" && final == 'p': // soft reset
		for _, mode := range []int{1, 6, 7, 25} {
			m.set(mode, tracked[mode])
		}
		m.keypad, m.region = false, ""
	}
}

func (m *Modes) set(mode int, on bool) {
	start, known := tracked[mode]
	if !known {
		return
	}
	if m.private == nil {
		m.private = map[int]bool{}
	}
	delete(m.private, mode)
	if on != start {
		m.private[mode] = on
	}
}

// Alternate reports whether the alternate screen is in use. A prompt overwrites it then, and the program that owns it has
// to draw itself again.
func (m *Modes) Alternate() bool { return m.private[47] || m.private[1047] || m.private[1049] }

// enter returns what makes any terminal ready for a prompt.
func (m *Modes) enter() string {
	// First out of whatever sequence or string the sandbox left unfinished, and out of a held-back update of the screen.
	s := "\x18\x1b\\\x1b[?2026l\x1b7"
	if !m.Alternate() {
		s += "\x1b[?1049h"
	}
	s += "\x1b%G\x1b(B\x0f\x1b[0m\x1b[4l\x1b[?1;5;6;69l\x1b[?7l\x1b[r\x1b>\x1b[?1000;1001;1002;1003;1004;1005;1006;1015;1016;2004;9;2031;2048l"
	// The sandbox may have chosen a text colour that is the background's.
	return s + "\x1b]110\x07\x1b]111\x07\x1b[>0u\x1b[>4;0m\x1b[?25l"
}

// leave returns what brings the terminal back.
func (m *Modes) leave() string {
	s := "\x1b[0m\x1b[H\x1b[2J\x1b[<u\x1b[?7h"
	if !m.Alternate() {
		s += "\x1b[?1049l"
	}
	if m.region != "" {
		s += "\x1b[" + m.region + "r"
	}
	s += "\x1b[?25h"
	for _, mode := range slices.Sorted(maps.Keys(m.private)) {
		if mode == 47 || mode == 1047 || mode == 1049 || mode == 2026 {
			continue
		}
		s += fmt.Sprintf("\x1b[?%d%c", mode, map[bool]byte{true: 'h', false: 'l'}[m.private[mode]])
	}
	if m.keypad {
		s += "\x1b="
	}
	if m.other != 0 {
		s += fmt.Sprintf("\x1b[>4;%dm", m.other)
	}
	for i, g := range []byte("()") {
		if m.charset[i] {
			s += "\x1b" + string(g) + "0"
		}
	}
	if m.shifted {
		s += "\x0e"
	}
	return s + "\x1b8"
}

// Reset returns what brings the terminal from the state that the sandbox left it in to that of its start, "" if there is
// nothing to undo. The screen's content stays.
func (m *Modes) Reset() string {
	s := ""
	if m.text || m.seq != nil {
		s = "\x18\x1b\\" // ends what was cut off
	}
	for screen := range m.kitty {
		if n := len(m.kitty[screen]); n > 0 && (screen == 1) == m.Alternate() {
			s += fmt.Sprintf("\x1b[<%du", n)
		}
	}
	if m.flags {
		s += "\x1b[=0u"
	}
	modes := slices.Sorted(maps.Keys(m.private))
	slices.Reverse(modes) // the alternate screen before the cursor, which it saves
	for _, mode := range modes {
		s += fmt.Sprintf("\x1b[?%d%c", mode, map[bool]byte{true: 'l', false: 'h'}[m.private[mode]])
	}
	if n := len(m.kitty[0]); n > 0 && m.Alternate() {
		s += fmt.Sprintf("\x1b[<%du", n)
	}
	if m.keypad {
		s += "\x1b>"
	}
	if m.other != 0 {
		s += "\x1b[>4;0m"
	}
	if m.region != "" {
		s += "\x1b7\x1b[r\x1b8" // it moves the cursor
	}
	if m.charset != [2]bool{} || m.shifted {
		s += "\x1b(B\x1b)B\x0f"
	}
	if m.styled {
		s += "\x1b[0m"
	}
	return s
}
