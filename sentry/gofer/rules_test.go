package gofer

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
)

// TestSR13RuleSources shows, for every source of rules and tracked paths, that the server obeys it as it is now. "hidden"
// and "shown" are host paths; change happens after the server has looked at everything once.
func TestSR13RuleSources(t *testing.T) {
	git := func(t *testing.T, ws string, args ...string) { t.Helper(); hostGit(t, ws, args...) }
	for _, c := range []struct {
		name   string
		fill   func(t *testing.T, ws string)
		plan   func(ws *sentry.Workspace)
		change func(t *testing.T, ws string)
		hidden []string
		shown  []string
	}{
		{
			name: "core.ignoreCase in the snapshot and in new rules",
			fill: func(t *testing.T, ws string) {
				git(t, ws, "config", "core.ignorecase", "true")
				write(t, ws+"/.ENV", "s")
			},
			change: func(t *testing.T, ws string) { write(t, ws+"/.gitignore", "*.KEY\n"); write(t, ws+"/a.key", "s") },
			hidden: []string{".ENV", "a.key"}, shown: []string{"README.md"},
		},
		{
			name: "core.ignoreCase is not assumed",
			fill: func(t *testing.T, ws string) {
				git(t, ws, "config", "core.ignorecase", "false")
				write(t, ws+"/.ENV", "s")
			},
			hidden: []string{".env"}, shown: []string{".ENV"},
		},
		{
			name: "core.ignoreCase set meanwhile",
			change: func(t *testing.T, ws string) {
				git(t, ws, "config", "core.ignorecase", "true")
				write(t, ws+"/X.LOG", "s")
			},
			hidden: []string{"X.LOG"},
		},
		{
			name: "a rule file that cannot be read hides everything that it governs",
			fill: func(t *testing.T, ws string) { write(t, ws+"/sub/deep/.gitignore", "!x\n") },
			change: func(t *testing.T, ws string) {
				write(t, ws+"/sub/.gitignore", "x\n")
				write(t, ws+"/sub/y", "s")
				write(t, ws+"/sub/deep/x", "s")
				must(t, os.Chmod(ws+"/sub/.gitignore", 0))
			},
			hidden: []string{"sub/y", "sub/deep"},
		},
		{
			name: "info/exclude",
			change: func(t *testing.T, ws string) {
				write(t, ws+"/.git/info/exclude", "*.pem\n")
				write(t, ws+"/a.pem", "s")
			},
			hidden: []string{"a.pem"}, shown: []string{"src/main.c"},
		},
		{
			name: "info/exclude that became a link: nobody has read it",
			change: func(t *testing.T, ws string) {
				write(t, ws+"/../exclude", "*.pem\n")
				must(t, os.Remove(ws+"/.git/info/exclude"))
				must(t, os.Symlink("../../../exclude", ws+"/.git/info/exclude"))
				write(t, ws+"/a.pem", "s")
			},
			hidden: []string{"a.pem"}, shown: []string{"src/main.c"},
		},
		{
			name: "info/exclude behind a link, read by the supervisor",
			fill: func(t *testing.T, ws string) {
				write(t, ws+"/../exclude", "*.pem\n")
				_ = os.Remove(ws + "/.git/info/exclude")
				must(t, os.Symlink("../../../exclude", ws+"/.git/info/exclude"))
				write(t, ws+"/a.pem", "s")
				write(t, ws+"/other", "")
			},
			plan:   func(w *sentry.Workspace) { w.Info = []byte("*.pem\n*.crt\n") },
			change: func(t *testing.T, ws string) { write(t, ws+"/a.crt", "s") },
			hidden: []string{"a.pem", "a.crt"}, shown: []string{"other"},
		},
		{
			name:   "core.excludesFile as of the start, beside the snapshot's",
			plan:   func(w *sentry.Workspace) { w.Excludes = []byte("*.p12\n") },
			change: func(t *testing.T, ws string) { write(t, ws+"/a.p12", "s") },
			hidden: []string{"a.p12"},
		},
		{
			name: "a damaged index keeps the tracked paths",
			fill: func(t *testing.T, ws string) { write(t, ws+"/t.log", "t"); git(t, ws, "add", "-f", "t.log") },
			change: func(t *testing.T, ws string) {
				b := read(t, ws+"/.git/index")
				write(t, ws+"/.git/index", b[:len(b)/2])
				write(t, ws+"/u.log", "s")
			},
			hidden: []string{"u.log"}, shown: []string{"t.log"},
		},
		{
			name: "a split index",
			fill: func(t *testing.T, ws string) {
				write(t, ws+"/t.log", "t")
				git(t, ws, "add", "-f", "t.log")
				git(t, ws, "update-index", "--split-index")
			},
			change: func(t *testing.T, ws string) {
				write(t, ws+"/new.log", "t")
				git(t, ws, "add", "-f", "new.log")
				write(t, ws+"/u.log", "s")
			},
			hidden: []string{"u.log", "new.log"}, shown: []string{"t.log"}, // the snapshot rules over what is tracked meanwhile
		},
		{
			name: "a .gitignore that only the index has",
			fill: func(t *testing.T, ws string) {
				write(t, ws+"/sub/.gitignore", "secret\n")
				write(t, ws+"/sub/file", "t")
				git(t, ws, "add", "sub")
			},
			change: func(t *testing.T, ws string) {
				git(t, ws, "update-index", "--skip-worktree", "sub/.gitignore")
				must(t, os.Remove(ws+"/sub/.gitignore"))
				write(t, ws+"/sub/secret", "s")
				write(t, ws+"/sub/any", "s")
			},
			hidden: []string{"sub/secret", "sub/any"}, shown: []string{"sub/file"},
		},
		{
			name: "a .gitignore that only the index has, at the start",
			fill: func(t *testing.T, ws string) {
				write(t, ws+"/sub/.gitignore", "secret\n")
				write(t, ws+"/sub/file", "t")
				git(t, ws, "add", "sub")
				git(t, ws, "update-index", "--skip-worktree", "sub/.gitignore")
				must(t, os.Remove(ws+"/sub/.gitignore"))
				write(t, ws+"/sub/secret", "s")
			},
			change: func(t *testing.T, ws string) { git(t, ws, "update-index", "--no-skip-worktree", "sub/.gitignore") },
			hidden: []string{"sub/secret"}, shown: []string{"sub/file"},
		},
		{
			name: "a linked worktree in the workspace obeys the common info/exclude",
			fill: func(t *testing.T, ws string) {
				git(t, ws, "worktree", "add", "-q", "wt")
				write(t, ws+"/wt/t.log", "t")
				git(t, ws+"/wt", "add", "-f", "t.log")
			},
			change: func(t *testing.T, ws string) {
				write(t, ws+"/.git/info/exclude", "*.pem\n")
				write(t, ws+"/wt/a.pem", "s")
				write(t, ws+"/wt/u.log", "s")
			},
			hidden: []string{"wt/a.pem", "wt/u.log"}, shown: []string{"wt/t.log", "wt/README.md"},
		},
		{
			name: "a nested repository's own rules",
			fill: func(t *testing.T, ws string) { must(t, os.Mkdir(ws+"/n", 0o755)); git(t, ws+"/n", "init", "-q") },
			change: func(t *testing.T, ws string) {
				write(t, ws+"/n/.git/info/exclude", "*.pem\n")
				write(t, ws+"/n/a.pem", "s")
				write(t, ws+"/n/a.log", "outer rules stop here")
			},
			hidden: []string{"n/a.pem"}, shown: []string{"n/a.log"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := shortTemp(t)
			ws, private := dir+"/d/h", dir+"/p"
			project(t, ws)
			must(t, os.Mkdir(private, 0o700))
			if c.fill != nil {
				c.fill(t, ws)
			}
			s, err := sentry.TakeSnapshot(ws, nil)
			must(t, err)
			w := dialPlan(t, ws, private, s, c.plan)
			for _, p := range append(append([]string{}, c.hidden...), c.shown...) {
				w.at(p)
			}
			if c.change != nil {
				c.change(t, ws)
				time.Sleep(ruleTTL + 50*time.Millisecond)
			}
			for _, p := range c.hidden {
				if _, _, err := w.at(p); err != unix.ENOENT {
					t.Errorf("SR-13: %s is shown: %v", p, err)
				}
			}
			for _, p := range c.shown {
				if _, _, err := w.at(p); err != nil {
					t.Errorf("%s is hidden: %v", p, err)
				}
			}
		})
	}
}

