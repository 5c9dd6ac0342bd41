package review

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
)

func TestSR4ItemsAreWhatDiffers(t *testing.T) {
	b := newBox(t)
	for name, text := range map[string]string{
		".envrc": "a\n", "same/.nvmrc": "18\n", ".vscode/tasks.json": "{}\n", ".vscode/keep.json": "1", ".idea/a": "x",
		".git/HEAD": "ref: refs/heads/main\n", ".git/config": "[core]\n\tbare = false\n[user]\n\tname = x\n", ".git/hooks/pre-commit": "#!/bin/sh\n", ".git/hooks/pre-push": "1",
		"x.code-workspace": "{}", "sub/file": "", "plain.txt": "host", ".git/modules/m/HEAD": "x", ".git/modules/m/config": "", "gone/.envrc": "1",
	} {
		b.hostFile(name, text)
	}
	must(t, os.MkdirAll(filepath.Join(b.host, "tree"), 0o755))
	b.twinFile(".envrc", "b\n")
	b.twinFile("same/.nvmrc", "18\n")
	b.twinFile(".vscode/new.json", "2")
	b.fifo(".vscode/tasks.json")
	must(t, os.MkdirAll(b.twin(".idea"), 0o755)) // replaced as a whole: a is removed
	must(t, os.WriteFile(b.twin(".idea/b"), nil, 0o755))
	b.skeleton(".git")
	b.twinFile(".git/config", "[core]\n\tbare = false\n\tpager = evil\n[user]\n\tname = x\n[gc]\n\tauto = 0\n\tpruneExpire = never\n[core]\n\tfsmonitor = false\n")
	must(t, os.MkdirAll(b.twin(".git/hooks"), 0o755))
	must(t, os.WriteFile(b.twin(".git/hooks/pre-commit"), []byte("#!/bin/sh\nevil\n"), 0o755))
	must(t, os.WriteFile(b.twin(".git/hooks/pre-push"), []byte("1"), 0o644))
	must(t, os.MkdirAll(b.twin(".git/rebase-merge"), 0o755))
	must(t, os.WriteFile(b.twin(".git/rebase-merge/git-rebase-todo"), []byte("pick 1\n\texec curl \x1b[8mevil\n# c\nx y\n"), 0o644))
	must(t, os.MkdirAll(b.twin(".git/worktrees/w"), 0o755))
	b.skeleton(".git/modules/m")
	b.twinFile(".git/modules/m/config", "[core]\n\tsshCommand = evil\n[gc]\n\tauto = 0\n\tpruneExpire = never\n[core]\n\tfsmonitor = false\n")
	b.skeleton("sub")
	must(t, os.MkdirAll(b.twin("sub/.git"), 0o755))
	b.skeleton("tree")
	b.fifo("tree/" + sentry.MarkTree)
	must(t, os.MkdirAll(b.twin("tree/.git"), 0o755))
	b.twinFile("plain.txt", "private")
	b.fifo("x.code-workspace")
	b.twinFile("bad\xff\x1b]0;/.envrc", "")
	must(t, os.Symlink("/etc/passwd", b.twin("gone")))

	tree, open := b.tree(), 0
	for range 2 {
		open = descriptors(t)
		items, partial := tree.Items()
		if n := descriptors(t); n != open {
			t.Errorf("%d descriptors left open", n-open)
		}
		var have []string
		for _, i := range items {
			have = append(have, fmt.Sprintf("%s %s: %s", i.Kind, i.Name(), i.What))
			for _, l := range i.Lines {
				have = append(have, "  "+l)
			}
		}
		want := []string{
			"held .envrc: changed", "config .git/config: changed", "  + core.pager = evil", "repository .git/hooks/pre-commit: changed, executable",
			"config .git/modules/m/config: changed", "  + core.sshcommand = evil", "unfinished .git/rebase-merge: not finished inside", "  pick 1", "! \texec curl \\x1b[8mevil", "! x y",
			"private .git/worktrees: a worktree that exists inside only", "held .idea/b: added, executable", "held .idea/a: removed", "held .vscode/new.json: added",
			"held .vscode/tasks.json: removed", `held "bad\xff\x1b]0;/.envrc": added`, "kept gone: changed in type", "kept plain.txt: changed",
			"private sub/.git: a repository that exists inside only", "private tree: a repository that exists inside only, with its work tree", "held x.code-workspace: removed",
		}
		for i := range want {
			if strings.HasPrefix(want[i], "  pick") {
				want[i] = "    pick 1"
			} else if strings.HasPrefix(want[i], "! ") {
				want[i] = "  " + want[i]
			}
		}
		if !slices.Equal(have, want) {
			t.Errorf("items:\n%s\nwant:\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
		}
		if len(partial) > 0 {
			t.Errorf("partial: %q", partial)
		}
	}
}

func TestSR13IgnoredStateIsNoItem(t *testing.T) {
	b := newBox(t)
	b.hostFile(".gitignore", "node_modules/\n.env\n!keep\n")
	s, err := sentry.TakeSnapshot(b.host, nil)
	must(t, err)
	js, err := ASCII(s)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(b.private, sentry.SnapshotFile), js, 0o600))
	must(t, os.MkdirAll(b.twin("node_modules/a/.vscode"), 0o755))
	b.twinFile(".env", "x")
	b.twinFile("later.log", "x")
	items, _ := b.tree().Items()
	if len(items) != 1 || items[0].Path != "later.log" || items[0].Kind != Kept {
		t.Errorf("items %+v", items)
	}
}

