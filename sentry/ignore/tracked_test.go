package ignore

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lazaret.dev/lazaret/sentry/gitindex"
)

// TestSR13TrackedWinsAsInGit puts engine and index together: on random trees with tracked files, also in
// ignored directories, and with nested repositories, the ignored files are those that git lists.
func TestSR13TrackedWinsAsInGit(t *testing.T) {
	git := needGit(t)
	seed := *gitSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-git.seed=%d", seed)
	ignored, tracked := 0, 0
	for i := range 40 {
		r := nasty{rand.New(rand.NewPCG(seed, 1<<32+uint64(i)))}
		w := newWorld(t, filepath.Join(t.TempDir(), "w"), false) // the index is compared exactly in any case
		run := func(stdin string, args ...string) string {
			t.Helper()
			cmd := exec.Command(git, args...)
			cmd.Dir = w.root
			cmd.Env = []string{"HOME=" + w.root, "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_LITERAL_PATHSPECS=1", "PATH=" + os.Getenv("PATH")}
			cmd.Stdin = strings.NewReader(stdin)
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("seed %d, repository %d: git %q: %v", seed, i, args, err)
			}
			return string(out)
		}
		w.rules[""] = r.rules(1 + r.IntN(5))
		w.info, w.exclude = r.rules(r.IntN(2)), r.rules(r.IntN(2))
		patterns := strings.Split(strings.ReplaceAll(string(w.rules[""]), "\r", ""), "\n")
		var files []string
		for range 80 {
			dirs := w.sortedDirs()
			dir := dirs[r.IntN(len(dirs))]
			if strings.Count(dir, "/") < 3 && r.IntN(2) == 0 {
				if d := strings.TrimPrefix(dir+"/"+r.name(patterns), "/"); w.mkdir(d) {
					dir = d
					if r.IntN(4) == 0 {
						w.rules[d] = r.rules(1 + r.IntN(3))
					}
				}
			}
			f := strings.TrimPrefix(dir+"/"+r.name(patterns), "/")
			if st, err := os.Lstat(filepath.Join(w.root, f)); err == nil && st.IsDir() || os.WriteFile(filepath.Join(w.root, f), nil, 0o644) != nil {
				continue
			}
			files = append(files, f)
		}
		w.write(t)
		for dir := range w.rules {
			files = append(files, strings.TrimPrefix(dir+"/.gitignore", "/"))
		}
		files = slices.Compact(slices.Sorted(slices.Values(files)))
		var add strings.Builder
		for _, f := range files {
			if r.IntN(4) == 0 {
				add.WriteString(f + "\x00")
			}
		}
		run(add.String(), "update-index", "--add", "-z", "--stdin")
		nested := w.sortedDirs()[r.IntN(len(w.dirs))]
		data, err := os.ReadFile(filepath.Join(w.root, ".git/index"))
		set := &gitindex.Set{}
		if err == nil {
			set, err = gitindex.Parse(data, gitindex.Options{})
			must(t, err)
		}
		if nested != "" && !set.HasTrackedBelow(nested) {
			must(t, os.MkdirAll(filepath.Join(w.root, nested, ".git/objects"), 0o755))
			must(t, os.MkdirAll(filepath.Join(w.root, nested, ".git/refs"), 0o755))
			must(t, os.WriteFile(filepath.Join(w.root, nested, ".git/HEAD"), []byte("ref: refs/heads/main\n"), 0o644))
		} else {
			nested = "/none"
		}
		a := newWalker(w)
		var have []string
		for _, f := range files {
			switch {
			case set.Tracked(f):
				tracked++
			case strings.HasPrefix(f, nested+"/"): // another repository's
			case a.match(f).Ignored:
				have = append(have, f)
			}
		}
		var want []string
		for f := range strings.SplitSeq(run("", "ls-files", "-z", "-o", "-i", "--exclude-standard"), "\x00") {
			if f != "" && !strings.HasPrefix(f, nested+"/") {
				want = append(want, f)
			}
		}
		slices.Sort(want)
		ignored += len(want)
		if !slices.Equal(have, want) {
			t.Fatalf("seed %d, repository %d: have %q\ngit has %q\nrules %q, info %q, global %q, tracked %q", seed, i, have, want, w.rules, w.info, w.exclude, add.String())
		}
	}
	t.Logf("%d ignored, %d tracked files", ignored, tracked)
}
