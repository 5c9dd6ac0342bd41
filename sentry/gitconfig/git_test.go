package gitconfig

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

var (
	gitSeed  = flag.Uint64("git.seed", 0, "seed of the comparison with git; 0 chooses one")
	gitFiles = flag.Int("git.files", 400, "generated files in the comparison with git")
)

func needGit(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("git")
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("git is required here: %v", err)
	default:
		t.Skipf("git: %v", err)
	}
	return path
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// gitList returns the records of git config --list -z -f file; ok is false if git refuses the file.
func gitList(t testing.TB, git, file string) (records []string, ok bool) {
	t.Helper()
	cmd := exec.Command(git, "config", "--list", "-z", "-f", file)
	cmd.Dir = filepath.Dir(file)
	cmd.Env = []string{"HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	out, err := cmd.Output()
	return splitNUL(string(out)), err == nil
}

func splitNUL(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(s, "\x00"), "\x00")
}

func list(f *File) []string {
	var records []string
	for _, e := range f.Entries {
		r := e.Name()
		if !e.NoValue {
			r += "\n" + e.Value
		}
		records = append(records, r)
	}
	return records
}

var pieces = []string{"[core]", "[core]\n", "[branch \"main\"]\n", "[a.b]\n", "[A \"B c\"]\n", "[a \"\\\"x\\\\\"]\n", "[a \t \"\"]\n", "[]\n", "[.]\n", "[a..b]\n", "[ \"s\"]\n", "[a\"b\"]", "[a \"b\" ]", "[a", "[é]\n", "[x] y = 1\n",
	"[s]\nkey = value\n", "key = value\n", "Key=Value\n", "\tk-1 = a b  c \n", "k\n", "k \n", "k # c\n", "k =\n", "k = \"\"\n", "k = \" a \" b \n", "k = a;b\n", "k = \"a;b#\" # c\n", "k = a\\\nb\n", "k = a\\\r\nb\n", "k = \\t\\n\\b\\\\\\\"\n", "k = \\x\n", "k = \"open\n",
	"k = a\tb\n", "k = a\r\n", "k = a\rb\n", "k\r\n", "; c\n", "# c\n", "\n", " ", "\t", "1k = a\n", "k_ = a\n", "k.l = a\n", "= a\n", "\\", "\"", "]", "[", "k = é\xff\n", "k = \"a\\\nb\"\n", "k == a\n", "k = a=b\n", "k = true \\\n", "k = a\\", "\xef\xbb\xbf", "\xef", "\v", "\f", "k = \v a \f\n", "k\v= a\n"}

func generate(r *rand.Rand) []byte {
	var b strings.Builder
	if r.IntN(4) > 0 {
		b.WriteString("[s]\n")
	}
	bad := r.IntN(3) == 0
	for range 1 + r.IntN(8) {
		p := pieces[r.IntN(len(pieces))]
		if _, err := Parse([]byte(p)); err != nil && !bad {
			continue // only steers towards files that git accepts
		}
		if bad && len(p) > 1 && r.IntN(3) == 0 {
			at := r.IntN(len(p))
			p = p[:at] + pieces[r.IntN(len(pieces))] + p[at+r.IntN(2):]
		}
		b.WriteString(p)
	}
	return []byte(b.String())
}

// TestSR4SameSettingsAsGit compares what is read, and what is written again, with git config --list.
func TestSR4SameSettingsAsGit(t *testing.T) {
	git := needGit(t)
	seed := *gitSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-git.seed=%d -git.files=%d", seed, *gitFiles)
	r := rand.New(rand.NewPCG(seed, 0))
	path := filepath.Join(t.TempDir(), "config")
	valid := 0
	for range *gitFiles {
		src := generate(r)
		must(t, os.WriteFile(path, src, 0o644))
		want, ok := gitList(t, git, path)
		f, err := Parse(src)
		if ok != (err == nil) {
			t.Fatalf("%q: have error %v, git accepts: %v", src, err, ok)
		}
		if !ok {
			continue
		}
		valid++
		if have := list(f); !reflect.DeepEqual(have, want) {
			t.Fatalf("%q: have %q, git has %q", src, have, want)
		}
		again, err := Parse(f.Bytes())
		if err != nil || !reflect.DeepEqual(list(again), want) {
			t.Fatalf("%q written as %q: %v, %q", src, f.Bytes(), err, list(again))
		}
		if valid%4 == 0 {
			must(t, os.WriteFile(path, f.Bytes(), 0o644))
			if have, ok := gitList(t, git, path); !ok || !reflect.DeepEqual(have, want) {
				t.Fatalf("%q written as %q: git reads %q", src, f.Bytes(), have)
			}
		}
	}
	t.Logf("%d of %d files valid", valid, *gitFiles)
}

