package ignore

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	gitSeed  = flag.Uint64("git.seed", 0, "seed of the comparison with git; 0 chooses one")
	gitRepos = flag.Int("git.repos", 160, "random repositories in the comparison with git")
)

// needGit returns the path of git, or skips; where the environment demands everything it fails.
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

// world is a repository on disk together with the rules written into it.
type world struct {
	root    string
	fold    bool
	exclude []byte            // core.excludesFile
	info    []byte            // .git/info/exclude
	rules   map[string][]byte // .gitignore by directory
	dirs    map[string]bool   // directories that exist, "" is the root
}

func newWorld(t testing.TB, root string, fold bool) *world {
	t.Helper()
	w := &world{root: root, fold: fold, rules: map[string][]byte{}, dirs: map[string]bool{"": true}}
	for _, dir := range []string{"objects", "refs", "info"} {
		must(t, os.MkdirAll(filepath.Join(root, ".git", dir), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(root, ".git/HEAD"), []byte("ref: refs/heads/main\n"), 0o644))
	config := fmt.Sprintf("[core]\nrepositoryformatversion=0\nbare=false\nignorecase=%v\nexcludesFile=%s\n", fold, filepath.Join(root, ".git/global"))
	must(t, os.WriteFile(filepath.Join(root, ".git/config"), []byte(config), 0o644))
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) mkdir(dir string) bool {
	if w.dirs[dir] {
		return true
	}
	if os.MkdirAll(filepath.Join(w.root, dir), 0o755) != nil {
		return false
	}
	for dir != "" {
		w.dirs[dir] = true
		dir = parentOf(dir)
	}
	return true
}

// sortedDirs lists the directories; the first is the root, "".
func (w *world) sortedDirs() []string { return slices.Sorted(maps.Keys(w.dirs)) }

func parentOf(path string) string {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return ""
	}
	return path[:i]
}

func (w *world) write(t testing.TB) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(w.root, ".git/global"), w.exclude, 0o644))
	must(t, os.WriteFile(filepath.Join(w.root, ".git/info/exclude"), w.info, 0o644))
	for dir, src := range w.rules {
		must(t, os.WriteFile(filepath.Join(w.root, dir, ".gitignore"), src, 0o644))
	}
}

// walker answers for whole paths, as a check of the name by name interface.
type walker struct {
	w     *world
	names map[*Patterns]string // as git prints the rule file
	files map[string]*Patterns
	dirs  map[string]*Dir
}

func newWalker(w *world) *walker {
	a := &walker{w: w, names: map[*Patterns]string{}, files: map[string]*Patterns{}, dirs: map[string]*Dir{}}
	global, info := Parse(w.exclude), Parse(w.info)
	a.names[global] = filepath.Join(w.root, ".git/global")
	a.names[info] = ".git/info/exclude"
	for dir, src := range w.rules {
		p := Parse(src)
		a.files[dir] = p
		a.names[p] = strings.TrimPrefix(dir+"/.gitignore", "/")
	}
	a.dirs[""] = Root(Config{FoldCase: w.fold, Excludes: global, Info: info, Own: a.files[""]})
	return a
}

func (a *walker) dir(path string) *Dir {
	if d, ok := a.dirs[path]; ok {
		return d
	}
	up := parentOf(path)
	name := strings.TrimPrefix(path[len(up):], "/")
	d := a.dir(up).Child(name, a.files[path])
	a.dirs[path] = d
	return d
}

func (a *walker) match(path string) Verdict {
	up := parentOf(path)
	return a.dir(up).Match(strings.TrimPrefix(path[len(up):], "/"), a.w.dirs[path])
}

// answer is one record of git check-ignore -z -v -n.
type answer struct{ source, line, pattern, path string }

