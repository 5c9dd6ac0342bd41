package gitconfig

import (
	"bytes"
	"fmt"
	"strings"
)

// Limits of one file.
const (
	MaxSource  = 1 << 20 // bytes
	MaxEntries = 1 << 14
)

// Entry is one setting. Section and Key are in lower case, Sub is as written.
type Entry struct {
	Section string
	Sub     string
	HasSub  bool
	Key     string
	Value   string
	NoValue bool // "key" alone, which means true; Value is empty
	Line    int  // where it ends, from 1; 0 if it was not read from a file

	bare       bool // before any section header
	start, end int  // bytes of the source, line end included
}

// Name is the full name as Git prints it, "section.sub.key".
func (e Entry) Name() string {
	if e.HasSub {
		return e.Section + "." + e.Sub + "." + e.Key
	}
	if e.bare {
		return e.Key
	}
	return e.Section + "." + e.Key
}

// Is reports whether e has the section and the key, whatever its subsection.
func (e Entry) Is(section, key string) bool { return e.Section == section && e.Key == key }

// File is the settings of one file in order.
type File struct {
	Entries []Entry
}

// A SyntaxError says where a file breaks the syntax. Git refuses such a file too.
type SyntaxError struct {
	Line   int
	Reason string
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("git config line %d: %s", e.Line, e.Reason) }

// Parse reads a config file. It does not keep src. Errors are *[SyntaxError].
func Parse(src []byte) (*File, error) {
	if len(src) > MaxSource {
		return nil, &SyntaxError{Reason: fmt.Sprintf("file of %d bytes, limit is %d", len(src), MaxSource)}
	}
	p := &parser{src: src, line: 1, file: &File{}}
	if i := bytes.IndexByte(src, 0); i >= 0 {
		return nil, &SyntaxError{Line: 1 + bytes.Count(src[:i], []byte("\n")), Reason: "NUL byte"}
	}
	if bytes.HasPrefix(src, []byte("\xef\xbb\xbf")) {
		p.at = 3
	}
	if err := p.run(); err != nil {
		return nil, err
	}
	return p.file, nil
}

type parser struct {
	src   []byte
	at    int
	line  int
	ended bool // the line feed that next gave out stands for the end of the source
	file  *File
}

func (p *parser) fail(reason string) error { return &SyntaxError{Line: p.line, Reason: reason} }

// next returns the next byte. A line end is '\n' however written, and so is the end of the source.
func (p *parser) next() byte {
	if p.at >= len(p.src) {
		p.ended = true
		return '\n'
	}
	c := p.src[p.at]
	p.at++
	if c == '\r' && p.at < len(p.src) && p.src[p.at] == '\n' {
		p.at++
		c = '\n'
	}
	if c == '\n' {
		p.line++
	}
	return c
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }
func isAlpha(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }
func isKeyChar(c byte) bool {
	return isAlpha(c) || '0' <= c && c <= '9' || c == '-'
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c | 0x20
	}
	return c
}

func (p *parser) run() error {
	at := Entry{bare: true} // section that the next settings belong to
	for {
		start := p.at
		c := p.next()
		switch {
		case c == '\n' && p.ended:
			return nil
		case isSpace(c):
		case c == '#' || c == ';':
			for p.next() != '\n' {
			}
			if p.ended {
				return nil
			}
		case c == '[':
			var err error
			if at, err = p.header(); err != nil {
				return err
			}
		case isAlpha(c):
			e := at
			e.start = start
			if err := p.setting(&e, c); err != nil {
				return err
			}
			if len(p.file.Entries) == MaxEntries {
				return p.fail(fmt.Sprintf("more than %d settings", MaxEntries))
			}
			p.file.Entries = append(p.file.Entries, e)
		default:
			return p.fail("neither a section nor a setting")
		}
	}
}

// header reads a section header after its '['.
func (p *parser) header() (Entry, error) {
	var name strings.Builder
	for {
		c := p.next()
		switch {
		case p.ended:
			return Entry{}, p.fail("section header without end")
		case c == ']' && name.Len() == 0:
			return Entry{}, p.fail("section without a name")
		case c == ']':
			return section(name.String() + "."), nil
		case isSpace(c):
			sub, err := p.subsection(c)
			return section(name.String() + "." + sub + "."), err
		case isKeyChar(c) || c == '.':
			name.WriteByte(lower(c))
		default:
			return Entry{}, p.fail("bad byte in a section name")
		}
	}
}

