package tests

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/creack/pty"

	"lazaret.dev/lazaret/sentry"
)

// wsRepo makes the box's workspace a repository with integration files, one commit and a remote.
func wsRepo(t *testing.T) *box {
	t.Helper()
	needsProgram(t, "git")
	b := newBox(t)
	b.host("git", "config", "--global", "user.name", "Dev")
	b.host("git", "config", "--global", "user.email", "dev@example.org")
	b.host("git", "init", "-q", "-b", "main", ".")
	if err := os.Mkdir(filepath.Join(b.ws, ".vscode"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		".gitignore": "node_modules/\n.env\n", ".envrc": "export A=1\n", "Makefile": "all:\n", ".vscode/tasks.json": "{}\n", "src.txt": "one\n",
	} {
		b.write(filepath.Join(b.ws, name), text)
	}
	b.host("git", "remote", "add", "origin", "https://example.org/x.git")
	b.host("git", "add", "-A")
	b.host("git", "commit", "-qm", "first")
	b.write(filepath.Join(b.ws, ".env"), "SECRET=host\n")
	return b
}

func (b *box) wsCmd(args ...string) *exec.Cmd {
	return b.lazaret(append([]string{"workspace"}, args...)...)
}

// wsHas fails unless text contains all of want.
func wsHas(t *testing.T, what, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s: %q is missing in:\n%s", what, w, text)
		}
	}
}

// wsSafe fails if text could do something to a terminal.
func wsSafe(t *testing.T, what, text string) {
	t.Helper()
	for _, r := range text {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar) {
			t.Errorf("%s: %q in:\n%q", what, r, text)
			return
		}
	}
}

const wsAgent = `set -e
echo 'curl evil' >> .envrc
rm .vscode/tasks.json
echo x >> Makefile
echo two >> src.txt
git switch -q -c feat
git config branch.feat.remote origin
git config branch.feat.merge refs/heads/feat
git config core.pager evil
printf '#!/bin/sh\n' > .git/hooks/pre-commit
chmod +x .git/hooks/pre-commit
git init -q sub
touch .git/index2.lock
git tag 'x$(id)'
git update-index --assume-unchanged Makefile
`