func askGit(t testing.TB, git string, w *world, paths []string) []answer {
	t.Helper()
	cmd := exec.Command(git, "check-ignore", "--no-index", "-z", "-v", "-n", "--stdin")
	cmd.Dir = w.root
	cmd.Env = []string{"HOME=" + w.root, "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "PATH=" + os.Getenv("PATH")}
	// "./" keeps a leading ':' from being read as pathspec magic.
	cmd.Stdin = strings.NewReader("./" + strings.Join(paths, "\x00./") + "\x00")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil && cmd.ProcessState.ExitCode() != 1 {
		t.Fatalf("git check-ignore: %v: %s", err, stderr.String())
	}
	fields := strings.Split(string(out), "\x00")
	var answers []answer
	for ; len(fields) >= 4; fields = fields[4:] {
		answers = append(answers, answer{fields[0], fields[1], fields[2], strings.TrimPrefix(fields[3], "./")})
	}
	if len(answers) != len(paths) {
		t.Fatalf("git gave %d answers for %d paths: %s", len(answers), len(paths), stderr.String())
	}
	return answers
}

// compare checks every path against git and returns the number of verdicts.
func compare(t *testing.T, git string, w *world, paths []string) int {
	t.Helper()
	a := newWalker(w)
	for _, ans := range askGit(t, git, w, paths) {
		v := a.match(ans.path)
		want := answer{path: ans.path}
		if v.Source != nil {
			want.source, want.line, want.pattern = a.names[v.Source], strconv.Itoa(int(v.Line)), v.Source.Text(int(v.Line))
		}
		if want != ans || v.Ignored != (ans.source != "" && !strings.HasPrefix(ans.pattern, "!")) {
			t.Errorf("path %q (dir %v, fold %v): have %q, git says %q", ans.path, w.dirs[ans.path], w.fold, want, ans)
		}
	}
	return len(paths)
}

// nasty makes patterns and the paths that may match them.
type nasty struct{ *rand.Rand }

func (r nasty) pick(s []string) string { return s[r.IntN(len(s))] }

var nastyNames = []string{"a", "b", "A", "aa", "ab", "abc", "foo", "Foo", "bar", "x", "build", "node_modules", "a.c", "a.o", ".env", "..x",
	"[a]", "a[b", "a]b", "*", "a*b", "?", "#x", "!x", "a b", "a ", " ", "\\", "a\\b", "-", "a-b", "^", "\xff\xfe", "caf\xc3\xa9", "\t", "a\r", "$x", "{a,b}", "1", "12", "x:]", ":", "~", "e.tar.gz", "ABC", "@"}

var nastyPieces = []string{"*", "**", "***", "?", "/", "//", "a", "b", "A", "x", "foo", "c", ".", ".o", "1", "\\", "\\*", "\\?", "\\a", "\\A", "\\/", "\\\\", "\\ ", "\\#", "\\!", "\\[",
	"[", "]", "[]", "[a", "[a]", "[abc]", "[a-c]", "[A-C]", "[!a]", "[^a]", "[]a]", "[]-]", "[!]a]", "[a-]", "[-a]", "[--0]", "[a-c-e]", "[\\]]", "[\\a-\\c]", "[c-a]", "[*]", "[/]", "[a/b]", "[!/]", "[[]", "[[:]",
	"[[:alpha:]]", "[[:digit:]]", "[[:upper:]]", "[[:lower:]]", "[[:space:]]", "[[:punct:]]", "[[:alnum:]]", "[[:xdigit:]]", "[[:blank:]]", "[[:cntrl:]]", "[[:graph:]]", "[[:print:]]", "[![:alpha:]]",
	"[[:bogus:]]", "[[:alpha:]", "[[:alpha", "[[:alpha:]-z]", "[a[:digit:]]", "[:alpha:]", "[[::]]", "[[:a]", "[\xc3-\xff]", "\xff", "\xc3", "\xa9", "é", " ", "-", "!", "#", "^", "\t", "$", "{", "a**", "**a", "**/", "/**", "/**/", "*/", "/*", "~", "@", "_"}

func (r nasty) pattern() string {
	var b strings.Builder
	switch r.IntN(10) {
	case 0, 1:
		b.WriteString("!")
	case 2:
		b.WriteString("/")
	}
	switch r.IntN(3) {
	case 0: // made of names
		for n := r.IntN(3); ; n-- {
			b.WriteString(r.pick(nastyNames))
			if n <= 0 {
				break
			}
			b.WriteString(r.pick([]string{"/", "/", "/**/", "/*/", "**", "*", "**/"}))
		}
	case 1: // made of pieces
		for range 1 + r.IntN(6) {
			b.WriteString(r.pick(nastyPieces))
		}
	default: // a name with something done to it
		name := r.pick(nastyNames)
		at := r.IntN(len(name) + 1)
		b.WriteString(name[:at] + r.pick(nastyPieces) + name[min(len(name), at+r.IntN(2)):])
	}
	switch r.IntN(12) {
	case 0, 1, 2:
		b.WriteString("/")
	case 3:
		b.WriteString(r.pick([]string{" ", "  ", "\\ ", "\\  ", " \\", "\t", "\r", "\\", "\x00x"}))
	}
	return b.String()
}

func (r nasty) rules(n int) []byte {
	var b strings.Builder
	if r.IntN(8) == 0 {
		b.WriteString("\xef\xbb\xbf")
	}
	eol := r.pick([]string{"\n", "\n", "\n", "\r\n"})
	for range n {
		switch r.IntN(16) {
		case 0:
			b.WriteString("#" + r.pattern())
		case 1:
		default:
			b.WriteString(r.pattern())
		}
		b.WriteString(eol)
	}
	src := b.String()
	if r.IntN(4) == 0 {
		src = strings.TrimSuffix(src, "\n")
	}
	return []byte(src)
}

// name makes one path component, often from a pattern.
func (r nasty) name(patterns []string) string {
	s := r.pick(nastyNames)
	if len(patterns) > 0 && r.IntN(2) == 0 {
		parts := strings.Split(strings.Trim(r.pick(patterns), "!/"), "/")
		s = r.instance(parts[r.IntN(len(parts))])
	}
	if r.IntN(6) == 0 {
		s = strings.ToUpper(s)
	}
	s = strings.ReplaceAll(strings.ReplaceAll(s, "\x00", ""), "/", "")
	if s == "" || s == "." || s == ".." || strings.EqualFold(s, ".git") || len(s) > 100 {
		return "z"
	}
	return s
}

// instance makes a text that a pattern is likely to match.
func (r nasty) instance(p string) string {
	var b []byte
	for i := 0; i < len(p); i++ {
		switch c := p[i]; c {
		case '*':
			b = append(b, r.pick([]string{"", "a", "b", "ab", "x.o"})...)
		case '?':
			b = append(b, "abcA1-"[r.IntN(6)])
		case '[':
			if end := strings.IndexByte(p[i:], ']'); end > 0 {
				b = append(b, "abcA1-] :"[r.IntN(9)])
				i += end
			} else {
				b = append(b, c)
			}
		case '\\':
			if i+1 < len(p) {
				i++
				b = append(b, p[i])
			}
		default:
			b = append(b, c)
		}
	}
	return string(b)
}

// TestSR13SameVerdictAsGit compares every verdict, its rule file and its line with git check-ignore.
func TestSR13SameVerdictAsGit(t *testing.T) {
	git := needGit(t)
	seed := *gitSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-git.seed=%d -git.repos=%d", seed, *gitRepos)
	verdicts, hits := 0, map[Cause]int{}
	for i := range *gitRepos {
		r := nasty{rand.New(rand.NewPCG(seed, uint64(i)))}
		w := newWorld(t, filepath.Join(t.TempDir(), "w"), r.IntN(4) == 0)
		w.info, w.exclude = r.rules(r.IntN(4)), r.rules(r.IntN(4))
		root := r.rules(1 + r.IntN(6+6*(i%2)))
		w.rules[""] = root
		patterns := strings.Split(strings.ReplaceAll(string(root), "\r", ""), "\n")
		for range 25 {
			dirs := w.sortedDirs()
			parent := dirs[r.IntN(len(dirs))]
			if strings.Count(parent, "/") > 4 {
				continue
			}
			dir := strings.TrimPrefix(parent+"/"+r.name(patterns), "/")
			if w.mkdir(dir) && r.IntN(4) == 0 {
				w.rules[dir] = r.rules(1 + r.IntN(5))
				patterns = append(patterns, strings.Split(strings.ReplaceAll(string(w.rules[dir]), "\r", ""), "\n")...)
			}
		}
		w.write(t)
		dirs := w.sortedDirs()
		paths := slices.Clone(dirs[1:])
		for len(paths) < 800 {
			p := strings.TrimPrefix(r.pick(dirs)+"/"+r.name(patterns), "/")
			for r.IntN(4) == 0 {
				p += "/" + r.name(patterns)
			}
			paths = append(paths, p)
		}
		verdicts += compare(t, git, w, paths)
		a := newWalker(w)
		for _, p := range paths {
			hits[a.match(p).Cause]++
		}
		if t.Failed() {
			t.Fatalf("stopped at repository %d of seed %d: rule files %q, info %q, global %q", i, seed, w.rules, w.info, w.exclude)
		}
	}
	t.Logf("%d verdicts without a difference; causes %v", verdicts, hits)
	if *gitRepos >= 130 && verdicts < 100_000 {
		t.Errorf("only %d verdicts", verdicts)
	}
}
