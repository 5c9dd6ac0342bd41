package ignore

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// corner is one rule file at the root and what becomes of some paths. A path with a trailing slash is a
// directory. The table is also put to git.
var corners = []struct {
	name, rules      string
	ignored, visible string // separated by '|'
}{
	{"byte order mark", "\xef\xbb\xbffoo\n", "foo", "\xef\xbb\xbffoo"},
	{"mark only at the start", "x\n\xef\xbb\xbffoo\n", "\xef\xbb\xbffoo", "foo"},
	{"carriage returns", "foo\r\nbar\r\n", "foo|bar", "foo\r"},
	{"carriage return without line feed", "foo\r", "foo", "foo\r"},
	{"trailing spaces", "foo   \n", "foo", "foo |foo   "},
	{"protected trailing space", "foo\\ \n", "foo ", "foo"},
	{"partly protected spaces", "foo\\   \n", "foo ", "foo|foo   "},
	{"tab stays", "foo\t\n", "foo\t", "foo"},
	{"comment", "#foo\n\\#bar\n", "#bar", "#foo|foo"},
	{"escaped bang", "\\!x\n", "!x", "x"},
	{"bang alone", "!\n", "", "!|x"},
	{"nul ends the line", "foo\x00bar\n", "foo", "foobar|bar"},
	{"middle double star", "a/**/b\n", "a/b|a/x/b|a/x/y/b", "b|x/a/b|ab"},
	{"leading double star", "**/x\n", "x|a/x|a/b/x", "ax|xa"},
	{"trailing double star", "x/**\n", "x/a|x/a/b", "x/|x|a/x/b"},
	{"double star alone", "**\n", "a|b/|b/c", ""},
	{"double star within", "a**/b\n", "ab|ax/b|ax/y/b|a/b", "xa/b|b"},
	{"double star before a name", "a/**b\n", "a/b|a/xb", "a/x/b|b"},
	{"anchored", "/foo\n", "foo", "a/foo"},
	{"slash in the middle anchors", "a/foo\n", "a/foo", "b/a/foo|foo"},
	{"only a slash", "/\n", "", "a|b/"},
	{"two slashes at the end", "foo//\n", "", "foo|foo/"},
	{"directory only", "foo/\n", "foo/|foo/x", "foo|foox"},
	{"star stops at slash", "a/*/c\n", "a/b/c", "a/b/d/c|a/c"},
	{"class", "[a-c]x\n", "ax|cx", "dx|x"},
	{"negated class", "[!a-c]x\n[^d]y\n", "dx|ay", "ax|dy"},
	{"bracket first", "[]-]x\n", "]x|-x", "ax"},
	{"escaped in class", "[\\]]x\n", "]x", "\\x"},
	{"posix class", "[[:digit:]]x\n", "1x", "ax|:x"},
	{"unknown class", "[[:bogus:]]x\n", "", "bx|:x|[x"},
	{"unterminated class", "[ab\n", "", "[ab|a|b"},
	{"trailing backslash", "foo\\\n", "", "foo|foo\\"},
	{"no class for slash", "a[/]b\n", "", "a/b"},
	{"last wins", "*.o\n!keep.o\n", "x.o", "keep.o|a/keep.o"},
	{"not below an excluded directory", "excl\n!excl/keep\n", "excl/|excl/keep", ""},
	{"all but one", "/x/*\n!/x/keep\n", "x/a|x/b/c", "x/|x/keep"},
	{"only c files", "*\n!*/\n!*.c\n", "a.o|d/x", "d/|d/a.c|a.c"},
	{"bytes", "\xff*\n", "\xff\xfe", "\xc3\xbf"},
	{"question mark is a byte", "?\n", "a|\xc3", "é"},
	{"case counts", "foo\n", "foo", "FOO"},
}

func TestSR13CornerCases(t *testing.T) {
	for _, c := range corners {
		t.Run(c.name, func(t *testing.T) {
			root := Root(Config{Own: Parse([]byte(c.rules))})
			for path := range strings.SplitSeq(c.ignored, "|") {
				if path != "" && !matchPath(root, path).Ignored {
					t.Errorf("%q is visible", path)
				}
			}
			for path := range strings.SplitSeq(c.visible, "|") {
				if path != "" && matchPath(root, path).Ignored {
					t.Errorf("%q is ignored", path)
				}
			}
		})
	}
}

