package rules

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// host makes a small host: bin with programs and links, and a workspace that the sandbox can write.
func host(t *testing.T) (bin, work string, r Resolver) {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	bin, work = filepath.Join(root, "bin"), filepath.Join(root, "work")
	for _, d := range []string{bin, work, filepath.Join(work, "bin")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{bin + "/tool", bin + "/git", bin + "/bash", bin + "/busybox", bin + "/make", bin + "/python3.12",
		work + "/run.sh", work + "/bin/tool"} {
		if err := os.WriteFile(f, []byte("#!/bin/true\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{bin + "/ls": "busybox", bin + "/sneaky": "bash", bin + "/py": "python3.12",
		bin + "/tool2": "tool", bin + "/fromwork": work + "/run.sh", bin + "/loop": "loop"} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(bin+"/data", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return bin, work, Resolver{Path: []string{work + "/bin", bin}, Writable: []string{work}}
}

func decide(t *testing.T, r Resolver, rs []Rule, argv ...string) Verdict {
	t.Helper()
	s, _, err := Compile(rs, Options{Resolver: r})
	if err != nil {
		t.Fatal(err)
	}
	p, err := r.Resolve(argv[0], r.Writable[0])
	if err != nil {
		t.Fatal(err)
	}
	return s.Decide(Command{argv, p})
}

func TestSR8Decide(t *testing.T) {
	bin, work, r := host(t)
	auto := func(trailing Trailing, argv ...string) Rule {
		return Rule{Argv: argv, Trailing: trailing, Action: Auto}
	}
	deny := func(argv ...string) Rule { return Rule{Argv: argv, Trailing: TrailingAny, Action: Deny} }
	for _, tc := range []struct {
		name  string
		rules []Rule
		argv  []string
		want  Action
	}{
		{"no rule", nil, []string{"tool"}, Ask},
		{"exact", []Rule{auto("", "tool", "a")}, []string{"tool", "a"}, Auto},
		{"absolute request for a named rule", []Rule{auto("", "tool", "a")}, []string{bin + "/tool", "a"}, Auto},
		{"fewer", []Rule{auto("", "tool", "a", "b")}, []string{"tool", "a"}, Ask},
		{"more", []Rule{auto("", "tool", "a")}, []string{"tool", "a", "b"}, Ask},
		{"trailing any", []Rule{auto(TrailingAny, "tool", "a")}, []string{"tool", "a", "b", "c"}, Auto},
		{"trailing any, no more", []Rule{auto(TrailingAny, "tool", "a")}, []string{"tool", "a"}, Auto},
		{"joined option", []Rule{auto("", "tool", "--x", "y")}, []string{"tool", "--x=y"}, Ask},
		{"abbreviation", []Rule{auto("", "tool", "--force")}, []string{"tool", "--forc"}, Ask},
		{"case", []Rule{auto("", "tool", "a")}, []string{"tool", "A"}, Ask},
		{"normal forms differ", []Rule{auto("", "tool", "\u00e9")}, []string{"tool", "e\u0301"}, Ask},
		{"control character in a free argument", []Rule{auto(TrailingAny, "tool")}, []string{"tool", "a\x1b[2J"}, Ask},
		{"line break in a free argument", []Rule{auto(TrailingAny, "tool")}, []string{"tool", "a\nb"}, Ask},
		{"bidi in a free argument", []Rule{auto(TrailingAny, "tool")}, []string{"tool", "a\u202eb"}, Ask},
		{"not UTF-8 in a free argument", []Rule{auto(TrailingAny, "tool")}, []string{"tool", "\xff"}, Ask},
		{"long arguments", []Rule{auto(TrailingAny, "tool")}, []string{"tool", strings.Repeat("a", 65<<10)}, Ask},
		{"deny wins over an earlier rule", []Rule{auto(TrailingAny, "tool"), deny("tool", "x")}, []string{"tool", "x", "y"}, Deny},
		{"deny by name, any path", []Rule{deny("run.sh")}, []string{work + "/run.sh"}, Deny},
		{"deny by the file's name", []Rule{deny("bash")}, []string{"sneaky"}, Deny},
		{"another name of the same file", []Rule{auto("", "tool")}, []string{"tool2"}, Ask},
		{"a link to a shell", []Rule{auto("", "sneaky")}, []string{"sneaky"}, Ask},
		{"a link to a versioned interpreter", []Rule{auto("", "py")}, []string{"py"}, Ask},
		{"a program that goes by its name", []Rule{auto("", "ls")}, []string{"ls"}, Ask},
		{"a namesake in the workspace", []Rule{auto("", "tool")}, []string{work + "/bin/tool"}, Ask},
		{"a link into the workspace", []Rule{{Argv: []string{"fromwork"}}}, []string{"fromwork"}, Ask},
		{"first rule counts", []Rule{{Argv: []string{"tool"}}, auto("", "tool")}, []string{"tool"}, Ask},
	} {
		if v := decide(t, r, tc.rules, tc.argv...); v.Action != tc.want {
			t.Errorf("%s: got %s (%v), want %s", tc.name, v.Action, v.Why, tc.want)
		}
	}
}

func TestSR8Resolve(t *testing.T) {
	bin, work, r := host(t)
	p, err := r.Resolve("tool", work)
	if err != nil || p.Path != bin+"/tool" || p.Ours {
		t.Errorf("the workspace shadowed a program: %+v, %v", p, err)
	}
	p, err = r.Resolve("./bin/tool", work)
	if err != nil || p.Path != work+"/bin/tool" || !p.Ours {
		t.Errorf("%+v, %v", p, err)
	}
	p, err = r.Resolve("sneaky", work)
	if err != nil || !slices.Equal(p.Names, []string{"sneaky", "bash"}) {
		t.Errorf("%+v, %v", p, err)
	}
	for _, name := range []string{"absent", "data", "loop", "..", ".", bin, work + "/absent", "\x00", "tool/"} {
		if p, err := r.Resolve(name, work); err == nil {
			t.Errorf("%q became %+v", name, p)
		}
	}
	if got := SearchPath(":/usr/bin:relative:.:/bin/"); !slices.Equal(got, []string{"/usr/bin", "/bin"}) {
		t.Errorf("%q", got)
	}
}

func TestSR8CompileFaults(t *testing.T) {
	_, work, r := host(t)
	for name, rule := range map[string]Rule{
		"argv":         {},
		"action":       {Argv: []string{"tool"}, Action: "allow"},
		"trailing":     {Argv: []string{"tool"}, Trailing: "all"},
		"dir":          {Argv: []string{"tool"}, Dir: "a/b"},
		"env":          {Argv: []string{"tool"}, Env: []string{"A=B"}},
		"time":         {Argv: []string{"tool"}, Time: -1},
		"output":       {Argv: []string{"tool"}, Output: -1},
		"match[0]":     {Argv: []string{"tool", "a"}, Match: [][]string{{"tool"}}},
		"match[1]":     {Argv: []string{"absent", "a"}, Match: [][]string{{"absent", "a"}, {"absent"}}},
		"not_match[0]": {Argv: []string{"tool"}, Trailing: TrailingAny, NotMatch: [][]string{{"tool", "x"}}},
	} {
		_, _, err := Compile([]Rule{{Argv: []string{"tool"}}, rule}, Options{Resolver: r})
		var f *Fault
		if !errors.As(err, &f) || f.Index != 1 || f.Field != name {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for _, prog := range []string{"sh", "bash", "/bin/bash", "python3", "python3.12", "perl5.36", "node", "env", "timeout", "xargs",
		"find", "sudo", "docker", "podman", "lazaret", "lazaret-escalate", "git", "nice", "ld-linux-x86-64.so.2", work + "/bin/tool"} {
		if _, _, err := Compile([]Rule{{Argv: []string{prog}, Action: Auto}}, Options{Resolver: r}); err == nil {
			t.Errorf("%s may be approved automatically", prog)
		}
		if _, _, err := Compile([]Rule{{Argv: []string{prog}, Action: Ask}}, Options{Resolver: r}); err != nil {
			t.Errorf("%s may not even be asked about: %v", prog, err)
		}
	}
	if _, _, err := Compile(nil, Options{Default: Auto}); err == nil {
		t.Error("a default of auto was taken")
	}
	_, warn, err := Compile([]Rule{{Argv: []string{"make", "test"}, Action: Auto}}, Options{Resolver: r})
	if err != nil || len(warn) != 1 {
		t.Errorf("got %v, %v", warn, err)
	}
}

// Rules see the argument vector only, so no quoting can make a shorter rule match a longer command.
func FuzzSR8NeverWider(f *testing.F) {
	f.Add("push", "push --force")
	f.Add("a", "a\x00b")
	s, _, err := Compile([]Rule{{Argv: []string{"/bin/true", "push"}, Action: Auto}}, Options{})
	if err != nil {
		f.Fatal(err)
	}
	p, err := Resolver{}.Resolve("/bin/true", "/")
	if err != nil {
		f.Skip(err)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		for _, args := range [][]string{{a}, {b}, {a, b}, {}, {a + b}} {
			v := s.Decide(Command{append([]string{"/bin/true"}, args...), p})
			if (v.Action == Auto) != slices.Equal(args, []string{"push"}) {
				t.Fatalf("%q: %s", args, v.Action)
			}
		}
	})
}

func TestExplainAndNarrow(t *testing.T) {
	bin, work, r := host(t)
	s, _, err := Compile([]Rule{{Name: "fetch", Argv: []string{"tool", "fetch"}, Action: Auto}}, Options{Resolver: r})
	if err != nil {
		t.Fatal(err)
	}
	p, err := r.Resolve("tool", work)
	if err != nil {
		t.Fatal(err)
	}
	c := Command{[]string{"tool", "push"}, p}
	text := strings.Join(s.Explain(c), "\n")
	for _, want := range []string{bin + "/tool", `rule "fetch" (auto): no match: argument 1 is "push", not "fetch"`, "verdict: ask"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	n, ok, why := Narrow(c)
	if !ok {
		t.Fatal(why)
	}
	if v := decide(t, r, []Rule{n}, "tool", "push"); v.Action != Auto {
		t.Errorf("the remembered rule does not match: %v", v)
	}
	if v := decide(t, r, []Rule{n}, "tool", "push", "x"); v.Action != Ask {
		t.Errorf("the remembered rule is too wide: %v", v)
	}
	p, err = r.Resolve("git", work)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := Narrow(Command{[]string{"git", "push"}, p}); ok {
		t.Error("git may be remembered")
	}
}
