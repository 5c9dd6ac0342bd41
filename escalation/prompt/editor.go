package prompt

import (
	"slices"
	"unicode/utf8"
)

// Key is a key: the character it types, or one of the names below.
type Key string

const (
	KeyEscape    Key = "escape"
	KeyUp        Key = "up"
	KeyDown      Key = "down"
	KeyLeft      Key = "left"
	KeyRight     Key = "right"
	KeyHome      Key = "home"
	KeyEnd       Key = "end"
	KeyPageUp    Key = "page-up"
	KeyPageDown  Key = "page-down"
	KeyDelete    Key = "delete"
	KeyBackspace Key = "backspace"
	keyOther     Key = "other"
)

var sequences = map[string]Key{
	"[A": KeyUp, "[B": KeyDown, "[C": KeyRight, "[D": KeyLeft, "OA": KeyUp, "OB": KeyDown, "OC": KeyRight, "OD": KeyLeft,
	"[H": KeyHome, "[F": KeyEnd, "OH": KeyHome, "OF": KeyEnd, "[1~": KeyHome, "[4~": KeyEnd, "[7~": KeyHome, "[8~": KeyEnd,
	"[3~": KeyDelete, "[5~": KeyPageUp, "[6~": KeyPageDown,
}

// Keys splits the bytes of one read into keys. A sequence that is not known is one key that does nothing.
func Keys(b []byte) (keys []Key) {
	for len(b) > 0 {
		if b[0] == 0x1b {
			n := sequenceLen(b)
			k, ok := sequences[string(b[1:n])]
			switch {
			case n == 1:
				k = KeyEscape
			case !ok:
				k = keyOther
			}
			keys = append(keys, k)
			b = b[n:]
			continue
		}
		r, n := utf8.DecodeRune(b)
		switch {
		case r == 0x7f || r == 0x08:
			keys = append(keys, KeyBackspace)
		case r == utf8.RuneError && n == 1:
			keys = append(keys, keyOther)
		default:
			keys = append(keys, Key(b[:n]))
		}
		b = b[n:]
	}
	return keys
}

// sequenceLen returns the length of the escape sequence at the start of b.
func sequenceLen(b []byte) int {
	if len(b) == 1 {
		return 1
	}
	switch b[1] {
	case 'O':
		return min(3, len(b))
	case '[':
		for i := 2; i < len(b); i++ {
			if b[i] >= 0x40 && b[i] < 0x7f {
				return i + 1
			}
		}
		return len(b)
	case 0x1b:
		return 1
	}
	return 2 // Alt and a key
}

// editor is a line editor. Its text is always showable.
type editor struct {
	text []rune
	at   int // 0 <= at <= len(text)
}

const maxEdit = 64 << 10 // runes

func newEditor(text string) editor {
	r := []rune(text)
	return editor{r, len(r)}
}

func (e *editor) key(k Key) {
	switch k {
	case KeyLeft, "\x02":
		e.at = max(0, e.at-1)
	case KeyRight, "\x06":
		e.at = min(len(e.text), e.at+1)
	case KeyHome, "\x01":
		e.at = 0
	case KeyEnd, "\x05":
		e.at = len(e.text)
	case KeyBackspace:
		e.cut(max(0, e.at-1), e.at)
	case KeyDelete, "\x04":
		e.cut(e.at, min(len(e.text), e.at+1))
	case "\x0b": // Control-K
		e.cut(e.at, len(e.text))
	case "\x15": // Control-U
		e.cut(0, e.at)
	case "\x17": // Control-W
		i := e.at
		for i > 0 && e.text[i-1] == ' ' {
			i--
		}
		for i > 0 && e.text[i-1] != ' ' {
			i--
		}
		e.cut(i, e.at)
	default:
		r, n := utf8.DecodeRuneInString(string(k))
		if n == len(k) && showable(r) && len(e.text) < maxEdit {
			e.text = slices.Insert(e.text, e.at, r)
			e.at++
		}
	}
}

func (e *editor) cut(from, to int) {
	e.text = slices.Delete(e.text, from, to)
	e.at = from
}

// lines wraps the text, with room for the cursor after its end.
func (e *editor) lines(n int) []string { return wrap(string(e.text)+" ", n) }

// cursor returns the line of the cursor and the byte in it that the cursor is on.
func (e *editor) cursor(n int) (line, at int) {
	left := e.at
	for i, l := range e.lines(n) {
		rs := []rune(l)
		if left < len(rs) {
			return i, len(string(rs[:left]))
		}
		left -= len(rs)
	}
	return 0, 0
}
