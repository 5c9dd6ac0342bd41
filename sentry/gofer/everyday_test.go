package gofer

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// everyday is what developers and agents do all day. Each step runs inside, in the workspace, and must succeed; what
// must hold on the host afterwards follows in TestDX3Everyday.
var everyday = []struct{ name, script string }{
	{"status", `test -z "$(git status --porcelain)"`},
	{"add and commit", `echo a > a.txt && git add a.txt && git commit -qm a`},
	{"amend", `echo b >> a.txt && git commit -qa --amend -m a2`},
	{"branch and switch", `git switch -qc topic && echo t > t.txt && git add . && git commit -qm topic && git switch -q main`},
	{"merge", `echo m > m.txt && git add . && git commit -qm m && git merge -q --no-edit topic`},
	{"conflict", `git switch -qc left && echo l > c.txt && git add . && git commit -qm l && git switch -q main && echo r > c.txt && git add . && git commit -qm r &&
		! git merge -q left && echo both > c.txt && git add c.txt && git commit -qm merged`},
	{"rebase -i", `git switch -qc re main~1 && echo 1 > r1 && git add . && git commit -qm r1 && echo 2 > r2 && git add . && git commit -qm r2 &&
		GIT_SEQUENCE_EDITOR='sed -i 2s/pick/squash/' GIT_EDITOR=true git rebase -qi HEAD~2 && git rebase -q main && git switch -q main`},
	{"rebase conflict", `git switch -qc rc main~1 && echo x > c.txt && git add . && git commit -qm x && ! git rebase -q main && echo y > c.txt && git add c.txt &&
		GIT_EDITOR=true git rebase --continue && git switch -q main`},
	{"rebase abort", `git switch -qc ra main~1 && echo z > c.txt && git commit -qam z && ! git rebase -q main && git rebase --abort && git switch -q main`},
	{"stash", `echo s >> README.md && git stash -q && test -z "$(git status --porcelain)" && git stash pop -q && git checkout -q README.md`},
	{"stash -u", `echo u > untracked && git stash -qu && test ! -e untracked && git stash pop -q && rm untracked`},
	{"cherry-pick", `git switch -qc cp main && git cherry-pick re >/dev/null && git switch -q main`},
	{"revert", `git revert --no-edit HEAD -m 1 >/dev/null || git revert --no-edit HEAD >/dev/null`},
	{"tag", `git tag v1 && git tag -a v2 -m v2 && git tag -d v1`},
	{"log and diff", `git log --stat -3 >/dev/null && git diff HEAD~1 >/dev/null && git blame README.md >/dev/null && git grep -q hello`},
	{"reset", `git reset -q --soft HEAD~1 && git reset -q --hard ORIG_HEAD`},
	{"bisect", `git bisect start HEAD HEAD~3 >/dev/null && git bisect run true >/dev/null && git bisect reset 2>/dev/null`},
	{"gc", `git gc -q && git fsck --no-dangling`},
	{"repack", `git repack -adq && git prune && git pack-refs --all`},
	{"config", `git config lazaret.test yes && test "$(git config lazaret.test)" = yes`},
	{"remote add", `git init -q --bare /tmp/remote.git && git remote add local /tmp/remote.git && git remote -v | grep -q local`},
	{"push -u", `git push -qu local main`},
	{"fetch", `git fetch -q local`},
	{"switch --track", `git push -q local main:other && git fetch -q local && git switch -q --track local/other && git switch -q main && git branch -D other`},
	{"pull", `git clone -q -b main /tmp/remote.git /tmp/other && (cd /tmp/other && echo o > o && git add . && git commit -qm o && git push -q origin HEAD:main) && git pull -q local main`},
	{"branch -m, -d", `git branch tmp && git branch -m tmp tmp2 && git branch -d tmp2`},
	{"worktree add", `git worktree add -q wt -b wtb && (cd wt && echo w > w && git add . && git commit -qm w && git status) && git worktree list | grep -q wtb && git worktree remove wt`},
	{"init elsewhere", `mkdir fresh && cd fresh && git init -q && echo f > f && git add . && git commit -qm f && git log --oneline | grep -q f`},
	{"clone inside", `git clone -q /tmp/remote.git cl && cd cl && git log -1 >/dev/null && git status --porcelain`},
	{"submodule existing", `cd sub && echo s >> s.txt && git switch -qc in && git commit -qam s && cd .. && git add sub && git commit -qm bump && git submodule status`},
	{"submodule update", `git submodule update -q --init && git submodule foreach -q true`},
	{"submodule add", `git submodule --quiet add /tmp/remote.git third && git commit -qm third`},
	{"notes", `git notes add -m n && git notes show | grep -q n`},
	{"hook inside", `printf '#!/bin/sh\ntouch /tmp/hooked\n' > .git/hooks/post-commit && chmod +x .git/hooks/post-commit && echo h > h && git add . && git commit -qm h && test -e /tmp/hooked`},
	{"sparse", `git sparse-checkout set src && test ! -e sub/s.txt -o -e sub/s.txt && git sparse-checkout disable`},
	{"clean", `mkdir -p node_modules/x && echo x > node_modules/x/y && git clean -qfdx && test ! -e node_modules`},
	{"mv and rm", `git mv README.md READ.md && git commit -qm mv && git mv READ.md README.md && git commit -qm back && git rm -q m.txt && git commit -qm rm`},
	{"mv directory", `mkdir -p d1/e && echo x > d1/e/f && git add d1 && git commit -qm d && git mv d1 d2 && git commit -qm d2 && mv d2 d3 && mv d3 d2 && git status --porcelain`},
	{"held file", `mkdir -p .vscode && echo '{}' > .vscode/settings.json && git add -A && git commit -qm vs && git switch -q -c novs HEAD~1 && git switch -q main && test -e .vscode/settings.json`},
	{"apply and am", `git format-patch -q -1 -o /tmp/p && git reset -q --hard HEAD~1 && git am -q /tmp/p/*`},
	{"atomic save of .env", `echo A=1 > .env && echo A=2 > .env.tmp && mv .env.tmp .env && test "$(cat .env)" = A=2`},
	{"rm -rf node_modules", `mkdir -p node_modules/p && touch node_modules/p/i && mv node_modules nm && mv nm node_modules && rm -rf node_modules`},
	{"fifo, socket", `mkfifo ff && rm ff`},
	{"hard link", `echo l > l1 && ln l1 l2 && test l1 -ef l2 && rm l1 l2`},
	{"symlink", `ln -s src/main.c link && cat link >/dev/null && rm link`},
	{"chmod, touch", `touch x && chmod 755 x && test -x x && touch -d 2001-01-01 x && rm x`},
	{"final fsck", `git fsck --no-dangling && test -z "$(git status --porcelain | grep -v fresh | grep -v cl/)"`},
}

