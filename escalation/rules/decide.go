package rules

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Command is what the sandbox asks for, with its program resolved.
type Command struct {
	Argv    []string
	Program Program
}

// Verdict is what happens to a command.
type Verdict struct {
	Action Action
	Rule   int      // index of the deciding rule; -1: the default
	Why    []string // reasons in order, for [Set.Explain], the prompt and the journal

	// Properties of the run, from the rule or the set.
	Dir    string
	Env    []string
	Time   time.Duration
	Output int64
	Stdin  bool
	ByPath bool
}

// Decide returns what happens to a command.
func (s *Set) Decide(c Command) Verdict {
	for i, r := range s.rules {
		if r.Action == Deny {
			if ok, _ := s.matches(r, c); ok {
				return s.verdict(i, Deny, "denied by "+r.title(i))
			}
		}
	}
	for i, r := range s.rules {
		if r.Action == Deny {
			continue
		}
		if ok, _ := s.matches(r, c); !ok {
			continue
		}
		if r.Action == Auto {
			if doubt := doubtful(r, c); doubt != "" {
				return s.verdict(i, Ask, r.title(i)+" would approve it, but "+doubt)
			}
			return s.verdict(i, Auto, "approved by "+r.title(i))
		}
		return s.verdict(i, Ask, r.title(i)+" says to ask")
	}
	return s.verdict(-1, s.opt.Default, "no rule matches; the default is to "+string(s.opt.Default))
}

func (r Rule) title(i int) string {
	if r.Name != "" {
		return "rule " + strconv.Quote(r.Name)
	}
	return "rule " + strconv.Itoa(i+1)
}

func (s *Set) verdict(i int, a Action, why string) Verdict {
	v := Verdict{Action: a, Rule: i, Why: []string{why}, Env: s.opt.Env, Time: DefaultTime, Output: DefaultOutput}
	if i >= 0 {
		r := s.rules[i]
		v.Dir, v.Env, v.Time, v.Output, v.Stdin, v.ByPath = r.Dir, r.Env, r.Time, r.Output, r.Stdin, r.ByPath
	}
	return v
}

// matches reports whether r matches c, and if not, why.
func (s *Set) matches(r Rule, c Command) (bool, string) {
	if ok, why := s.sameProgram(r, c.Program); !ok {
		return false, why
	}
	own, args := r.Argv[1:], c.Argv[1:]
	for i, want := range own {
		if i >= len(args) {
			return false, fmt.Sprintf("argument %d, %q, is missing", i+1, want)
		}
		if args[i] != want {
			return false, fmt.Sprintf("argument %d is %q, not %q", i+1, args[i], want)
		}
	}
	if len(args) > len(own) && r.Trailing != TrailingAny {
		return false, fmt.Sprintf("argument %d, %q, is one more than the rule has", len(own)+1, args[len(own)])
	}
	return true, ""
}

// sameProgram compares the resolved files. As one file may be many programs (by argv[0]), the names must be equal too.
// A deny rule takes either for enough, and any name on the way.
func (s *Set) sameProgram(r Rule, p Program) (bool, string) {
	want := r.Argv[0]
	named := slices.Contains(p.Names, filepath.Base(want))
	if r.Action == Deny && !filepath.IsAbs(want) && named {
		return true, ""
	}
	if r.Action != Deny && p.Names[0] != filepath.Base(want) {
		return false, fmt.Sprintf("program is %q, not %q", p.Name, want)
	}
	have, err := s.opt.Resolver.Resolve(want, "/")
	switch {
	case err != nil && p.Path == "" && p.Name == want: // an example, on a machine without the program
		return true, ""
	case err != nil:
		return false, fmt.Sprintf("the rule's program %q is not on this host", want)
	case have.Path != p.Path:
		return false, fmt.Sprintf("program is %s, not %s", p.Path, have.Path)
	}
	return true, ""
}

// doubtful says why an automatic approval does not hold for this command; "" if it does.
func doubtful(r Rule, c Command) string {
	if c.Program.Ours {
		return "the program lies where the sandbox can write"
	}
	for _, n := range c.Program.Names {
		if why := NeverAuto(n); why != "" {
			return fmt.Sprintf("%q %s", n, why)
		}
	}
	size := 0
	for i, a := range c.Argv[1:] {
		size += len(a)
		if i >= len(r.Argv)-1 && !plain(a) {
			return fmt.Sprintf("argument %d is not plain text", i+1)
		}
	}
	if size > 64<<10 {
		return "its arguments are over 64 KiB"
	}
	return ""
}

// plain reports whether s is printable text without anything invisible.
func plain(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if !unicode.IsPrint(r) || unicode.Is(unicode.M, r) {
			return false
		}
	}
	return true
}

// Explain says what Decide does with a command and why each rule does or does not match, a line each.
func (s *Set) Explain(c Command) []string {
	lines := []string{fmt.Sprintf("program: %q is %s", c.Program.Name, strconv.Quote(c.Program.Path))}
	for i, r := range s.rules {
		ok, why := s.matches(r, c)
		if ok {
			lines = append(lines, fmt.Sprintf("%s (%s): matches", r.title(i), r.Action))
		} else {
			lines = append(lines, fmt.Sprintf("%s (%s): no match: %s", r.title(i), r.Action, why))
		}
	}
	v := s.Decide(c)
	for _, why := range v.Why {
		lines = append(lines, "because: "+why)
	}
	return append(lines, "verdict: "+string(v.Action))
}

// Narrow returns the rule that remembers an approval: this program by its path, these arguments, nothing else. It is
// Auto where that is allowed; ok is false where it is not, and why says the reason.
func Narrow(c Command) (r Rule, ok bool, why string) {
	if doubt := doubtful(Rule{Argv: c.Argv[:1]}, c); doubt != "" {
		return Rule{}, false, doubt
	}
	for _, a := range c.Argv {
		if !plain(a) {
			return Rule{}, false, "an argument is not plain text"
		}
	}
	argv := slices.Clone(c.Argv)
	if filepath.Base(c.Program.Path) == c.Program.Names[0] {
		argv[0] = c.Program.Path
	}
	return Rule{Argv: argv, Trailing: TrailingNone, Action: Auto}, true, ""
}

// String returns r as a table of a profile's TOML, fit to be shown to a person: every byte outside of plain ASCII is
// escaped. Values that are defaults are left out.
func (r Rule) String() string {
	quoted := make([]string, len(r.Argv))
	for i, a := range r.Argv {
		quoted[i] = tomlString(a)
	}
	text := "[[escalation.rule]]\nargv = [" + strings.Join(quoted, ", ") + "]\ntrailing = " + tomlString(string(r.Trailing))
	if r.Action == Auto {
		text += "\nauto = true"
	}
	return text + "\n"
}

func tomlString(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < 0x20 || r > 0x7e:
			fmt.Fprintf(&b, "\\U%08x", r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