// matchPath walks a path; a trailing slash makes the last component a directory.
func matchPath(d *Dir, path string) Verdict {
	path, isDir := strings.CutSuffix(path, "/")
	for {
		name, rest, more := strings.Cut(path, "/")
		if !more {
			return d.Match(name, isDir)
		}
		d, path = d.Child(name, nil), rest
	}
}

func TestSR13CornerCasesAgainstGit(t *testing.T) {
	git := needGit(t)
	for i, c := range corners {
		w := newWorld(t, filepath.Join(t.TempDir(), "w"), i%2 == 1)
		w.rules[""] = []byte(c.rules)
		var paths []string
		for path := range strings.SplitSeq(c.ignored+"|"+c.visible, "|") {
			if dir, ok := strings.CutSuffix(path, "/"); ok {
				w.mkdir(dir)
				path = dir
			}
			if path != "" {
				paths = append(paths, path)
			}
		}
		w.write(t)
		compare(t, git, w, paths)
	}
}

func TestSR13Precedence(t *testing.T) {
	global, info := Parse([]byte("g\nx\n")), Parse([]byte("!x\ni\n"))
	root, near := Parse([]byte("x\nr\n")), Parse([]byte("!r\n/here\n"))
	d := Root(Config{Excludes: global, Info: info, Own: root})
	sub := d.Child("sub", near)
	for _, c := range []struct {
		dir     *Dir
		name    string
		ignored bool
		source  *Patterns
		line    int32
	}{
		{d, "g", true, global, 1}, {d, "i", true, info, 2}, {d, "x", true, root, 1}, {d, "r", true, root, 2}, {d, "n", false, nil, 0},
		{sub, "r", false, near, 1}, {sub, "here", true, near, 2}, {d, "here", false, nil, 0}, {sub, "x", true, root, 1},
	} {
		v := c.dir.Match(c.name, false)
		if v.Ignored != c.ignored || v.Source != c.source || v.Line != c.line {
			t.Errorf("%s in %q: %+v", c.name, c.dir.Path(), v)
		}
	}
	below := d.Child("r", near) // ignored by root: its own "!r" does not count
	if v := below.Match("r", false); !v.Ignored || v.Cause != ByParent || v.Source != root || v.Line != 2 {
		t.Errorf("below an ignored directory: %+v", v)
	}
	if !below.Child("deeper", nil).Excluded() {
		t.Error("directory below an ignored one is not excluded")
	}
}

// TestSR13OverflowIsIgnored: whatever runs over a limit hides, and is quick about it.
func TestSR13OverflowIsIgnored(t *testing.T) {
	for name, src := range map[string]string{
		"stars":         strings.Repeat("*a", 100) + "b\n",
		"deep":          strings.Repeat("**/a*b/", 60) + "x\n",
		"crossing":      "x/**" + strings.Repeat("/**/*a*a*a", 40) + "c\n",
		"many":          strings.Repeat(strings.Repeat("*a", 20)+"b\n", 3000),
		"too big":       strings.Repeat("#\n", MaxSource),
		"too many":      strings.Repeat("x\n", MaxRules+1),
		"too many sets": manySets(),
	} {
		d := Root(Config{Own: Parse([]byte(src))})
		start := time.Now()
		for range 30 {
			d = d.Child(strings.Repeat("a", 250), nil)
		}
		v := d.Match(strings.Repeat("a", 250), false)
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("%s: %v for 31 verdicts", name, took)
		}
		if strings.HasPrefix(name, "too") && (!v.Ignored || v.Cause != Overflow) {
			t.Errorf("%s: %+v", name, v)
		}
	}
	many := Root(Config{Own: Parse([]byte(strings.Repeat(strings.Repeat("*a", 20)+"b\n", 3000)))})
	if v := many.Match(strings.Repeat("a", 250), false); !v.Ignored || v.Cause != Overflow {
		t.Errorf("step limit: %+v", v)
	}
	deep := Root(Config{})
	for range 200 {
		deep = deep.Child(strings.Repeat("d", 200), nil)
	}
	if v := deep.Match("x", false); !v.Ignored || v.Cause != Overflow {
		t.Errorf("path limit: %+v", v)
	}
	stack := Root(Config{})
	for range maxFiles + 1 {
		stack = stack.Child("a", Parse([]byte(strings.Repeat("/a/*x\n", 50))))
		if stack.Cost() > 80<<10 {
			t.Fatalf("a directory costs %d bytes", stack.Cost())
		}
	}
	if !stack.Excluded() || stack.Verdict().Cause != Overflow {
		t.Errorf("limit of rule files: %+v", stack.Verdict())
	}
	// A nearer file may still decide before the broken one is asked.
	near := Root(Config{Excludes: Parse([]byte(strings.Repeat("x\n", MaxRules+1))), Own: Parse([]byte("!keep\n"))})
	if near.Match("keep", false).Ignored || !near.Match("other", false).Ignored {
		t.Error("precedence over a file that is too large")
	}
}