// TestSR13RepositoryOutside serves a linked worktree whose repository lies elsewhere.
func TestSR13RepositoryOutside(t *testing.T) {
	dir := shortTemp(t)
	main, ws, private := dir+"/main", dir+"/wt", dir+"/p"
	project(t, main)
	hostGit(t, main, "worktree", "add", "-q", ws)
	write(t, ws+"/t.log", "t")
	hostGit(t, ws, "add", "-f", "t.log")
	must(t, os.Mkdir(private, 0o700))
	s, err := sentry.TakeSnapshot(ws, nil)
	must(t, err)
	for _, reach := range []bool{false, true} {
		w := dialPlan(t, ws, private, s, nil)
		if reach {
			for name, fd := range map[string]*int{main + "/.git/worktrees/wt": &w.tree.gitdir, main + "/.git": &w.tree.common} {
				*fd, err = unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				must(t, err)
			}
		}
		if _, _, err := w.at("t.log"); err != nil {
			t.Errorf("repository reached %v: the tracked file is hidden: %v", reach, err)
		}
		if reach {
			write(t, main+"/.git/info/exclude", "*.pem\n")
			time.Sleep(ruleTTL + 50*time.Millisecond)
			write(t, ws+"/a.pem", "s")
			if _, _, err := w.at("a.pem"); err != unix.ENOENT {
				t.Errorf("SR-13: the common info/exclude does not count: %v", err)
			}
			unix.Close(w.tree.gitdir)
			unix.Close(w.tree.common)
		}
		w.close()
	}
}
