package prompt

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// scripts are those whose letters terminals draw left to right, alone, and one or two cells wide.
var scripts = []*unicode.RangeTable{unicode.Latin, unicode.Greek, unicode.Cyrillic, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Hangul}

// showable reports whether a character is drawn as it is.
func showable(r rune) bool {
	switch {
	case r < 0x80:
		return r >= 0x20 && r < 0x7f
	case r > 0xffff, r >= 0xff00: // rare planes; half and full width forms
		return false
	case r >= 0x1100 && r < 0x1200, r >= 0xa960 && r < 0xa980, r >= 0xd7b0 && r < 0xd800, r >= 0x3130 && r < 0x3190: // parts of Hangul, fillers
		return false
	case r >= 0xf900 && r < 0xfb00: // compatibility forms
		return false
	}
	return unicode.In(r, unicode.Lu, unicode.Ll, unicode.Lt, unicode.Lo) && unicode.In(r, scripts...)
}

// cells is the most that a terminal takes for a showable character: which letters are wide differs between terminals, so
// a line may end early but never run over.
func cells(r rune) int {
	if r < 0x80 {
		return 1
	}
	return 2
}

func width(s string) (n int) {
	for _, r := range s {
		n += cells(r)
	}
	return n
}

// escape returns s with everything that is not showable, and the characters in also, as escapes.
func escape(s, also string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r == '\\' || r < 0x80 && strings.ContainsRune(also, r):
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, r)
		case showable(r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\u{%x}`, r)
		}
		s = s[n:]
	}
	return b.String()
}

// Quote returns an argument as it is shown and edited: as it is if it is plain, otherwise in double quotes with escapes.
func Quote(arg string) string {
	for _, r := range arg {
		if r >= 0x80 && showable(r) || r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("_@%+=:,./-", r)) {
			continue
		}
		return `"` + escape(arg, `"`) + `"`
	}
	if arg == "" {
		return `""`
	}
	return arg
}

// Join quotes an argument vector, separated by spaces.
func Join(argv []string) string {
	q := make([]string, len(argv))
	for i, a := range argv {
		q[i] = Quote(a)
	}
	return strings.Join(q, " ")
}

// ErrQuote means that a line is no argument vector.
var ErrQuote = errors.New("the command is not well quoted")

func badQuote(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrQuote, fmt.Sprintf(format, a...))
}

// Split is the inverse of [Join]. It is no shell: only spaces separate, only double quotes and backslashes are special,
// and in an unquoted argument no character has a meaning that it would not have for a program. Characters that a shell
// would expand are refused outside of quotes, so that nobody expects it.
func Split(line string) ([]string, error) {
	for i, r := range line {
		if !showable(r) || r == utf8.RuneError {
			return nil, badQuote("write byte %d as an escape", i)
		}
	}
	var argv []string
	for {
		line = strings.TrimLeft(line, " ")
		if line == "" {
			return argv, nil
		}
		var arg string
		var err error
		if line[0] == '"' {
			arg, line, err = unquote(line[1:])
			if err == nil && line != "" && line[0] != ' ' {
				err = badQuote("text follows a closing quote")
			}
		} else {
			end := strings.IndexByte(line+" ", ' ')
			arg, line = line[:end], line[end:]
			if i := strings.IndexAny(arg, "\"'\\`$&|;<>()*?[]{}~#!\t\r\n"); i >= 0 {
				err = badQuote("put %s in double quotes", Quote(arg[i:i+1]))
			}
		}
		if err != nil {
			return nil, err
		}
		argv = append(argv, arg)
	}
}

// unquote reads up to the closing quote.
func unquote(s string) (arg, rest string, err error) {
	var b strings.Builder
	for {
		i := strings.IndexAny(s, `"\`)
		if i < 0 {
			return "", "", badQuote("a double quote is not closed")
		}
		b.WriteString(s[:i])
		if s[i] == '"' {
			return b.String(), s[i+1:], nil
		}
		s = s[i+1:]
		if s == "" {
			return "", "", badQuote("a backslash at the end")
		}
		c := s[0]
		s = s[1:]
		switch c {
		case '\\', '"':
			b.WriteByte(c)
		case 'n':
			b.WriteByte('\n')
		case 't':
			b.WriteByte('\t')
		case 'r':
			b.WriteByte('\r')
		case 'x':
			if len(s) < 2 {
				return "", "", badQuote(`\x needs two digits`)
			}
			v, err := strconv.ParseUint(s[:2], 16, 8)
			if err != nil || v == 0 {
				return "", "", badQuote(`\x%s is no byte of an argument`, escape(s[:2], ""))
			}
			b.WriteByte(byte(v))
			s = s[2:]
		case 'u':
			end := strings.IndexByte(s, '}')
			if end < 2 || s[0] != '{' {
				return "", "", badQuote(`\u needs {digits}`)
			}
			v, err := strconv.ParseUint(s[1:end], 16, 32)
			if err != nil || v == 0 || !utf8.ValidRune(rune(v)) || v > unicode.MaxRune {
				return "", "", badQuote(`\u%s is no character`, escape(s[:end+1], ""))
			}
			b.WriteRune(rune(v))
			s = s[end+1:]
		default:
			return "", "", badQuote(`\%s is not known`, escape(string(c), ""))
		}
	}
}
