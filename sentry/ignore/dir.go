package ignore

import (
	"bytes"
	"strings"
)

// Limits, which also keep the memory of a Dir small whatever rule files there are.
const (
	maxSteps  = 1 << 18 // elementary steps of one verdict, about two milliseconds
	maxPath   = 1 << 12 // bytes of a directory's path; Git stops there too (PATH_MAX)
	maxFiles  = 128     // rule files that hold for one directory
	maxNarrow = 64      // anchored globs of one file that are sorted out per directory; more are shared
)

// A Cause says why a verdict is what it is.
type Cause uint8

const (
	NoRule   Cause = iota // no rule matches: not ignored
	ByRule                // Source and Line decide
	ByParent              // a directory above is ignored, by Source and Line
	Overflow              // a limit was reached: ignored, to be safe
)

func (c Cause) String() string {
	switch c {
	case NoRule:
		return "no rule"
	case ByRule:
		return "rule"
	case ByParent:
		return "parent ignored"
	default:
		return "limit reached"
	}
}

// A Verdict is the answer for one name. The zero value is "not ignored, no rule".
type Verdict struct {
	Ignored bool
	Cause   Cause
	Line    int32     // of the deciding rule in Source, from 1; 0 if there is none
	Source  *Patterns // the deciding file, nil if there is none
}

// Config is what holds for one repository's work tree. All files may be nil.
type Config struct {
	FoldCase bool      // core.ignorecase
	Excludes *Patterns // core.excludesFile
	Info     *Patterns // info/exclude of the common directory
	Own      *Patterns // .gitignore of the root
}

// Dir is one directory of a work tree with the rules that hold for its entries. Immutable.
type Dir struct {
	path     string // relative to the root; "" or with a trailing slash
	text     string // path as compared: folded if case is ignored
	fold     bool
	anchored bool    // some level has anchored globs
	levels   []level // low to high precedence; without empty files
	verdict  Verdict // of this directory; Ignored makes it that of all below
}

// level is one rule file as it bears on one directory.
type level struct {
	file  *Patterns
	rules *ruleSet
	base  int      // length of the path of the rule file's directory, trailing slash included
	paths literals // anchored names of exactly this directory
	globs []*glob  // anchored globs that may match here or below; ascending
}

// Root starts a walk at the root of a repository's work tree.
func Root(c Config) *Dir {
	d := &Dir{fold: c.FoldCase}
	for _, file := range []*Patterns{c.Excludes, c.Info, c.Own} {
		d.push(file)
	}
	d.settle()
	return d
}

// Child enters the directory name, whose own rule file is own (nil if it has none). If name is
// ignored, so is everything below it, and own does not count.
func (d *Dir) Child(name string, own *Patterns) *Dir {
	c := &Dir{fold: d.fold, path: d.path + name + "/"}
	c.verdict = d.Match(name, true)
	if !c.verdict.Ignored && (len(c.path) > maxPath || len(d.levels) >= maxFiles) {
		c.verdict = Verdict{Ignored: true, Cause: Overflow}
	}
	if c.verdict.Ignored {
		if c.verdict.Cause == ByRule {
			c.verdict.Cause = ByParent
		}
		return c
	}
	c.text = c.path
	if c.fold {
		c.text = lowerString(c.path)
	}
	c.levels = make([]level, len(d.levels), len(d.levels)+1)
	for i := range d.levels {
		c.levels[i] = d.levels[i].below(c.text)
	}
	c.push(own)
	c.settle()
	return c
}

// push adds a rule file that lies in this directory.
func (d *Dir) push(file *Patterns) {
	if file.Empty() {
		return
	}
	l := level{file: file, rules: file.rules(d.fold), base: len(d.path)}
	l.paths, l.globs = l.rules.paths[""], l.rules.anchored
	d.levels = append(d.levels, l)
}

func (d *Dir) settle() {
	for i := range d.levels {
		d.anchored = d.anchored || len(d.levels[i].globs) > 0
	}
}