// manySets is a pattern with more different byte sets than there are numbers for.
func manySets() string {
	var b strings.Builder
	for i := range 70_000 {
		fmt.Fprintf(&b, "[%s]", []byte{byte(65 + i%50), byte(128 + i/50%50), byte(190 + i/2500)})
	}
	return b.String() + "\n"
}

// slowMatch is the meaning of tokens without any cleverness.
func slowMatch(tokens []token, sets []byteSet, text []byte) bool {
	if len(tokens) == 0 {
		return len(text) == 0
	}
	tok, rest := tokens[0], tokens[1:]
	switch tok.op {
	case opStar, opSpan, opDirs:
		for i := 0; i <= len(text); i++ {
			if (tok.op != opDirs || i == 0 || text[i-1] == '/') && slowMatch(rest, sets, text[i:]) {
				return true
			}
			if tok.op == opStar && i < len(text) && text[i] == '/' {
				return false
			}
		}
		return false
	}
	if len(text) == 0 {
		return false
	}
	ok := tok.op == opByte && text[0] == tok.c || tok.op == opAny && text[0] != '/' || tok.op == opSet && sets[tok.set].has(text[0])
	return ok && slowMatch(rest, sets, text[1:])
}

// TestTwoBacktrackPointsAreEnough compares the matcher with the definition on every short text.
func TestTwoBacktrackPointsAreEnough(t *testing.T) {
	var texts []string
	for grow := []string{""}; len(texts) < 6000; {
		texts = append(texts, grow...)
		var next []string
		for _, s := range grow {
			next = append(next, s+"a", s+"b", s+"/")
		}
		grow = next
	}
	r := rand.New(rand.NewPCG(1, 2))
	pieces := []string{"*", "**", "a", "b", "/", "?", "/**/", "**/", "/**", "[ab]", "\\/", "**\\/"}
	for range 1500 {
		var pat string
		for range 1 + r.IntN(7) {
			pat += pieces[r.IntN(len(pieces))]
		}
		c := &compiler{}
		tokens, ok := c.compile(pat, true)
		if !ok {
			t.Fatalf("%q does not compile", pat)
		}
		for range 600 {
			text := []byte(texts[r.IntN(len(texts))])
			steps := maxSteps
			if have, want := matchTokens(tokens, c.sets, text, &steps), slowMatch(tokens, c.sets, text); have != want || steps < 0 {
				t.Fatalf("pattern %q text %q: have %v, want %v, %d steps left", pat, text, have, want, steps)
			}
		}
	}
}

// TestManyAnchoredGlobs: the list that is shared between directories gives the same verdicts.
func TestManyAnchoredGlobs(t *testing.T) {
	few := "/a/b*\n!/a/bc*\n/d/**/x\n"
	var many strings.Builder
	for i := range 2 * maxNarrow {
		fmt.Fprintf(&many, "/none%d/*y\n", i)
	}
	f, m := Root(Config{Own: Parse([]byte(few))}), Root(Config{Own: Parse([]byte(many.String() + few))})
	for _, path := range []string{"a/bx", "a/bcx", "a/x", "d/x", "d/e/x", "a/b/c", "none1/zy"} {
		if have, want := matchPath(m, path).Ignored, matchPath(f, path).Ignored || path == "none1/zy"; have != want {
			t.Errorf("%s: %v, want %v", path, have, want)
		}
	}
}

func TestSR13UnknownRulesHide(t *testing.T) {
	d := Root(Config{Excludes: Parse([]byte("!x\n"))})
	sub := d.Child("sub", Unknown())
	if v := sub.Match("x", false); !v.Ignored || v.Cause != Overflow || d.Match("x", false).Ignored {
		t.Errorf("%+v", v)
	}
	if sub.Child("near", Parse([]byte("!x\n"))).Match("x", false).Ignored != true {
		t.Error("below a directory that is hidden")
	}
}

