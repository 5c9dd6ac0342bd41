package supervisor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"lazaret.dev/lazaret/escalation/rules"
)

func parseRules(t *testing.T, text string) (Profile, error) {
	t.Helper()
	base, err := parseProfile(defaultProfile, "built-in default", Profile{})
	if err != nil {
		t.Fatal(err)
	}
	return parseProfile([]byte(text), "p.toml", base)
}

// TestDX5RuleFaults: each fault has its file and line.
func TestDX5RuleFaults(t *testing.T) {
	for text, want := range map[string]string{
		"[escalation]\ndefault = \"auto\"\n":    "p.toml:2: escalation.default:",
		"[escalation]\nwait = \"0s\"\n":         "p.toml:2: escalation.wait:",
		"\n[[escalation.rule]]\nname = \"x\"\n": "p.toml:2: escalation.rule[0].argv: it names no program",
		"[[escalation.rule]]\nargv = [\"a\"]\n[[escalation.rule]]\nargv = [\"b\"]\ntrailing = \"x\"\n": "p.toml:5: escalation.rule[1].trailing:",
		"[[escalation.rule]]\nargv = [\"sh\"]\nauto = true\n":                                          `p.toml:3: escalation.rule[0].auto: "sh" is a shell`,
		"[[escalation.rule]]\nargv = [\"a\"]\nauto = true\ndeny = true\n":                              "p.toml:4: escalation.rule[0].deny: contradicts",
		"[[escalation.rule]]\nargv = [\"a\"]\ntimeout = \"48h\"\n":                                     "p.toml:3: escalation.rule[0].timeout:",
		"[[escalation.rule]]\nargv = [\"a\"]\ncwd = \"b\"\n":                                           "p.toml:3: escalation.rule[0].cwd:",
		"[[escalation.rule]]\nargv = [\"a\"]\nenv = [\"A=B\"]\n":                                       "p.toml:3: escalation.rule[0].env:",
		"[[escalation.rule]]\nargv = [\"a\", \"b\"]\nmatch = [\n[\"a\", \"b\"],\n[\"a\"],\n]\n":        "p.toml:3: escalation.rule[0].match[1]: the example does not match",
		"[[escalation.rule]]\nargs = [\"a\"]\n":                                                        `p.toml:2: there is no key "escalation.rule.args"`,
	} {
		if _, err := parseRules(t, text); err == nil || !strings.Contains(err.Error(), want) || HintOf(err) == "" {
			t.Errorf("%q: want %q: %v", text, want, err)
		}
	}
}

func TestSR3CommandsGetNamedVariablesOnly(t *testing.T) {
	p, err := parseRules(t, "[escalation]\nenv = [\"SECTION\"]\n[[escalation.rule]]\nargv = [\"a\"]\nenv = [\"RULE\"]\n[[escalation.rule]]\nargv = [\"b\"]\n[[escalation.rule]]\nargv = [\"c\"]\nenv = []\n")
	if err != nil {
		t.Fatal(err)
	}
	set, _, err := p.Escalation.compile(rules.Resolver{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{"a": withBase([]string{"RULE"}), "b": withBase([]string{"SECTION"}), "c": rules.BaseEnv, "d": withBase([]string{"SECTION"})} {
		got := set.Decide(rules.Command{Argv: []string{name}, Program: rules.Program{Name: name, Names: []string{name}}}).Env
		if !slices.Equal(got, want) {
			t.Errorf("%s gets %q, want %q", name, got, want)
		}
	}
	if names := p.Escalation.names(); !slices.Equal(names, withBase([]string{"SECTION", "RULE"})) {
		t.Errorf("the coordinator gets %q", names)
	}
}

// TestDX4RememberIsAtomicAndNarrow adds rules to profiles in several forms.
func TestDX4RememberIsAtomicAndNarrow(t *testing.T) {
	rule := rules.Rule{Argv: []string{"/usr/bin/x", "a \"b\"\\ é"}, Trailing: rules.TrailingNone, Action: rules.Auto}
	for name, tc := range map[string]struct {
		old  string
		ok   bool
		many int
	}{
		"no file":      {"", true, 1},
		"no newline":   {"linger = \"1s\"", true, 1},
		"other rules":  {"[[escalation.rule]]\nargv = [\"y\"]\n\n[env]\nA = \"b\"\n", true, 2},
		"there before": {rule.String(), true, 1},
		"inline":       {"[escalation]\nrule = [{argv = [\"y\"]}]\n", false, 1},
		"broken":       {"linger = \n", false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			dirs := Dirs{Config: t.TempDir()}
			file := filepath.Join(dirs.Config, "profiles/p.toml")
			kept := filepath.Join(dirs.Config, "kept.toml")
			if tc.old != "" {
				if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(kept, []byte(tc.old), 0o640); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("../kept.toml", file); err != nil {
					t.Fatal(err)
				}
			}
			added, err := rememberIn(dirs, "p", rule)
			if (err == nil) != tc.ok {
				t.Fatalf("error %v", err)
			}
			text, _ := os.ReadFile(file)
			if !tc.ok {
				if string(text) != tc.old {
					t.Errorf("the file was changed:\n%s", text)
				}
				return
			}
			p, err := parseRules(t, string(text))
			if err != nil || len(p.Escalation.Rules) != tc.many || !sameJSON(p.Escalation.Rules[tc.many-1], added) || !slices.Equal(added.Argv, rule.Argv) || !added.Auto {
				t.Errorf("%v, rules %+v in\n%s", err, p.Escalation.Rules, text)
			}
			if !strings.HasPrefix(string(text), strings.TrimRight(tc.old, "\n")) {
				t.Errorf("what was there is gone:\n%s", text)
			}
			if tc.old != "" {
				if st, err := os.Stat(kept); err != nil || st.Mode().Perm() != 0o640 {
					t.Errorf("%v %v", st, err)
				}
				if _, err := os.Readlink(file); err != nil {
					t.Errorf("the link is gone: %v", err)
				}
			}
		})
	}
}