func TestApplyAndDrop(t *testing.T) {
	b := newBox(t)
	b.hostFile(".envrc", "old\n")
	b.hostFile("run.sh", "old\n")
	must(t, os.Chmod(filepath.Join(b.host, ".envrc"), 0o640))
	b.hostFile(".mise.toml", "old")
	b.hostFile(".vscode/host.json", "h")
	b.twinFile(".envrc", "new\n")
	must(t, os.Chmod(b.twin(".envrc"), 0o777|os.ModeSetuid))
	b.fifo(".mise.toml")
	must(t, os.MkdirAll(b.twin(".vscode"), 0o755)) // not a skeleton: host.json is removed inside
	must(t, os.WriteFile(b.twin(".vscode/a.json"), []byte("a"), 0o644))
	must(t, os.WriteFile(b.twin(".vscode/b.json"), []byte("b"), 0o644))
	must(t, os.MkdirAll(b.twin(".cursor/rules"), 0o755))
	must(t, os.WriteFile(b.twin(".cursor/rules/r"), []byte("r"), 0o600))
	tree := b.tree()
	for _, p := range []string{".envrc", ".mise.toml", ".vscode/a.json", ".cursor/rules/r"} {
		must(t, tree.Apply(find(t, tree, p)))
	}
	st, err := os.Stat(filepath.Join(b.host, ".envrc"))
	must(t, err)
	if b.read(".envrc") != "new\n" || st.Mode() != 0o750 {
		t.Errorf(".envrc is %q, mode %v", b.read(".envrc"), st.Mode())
	}
	if _, err := os.Lstat(filepath.Join(b.host, ".mise.toml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf(".mise.toml is still there: %v", err)
	}
	if b.read(".vscode/a.json") != "a" || b.read(".cursor/rules/r") != "r" {
		t.Error("not applied")
	}
	have := func() (list []string) {
		items, _ := tree.Items()
		for _, i := range items {
			list = append(list, i.Path+" "+i.What)
		}
		return list
	}
	if want := []string{".vscode/b.json added", ".vscode/host.json removed"}; !slices.Equal(have(), want) {
		t.Errorf("left %q, want %q", have(), want)
	}
	must(t, tree.Drop(find(t, tree, ".vscode/host.json")))
	must(t, tree.Drop(find(t, tree, ".vscode/b.json")))
	if len(have()) > 0 {
		t.Errorf("left %q", have())
	}
	if names, _ := os.ReadDir(b.host); len(names) != 4 {
		t.Errorf("stray files on the host: %v", names)
	}
	if names, _ := os.ReadDir(filepath.Join(b.private, sentry.TempDir)); len(names) > 0 {
		t.Errorf("stray private files: %v", names)
	}
}

func TestApplyRefusesWhatChanged(t *testing.T) {
	b := newBox(t)
	b.hostFile(".envrc", "old\n")
	b.twinFile(".envrc", "new\n")
	b.twinFile("d/.envrc", "new\n")
	tree := b.tree()
	item := find(t, tree, ".envrc")
	item.Tree.Review(&bytes.Buffer{}, item)
	must(t, os.WriteFile(b.twin(".envrc"), []byte("evl\n"), 0o644))
	if err := tree.Apply(item); !errors.Is(err, ErrChanged) || b.read(".envrc") != "old\n" {
		t.Errorf("changed private copy: %v", err)
	}
	must(t, os.WriteFile(b.twin(".envrc"), []byte("new\n"), 0o644))
	b.hostFile(".envrc", "edited by the developer\n")
	if err := tree.Apply(item); !errors.Is(err, ErrChanged) || !strings.HasPrefix(b.read(".envrc"), "edited") {
		t.Errorf("changed host file: %v", err)
	}
	must(t, os.Remove(filepath.Join(b.host, ".envrc")))
	must(t, unix.Mkfifo(filepath.Join(b.host, ".envrc"), 0o600))
	if err := tree.Apply(item); !errors.Is(err, ErrChanged) { // and does not hang
		t.Errorf("FIFO on the host: %v", err)
	}
	must(t, os.Remove(b.twin(".envrc")))
	b.fifo(".envrc")
	if err := tree.Apply(item); !errors.Is(err, ErrChanged) {
		t.Errorf("FIFO in the twin: %v", err)
	}
	outside := t.TempDir()
	must(t, os.Symlink(outside, filepath.Join(b.host, "d")))
	if err := tree.Apply(find(t, tree, "d/.envrc")); err == nil {
		t.Error("applied through a symbolic link")
	}
	if names, _ := os.ReadDir(outside); len(names) > 0 {
		t.Errorf("written outside: %v", names)
	}
}

func TestApplyRefusesWhatMustStay(t *testing.T) {
	b := newBox(t)
	b.hostFile(".git/HEAD", "x")
	b.hostFile(".git/config", "[core]\n\tbare = false\n")
	b.hostFile(".vscode/l", "x")
	b.twinFile(".git/config", "[core]\n\tpager = evil\n")
	must(t, os.MkdirAll(b.twin(".git/hooks"), 0o755))
	must(t, os.WriteFile(b.twin(".git/hooks/pre-commit"), []byte("x"), 0o755))
	b.twinFile("x/HEAD", "ref: refs/heads/x\n")
	b.skeleton(".vscode")
	must(t, os.Symlink("/etc/passwd", b.twin(".vscode/l")))
	must(t, os.Mkdir(b.twin("dir"), 0o755))
	big, err := os.Create(b.twin(".envrc"))
	must(t, err)
	must(t, big.Truncate(1<<40)) // sparse
	big.Close()
	tree := b.tree()
	for _, p := range []string{".git/config", ".git/hooks/pre-commit", "x/HEAD", ".vscode/l", "dir", ".envrc"} {
		i := find(t, tree, p)
		i.Tree.Review(&bytes.Buffer{}, i)
		if err := tree.Apply(i); !errors.Is(err, ErrStays) {
			t.Errorf("%s: %v", p, err)
		}
	}
}

// TestSR4ApplyRaces swaps the parent of a target for a symbolic link, and the content for another, while applying.
func TestSR4ApplyRaces(t *testing.T) {
	b := newBox(t)
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, ".envrc"), []byte("outside"), 0o644))
	must(t, os.MkdirAll(filepath.Join(b.host, "d"), 0o755))
	must(t, os.Symlink(outside, filepath.Join(b.host, "link")))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	host, err := os.Open(b.host)
	must(t, err)
	defer host.Close()
	swaps := 0
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for range 2 * (1 + rand.IntN(20)) {
				_ = unix.Renameat2(int(host.Fd()), "d", int(host.Fd()), "link", unix.RENAME_EXCHANGE)
				swaps++
			}
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) // or no attempt would ever succeed
		}
	})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.WriteFile(b.twin("d/.envrc"), []byte([]string{"good", "evil"}[i%2]), 0o644)
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
		}
	})
	b.skeleton("d")
	tree := b.tree()
	applied := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		p, done := tree.bothSides("d/.envrc")
		hostSeen := ""
		if p.host != nil {
			hostSeen, _ = contentOf(p.host, ".envrc")
		}
		done()
		i := &Item{Kind: Held, Path: "d/.envrc", Tree: tree, Seen: Seen{Private: sum([]byte("good")), Host: hostSeen}}
		if tree.Apply(i) == nil {
			applied++
		}
		for _, dir := range []string{"d", "link"} {
			p := filepath.Join(b.host, dir, ".envrc")
			if c, err := os.ReadFile(p); err == nil && string(c) != "good" && string(c) != "outside" {
				t.Fatalf("%s holds %q", p, c)
			}
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d swaps, %d applied", swaps, applied)
	if swaps < 10000 || applied == 0 {
		t.Error("too few to have met")
	}
	names, _ := os.ReadDir(outside)
	c, _ := os.ReadFile(filepath.Join(outside, ".envrc"))
	if len(names) != 1 || string(c) != "outside" {
		t.Errorf("written outside: %v, %q", names, c)
	}
}

