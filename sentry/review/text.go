package review

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Show makes a name of the sandbox fit for one line of a terminal: as it is if every character is visible, else quoted.
func Show(name string) string {
	odd := name == "" || !utf8.ValidString(name) || strings.TrimSpace(name) != name ||
		strings.ContainsFunc(name, func(r rune) bool { return !visible(r) || r == '"' || r == '\\' })
	if odd {
		return strconv.QuoteToASCII(name)
	}
	return name
}

// visible holds for characters that a terminal shows, in the order in which they stand.
func visible(r rune) bool {
	return unicode.IsPrint(r) && !unicode.Is(unicode.Cf, r) && (r < 0xfe00 || r > 0xfe0f) && (r < 0xe0100 || r > 0xe01ef)
}

const maxShownLine = 4096 // bytes of one line of a file

// ShowLine makes a line of a file fit for a terminal. Tabs stay. If something must be escaped, backslashes are doubled.
func ShowLine(line string) string {
	cut := ""
	if len(line) > maxShownLine {
		cut = fmt.Sprintf(" [%d bytes more]", len(line)-maxShownLine)
		line = line[:maxShownLine]
	}
	if utf8.ValidString(line) && !strings.ContainsFunc(line, func(r rune) bool { return r != '\t' && !visible(r) }) {
		return line + cut
	}
	var b strings.Builder
	for i := 0; i < len(line); {
		r, n := utf8.DecodeRuneInString(line[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, line[i])
		case r == '\\':
			b.WriteString(`\\`)
		case r == '\t' || visible(r):
			b.WriteRune(r)
		default:
			s := strconv.QuoteRuneToASCII(r)
			b.WriteString(s[1 : len(s)-1])
		}
		i += n
	}
	return b.String() + cut
}

// ASCII encodes v as indented JSON in printable ASCII only, so that it may go to a terminal too.
func ASCII(v any) ([]byte, error) {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(raw)+1)
	for _, r := range string(raw) {
		switch {
		case r < 0x7f:
			out = append(out, byte(r))
		case r > 0xffff:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return append(out, '\n'), nil
}

// few joins at most n names for one line.
func few(names []string, n int) string {
	shown := make([]string, 0, n)
	for _, s := range names[:min(n, len(names))] {
		shown = append(shown, Show(s))
	}
	out := strings.Join(shown, ", ")
	if len(names) > n {
		out += fmt.Sprintf(" and %d more", len(names)-n)
	}
	return out
}