// everydayProject makes a project with a submodule.
func everydayProject(t testing.TB, dir, ws string) {
	t.Helper()
	project(t, ws)
	must(t, os.MkdirAll(dir+"/up/sub", 0o755))
	hostGit(t, dir+"/up/sub", "init", "-q", "-b", "main")
	write(t, dir+"/up/sub/s.txt", "s\n")
	hostGit(t, dir+"/up/sub", "add", ".")
	hostGit(t, dir+"/up/sub", "commit", "-qm", "s")
	hostGit(t, ws, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", dir+"/up/sub", "sub")
	hostGit(t, ws, "commit", "-qm", "sub")
}

func TestDX3Everyday(t *testing.T) {
	dir := shortTemp(t)
	ws := dir + "/ws"
	everydayProject(t, dir, ws)
	before := fingerprint(t, ws)
	b := newBox(t, dir, ws)
	for _, step := range everyday {
		rc, out := b.run("set -e\n" + step.script)
		if rc != 0 {
			t.Errorf("%s: rc %d\n%s", step.name, rc, out)
		}
	}
	if d := diffFingerprints(before, fingerprint(t, ws)); d != "" {
		t.Errorf("protected state on the host has changed:\n%s", d)
	}
	hostGit(t, ws, "fsck", "--no-dangling")
	if s := hostGit(t, ws, "log", "-1", "--format=%s"); s == "sub\n" {
		t.Error("the host sees no commit of the sandbox")
	}
	t.Log(hostGit(t, ws, "status", "--short"))
}

// TestSR4BothSidesCommit is 40 commits on each side at once, with Git's own locks as the only agreement.
func TestSR4BothSidesCommit(t *testing.T) {
	dir := shortTemp(t)
	ws := dir + "/ws"
	project(t, ws)
	b := newBox(t, dir, ws)
	const loop = `for i in $(seq 40); do echo $i > %[1]s.$i; for try in $(seq 200); do git add %[1]s.$i 2>/dev/null && git commit -qm %[1]s.$i -- %[1]s.$i 2>/dev/null && break; sleep 0.0$((RANDOM %% 9 + 1)); done || exit 1; done`
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		c := exec.Command("bash", "-c", fmt.Sprintf(loop, "host"))
		c.Dir = ws
		c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_AUTHOR_NAME=D", "GIT_AUTHOR_EMAIL=d@e", "GIT_COMMITTER_NAME=D", "GIT_COMMITTER_EMAIL=d@e"}
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("host loop: %v\n%s", err, out)
		}
	}()
	b.do(fmt.Sprintf(loop, "box"))
	wg.Wait()
	subjects := strings.Fields(hostGit(t, ws, "log", "--format=%s"))
	if len(subjects) != 81 {
		t.Errorf("%d commits, want 81", len(subjects))
	}
	log := strings.Split(strings.TrimRight(read(t, ws+"/.git/logs/HEAD"), "\n"), "\n")
	if len(log) != 81 {
		t.Errorf("%d lines in the reflog, want 81", len(log))
	}
	for i, line := range log {
		if f := strings.Fields(line); len(f) < 7 || len(f[0]) != 40 || len(f[1]) != 40 {
			t.Errorf("reflog line %d is damaged: %q", i, line)
		}
	}
	hostGit(t, ws, "fsck", "--strict", "--no-dangling")
}