func TestSR4DropOfHostileTrees(t *testing.T) {
	b := newBox(t)
	canary := t.TempDir()
	must(t, os.WriteFile(filepath.Join(canary, "c"), nil, 0o644))
	must(t, os.MkdirAll(b.twin("p/a/b"), 0o755))
	must(t, os.Symlink(canary, b.twin("p/a/link")))
	must(t, os.WriteFile(b.twin("p/a/b/f"), nil, 0o000))
	must(t, os.Chmod(b.twin("p/a/b"), 0o000))
	must(t, os.Chmod(b.twin("p/a"), 0o500))
	tree := b.tree()
	must(t, tree.Drop(find(t, tree, "p")))
	if names, _ := os.ReadDir(canary); len(names) != 1 {
		t.Error("followed a link")
	}
	if items, _ := tree.Items(); len(items) > 0 {
		t.Errorf("left %v", items)
	}
	b.hostFile(".git/hooks/a", "host")
	must(t, os.MkdirAll(b.twin(".git/hooks"), 0o755))
	b.fifo(".git/" + sentry.MarkSkeleton)
	must(t, os.WriteFile(b.twin(".git/hooks/a"), []byte("evil"), 0o755))
	must(t, tree.Drop(find(t, tree, ".git/hooks/a")))
	if c, _ := os.ReadFile(b.twin(".git/hooks/a")); string(c) != "host" {
		t.Errorf("hook is %q inside", c)
	}
}

