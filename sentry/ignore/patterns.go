package ignore

import (
	"strings"
	"sync"
)

// Limits of one rule file. A file over them makes every name that it would decide ignored.
const (
	MaxSource = 1 << 20 // bytes
	MaxRules  = 1 << 16 // lines that hold a pattern
)

// Patterns is one parsed rule file. The zero value and nil hold no rules. Immutable.
type Patterns struct {
	lines    []line
	overflow bool
	size     int // bytes of source

	exact, folded compiled
}

// line is one pattern as written, without its '!' and trailing '/'.
type line struct {
	text    string
	number  int32 // from 1
	negated bool
	dirOnly bool
}

type compiled struct {
	once sync.Once
	set  *ruleSet
}

// Parse reads a rule file. It accepts any bytes: what Git does not understand matches nothing.
// It does not keep src.
func Parse(src []byte) *Patterns {
	p := &Patterns{size: len(src)}
	if len(src) > MaxSource {
		p.overflow = true
		return p
	}
	rest := strings.TrimPrefix(string(src), "\xef\xbb\xbf")
	for number := int32(1); rest != ""; number++ {
		var text string
		text, rest, _ = strings.Cut(rest, "\n")
		if text == "" || text[0] == '#' {
			continue
		}
		text = strings.TrimSuffix(text, "\r")
		text, _, _ = strings.Cut(text, "\x00") // Git reads lines as C strings
		text = trimSpaces(text)
		l := line{number: number}
		text, l.negated = strings.CutPrefix(text, "!")
		l.text, l.dirOnly = strings.CutSuffix(text, "/")
		if l.text == "" {
			continue
		}
		if len(p.lines) == MaxRules {
			p.overflow = true
			p.lines = nil
			return p
		}
		p.lines = append(p.lines, l)
	}
	return p
}

// Unknown stands for a rule file that Git reads but the caller cannot: everything it governs is ignored.
// Its verdicts have the cause [Overflow].
func Unknown() *Patterns { return &Patterns{overflow: true} }

// trimSpaces removes trailing spaces that no backslash protects.
func trimSpaces(s string) string {
	keep := 0
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case ' ':
			continue
		case '\\':
			i++
			if i >= len(s) {
				return s // a lone backslash at the end protects all before it
			}
		}
		keep = i + 1
	}
	return s[:keep]
}

// Empty reports whether no rule can ever decide anything, so that the file may be left out.
func (p *Patterns) Empty() bool { return p == nil || len(p.lines) == 0 && !p.overflow }

// Overflow reports whether the file is over a limit or [Unknown]; then everything it governs counts as ignored.
func (p *Patterns) Overflow() bool { return p != nil && p.rules(false).overflow }

// Rules is the number of patterns.
func (p *Patterns) Rules() int {
	if p == nil {
		return 0
	}
	return len(p.lines)
}

// Cost is an upper estimate in bytes of the memory held, for callers that bound their caches.
func (p *Patterns) Cost() int {
	if p == nil {
		return 0
	}
	return 256 + 10*p.size + 160*len(p.lines)
}

// Text returns the pattern on a line as Git would print it, or "" if there is none.
func (p *Patterns) Text(lineNumber int) string {
	if p == nil {
		return ""
	}
	for _, l := range p.lines {
		if int(l.number) == lineNumber {
			text := l.text
			if l.negated {
				text = "!" + text
			}
			if l.dirOnly {
				text += "/"
			}
			return text
		}
	}
	return ""
}

func (p *Patterns) rules(fold bool) *ruleSet {
	c := &p.exact
	if fold {
		c = &p.folded
	}
	c.once.Do(func() {
		if p.overflow {
			c.set = &ruleSet{overflow: true}
			return
		}
		c.set = newRuleSet(p.lines, fold)
	})
	return c.set
}

// lastRule is the highest rule number that names one text: for any entry, and for directories only.
// -1 means none.
type lastRule struct{ any, dir int32 }

func (l lastRule) pick(isDir bool) int32 {
	if isDir {
		return max(l.any, l.dir)
	}
	return l.any
}

