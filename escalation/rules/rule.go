package rules

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Action is what a rule does with a command.
type Action string

const (
	Ask  Action = "ask"  // the developer decides; the zero value means this too
	Auto Action = "auto" // run without asking
	Deny Action = "deny"
)

// Trailing says which arguments may follow a rule's own.
type Trailing string

const (
	TrailingNone Trailing = "none" // none; the zero value means this too
	TrailingAny  Trailing = "any"
)

// Defaults and bounds of a rule's limits.
const (
	DefaultTime   = 10 * time.Minute
	MaxTime       = 24 * time.Hour
	DefaultOutput = 256 << 20 // bytes of standard output and error together
)

// Rule is one escalation rule of an Agent Profile.
type Rule struct {
	Name     string   // for people; may be empty
	Argv     []string // program (a name on the host's PATH, or absolute) and its exact arguments
	Trailing Trailing
	Action   Action

	Dir    string        // fixed absolute host directory; empty: the sandbox's, which must be in the workspace
	Env    []string      // names passed from the developer's environment; nil: the set's; empty: none
	Time   time.Duration // limit of the run; 0: DefaultTime
	Output int64         // limit of output, bytes; 0: DefaultOutput
	Stdin  bool          // whether the client's standard input may be passed
	ByPath bool          // run a script of the workspace by its path, not as a sealed copy: see package runner

	Match    [][]string // examples that must match
	NotMatch [][]string // examples that must not
}

// Options are what all rules of a profile share.
type Options struct {
	Default  Action   // for commands that no rule matches; the zero value asks; Auto is refused
	Env      []string // names passed when a rule has no list of its own; nil: BaseEnv
	Resolver Resolver
}

// BaseEnv are the names passed to commands by default. None lets a program run another.
var BaseEnv = []string{"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"}

// Fault is what is wrong with a rule.
type Fault struct {
	Index int    // of the rule; -1: of the options
	Field string // "argv", "match[2]", …
	Err   error
}

func (f *Fault) Error() string {
	if f.Index < 0 {
		return fmt.Sprintf("escalation %s: %v", f.Field, f.Err)
	}
	return fmt.Sprintf("escalation rule %d, %s: %v", f.Index+1, f.Field, f.Err)
}

func (f *Fault) Unwrap() error { return f.Err }

// Set is a validated list of rules.
type Set struct {
	rules []Rule
	opt   Options
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// Compile validates rules and returns the set, with warnings that are worth showing. The error joins one [*Fault] for each
// thing that is wrong; then the set is nil.
func Compile(rs []Rule, opt Options) (set *Set, warnings []Fault, err error) {
	c := compiler{}
	if opt.Default == "" {
		opt.Default = Ask
	}
	if opt.Default != Ask && opt.Default != Deny {
		c.fault(-1, "default", "%q is neither \"ask\" nor \"deny\"", opt.Default)
	}
	if opt.Env == nil {
		opt.Env = BaseEnv
	}
	c.env(-1, opt.Env)
	set = &Set{rules: slices.Clone(rs), opt: opt}
	for i := range set.rules {
		c.rule(i, &set.rules[i], opt)
	}
	if len(c.faults) == 0 {
		for i, r := range set.rules {
			c.examples(set, i, r)
		}
	}
	if len(c.faults) > 0 {
		return nil, c.warnings, errors.Join(c.faults...)
	}
	return set, c.warnings, nil
}

type compiler struct {
	faults   []error
	warnings []Fault
}

func (c *compiler) fault(i int, field, format string, a ...any) {
	c.faults = append(c.faults, &Fault{i, field, fmt.Errorf(format, a...)})
}

func (c *compiler) warn(i int, field, format string, a ...any) {
	c.warnings = append(c.warnings, Fault{i, field, fmt.Errorf(format, a...)})
}

func (c *compiler) env(i int, names []string) {
	for _, n := range names {
		if !envName.MatchString(n) {
			c.fault(i, "env", "%q is not the name of an environment variable", n)
		}
	}
}

func (c *compiler) rule(i int, r *Rule, opt Options) {
	if r.Action == "" {
		r.Action = Ask
	}
	if r.Trailing == "" {
		r.Trailing = TrailingNone
	}
	if r.Time == 0 {
		r.Time = DefaultTime
	}
	if r.Output == 0 {
		r.Output = DefaultOutput
	}
	if r.Env == nil {
		r.Env = opt.Env
	}
	if r.Action != Ask && r.Action != Auto && r.Action != Deny {
		c.fault(i, "action", "%q is none of \"ask\", \"auto\", \"deny\"", r.Action)
	}
	if r.Trailing != TrailingNone && r.Trailing != TrailingAny {
		c.fault(i, "trailing", "%q is neither \"none\" nor \"any\"", r.Trailing)
	}
	if r.Time < 0 || r.Time > MaxTime {
		c.fault(i, "time", "%v is not between 0 and %v", r.Time, MaxTime)
	}
	if r.Output < 0 {
		c.fault(i, "output", "%d is negative", r.Output)
	}
	c.env(i, r.Env)
	if r.Dir != "" && (!filepath.IsAbs(r.Dir) || filepath.Clean(r.Dir) != r.Dir || strings.Contains(r.Dir, "\x00")) {
		c.fault(i, "dir", "%q is not an absolute, clean path", r.Dir)
	}
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		c.fault(i, "argv", "it names no program")
		return
	}
	prog := r.Argv[0]
	if strings.Contains(prog, "/") && !filepath.IsAbs(prog) {
		c.fault(i, "argv", "program %q is neither a plain name nor an absolute path", prog)
	}
	for _, a := range r.Argv {
		if strings.Contains(a, "\x00") {
			c.fault(i, "argv", "%q holds a zero byte", a)
		}
	}
	if r.Action != Auto {
		return
	}
	if why := NeverAuto(prog); why != "" {
		c.fault(i, "action", "%q %s: it can be \"ask\" or \"deny\", never \"auto\"", prog, why)
	}
	if slices.ContainsFunc(forms(prog), func(f string) bool { return workspaceCode[f] }) {
		c.warn(i, "action", "%q runs code from the workspace, which the agent writes: whatever it wants will run on the host", prog)
	}
	if r.Trailing == TrailingAny {
		c.warn(i, "trailing", "any arguments of %q run without being asked about", prog)
	}
	if p, err := opt.Resolver.Resolve(prog, "/"); err == nil && p.Ours {
		c.fault(i, "argv", "program %s lies where the sandbox can write", p.Path)
	}
}

func (c *compiler) examples(s *Set, i int, r Rule) {
	check := func(field string, examples [][]string, want bool) {
		for n, argv := range examples {
			at := fmt.Sprintf("%s[%d]", field, n)
			if len(argv) == 0 || argv[0] == "" {
				c.fault(i, at, "it names no program")
				continue
			}
			// An absent program still has a name, so that examples mean the same on every machine.
			cmd := Command{Argv: argv}
			var err error
			if cmd.Program, err = s.opt.Resolver.Resolve(argv[0], "/"); err != nil {
				cmd.Program = Program{Name: argv[0], Names: []string{filepath.Base(argv[0])}}
			}
			if got, why := s.matches(r, cmd); got != want {
				if want {
					c.fault(i, at, "the example does not match: %s", why)
				} else {
					c.fault(i, at, "the example matches")
				}
			}
		}
	}
	check("match", r.Match, true)
	check("not_match", r.NotMatch, false)
}