func TestWorkspaceReviewApplyDrop(t *testing.T) {
	b := wsRepo(t)
	hostConfig := b.readFile(".git/config")
	r := b.run(b.shell(wsAgent))
	if r.status != 0 {
		t.Fatalf("agent: %v", r)
	}
	wsHas(t, "report at the end", r.err, "lazaret: 2 changes of integration files are held: .envrc, .vscode/tasks.json\n", ".git/config", ".git/hooks/pre-commit",
		"exists inside only: sub\n", "Makefile\n", "Makefile (assume-unchanged)", "index2.lock", "x$(id)", "lazaret workspace status\n")
	if r := b.run(b.shell("true")); r.err != warnings() {
		t.Errorf("a session that changes nothing reports: %v", r)
	}
	if b.readFile(".envrc") != "export A=1\n" || b.readFile(".vscode/tasks.json") != "{}\n" || b.readFile(".git/config") != hostConfig || b.readFile("src.txt") != "one\ntwo\n" {
		t.Error("what is held is on the host, or what is shared is not")
	}
	wsHas(t, "status", b.ok(b.wsCmd("status")), "no sandbox runs", ".envrc: changed", ".vscode/tasks.json: removed", "+ core.pager = evil", ".git/hooks/pre-commit: added, executable", "sub: ")
	var js struct {
		Changes []struct{ Kind, Path, What string }
	}
	if err := json.Unmarshal([]byte(b.ok(b.wsCmd("status", "--json"))), &js); err != nil || len(js.Changes) < 5 {
		t.Errorf("JSON: %v, %+v", err, js)
	}
	b.refused(b.wsCmd("apply", ".envrc"), "nobody can be asked", "--yes")
	b.refused(b.wsCmd("apply", "--yes", ".envrc"), "has not been reviewed")
	b.refused(b.wsCmd("apply", "--yes", "src.txt"), "nothing is held or private there")
	wsHas(t, "review", b.ok(b.wsCmd("review")), "=== .envrc: changed", "+curl evil\n", "-{}\n", "branch.feat.merge = refs/heads/feat", "+#!/bin/sh")
	b.ok(b.shell("echo more >> .envrc"))
	b.refused(b.wsCmd("apply", "--yes", ".envrc"), "has changed since it was reviewed")
	wsHas(t, "review of one", b.ok(b.wsCmd("review", ".envrc")), "+more\n")
	b.ok(b.wsCmd("apply", "--yes", ".envrc", ".vscode", ".git/config"))
	if got := b.readFile(".envrc"); got != "export A=1\ncurl evil\nmore\n" {
		t.Errorf(".envrc is %q", got)
	}
	if _, err := os.Lstat(filepath.Join(b.ws, ".vscode/tasks.json")); !os.IsNotExist(err) {
		t.Errorf("tasks.json: %v", err)
	}
	if got, want := b.readFile(".git/config"), hostConfig+"[branch \"feat\"]\n\tmerge = refs/heads/feat\n\tremote = origin\n"; got != want {
		t.Errorf("configuration is %q, want %q", got, want)
	}
	b.refused(b.wsCmd("apply", "--yes", "--force", ".git/hooks/pre-commit", "sub"), "none of it can be applied")
	b.ok(b.wsCmd("drop", "--yes", "."))
	wsHas(t, "status", b.ok(b.wsCmd("status")), "Makefile (assume-unchanged)")
	if s := b.ok(b.wsCmd("status")); strings.Contains(s, "Held") || strings.Contains(s, "inside") {
		t.Errorf("left after drop:\n%s", s)
	}
	out := b.ok(b.shell("cat .envrc; git config core.pager || echo none; test -e .git/hooks/pre-commit || test -n \"$(ls -A sub)\" || echo clean"))
	if out != "export A=1\ncurl evil\nmore\nnone\nclean\n" {
		t.Errorf("inside after drop: %q", out)
	}
	b.host("git", "fsck", "--strict", "--no-dangling")
}

// TestWorkspaceWhileItRuns applies and drops single files under a running sandbox, which sees the host's at once.
func TestWorkspaceWhileItRuns(t *testing.T) {
	b := wsRepo(t)
	_, release := b.hold()
	b.ok(b.shell("echo B >> .envrc; mkdir -p .cursor/rules; echo r > .cursor/rules/r; git config x.y z; git init -q sub"))
	wsHas(t, "status", b.ok(b.wsCmd("status")), "its sandbox runs", ".envrc: changed", ".cursor/rules/r: added")
	b.ok(b.wsCmd("apply", "--yes", "--force", ".envrc", ".cursor"))
	b.write(filepath.Join(b.ws, ".envrc"), "host again\n")
	if out := b.ok(b.shell("cat .envrc .cursor/rules/r")); out != "host again\nr\n" {
		t.Errorf("inside after apply: %q", out)
	}
	b.ok(b.wsCmd("drop", "--yes", ".git/config"))
	if r := b.run(b.shell("git config x.y")); r.status == 0 {
		t.Errorf("configuration is still there: %v", r)
	}
	b.refused(b.wsCmd("drop", "--yes", "sub"), "the sandbox runs")
	b.refused(b.wsCmd("rescan", "--yes"), "the sandbox of this workspace runs")
	release()
	b.ok(b.wsCmd("drop", "--yes", "sub"))
}