func TestSR4WalkIsBounded(t *testing.T) {
	b := newBox(t)
	deep := strings.Repeat("d/", 200)
	b.twinFile(deep+".envrc", "")
	must(t, os.Chmod(b.twin("d"), 0o755))
	b.skeleton("closed")
	must(t, os.Chmod(b.twin("closed"), 0))
	items, partial := b.tree().Items()
	must(t, os.Chmod(b.twin("closed"), 0o700))
	if len(items) > 1 || len(partial) == 0 {
		t.Errorf("%d items, partial %q", len(items), partial)
	}
}

func TestAdoptOnlyTracking(t *testing.T) {
	b := newBox(t)
	b.hostFile(".git/HEAD", "x")
	host := "# mine\n[remote \"origin\"]\n\turl = https://h/x\n"
	b.hostFile(".git/config", host)
	b.twinFile(".git/config", host+"[branch \"f\"]\n\tremote = origin\n\tmerge = refs/heads/f\n[core]\n\tpager = evil\n[alias]\n\tst = !evil\n")
	tree := b.tree()
	must(t, tree.Apply(find(t, tree, ".git/config")))
	if got, want := b.read(".git/config"), host+"[branch \"f\"]\n\tmerge = refs/heads/f\n\tremote = origin\n"; got != want {
		t.Errorf("config is %q, want %q", got, want)
	}
	b.twinFile(".git/config", host+"[branch \"g\"]\n\tremote = origin\n")
	item := find(t, tree, ".git/config")
	b.hostFile(".git/config.lock", "")
	if err := tree.Apply(item); !errors.Is(err, os.ErrExist) {
		t.Errorf("config is locked by the host's Git: %v", err)
	}
}