// TestSR13EffectiveSettingsAsGit builds a home with includes of each kind and compares the whole list.
func TestSR13EffectiveSettingsAsGit(t *testing.T) {
	git := needGit(t)
	base, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	home, work := filepath.Join(base, "home"), filepath.Join(base, "home/Src/proj")
	write := func(path, content string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(content), 0o644))
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(git, args...)
		cmd.Dir = work
		cmd.Env = []string{"HOME=" + home, "GIT_CONFIG_SYSTEM=" + filepath.Join(base, "system"), "LC_ALL=C", "PATH=" + os.Getenv("PATH")}
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("git %q: %v", args, err)
		}
		return string(out)
	}
	must(t, os.MkdirAll(work, 0o755))
	run("init", "-q", "-b", "feature/x")
	write(filepath.Join(base, "system"), "[core]\n\texcludesFile = /sys\n[include]\n\tpath = missing\n")
	write(filepath.Join(home, ".config/git/config"), "[user]\n\tname = xdg\n[include]\n\tpath = more/a\n")
	write(filepath.Join(home, ".config/git/more/a"), "[a]\n\tfrom = xdg-include\n[include]\n\tpath = b\n")
	write(filepath.Join(home, ".config/git/more/b"), "[b]\n\tk\n")
	var global strings.Builder
	global.WriteString("[user]\n\tname = home\n")
	for i, cond := range []string{"gitdir:~/Src/", "gitdir:~/src/", "gitdir/i:~/src/", "gitdir:Src/", "gitdir:proj/.git", "gitdir:./Src/**/.git", "gitdir:/nowhere/", "gitdir:*/.git", "gitdir:" + base + "/home/*/proj/.git",
		"onbranch:feature/", "onbranch:feature/*", "onbranch:feature", "onbranch:main", "onbranch:*", "hasconfig:remote.*.url:https://example.org/**", "hasconfig:remote.*.url:https://example.org/", "hasconfig:remote.*.url:https://**/y", "hasconfig:remote.*.url:ssh://**", "bogus:x", "gitdir/i:SRC/PROJ/"} {
		fmt.Fprintf(&global, "[includeIf %q]\n\tpath = ~/inc/%d\n", cond, i)
		write(filepath.Join(home, "inc", fmt.Sprint(i)), fmt.Sprintf("[inc]\n\tn%d = %d\n", i, i))
	}
	write(filepath.Join(home, ".gitconfig"), global.String())
	run("config", "remote.origin.url", "https://example.org/x/y")
	run("config", "extensions.worktreeConfig", "true")
	run("config", "core.excludesFile", "~/ign")
	write(filepath.Join(work, ".git/config.worktree"), "[core]\n\tsparseCheckout = true\n")

	env := Env{Home: home, System: filepath.Join(base, "system"), GitDir: filepath.Join(work, ".git"), Branch: "feature/x", ReadFile: os.ReadFile}
	eff := Resolve(env)
	for _, p := range eff.Problems {
		t.Error(p)
	}
	var have []string
	for _, o := range eff.Settings {
		rec := o.Name()
		if !o.NoValue {
			rec += "\n" + o.Value
		}
		rel := o.Path
		if in, ok := strings.CutPrefix(rel, work+"/"); ok {
			rel = in // git names these relative to where it runs
		}
		have = append(have, "file:"+rel, rec)
	}
	want := splitNUL(run("config", "--list", "-z", "--show-origin"))
	for i := range max(len(have), len(want)) {
		if i >= len(have) || i >= len(want) || have[i] != want[i] {
			t.Fatalf("record %d: have %q, git has %q", i, have[min(i, len(have)):], want[min(i, len(want)):])
		}
	}
	p, err := env.Excludes(eff)
	if want := strings.TrimSpace(run("config", "--type=path", "--get", "core.excludesFile")); err != nil || p != want {
		t.Errorf("excludes %q, %v; git has %q", p, err, want)
	}
	if below := eff.FilesBelow(work); len(below) != 2 {
		t.Errorf("files in the workspace: %q", below)
	}
}