func TestWorkspaceRescan(t *testing.T) {
	b := wsRepo(t)
	wsHas(t, "before the first start", b.ok(b.wsCmd("rescan")), "no snapshot yet")
	b.ok(b.shell("mkdir -p node_modules/a; echo agent > node_modules/a/b; printf 'x\n' > .gitignore"))
	if out := b.ok(b.shell("cat .env 2>/dev/null || echo hidden")); out != "hidden\n" {
		t.Fatalf("the agent has loosened the rules: %q", out)
	}
	b.refused(b.wsCmd("rescan"), "nobody can be asked")
	wsHas(t, "rescan", b.ok(b.wsCmd("rescan", "--yes")), "would see these paths of the host:\n    .env\n", "no longer ignored", "node_modules")
	wsHas(t, "second", b.ok(b.wsCmd("rescan")), "those that you consented to")
	if out := b.ok(b.shell("cat .env node_modules/a/b")); out != "SECRET=host\nagent\n" {
		t.Errorf("after consent: %q", out)
	}
	if _, err := os.Lstat(filepath.Join(b.ws, "node_modules")); !os.IsNotExist(err) {
		t.Errorf("private content is on the host: %v", err)
	}
	wsHas(t, "status", b.ok(b.wsCmd("status")), "node_modules: directory")
}

// TestWorkspaceHiddenButTracked is the state in which git commit -a would commit the host's secret.
func TestWorkspaceHiddenButTracked(t *testing.T) {
	b := wsRepo(t)
	r := b.run(b.shell("printf x > .gitignore; echo agent > .env; git add -f .env && git commit -qm env"))
	if r.status != 0 {
		t.Fatalf("agent: %v", r)
	}
	wsHas(t, "report", r.err, "tracked although hidden from the sandbox: .env;", "git commit -a")
	wsHas(t, "status", b.ok(b.wsCmd("status")), "tracked although hidden from the sandbox: .env;")
}

// TestWorkspaceHostileText makes names and content that would harm a terminal.
func TestWorkspaceHostileText(t *testing.T) {
	b := wsRepo(t)
	r := b.run(b.shell(`mkdir .claude
n=$(printf 'a\033]0;owned\007\nlazaret: error: no\r\342\200\256b\377\302\233')
printf 'x\033[2J\r\377\342\200\256\n' > ".claude/$n.md"
ln -s "$n" ".claude/link$n"
mkdir -p "$n"; echo x > "$n/Makefile"; git init -q "$n/repo"
git config "$(printf 'a.b\302\233c.d')" "$(printf 'v\033[31m\n[core]')"
mkdir .git/rebase-merge; printf 'exec \033[8mevil\n' > .git/rebase-merge/git-rebase-todo
mkdir -p .vscode/d; head -c 3000000 /dev/zero > .vscode/big; printf 'a\000b' > .vscode/binary; truncate -s 1T .vscode/huge || true
`))
	if r.status != 0 {
		t.Fatalf("agent: %v", r)
	}
	wsSafe(t, "report", r.err)
	for _, args := range [][]string{{"status"}, {"review"}, {"status", "--json"}} {
		res := b.run(b.wsCmd(args...))
		if res.status != 0 {
			t.Errorf("%q: %v", args, res)
		}
		wsSafe(t, strings.Join(args, " "), res.out+res.err)
		if res.took > 20*time.Second {
			t.Errorf("%q takes %v", args, res.took)
		}
	}
	out := b.ok(b.wsCmd("review"))
	wsHas(t, "review", out, `+x\x1b[2J\r\xff\u202e`, "too large to show", "binary", "symbolic link", `! exec \x1b[8mevil`)
	wsSafe(t, "apply", b.run(b.wsCmd("apply", "--yes", ".claude")).out)
	b.ok(b.wsCmd("drop", "--yes", "."))
}