func TestMemoAgreesAndIsShared(t *testing.T) {
	d := Root(Config{Own: Parse([]byte("*.o\nout/\n/a*b\n"))})
	m := NewMemo(d, 8)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 500 {
				name := []string{"x.o", "out", "axb", "keep"}[i%4] + strings.Repeat("y", (i+worker)%5)
				if isDir := i%3 == 0; m.Ignored(name, isDir) != d.Match(name, isDir).Ignored {
					t.Errorf("%q differs", name)
				}
			}
		})
	}
	wg.Wait()
	if len(m.known) > 8 {
		t.Errorf("%d names held", len(m.known))
	}
}

// usual is a list as found in real projects.
const usual = "node_modules/\n*.log\n*.py[cod]\n__pycache__/\n.env\n.env.*\n!.env.example\n/build\n/dist/\n*.o\n*.so\n.DS_Store\n*~\n.venv/\ncoverage/\n/target\n*.swp\n.idea/\n**/generated/*.c\ndocs/_build/\n"

func TestCommonPathDoesNotAllocate(t *testing.T) {
	d := Root(Config{Info: Parse([]byte("*.bak\n")), Own: Parse([]byte(usual))}).Child("src", nil).Child("pkg", Parse([]byte("/gen\n")))
	m := NewMemo(d, 100)
	m.Ignored("main.go", false)
	for name, f := range map[string]func(){
		"literal": func() { d.Match("node_modules", true) },
		"suffix":  func() { d.Match("a.b.log", false) },
		"none":    func() { d.Match("main.go", false) },
		"memo":    func() { m.Ignored("main.go", false) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkMatch(b *testing.B) {
	var big, globs strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&big, "name%d\n/dir%d/x\n*.ext%d\n", i, i, i)
		fmt.Fprintf(&globs, "name%d*\n", i)
	}
	for _, c := range []struct {
		name  string
		rules string
		fold  bool
	}{{"usual", usual, false}, {"usual-fold", usual, true}, {"15000-literals", big.String(), false}, {"5000-globs", globs.String(), false}} {
		d := Root(Config{Own: Parse([]byte(c.rules)), FoldCase: c.fold}).Child("src", nil).Child("pkg", nil)
		b.Run(c.name+"/uncached", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				d.Match("some_module.go", false)
			}
		})
		m := NewMemo(d, 1000)
		b.Run(c.name+"/cached", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m.Ignored("some_module.go", false)
			}
		})
	}
}

func BenchmarkParse(b *testing.B) {
	src := []byte(usual)
	b.ReportAllocs()
	for b.Loop() {
		Root(Config{Own: Parse(src)})
	}
}

func BenchmarkChild(b *testing.B) {
	d := Root(Config{Own: Parse([]byte(usual))})
	b.ReportAllocs()
	for b.Loop() {
		d.Child("src", nil)
	}
}

// FuzzMatch: any bytes as rules and names; the verdict comes, is stable, and a name below an ignored
// directory is ignored.
func FuzzMatch(f *testing.F) {
	for _, c := range corners {
		f.Add([]byte(c.rules), "foo", "a/b", false)
	}
	f.Add([]byte("a/[[:alpha:]-z]**/\\"), "dir", "x", true)
	f.Fuzz(func(t *testing.T, rules []byte, dir, name string, fold bool) {
		p := Parse(rules)
		d := Root(Config{Own: p, FoldCase: fold})
		v := d.Match(dir, true)
		if v != d.Match(dir, true) {
			t.Fatal("unstable")
		}
		if v.Cause == ByRule && (v.Line < 1 || p.Text(int(v.Line)) == "") {
			t.Fatalf("line %d has no pattern", v.Line)
		}
		c := d.Child(dir, p)
		if inner := c.Match(name, false); v.Ignored && !inner.Ignored {
			t.Fatal("included below an ignored directory")
		}
		comp := &compiler{fold: fold}
		tokens, ok := comp.compile(string(rules[:min(len(rules), 12)]), true)
		if steps := maxSteps; ok && len(name) < 12 {
			if matchTokens(tokens, comp.sets, []byte(name), &steps) != slowMatch(tokens, comp.sets, []byte(name)) {
				t.Fatal("matcher differs from the definition")
			}
		}
	})
}