type literals map[string]lastRule

func (m literals) put(key string, rule int32, dirOnly bool) {
	last, ok := m[key]
	if !ok {
		last = lastRule{-1, -1}
	}
	if dirOnly {
		last.dir = rule
	} else {
		last.any = rule
	}
	m[key] = last
}

// glob is a rule that needs the matcher.
type glob struct {
	rule    int32
	dirOnly bool
	prefix  string // literal start; the tokens cover what follows it
	tokens  []token
}

// ruleSet is a rule file arranged for lookup by name. Rules are numbered by position; the highest wins.
type ruleSet struct {
	lines    []line
	names    literals            // by base name, at any depth
	suffixes literals            // "*.x" by ".x", at any depth
	globs    []glob              // by base name, at any depth; ascending
	paths    map[string]literals // anchored, without wildcards: by "dir/" (or ""), then base name
	anchored []*glob             // anchored, by path; ascending
	sets     []byteSet
	overflow bool // over a limit: everything it governs is ignored
}

func newRuleSet(lines []line, fold bool) *ruleSet {
	s := &ruleSet{
		lines:    lines,
		names:    literals{},
		suffixes: literals{},
		paths:    map[string]literals{},
	}
	c := &compiler{fold: fold}
	for i, l := range lines {
		if strings.Contains(l.text, "/") {
			s.addAnchored(c, int32(i), l)
		} else {
			s.addName(c, int32(i), l)
		}
	}
	s.sets, s.overflow = c.sets, c.full
	return s
}

func (s *ruleSet) addName(c *compiler, rule int32, l line) {
	tokens, ok := c.compile(l.text, false)
	if !ok {
		return
	}
	n := 0
	for n < len(tokens) && tokens[n].op == opByte {
		n++
	}
	switch {
	case n == len(tokens):
		s.names.put(spell(tokens), rule, l.dirOnly)
	case tokens[0].op == opSpan && len(tokens) > 1 && tokens[1].op == opByte && tokens[1].c == '.' && allBytes(tokens[1:]):
		s.suffixes.put(spell(tokens[1:]), rule, l.dirOnly)
	default:
		s.globs = append(s.globs, glob{rule: rule, dirOnly: l.dirOnly, prefix: spell(tokens[:n]), tokens: tokens[n:]})
	}
}

func (s *ruleSet) addAnchored(c *compiler, rule int32, l line) {
	text := strings.TrimPrefix(l.text, "/")
	n := literalLen(text)
	prefix := text[:n]
	if c.fold {
		prefix = lowerString(prefix)
	}
	if n == len(text) {
		cut := strings.LastIndexByte(prefix, '/') + 1
		dir, base := prefix[:cut], prefix[cut:]
		if base == "" {
			return
		}
		if s.paths[dir] == nil {
			s.paths[dir] = literals{}
		}
		s.paths[dir].put(base, rule, l.dirOnly)
		return
	}
	if tokens, ok := c.compile(text[n:], true); ok {
		s.anchored = append(s.anchored, &glob{rule: rule, dirOnly: l.dirOnly, prefix: prefix, tokens: tokens})
	}
}

func allBytes(tokens []token) bool {
	for _, t := range tokens {
		if t.op != opByte {
			return false
		}
	}
	return true
}

func spell(tokens []token) string {
	b := make([]byte, len(tokens))
	for i, t := range tokens {
		b[i] = t.c
	}
	return string(b)
}

func lowerString(s string) string {
	for i := range len(s) {
		if lower(s[i]) != s[i] {
			b := []byte(s)
			lowerBytes(b)
			return string(b)
		}
	}
	return s
}

func lowerBytes(b []byte) {
	for i, c := range b {
		b[i] = lower(c)
	}
}

// match reports whether the glob covers text.
func (g *glob) match(sets []byteSet, text []byte, steps *int) bool {
	*steps--
	if len(text) < len(g.prefix) || string(text[:len(g.prefix)]) != g.prefix {
		return false
	}
	return matchTokens(g.tokens, sets, text[len(g.prefix):], steps)
}