// section takes apart the name of a section, which ends in a dot: the subsection is what lies between
// the first and the last dot.
func section(name string) Entry {
	first, last := strings.IndexByte(name, '.'), len(name)-1
	e := Entry{Section: name[:first]}
	if first < last {
		e.Sub, e.HasSub = name[first+1:last], true
	}
	return e
}

func (p *parser) subsection(c byte) (string, error) {
	for isSpace(c) {
		if c == '\n' {
			return "", p.fail("section header without end")
		}
		c = p.next()
	}
	if c != '"' {
		return "", p.fail("subsection without quotes")
	}
	var sub strings.Builder
	for {
		switch c = p.next(); c {
		case '"':
			if p.next() != ']' {
				return "", p.fail("section header without end")
			}
			return sub.String(), nil
		case '\\':
			c = p.next()
		}
		if c == '\n' {
			return "", p.fail("subsection over a line end")
		}
		sub.WriteByte(c)
	}
}

// setting reads a key, whose first byte is c, and its value.
func (p *parser) setting(e *Entry, c byte) error {
	key := []byte{lower(c)}
	for c = p.next(); isKeyChar(c); c = p.next() {
		key = append(key, lower(c))
	}
	for c == ' ' || c == '\t' {
		c = p.next()
	}
	e.Key = string(key)
	switch c {
	case '\n':
		e.NoValue = true
	case '=':
		value, err := p.value()
		if err != nil {
			return err
		}
		e.Value = value
	default:
		return p.fail("no '=' after a key")
	}
	e.Line, e.end = p.line, p.at
	if !p.ended {
		e.Line--
	}
	return nil
}

// value reads up to the end of the line. Space at both ends is dropped, a run within is kept as blanks.
func (p *parser) value() (string, error) {
	var v []byte
	blanks := 0 // not written yet, since they may be the last
	quoted := false
	for {
		c := p.next()
		if c == '\n' {
			if quoted {
				return "", p.fail("quote without end")
			}
			return string(v), nil
		}
		if !quoted {
			if isSpace(c) {
				if len(v) > 0 {
					blanks++
				}
				continue
			}
			if c == ';' || c == '#' {
				for p.next() != '\n' {
				}
				return string(v), nil
			}
		}
		v = append(v, strings.Repeat(" ", blanks)...)
		blanks = 0
		switch c {
		case '"':
			quoted = !quoted
		case '\\':
			c = p.next()
			at := strings.IndexByte("\ntbn\\\"", c)
			if at < 0 {
				return "", p.fail("unknown escape in a value")
			}
			if at > 0 {
				v = append(v, "\x00\t\b\n\\\""[at])
			}
		default:
			v = append(v, c)
		}
	}
}

// Bytes writes the settings afresh, without comments. Parsing the result gives the same settings.
// Values that Git could not read back cannot occur in a File made by Parse.
func (f *File) Bytes() []byte {
	var b bytes.Buffer
	for i, e := range f.Entries {
		if !e.bare && (i == 0 || !sameSection(e, f.Entries[i-1])) {
			b.WriteString(e.header())
		}
		b.WriteString(e.line())
	}
	return b.Bytes()
}

func sameSection(a, b Entry) bool {
	return a.bare == b.bare && a.Section == b.Section && a.HasSub == b.HasSub && a.Sub == b.Sub
}

func (e Entry) header() string {
	if !e.HasSub {
		return "[" + e.Section + "]\n"
	}
	sub := strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(e.Sub)
	return "[" + e.Section + ` "` + sub + "\"]\n"
}

func (e Entry) line() string {
	if e.NoValue {
		return "\t" + e.Key + "\n"
	}
	value := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\t", `\t`, "\b", `\b`).Replace(e.Value)
	if strings.ContainsAny(value, "#;\r\t") || strings.TrimSpace(value) != value || strings.Contains(value, "  ") {
		value = `"` + value + `"`
	}
	return "\t" + e.Key + " = " + value + "\n"
}