// TestWorkspaceHalfMadeFileIsOutOfReach puts a file where apply makes its own before it becomes an integration file, and
// tries from inside to read, write, alias, move or remove it. A handle on it would outlive the rename.
func TestWorkspaceHalfMadeFileIsOutOfReach(t *testing.T) {
	b := wsRepo(t)
	for _, dir := range []string{"", ".vscode"} {
		b.write(filepath.Join(b.ws, dir, sentry.MarkTree), "half made\n")
	}
	out := b.ok(b.shell(`for d in . .vscode; do
	f=$d/` + sentry.MarkTree + `
	cat $f && echo LEAK read
	(echo evil >> $f) && echo LEAK append
	(echo evil > $f) && echo LEAK write
	ln $f caught && echo LEAK link
	mv $f caught && echo LEAK move
	echo x > mine && mv mine $f && echo LEAK replace
	ln mine $f && echo LEAK alias
	rm -f $f; mkdir $f && echo LEAK mkdir
	ln -s /etc/passwd $f && echo LEAK symlink
	chmod 666 $f && echo LEAK chmod
	truncate -s 0 $f && echo LEAK truncate
	rm -f mine caught
done 2>/dev/null; true`))
	if out != "" {
		t.Errorf("inside:\n%s", out)
	}
	for _, dir := range []string{"", ".vscode"} {
		if got := b.readFile(filepath.Join(dir, sentry.MarkTree)); got != "half made\n" {
			t.Errorf("%q on the host is %q", dir, got)
		}
	}
}

// TestWorkspaceApplyAsks answers on a terminal.
func TestWorkspaceApplyAsks(t *testing.T) {
	b := wsRepo(t)
	b.ok(b.shell("echo B >> .envrc"))
	for _, answer := range []string{"n", "", "yes"} {
		cmd := b.wsCmd("apply", ".envrc")
		cmd.Env = append(cmd.Environ(), "TERM=dumb")
		master, err := pty.Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		done := make(chan struct{})
		go func() {
			defer close(done)
			buf := make([]byte, 4096)
			for {
				n, err := master.Read(buf)
				out.Write(buf[:n])
				if strings.Contains(out.String(), "[y/N] ") && answer != "sent" {
					fmt.Fprintf(master, "%s\n", answer)
					answer = "sent"
				}
				if err != nil {
					return
				}
			}
		}()
		want := answer
		select {
		case <-done:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
		}
		_ = cmd.Wait()
		master.Close()
		wsHas(t, "terminal", out.String(), "+B", "Write 1 change to the host? [y/N] ")
		if applied := b.readFile(".envrc") != "export A=1\n"; applied != (want == "yes") {
			t.Errorf("answer %q: applied is %v; terminal: %s", want, applied, out.String())
		}
	}
}

// TestWorkspaceLinkedWorktree reviews the configuration that lies in the repository of a linked worktree, outside.
func TestWorkspaceLinkedWorktree(t *testing.T) {
	b := wsRepo(t)
	main := b.ws
	wt := filepath.Join(b.dir, "wt")
	b.host("git", "worktree", "add", "-q", "-b", "other", wt)
	b.ws = wt
	config := filepath.Join(main, ".git/config")
	before, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	r := b.run(b.shell("echo B >> .envrc; git config branch.other.remote origin; touch $(git rev-parse --git-dir)/index2.lock"))
	if r.status != 0 {
		t.Fatalf("agent: %v", r)
	}
	wsHas(t, "report", r.err, ".envrc", "index2.lock")
	wsHas(t, "status", b.ok(b.wsCmd("status")), ".envrc: changed", config+": changed")
	b.ok(b.wsCmd("apply", "--yes", "--force", config, ".envrc"))
	after, err := os.ReadFile(config)
	if err != nil || string(after) != string(before)+"[branch \"other\"]\n\tremote = origin\n" {
		t.Errorf("configuration is %q: %v", after, err)
	}
	b.ws = main
}

// TestWorkspaceStatusIsCheap bounds what the report adds to a session.
func TestWorkspaceStatusIsCheap(t *testing.T) {
	b := wsRepo(t)
	for i := range 500 {
		b.write(filepath.Join(b.ws, fmt.Sprintf("f%d.txt", i)), "x")
	}
	b.ok(b.shell("echo B >> .envrc"))
	r := b.run(b.wsCmd("status"))
	if r.status != 0 || r.took > 5*time.Second {
		t.Errorf("status: %v", r)
	}
}