// fingerprint is everything on the host that the sandbox must not change: by path, its type and content.
func fingerprint(t testing.TB, ws string) map[string]string {
	t.Helper()
	f := make(map[string]string)
	err := filepath.WalkDir(ws, func(p string, e os.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		rel, _ := filepath.Rel(ws, p)
		kind := e.Type().String()
		if e.IsDir() {
			kind = "dir"
		}
		switch {
		case e.Type().IsRegular():
			if guarded(rel) {
				b, _ := os.ReadFile(p)
				f[rel] = string(b)
			}
		case e.IsDir():
			if guarded(rel) || isGitLike(e.Name()) || bareLike(p) && !strings.HasSuffix(p, "/.git") {
				f[rel] = kind
			}
		default: // links and special files anywhere
			target, _ := os.Readlink(p)
			if in := "/" + rel + "/"; guarded(rel) || strings.Contains(in, "/.git/") || filepath.IsAbs(target) || strings.HasPrefix(target, "..") || e.Type()&os.ModeSymlink == 0 {
				f[rel] = kind + " " + target
			}
		}
		return nil
	})
	must(t, err)
	return f
}

func bareLike(p string) bool {
	has := func(n string) bool { _, err := os.Lstat(filepath.Join(p, n)); return err == nil }
	return has("HEAD") && (has("objects") && has("refs") || has("commondir"))
}

func isGitLike(name string) bool {
	l := strings.ToLower(name)
	return strings.HasPrefix(l, ".git") && !strings.HasPrefix(l, ".gitignore") && !strings.HasPrefix(l, ".gitattr") && !strings.HasPrefix(l, ".gitmodules") && !strings.HasPrefix(l, ".github") || strings.HasPrefix(l, "git~")
}

// guarded reports whether content at rel is the developer's alone.
func guarded(rel string) bool {
	in := "/" + rel + "/"
	if i := strings.LastIndex(in, "/.git/"); i >= 0 {
		rest := in[i+len("/.git/"):]
		for strings.HasPrefix(rest, "modules/") || strings.HasPrefix(rest, "worktrees/") {
			parts := strings.SplitN(rest, "/", 3) // the admin directory, and then its own top
			if len(parts) < 3 || parts[2] == "" {
				return true
			}
			rest = parts[2]
		}
		for _, n := range []string{"config/", "config.worktree/", "hooks/", "info/", "commondir/", "gitdir/", "branches/", "remotes/", "objects/info/alternates/", "shallow/", "rebase-merge/", "rebase-apply/", "sequencer/", "rr-cache/"} {
			if strings.HasPrefix(rest, n) {
				return true
			}
		}
		return rest == ""
	}
	for _, n := range []string{"/.vscode/", "/.envrc/", "/.env/", "/node_modules/", "/.idea/", "/.mcp.json/", "/.claude/", "/.husky/"} {
		if strings.Contains(in, n) {
			return true
		}
	}
	return isGitLike(filepath.Base(rel))
}

func diffFingerprints(before, after map[string]string) string {
	var s strings.Builder
	for p, b := range before {
		if a, ok := after[p]; !ok {
			fmt.Fprintf(&s, "gone: %q\n", p)
		} else if a != b {
			fmt.Fprintf(&s, "changed: %q\n\twas %.200q\n\tnow %.200q\n", p, b, a)
		}
	}
	for p, a := range after {
		if _, ok := before[p]; !ok {
			fmt.Fprintf(&s, "new: %q: %.200q\n", p, a)
		}
	}
	return s.String()
}