// below narrows a level to the directory whose compared path is text.
func (l *level) below(text string) level {
	n := level{file: l.file, rules: l.rules, base: l.base}
	rel := text[l.base:]
	n.paths = l.rules.paths[rel]
	if len(l.globs) > maxNarrow {
		n.globs = l.globs
		return n
	}
	for _, g := range l.globs {
		if strings.HasPrefix(g.prefix, rel) || strings.HasPrefix(rel, g.prefix) {
			n.globs = append(n.globs, g)
		}
	}
	return n
}

// Cost is an upper estimate in bytes of the memory held beside the rule files, at most about 100 KiB.
func (d *Dir) Cost() int {
	n := 200 + len(d.path) + len(d.text)
	for i := range d.levels {
		n += 96
		if len(d.levels[i].globs) <= maxNarrow {
			n += 8 * cap(d.levels[i].globs)
		}
	}
	return n
}

// Path is the directory's path relative to the root, "" for the root itself, else without slashes at
// its ends.
func (d *Dir) Path() string { return strings.TrimSuffix(d.path, "/") }

// Excluded reports whether the directory itself is ignored, so that everything in it is.
func (d *Dir) Excluded() bool { return d.verdict.Ignored }

// Verdict is the verdict on the directory itself; the zero Verdict for the root.
func (d *Dir) Verdict() Verdict { return d.verdict }

// Match decides about the entry name of this directory. name is one path component.
func (d *Dir) Match(name string, isDir bool) Verdict {
	if d.verdict.Ignored {
		return d.verdict
	}
	if len(d.levels) == 0 {
		return Verdict{}
	}
	var array [320]byte
	text := array[:0]
	if d.anchored {
		text = append(text, d.text...)
	}
	dirLen := len(text)
	text = append(text, name...)
	if d.fold {
		lowerBytes(text[dirLen:])
	}
	steps := maxSteps
	for i := len(d.levels) - 1; i >= 0; i-- {
		l := &d.levels[i]
		if l.rules.overflow {
			return Verdict{Ignored: true, Cause: Overflow, Source: l.file}
		}
		rule := l.find(text, dirLen, isDir, &steps)
		if steps < 0 {
			return Verdict{Ignored: true, Cause: Overflow, Source: l.file}
		}
		if rule >= 0 {
			at := &l.file.lines[rule]
			return Verdict{Ignored: !at.negated, Cause: ByRule, Line: at.number, Source: l.file}
		}
	}
	return Verdict{}
}

// find returns the last rule that matches, or -1. text[dirLen:] is the name; if the level has anchored
// globs, text[:dirLen] is the directory's path.
func (l *level) find(text []byte, dirLen int, isDir bool, steps *int) int32 {
	s, name := l.rules, text[dirLen:]
	best := int32(-1)
	if last, ok := s.names[string(name)]; ok {
		best = last.pick(isDir)
	}
	if l.paths != nil {
		if last, ok := l.paths[string(name)]; ok {
			best = max(best, last.pick(isDir))
		}
	}
	if len(s.suffixes) > 0 {
		for at := bytes.IndexByte(name, '.'); at >= 0 && at < len(name); {
			if last, ok := s.suffixes[string(name[at:])]; ok {
				best = max(best, last.pick(isDir))
			}
			next := bytes.IndexByte(name[at+1:], '.')
			if next < 0 {
				break
			}
			at += 1 + next
		}
	}
	for i := len(s.globs) - 1; i >= 0 && s.globs[i].rule > best; i-- {
		g := &s.globs[i]
		if (isDir || !g.dirOnly) && g.match(s.sets, name, steps) {
			best = g.rule
		}
	}
	for i := len(l.globs) - 1; i >= 0 && l.globs[i].rule > best; i-- {
		g := l.globs[i]
		if (isDir || !g.dirOnly) && g.match(s.sets, text[l.base:], steps) {
			best = g.rule
		}
	}
	return best
}