func TestReportedFilesChange(t *testing.T) {
	b := newBox(t)
	b.hostFile("Makefile", "a")
	b.hostFile("x/package.json", "a")
	b.hostFile("x/gone.config.js", "a")
	b.hostFile("big/package.json", strings.Repeat("x", maxDigest+1))
	b.hostFile(".github/workflows/ci.yml", "a")
	b.hostFile("main.go", "a")
	must(t, unix.Mkfifo(filepath.Join(b.host, "Dockerfile"), 0o600))
	before := b.tree().Baseline()
	if c := before.Changes(b.tree().Baseline()); len(c) > 0 {
		t.Errorf("nothing changed: %v", c)
	}
	st, err := os.Stat(filepath.Join(b.host, "big/package.json"))
	must(t, err)
	b.hostFile("big/package.json", strings.Repeat("y", maxDigest+1))
	must(t, os.Chtimes(filepath.Join(b.host, "big/package.json"), st.ModTime(), st.ModTime())) // forged
	b.hostFile("Makefile", "b")
	b.hostFile("new/Makefile", "b")
	b.hostFile(".github/workflows/ci.yml", "a")
	must(t, os.Remove(filepath.Join(b.host, "x/gone.config.js")))
	must(t, os.Chmod(filepath.Join(b.host, "x/package.json"), 0o755))
	b.hostFile("main.go", "b")
	got := fmt.Sprint(before.Changes(b.tree().Baseline()))
	if want := "[{Makefile changed} {big/package.json changed} {new/Makefile added} {x/gone.config.js removed} {x/package.json changed in mode}]"; got != want {
		t.Errorf("changes %s\nwant %s", got, want)
	}
}

func TestNothingUnsafeIsPrinted(t *testing.T) {
	hostile := []string{"", "\x1b]0;x\a", "a\nb", "a\rb", "\u202eabc", "\u200b", "\xff\xfe", "a\u0300", "\u009b31m", " x", "x\u2028", "\\x1b", "\"", "\U000e0041", "größe", "中文"}
	check := func(what, s string) {
		t.Helper()
		if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r != '\t' && (r < ' ' || r >= 0x7f && r < 0xa0 || !visible(r)) }) {
			t.Errorf("%s: %q is not safe", what, s)
		}
	}
	for _, s := range hostile {
		check("Show", Show(s))
		check("ShowLine", ShowLine(s))
	}
	for range 20000 {
		b := make([]byte, rand.IntN(12))
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		check("Show", Show(string(b)))
		check("ShowLine", ShowLine(string(b)))
	}
	if Show("größe.txt") != "größe.txt" || Show(".vscode/tasks.json") != ".vscode/tasks.json" {
		t.Error("ordinary names are quoted")
	}
	s := &Status{Reported: []Change{{"\x1b\xff\u202e", "changed"}}, Partial: []string{"x"}}
	js, err := s.JSON(time.Now())
	must(t, err)
	if bytes.ContainsFunc(js, func(r rune) bool { return r != '\n' && (r < ' ' || r > '~') }) {
		t.Errorf("JSON is not ASCII: %q", js)
	}
	var out bytes.Buffer
	s.Write(&out, time.Now())
	for line := range strings.Lines(out.String()) {
		check("Write", strings.TrimSuffix(line, "\n"))
	}
}

// TestDiffAgainstPatch checks that what is shown is a correct difference: patch(1) makes the one side out of the other.
func TestDiffAgainstPatch(t *testing.T) {
	_, perr := exec.LookPath("patch")
	if perr != nil && os.Getenv("LAZARET_TEST_REQUIRE") != "" {
		t.Fatal(perr)
	}
	for n := range 300 {
		var a, b strings.Builder
		for range rand.IntN(40) {
			line := fmt.Sprintf("%d\n", rand.IntN(6))
			if rand.IntN(4) > 0 {
				a.WriteString(line)
			}
			if rand.IntN(4) > 0 {
				b.WriteString(line)
			}
		}
		from, to := a.String(), b.String()
		if n%3 == 0 {
			to = strings.TrimSuffix(to, "\n")
		}
		x, y := splitLines([]byte(from)), splitLines([]byte(to))
		var left, right strings.Builder
		for _, e := range compareLines(x, y) {
			if e.op != '+' {
				left.WriteString(x[e.a])
			}
			if e.op != '-' {
				right.WriteString(y[e.b])
			}
		}
		if left.String() != from || right.String() != to {
			t.Fatalf("script of %q and %q gives %q and %q", from, to, left.String(), right.String())
		}
		if perr != nil || n >= 100 || from == to {
			continue
		}
		dir := t.TempDir()
		file := filepath.Join(dir, "f")
		must(t, os.WriteFile(file, []byte(from), 0o644))
		cmd := exec.Command("patch", "-s", "-f", file)
		cmd.Stdin = strings.NewReader("--- f\n+++ f\n" + strings.Join(unified([]byte(from), []byte(to)), "\n") + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("patch: %v: %s", err, out)
		}
		if got, _ := os.ReadFile(file); string(got) != to {
			t.Fatalf("%q became %q, want %q", from, got, to)
		}
	}
	start := time.Now()
	var a, b strings.Builder
	for i := range maxDiffLines - 1 {
		fmt.Fprintf(&a, "a%d\n", i)
		fmt.Fprintf(&b, "b%d\n", i)
	}
	compareLines(splitLines([]byte(a.String())), splitLines([]byte(b.String())))
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("two different large files take %v", d)
	}
}

