package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lazaret.dev/lazaret/sentry"
)

// step is something that is done inside; each is one shell, in the workspace.
type step struct {
	name, script string
	says         string // "" if it must succeed; else it must fail with this in its output
}

// steps runs them in one session, in order, and reports each that does not end as it should.
func (b *box) steps(steps []step, limit time.Duration) {
	b.t.Helper()
	const mark = "\x1e"
	var s strings.Builder
	for i, st := range steps {
		fmt.Fprintf(&s, "( set -e\n%s\n) </dev/null 2>&1; printf '%s%%d %d\\n%s' $?\n", st.script, mark, i, mark)
	}
	b.write(filepath.Join(b.dir, "steps"), s.String())
	f, err := os.Open(filepath.Join(b.dir, "steps"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	cmd := b.enter("bash", "-s")
	var out strings.Builder
	cmd.Stdin, cmd.Stdout = f, &out
	r := b.start(cmd).wait(limit)
	parts := strings.Split(out.String(), mark)
	for i, st := range steps {
		if 2*i+1 >= len(parts) {
			b.t.Fatalf("%s: the session ended before: status %d", st.name, r.status)
		}
		var rc, n int
		if _, err := fmt.Sscanf(parts[2*i+1], "%d %d", &rc, &n); err != nil || n != i {
			b.t.Fatalf("%s: lost in %q", st.name, parts[2*i+1])
		}
		text := parts[2*i]
		switch {
		case st.says == "" && rc != 0:
			b.t.Errorf("%s: status %d\n%s", st.name, rc, clip(text))
		case st.says != "" && (rc == 0 || !strings.Contains(text, st.says)):
			b.t.Errorf("%s: status %d, want a failure that says %q\n%s", st.name, rc, st.says, clip(text))
		}
	}
}

// guarded is what of the developer's the sandbox must leave as it is, by path: repository configuration, hooks and what
// else of a repository host Git obeys, and whatever is named.
func (b *box) guarded(root string, more ...string) map[string]string {
	b.t.Helper()
	out := map[string]string{}
	add := func(p string) {
		_ = filepath.WalkDir(p, func(p string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return nil
			}
			text, _ := os.ReadFile(p)
			target, _ := os.Readlink(p)
			out[p] = e.Type().String() + target + string(text)
			return nil
		})
	}
	_ = filepath.WalkDir(root, func(p string, e os.DirEntry, err error) error {
		if err == nil && slices.Contains([]string{"config", "config.worktree", "hooks", "info", "commondir", "gitdir", ".git", "alternates"}, e.Name()) &&
			(strings.Contains(p, ".git/") || strings.Contains(p, ".bare/") || !e.IsDir()) {
			if !strings.HasSuffix(p, "/objects/info") && !strings.Contains(p, "/refs/") {
				add(p)
			}
		}
		return nil
	})
	for _, p := range more {
		add(filepath.Join(root, p))
	}
	return out
}

func (b *box) unchanged(before, after map[string]string) {
	b.t.Helper()
	for p, was := range before {
		if now, ok := after[p]; !ok || now != was {
			b.t.Errorf("SR-4: %s: was %q, is %q", p, clip(was), clip(now))
		}
	}
	for p, now := range after {
		if _, ok := before[p]; !ok {
			b.t.Errorf("SR-4: %s is new: %q", p, clip(now))
		}
	}
}

// gitRepo makes a project with ignored content, a submodule, a bare repository in the workspace and one elsewhere.
func gitRepo(t *testing.T) *box {
	b := wsRepo(t)
	up := filepath.Join(b.dir, "up")
	script := `set -e
mkdir -p ` + up + `; cd ` + up + `; git init -q -b main sub; cd sub; echo s > s.txt; git add .; git commit -qm s; cd "$W"
git -c protocol.file.allow=always submodule --quiet add ` + up + `/sub sub; git commit -qm sub
printf 'node_modules/\n.env\n.venv/\n*.log\nremotes/\n__pycache__/\ntarget/\n' > .gitignore; git commit -qam ignore
git clone -q --bare . mirror.git; echo /mirror.git >> .git/info/exclude
mkdir -p src node_modules/h; echo 'int main(void){return 0;}' > src/main.c; git add src; git commit -qm src
echo ` + canary + ` > node_modules/h/index.js; echo SECRET=` + canary + ` > .env`
	cmd := b.command("bash", "-c", script)
	cmd.Env = append(cmd.Env, "W="+b.ws)
	b.ok(cmd)
	return b
}

// everyday is issue and documentation in one: docs/git-inside.md lists what it shows.
var everyday = []step{
	{name: "identity is a fact", script: `test "$(git config user.name)" = Dev`},
	{name: "status", script: `test -z "$(git status --porcelain)"`},
	{name: "add, commit", script: `echo a > a.txt; git add a.txt; git commit -qm a`},
	{name: "commit --amend", script: `echo b >> a.txt; git commit -qa --amend -m a2`},
	{name: "branch, switch -c", script: `git branch other; git switch -qc topic; echo t > t.txt; git add .; git commit -qm t; git switch -q main`},
	{name: "merge", script: `echo m > m.txt; git add .; git commit -qm m; git merge -q --no-edit topic`},
	{name: "merge with a conflict", script: `git switch -qc left; echo l > c; git add c; git commit -qm l; git switch -q main; echo r > c; git add c; git commit -qm r
		if git merge -q left; then exit 1; fi; echo both > c; git add c; git commit -qm both`},
	{name: "rebase -i", script: `git switch -qc re; echo 1 > r1; git add .; git commit -qm r1; echo 2 > r2; git add .; git commit -qm r2
		GIT_SEQUENCE_EDITOR='sed -i 2s/pick/squash/' GIT_EDITOR=true git rebase -qi HEAD~2; git switch -q main`},
	{name: "rebase --abort", script: `git switch -qc ra main~1; echo z > c; git add c; git commit -qm z; if git rebase -q main; then exit 1; fi; git rebase --abort; git switch -q main`},
	{name: "stash", script: `echo s >> a.txt; git stash -q; test -z "$(git status --porcelain)"; git stash pop -q; git checkout -q a.txt`},
	{name: "cherry-pick", script: `git switch -qc cp main; git cherry-pick re; git switch -q main`},
	{name: "revert, reset", script: `git revert --no-edit HEAD -m 1; git reset -q --hard HEAD~1`},
	{name: "tag", script: `git tag v1; git tag -a v2 -m v2; git tag -d v1`},
	{name: "gc, repack, fsck", script: `git gc -q; git repack -adq; git fsck --no-dangling`},
	{name: "config", script: `git config lazaret.test yes; test "$(git config lazaret.test)" = yes`},
	{name: "remote add", script: `git init -q --bare -b main /tmp/r.git; git remote add local /tmp/r.git`},
	{name: "push -u", script: `git push -qu local main`},
	{name: "fetch", script: `git fetch -q local`},
	{name: "pull", script: `git clone -q -b main /tmp/r.git /tmp/cl; cd /tmp/cl; echo p > p; git add p; git commit -qm p; git push -q; cd -; git pull -q local main; test -e p`},
	{name: "switch --track", script: `git push -q local main:track; git fetch -q local; git switch -q --track local/track; git switch -q main`},
	{name: "push and fetch, bare repository of the developer in the workspace", script: `git remote add in "$PWD/mirror.git"; git push -q in main; git fetch -q in`, says: "mirror.git"},
	{name: "fetch from a repository of the host elsewhere", script: `git fetch -q "$(git config -f .gitmodules submodule.sub.url)"`, says: "does not appear to be a git repository"},
	{name: "worktree add", script: `git worktree add -q wt -b wtb; cd wt; echo w > w; git add .; git commit -qm w; cd ..; git worktree remove wt`},
	{name: "submodule update, foreach", script: `git submodule update -q --init; git submodule foreach -q true`},
	{name: "commit in a submodule", script: `cd sub; git switch -qc in; echo s >> s.txt; git commit -qam s2; cd ..; git add sub; git commit -qm bump`},
	{name: "submodule add", script: `git submodule --quiet add /tmp/r.git third; git commit -qm third`},
	{name: "init of a new repository", script: `mkdir fresh; cd fresh; git init -q; echo f > f; git add f; git commit -qm f; git log -1`},
	{name: "init --bare in the shared tree", script: `git init -q --bare b.git`, says: "Operation not permitted"},
	{name: "init --bare in an ignored directory", script: `mkdir -p remotes; git init -q --bare remotes/b.git; git push -q remotes/b.git main`},
	{name: "clone", script: `git clone -q /tmp/r.git cl; cd cl; git log -1`},
	{name: "hooks run inside", script: `printf '#!/bin/sh\ntouch /tmp/hooked\n' > .git/hooks/post-commit; chmod +x .git/hooks/post-commit; git commit -q --allow-empty -m h; test -e /tmp/hooked`},
	{name: "sparse-checkout", script: `git sparse-checkout set src; git sparse-checkout disable`},
	{name: "clean -fdx keeps the rest", script: `mkdir -p node_modules/x; touch node_modules/x/y .env; git clean -qfdx -e fresh; test ! -e node_modules; test ! -e .env; test -e src/main.c`},
	{name: "fsck at the end", script: `git fsck --no-dangling`},
}

// TestDX3EverydayGit is an ordinary week with Git, through the product.
func TestDX3EverydayGit(t *testing.T) {
	b := gitRepo(t)
	before := b.guarded(b.ws, ".env", "node_modules", ".envrc", ".vscode")
	b.steps(everyday, 5*time.Minute)
	b.unchanged(before, b.guarded(b.ws, ".env", "node_modules", ".envrc", ".vscode"))
	b.host("git", "fsck", "--no-dangling")
	if s := b.host("git", "log", "-9", "--format=%s"); !strings.Contains(s, "third") {
		t.Errorf("the host does not see the commits of the sandbox: %s", s)
	}
	if s := b.host("git", "status", "--porcelain", "--untracked-files=no"); strings.Contains(s, "src/main.c") {
		t.Errorf("host status: %s", s)
	}
}

// attackCommon tries to change what Git obeys in the repository directory $G from inside.
const attackCommon = `
G=$(cd "$(git rev-parse --git-common-dir)"; pwd); A=$(cd "$(git rev-parse --git-dir)"; pwd)
for d in "$G" "$A"; do
printf '[core]\n\tfsmonitor = "touch ` + canary + `; false"\n' > $d/config; mv -f $d/config $d/config.x; rm -f $d/config; printf '[core]\n\tbare = false\n\tfsmonitor = x\n' > $d/x; mv -f $d/x $d/config
ln $d/config $d/alias; ln -sf /etc/passwd $d/config
echo ../evil > $d/commondir; echo /evil > $d/gitdir; mv $d/commondir $d/c2; rm -f $d/commondir
mkdir -p $d/hooks; printf '#!/bin/sh\ntouch ` + canary + `\n' > $d/hooks/pre-commit; chmod +x $d/hooks/pre-commit; mv $d/hooks $d/h2
echo '* filter=x' > $d/info/attributes; echo '*' > $d/info/exclude; echo /evil > $d/objects/info/alternates
printf '[core]\n\tfsmonitor = x\n' > $d/config.worktree; echo x > $d/shallow
done
echo 'gitdir: /tmp/evil' > .git; mv .git g2; rm -f .git; true`

// TestSR4RepositoryElsewhere works in workspaces whose repository is not their own .git directory.
func TestSR4RepositoryElsewhere(t *testing.T) {
	work := []step{
		{name: "status", script: `test -z "$(git status --porcelain)"`},
		{name: "commit", script: `echo x > x; git add x; git commit -qm inside`},
		{name: "branch, stash", script: `git branch nb; echo y >> x; git stash -q; git stash pop -q; git checkout -q x`},
		{name: "config, push", script: `git config a.b c; git init -q --bare /tmp/r.git; git remote add l /tmp/r.git; git push -qu l HEAD`},
		{name: "worktree list", script: `git worktree list; git worktree prune; git fsck --no-dangling`},
		{name: "ignored", script: `test ! -e .env; echo mine > .env; git check-ignore -q .env`},
		{name: "attack", script: "set +e" + attackCommon},
	}
	t.Run("linked worktree", func(t *testing.T) {
		b := gitRepo(t)
		main := b.ws
		b.host("git", "worktree", "add", "-q", "-b", "wt", filepath.Join(b.dir, "wt"))
		b.ws = filepath.Join(b.dir, "wt")
		b.write(filepath.Join(b.ws, ".env"), canary)
		before := b.guarded(main)
		b.steps(work, 2*time.Minute)
		b.unchanged(before, b.guarded(main))
		if s := b.host("git", "log", "-1", "--format=%s"); s != "inside\n" {
			t.Errorf("the host sees %q", s)
		}
		b.host("git", "status")
		b.ws = main
		b.host("git", "commit", "-q", "--allow-empty", "-m", "victim")
		b.host("git", "fsck", "--no-dangling")
		if _, err := os.Stat(filepath.Join(main, canary)); err == nil {
			t.Error("SR-4: code ran on the host")
		}
	})
	t.Run("bare directory and gitfile", func(t *testing.T) {
		b := newBox(t)
		b.host("git", "config", "--global", "user.name", "Dev")
		b.host("git", "config", "--global", "user.email", "dev@example.org")
		b.ok(b.command("bash", "-c", `set -e; git init -q -b main seed; cd seed; echo .env > .gitignore; git add .; git commit -qm s; cd ..
git clone -q --bare seed .bare; rm -rf seed; echo 'gitdir: ./.bare' > .git; git worktree add -q main; echo `+canary+` > main/.env`))
		before := b.guarded(b.ws)
		for i := range work {
			work[i].script = "cd main\n" + work[i].script
		}
		b.steps(work, 2*time.Minute)
		b.unchanged(before, b.guarded(b.ws))
		if s := b.host("git", "-C", "main", "log", "-1", "--format=%s"); s != "inside\n" {
			t.Errorf("the host sees %q", s)
		}
		if s, err := os.ReadFile(filepath.Join(b.ws, "main/.env")); err != nil || string(s) != canary+"\n" {
			t.Errorf("SR-13: the host's secret is %q: %v", s, err)
		}
	})
}

// agentGrep looks for the canary in all that can be read in the workspace, and in all that Git knows; it must find none.
const agentGrep = `
if grep -rIq lazaret-canary . ; then exit 9; fi; if git grep -q lazaret-canary $(git rev-list --all); then exit 9; fi`

// TestSR13RealTools lets package managers and editors work on ignored paths, which stay the Domain's.
func TestSR13RealTools(t *testing.T) {
	b := gitRepo(t)
	mine := []string{".env", "node_modules", "__pycache__"}
	before := b.guarded(b.ws, mine...)
	first := []step{
		{name: "secrets are not there", script: `test ! -e .env; test ! -e node_modules` + agentGrep},
		{name: "atomic save of .env", script: `for i in 1 2 3; do printf 'A=%s\n' $i > .env.tmp; mv -f .env.tmp .env; done; test "$(cat .env)" = A=3`},
		{name: "save with a backup", script: `cp -p .env .env~; printf 'A=4\n' > .env; mv -f .env .env.new; mv -f .env.new .env; rm -f .env~; test "$(cat .env)" = A=4`},
		{name: "sed -i does not copy when it cannot rename", script: `sed -i s/4/5/ .env`, says: "cross-device"},
		{name: "what it leaves is shared", script: `rm -f ./sed*; echo A=5 > .env`},
		{name: "log files", script: `echo 1 > a.log; echo 2 >> a.log; test "$(wc -l < a.log)" = 2; mkdir -p deep/er; echo x > deep/er/b.log`},
		{name: "object files of a build", script: `mkdir -p target/obj; cp src/main.c target/obj/; for i in $(seq 50); do echo $i > target/obj/$i.o; done; mv target/obj target/o2; test "$(ls target/o2 | wc -l)" = 51`},
	}
	again := []step{
		{name: "all is there after a restart", script: `test "$(cat .env)" = A=5; test "$(wc -l < a.log)" = 2; test -e deep/er/b.log; test "$(ls target/o2 | wc -l)" = 51` + agentGrep},
	}
	if _, err := os.Stat("/usr/bin/python3"); err == nil {
		first = append(first, step{name: "python venv", script: `/usr/bin/python3 -m venv .venv; .venv/bin/pip --version; site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
			mkdir -p $site/pkg; echo 'X = 42' > $site/pkg/__init__.py; .venv/bin/python -c 'import pkg; assert pkg.X == 42'; test -e $site/pkg/__pycache__`})
		again = append(again, step{name: "the venv works after a restart", script: `.venv/bin/python -c 'import pkg, sys; assert pkg.X == 42 and sys.prefix.endswith(".venv")'`})
	}
	if _, err := os.Stat("/usr/bin/npm"); err == nil {
		first = append(first, step{name: "npm install, npm ci", script: `mkdir -p /tmp/dep/bin; cd /tmp/dep; printf '{"name":"dep","version":"1.0.0","main":"i.js","bin":{"dep":"bin/dep"}}' > package.json; echo 'module.exports = 42' > i.js
			printf '#!/usr/bin/env node\nconsole.log(require("..") )\n' > bin/dep; chmod +x bin/dep; npm pack --silent --offline >/dev/null; cd - >/dev/null
			cp /tmp/dep/dep-1.0.0.tgz src/; printf '{"name":"app","version":"1.0.0"}' > package.json
			export npm_config_cache=/tmp/npm npm_config_offline=true npm_config_audit=false npm_config_fund=false npm_config_update_notifier=false
			npm install --silent ./src/dep-1.0.0.tgz; node -e 'if (require("dep") !== 42) process.exit(1)'
			npm ci --silent; test "$(node_modules/.bin/dep)" = 42
			mv node_modules nm2; mv nm2 node_modules; rm -rf node_modules; test ! -e node_modules; npm ci --silent; test "$(node_modules/.bin/dep)" = 42`})
		again = append(again, step{name: "node_modules works after a restart", script: `test "$(node_modules/.bin/dep)" = 42`})
	}
	b.steps(first, 4*time.Minute)
	b.unchanged(before, b.guarded(b.ws, mine...))
	again = append(again, step{name: "git clean -fdx", script: `git clean -qfdx -e /package.json -e /package-lock.json -e /src; ls -A; test ! -e .env; test ! -e .venv; test ! -e a.log; test ! -e node_modules` + agentGrep},
		step{name: "rm -rf of all", script: `mkdir -p node_modules/a/b .venv/c; touch node_modules/a/b/c .env; rm -rf node_modules .venv .env; test -z "$(ls -d node_modules .venv .env 2>/dev/null)"`})
	b.steps(again, 2*time.Minute) // the Domain has ended with its last session
	b.unchanged(before, b.guarded(b.ws, mine...))
}

// TestSR13Race lets the developer edit files, add rules with the secrets they hide, and switch branches, while the agent
// writes. Nothing of the secrets is read inside, and no write of either side is lost. LAZARET_TEST_RACE sets how long.
//
// A new rule of the developer holds inside within half a second (docs/git-inside.md), so the secret comes after that: made at
// once with its rule, it has been seen inside.
func TestSR13Race(t *testing.T) {
	long := 20 * time.Second
	if s := os.Getenv("LAZARET_TEST_RACE"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		long = d
	}
	b := gitRepo(t)
	b.ok(b.command("bash", "-c", `set -e; git branch topic; git switch -q topic; echo topic > branch.txt; git add branch.txt; git commit -qm topic; git switch -q main`))
	// The agent appends to files of its own, and reads whatever it finds.
	agent := fmt.Sprintf(`end=$(($(date +%%s) + %d)); n=0; mkdir -p agent; touch ready
while [ $(date +%%s) -lt $end ]; do n=$((n+1)); echo $n >> agent/log.txt; echo $n > agent/f.$n; mv agent/f.$n agent/g.$n
  echo $n > .env.tmp; mv .env.tmp .env
  cat s*/key* key* s*/*/key* 2>/dev/null | grep lazaret-canary && exit 9
  ls -R . > /dev/null 2>&1; [ $((n %% 20)) = 0 ] && grep -rI lazaret-canary . --exclude-dir=.git && exit 9
done; echo $n > agent/count`, int(long.Seconds()))
	p := b.start(b.enter("bash", "-c", agent))
	b.waitFile("ready")
	// Each round: a rule first, then the secret that it hides, in one of three ways, and edits of shared files.
	developer := `set -e; n=$1
case $((n % 3)) in
0) echo "key$n" >> .gitignore; sleep 0.7; echo ` + canary + ` > key$n;;
1) mkdir -p s$n; echo 'key*' > s$n/.gitignore; sleep 0.7; echo ` + canary + ` > s$n/key$n;;
2) mkdir -p s$n/t; echo "/s$n/t/" >> .git/info/exclude; sleep 0.7; echo ` + canary + ` > s$n/t/key$n;;
esac
echo $n >> dev.txt; echo $n > dev.tmp; mv dev.tmp dev2.txt
git switch -q topic; test "$(cat branch.txt)" = topic; git switch -q main; test ! -e branch.txt`
	n := 0
	for end := time.Now().Add(long); time.Now().Before(end); n++ {
		b.ok(b.command("bash", "-c", developer, "developer", fmt.Sprint(n)))
		time.Sleep(20 * time.Millisecond)
	}
	if r := p.wait(long + patience); r.status != 0 {
		t.Fatalf("SR-13: the agent has read a secret, or failed: %v", r)
	}
	count := strings.TrimSpace(b.readFile("agent/count"))
	var all, dev strings.Builder
	for i := 1; fmt.Sprint(i-1) != count; i++ {
		fmt.Fprintln(&all, i)
		if s, err := os.ReadFile(filepath.Join(b.ws, fmt.Sprintf("agent/g.%d", i))); err != nil || string(s) != fmt.Sprintf("%d\n", i) {
			t.Fatalf("write %d of the agent is lost: %q, %v", i, s, err)
		}
	}
	for i := range n {
		fmt.Fprintln(&dev, i)
	}
	if b.readFile("agent/log.txt") != all.String() {
		t.Error("a line of the agent is lost")
	}
	if b.readFile("dev.txt") != dev.String() {
		t.Error("a line of the developer is lost")
	}
	if s := b.readFile(".env"); s != "SECRET="+canary+"\n" {
		t.Errorf("SR-13: the developer's .env is %q", s)
	}
	t.Logf("%s rounds inside, %d on the host", count, n)
}

// TestSR4DenialsAreListed looks for what the sandbox was refused.
func TestSR4DenialsAreListed(t *testing.T) {
	b := gitRepo(t)
	b.ok(b.shell("for i in $(seq 20); do ln -s /etc/passwd out; mv .git g; done 2>/dev/null; mkdir .GIT; true"))
	found, err := filepath.Glob(filepath.Join(b.storage(), "domains/*/ignored/0", sentry.DenialsFile))
	if err != nil || len(found) != 1 {
		t.Fatalf("no list of refusals: %v %v", found, err)
	}
	f, err := os.Open(found[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	list, _, err := sentry.ParseDenials(f)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range list {
		if time.Since(d.Time) > time.Hour {
			t.Errorf("time of %v", d)
		}
		got = append(got, d.Op+" "+d.Errno+" "+d.Path)
	}
	for _, want := range []string{"symlink EPERM out", "rename-from EBUSY .git", "mkdir EPERM .GIT"} {
		if n := len(slices.DeleteFunc(slices.Clone(got), func(s string) bool { return s != want })); n != 1 {
			t.Errorf("%q is listed %d times in %q", want, n, got)
		}
	}
}