// TestWalksReadABoundedAmount gives both walks far more content than they may read at the end of a session.
func TestWalksReadABoundedAmount(t *testing.T) {
	b := newBox(t)
	sparse := func(path string, size int64) {
		f, err := os.Create(path)
		must(t, err)
		must(t, f.Truncate(size))
		must(t, f.Close())
	}
	must(t, os.MkdirAll(b.twin(".vscode"), 0o755))
	for i := range 500 {
		sparse(b.twin(fmt.Sprintf(".vscode/%d", i)), maxCompare)
		sparse(filepath.Join(b.host, fmt.Sprintf("%d.mk", i)), maxDigest)
	}
	tree, start := b.tree(), time.Now()
	before := tree.Baseline()
	items, _ := tree.Items()
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("takes %v", d)
	}
	if len(items) != 500 || len(before.Files) != 500 {
		t.Errorf("%d items, %d files", len(items), len(before.Files))
	}
	sparse(filepath.Join(b.host, "499.mk"), maxDigest)
	if c := before.Changes(tree.Baseline()); len(c) != 1 {
		t.Errorf("changes %v", c)
	}
}

// BenchmarkSmallRepository is what a session's end costs: 500 files, hooks and configuration copied, one held change.
func BenchmarkSmallRepository(b *testing.B) {
	x := newBox(b)
	for i := range 500 {
		x.hostFile(fmt.Sprintf("d%d/f%d", i%20, i), "text")
		x.hostFile(fmt.Sprintf(".git/refs/heads/b%d", i%50), strings.Repeat("a", 40))
	}
	x.hostFile("Makefile", "all:\n")
	x.hostFile(".git/HEAD", "ref: refs/heads/main\n")
	x.hostFile(".git/config", "[core]\n\tbare = false\n")
	x.twinFile(".git/config", "[core]\n\tbare = false\n\tpager = x\n")
	must(b, os.MkdirAll(x.twin(".git/hooks"), 0o755))
	for i := range 14 {
		x.hostFile(fmt.Sprintf(".git/hooks/%d.sample", i), strings.Repeat("x", 3000))
		must(b, os.WriteFile(x.twin(fmt.Sprintf(".git/hooks/%d.sample", i)), []byte(strings.Repeat("x", 3000)), 0o755))
	}
	x.twinFile(".envrc", "x")
	tree := x.tree()
	for b.Loop() {
		Take([]*Tree{tree}, nil)
		tree.Baseline()
	}
}

// TestSR4HalfMadeFileHasTheReservedName watches the directory while a file is applied: the one name that comes and goes
// beside the target is that which the workspace server refuses.
func TestSR4HalfMadeFileHasTheReservedName(t *testing.T) {
	b := newBox(t)
	b.hostFile("d/.envrc", "old")
	b.twinFile("d/.envrc", "new")
	tree := b.tree()
	item := find(t, tree, "d/.envrc")
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(t, err)
	defer unix.Close(fd)
	_, err = unix.InotifyAddWatch(fd, filepath.Join(b.host, "d"), unix.IN_CREATE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO)
	must(t, err)
	must(t, tree.Apply(item))
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	must(t, err)
	var names []string
	for at := 0; at < n; {
		size := int(buf[at+12]) // of the name, padded; native order, small
		names = append(names, strings.TrimRight(string(buf[at+16:at+16+size]), "\x00"))
		at += 16 + size
	}
	for _, name := range names {
		if name != sentry.MarkTree && name != ".envrc" {
			t.Errorf("%q was made beside the target", name)
		}
	}
	if !slices.Contains(names, sentry.MarkTree) {
		t.Errorf("names %q", names)
	}
}
