package gofer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// attack is one attempt to get code run, or state changed, on the host. Its script runs in a fresh repository; $C is a
// file outside the workspace that only a program on the host can make, $R the repository. Afterwards the victim works
// in that repository on the host.
type attack struct {
	n      int
	name   string
	setup  string // on the host, before
	script string
	victim string // on the host, besides the usual
	quiet  bool   // harmless with this machine's Git even without protection; still must not land
}

// prelude is what scripts on either side use.
const prelude = `
pay() { mkdir -p "$(dirname "$1")" 2>/dev/null; printf '#!/bin/sh\ntouch %s\nexit 0\n' "$C" > "$1"; chmod +x "$1"; }
evil() { printf '[core]\n\trepositoryformatversion = 0\n\tbare = %s\n\tfsmonitor = "touch %s; false"\n' "${1:-false}" "$C"; }
layout() { mkdir -p "$1/objects" "$1/refs/heads"; echo 'ref: refs/heads/main' > "$1/HEAD"; evil "${2:-false}" > "$1/config"; }
cfg() { git config "$@"; printf '[%s]\n\t%s = "%s"\n' "$(echo "$1" | cut -d. -f1)" "$(echo "$1" | sed 's/.*\.//')" "$2" >> .git/config; }
`

// victim is an ordinary hour of a developer. Git is also asked in every directory that an attack may have made a
// repository of.
const victim = `
export EDITOR=true VISUAL=true GIT_PAGER=cat
cd "$R" || exit
git status; git diff; git log -1 -p; echo v >> README.md; git add -A; git commit -qm v
git switch -qc victim; git switch -q main; echo s >> README.md; git stash; git stash pop
git checkout -q .; git merge -q --no-edit feat; git log --show-signature -1
find . -maxdepth 5 \( -iname '.git*' -o -name HEAD -o -name commondir \) -cnewer "$C-before" -printf '%h\n' | sort -u | grep -v logs | head -10 | while read -r d; do (cd "$d" 2>/dev/null && git status -s); done
test -f "$H/.bashrc" && bash "$H/.bashrc"
`

// More of that hour, for attacks that have to do with it.
const (
	victimRemote    = `git fetch -q origin; git push -q origin main;`
	victimRebase    = `git rebase --continue;`
	victimSubmodule = `git submodule update -q --init; git status;`
)

// day is what the developer does after the attack.
func (a *attack) day() string {
	s := victim
	about := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(a.setup+a.script, w) })
	}
	if about("remote", "origin", "hook", "hk/", "husky", "objects", "refs", "shallow", "FETCH_HEAD", "protocol") {
		s += victimRemote
	}
	if about("rebase") {
		s += victimRebase
	}
	if about("sub", "modules") {
		s += victimSubmodule
	}
	return s + a.victim
}

var attacks = []attack{
	{n: 1, name: "config written", script: `printf '[core]\n\tfsmonitor = "touch %s; false"\n' $C >> .git/config`},
	{n: 2, name: "config by git config", script: `git config core.fsmonitor "touch $C; false"`},
	{n: 3, name: "config renamed over", script: `evil > x; mv -f x .git/config`},
	{n: 4, name: "config removed and made", script: `rm -f .git/config; evil > .git/config`},
	{n: 5, name: "config as a symlink", script: `evil > x; ln -sf ../x .git/config`},
	{n: 6, name: "config by a hard link", script: `ln .git/config alias && evil > alias`},
	{n: 7, name: "config through /proc", script: `exec 9<.git/config; evil > /proc/self/fd/9`},
	{n: 8, name: "config by a held descriptor", script: `exec 9<>.git/config; evil >&9`},
	{n: 9, name: "config exchanged", script: `evil > x; python3 -c "import ctypes; ctypes.CDLL(None).renameat2(-100, b'x', -100, b'.git/config', 2)"`},
	{n: 10, name: "sshCommand", script: `cfg core.sshCommand "touch $C"; cfg remote.origin.url ssh://localhost/x; git config remote.origin.url ssh://localhost/x`},
	{n: 11, name: "pager", script: `cfg core.pager "touch $C"`, quiet: true},
	{n: 12, name: "editor", script: `git config core.editor "touch $C; true"`, victim: `unset EDITOR VISUAL; git commit --allow-empty`},
	{n: 13, name: "diff.external", script: `cfg diff.external "touch $C; true"`},
	{n: 14, name: "textconv", script: `git config diff.x.textconv "touch $C; cat"; printf '* diff=x\n' > .gitattributes`},
	{n: 15, name: "filter", script: `git config filter.x.clean "touch $C; cat"; git config filter.x.smudge "touch $C; cat"; printf '* filter=x\n' > .gitattributes; echo >> README.md`},
	{n: 16, name: "filter process", script: `git config filter.x.process "touch $C"; printf '* filter=x\n' > .gitattributes; echo >> README.md`},
	{n: 17, name: "merge driver", script: `git config merge.x.driver "touch $C; true"; printf '* merge=x\n' > .gitattributes; git switch -q feat; echo f1 >> src/main.c; git commit -qam f1; git switch -q main; echo m1 >> src/main.c; git commit -qam m1`},
	{n: 18, name: "gpg program", script: `printf '#!/bin/sh\ntouch %s\n' $C > g; chmod +x g; git config gpg.program "$R/g"; git config commit.gpgSign true`},
	{n: 19, name: "credential helper", script: `git config credential.helper "!touch $C;"; git config remote.origin.url http://127.0.0.1:1/x`, quiet: true},
	{n: 20, name: "uploadpack", script: `git config remote.origin.uploadpack "touch $C;git-upload-pack"; git config remote.origin.receivepack "touch $C;git-receive-pack"`},
	{n: 21, name: "ext url", script: `git config protocol.ext.allow always; git config remote.origin.url "ext::sh -c 'touch $C'"`},
	{n: 22, name: "submodule update command", script: `git config submodule.sub.update "!touch $C; true"; git config submodule.sub.url x; (cd sub && git commit -q --allow-empty -m x); git add sub; git commit -qm x; (cd sub && git switch -q main~1 --detach)`, victim: `git submodule update`},
	{n: 23, name: "include", script: `evil > evil.inc; git config include.path ../evil.inc`},
	{n: 24, name: "includeIf", script: `evil > evil.inc; printf '[includeIf "gitdir:/"]\n\tpath = ../evil.inc\n' >> .git/config`},
	{n: 25, name: "alias of a command line", script: `git config alias.st "!touch $C"`, victim: `git st`},
	{n: 26, name: "core.worktree", script: `git config core.worktree ..`},
	{n: 27, name: "core.attributesFile", script: `git config core.attributesFile "$R/a"; git config core.excludesFile "$R/b"; echo '*' > b`},
	{n: 28, name: "hooksPath", script: `pay hk/pre-commit; pay hk/post-checkout; pay hk/reference-transaction; git config core.hooksPath hk`},
	{n: 29, name: "config raced", script: `evil > x; for i in $(seq 60); do cp x .git/config.lock 2>/dev/null; mv -f .git/config.lock .git/config & cp x .git/config & done; wait`},
	{n: 30, name: "hook made", script: `for h in pre-commit post-commit post-checkout reference-transaction pre-push post-merge; do pay .git/hooks/$h; done`},
	{n: 31, name: "hook changed", setup: `printf '#!/bin/sh\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit`, script: `printf 'touch %s\n' $C >> .git/hooks/pre-commit`},
	{n: 32, name: "hook made executable", setup: `printf '#!/bin/sh\ntouch %s\n' $C > .git/hooks/pre-commit; chmod 644 .git/hooks/pre-commit`, script: `chmod +x .git/hooks/pre-commit`},
	{n: 33, name: "hook removed", setup: `printf '#!/bin/sh\nexit 0\n' > .git/hooks/commit-msg; chmod +x .git/hooks/commit-msg`, script: `rm -f .git/hooks/commit-msg`},
	{n: 34, name: "sample hook renamed", script: `pay .git/hooks/pre-commit.sample; mv .git/hooks/pre-commit.sample .git/hooks/pre-commit`},
	{n: 35, name: "hooks directory replaced", script: `pay h2/pre-commit; mv .git/hooks .git/hooks.old; mv h2 .git/hooks`},
	{n: 36, name: "hooks directory as a symlink", script: `pay h2/pre-commit; rm -rf .git/hooks; ln -s ../h2 .git/hooks`},
	{n: 37, name: "hook as a symlink", script: `pay p; ln -s ../../p .git/hooks/pre-commit`},
	{n: 38, name: "hook by a hard link", setup: `printf '#!/bin/sh\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit`, script: `ln .git/hooks/pre-commit p && pay p`},
	{n: 39, name: "husky", setup: `mkdir .husky; printf '#!/bin/sh\n' > .husky/pre-commit; chmod +x .husky/pre-commit; git config core.hooksPath .husky`, script: `pay .husky/pre-commit`},
	{n: 40, name: "husky directory replaced", setup: `mkdir .husky; printf '#!/bin/sh\n' > .husky/pre-commit; chmod +x .husky/pre-commit; git config core.hooksPath .husky`, script: `pay hk/pre-commit; mv .husky old; mv hk .husky`},
	{n: 50, name: ".git replaced", script: `mv .git old; layout .git; cp -r old/refs old/objects .git/`},
	{n: 51, name: ".git as a gitfile", script: `mv .git old; layout g2; echo 'gitdir: g2' > .git`},
	{n: 52, name: ".git as a symlink", script: `mv .git old; layout g2; ln -s g2 .git`},
	{n: 53, name: "commondir", script: `layout evilc; echo ../evilc > .git/commondir`},
	{n: 54, name: "config.worktree", setup: `git config extensions.worktreeConfig true`, script: `evil > .git/config.worktree`},
	{n: 55, name: "bare repository at the root", script: `echo garbage > .git/HEAD; layout . true`},
	{n: 56, name: "objects moved away", script: `mv .git/objects .git/o2; layout . true`},
	{n: 57, name: "worktree's commondir", setup: `git worktree add -q wt -b wtb`, script: `layout ec; echo "$R/ec" > .git/worktrees/wt/commondir`},
	{n: 58, name: "worktree's config.worktree", setup: `git worktree add -q wt -b wtb; git config extensions.worktreeConfig true`, script: `evil > .git/worktrees/wt/config.worktree`},
	{n: 59, name: "new worktree", script: `layout ec; mkdir -p .git/worktrees/n w; echo "$R/ec" > .git/worktrees/n/commondir; cp .git/HEAD .git/worktrees/n/; echo "$R/w/.git" > .git/worktrees/n/gitdir; echo "gitdir: $R/.git/worktrees/n" > w/.git`},
	{n: 60, name: "submodule's config", script: `evil > .git/modules/sub/config; git -C sub config core.fsmonitor "touch $C; false"`},
	{n: 61, name: "submodule's hooks", script: `pay .git/modules/sub/hooks/post-checkout; pay .git/modules/sub/hooks/reference-transaction`, victim: `cd sub; git switch -qc x`},
	{n: 62, name: "submodule's gitfile", script: `layout g3; echo 'gitdir: ../g3' > sub/.git; (rm -f sub/.git; echo 'gitdir: ../g3' > sub/.git)`},
	{n: 63, name: "submodule's .git as a directory", script: `rm -f sub/.git; layout sub/.git`},
	{n: 64, name: "new submodule", script: `layout .git/modules/new; mkdir new; echo 'gitdir: ../.git/modules/new' > new/.git; h=$(git rev-parse HEAD); git update-index --add --cacheinfo 160000,$h,new; printf '[submodule "new"]\n\tpath = new\n\turl = ./x\n' >> .gitmodules; git add .gitmodules; git commit -qm new`},
	{n: 65, name: "modules rebuilt", script: `mv .git/modules .git/m2; cp -r .git/m2 .git/modules; evil > .git/modules/sub/config`},
	{n: 66, name: "submodule's parent swapped", script: `mkdir p2; layout p2/.git; mv sub s2; mv p2 sub`},
	{n: 67, name: "nested submodule's gitdir", script: `layout .git/modules/sub/modules/deep; mkdir -p sub/deep; echo 'gitdir: ../../.git/modules/sub/modules/deep' > sub/deep/.git`},
	{n: 68, name: "commondir by a held directory", script: `layout ec; cd .git; (echo ../ec > commondir); (echo "$R/ec" > ./commondir.lock; mv commondir.lock commondir)`},
	{n: 69, name: "worktree registration removed", setup: `git worktree add -q wt -b wtb; rm -rf wt`, script: `git worktree prune; rm -rf .git/worktrees/wt`},
	{n: 70, name: "rebase todo", script: `mkdir -p .git/rebase-merge; h=$(git rev-parse HEAD); echo refs/heads/main > .git/rebase-merge/head-name; echo $h > .git/rebase-merge/onto; echo $h > .git/rebase-merge/orig-head; echo > .git/rebase-merge/interactive; echo "exec touch $C" > .git/rebase-merge/git-rebase-todo; : > .git/rebase-merge/done; echo 1 > .git/rebase-merge/msgnum; echo 1 > .git/rebase-merge/end`},
	{n: 71, name: "info/attributes", setup: `git config diff.x.textconv "touch $C; cat"`, script: `mkdir -p .git/info; echo '* diff=x' > .git/info/attributes`},
	{n: 72, name: "info/exclude", script: `echo '*' >> .git/info/exclude`},
	{n: 73, name: "alternates", script: `mkdir -p o2; echo "$R/o2" > .git/objects/info/alternates`},
	{n: 74, name: "legacy remotes", script: `mkdir -p .git/remotes .git/branches; echo "URL: ext::x" > .git/remotes/leg; echo "$R" > .git/branches/leg`},
	{n: 75, name: "shallow", script: `git rev-parse HEAD > .git/shallow`},
	{n: 78, name: "reflog as a symlink", script: "rm -f .git/logs/HEAD; ln -s $H/.bashrc .git/logs/HEAD; git symbolic-ref HEAD 'refs/heads/x/$(touch${IFS}'$C')'; echo 'ref: refs/heads/x/$(touch${IFS}'$C')' > .git/HEAD; cp .git/refs/heads/main x"},
	{n: 79, name: "COMMIT_EDITMSG as a symlink", script: `rm -f .git/COMMIT_EDITMSG; ln -s $H/.bashrc .git/COMMIT_EDITMSG`},
	{n: 80, name: "FETCH_HEAD as a symlink", script: `rm -f .git/FETCH_HEAD; ln -s $H/.bashrc .git/FETCH_HEAD`},
	{n: 81, name: "logs as a symlink", script: `mv .git/logs .git/l2; ln -s $H .git/logs`},
	{n: 82, name: "FIFO in the repository", script: `rm -f .git/FETCH_HEAD; mkfifo .git/FETCH_HEAD`},
	{n: 83, name: "socket in the repository", script: `python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('.git/fsmonitor--daemon.ipc')"`},
	{n: 84, name: "program that configuration names", setup: `mkdir tools; printf '#!/bin/sh\ncat "$1"\n' > tools/tc; chmod +x tools/tc; git config diff.c.textconv "$R/tools/tc"; echo '*.c diff=c' > .gitattributes; git add -A; git commit -qm t; echo >> src/main.c`, script: `pay tools/tc`},
	{n: 85, name: "modules of a worktree", setup: `git worktree add -q wt -b wtb`, script: `layout .git/worktrees/wt/modules/sub; mkdir -p wt/sub; echo "gitdir: $R/.git/worktrees/wt/modules/sub" > wt/sub/.git`},
	{n: 90, name: "nested repository", script: `mkdir n; layout n/.git`},
	{n: 91, name: "nested repository as a submodule of the index", script: `mkdir n; layout n/.git; h=$(git rev-parse HEAD); echo $h > n/.git/refs/heads/main; git update-index --add --cacheinfo 160000,$h,n`},
	{n: 92, name: "embedded bare repository", script: `mkdir b; layout b true`},
	{n: 93, name: "HEAD and commondir alone", script: `mkdir b q; layout q true; echo 'ref: refs/heads/main' > b/HEAD; echo ../q > b/commondir`},
	{n: 94, name: "configuration of an existing nested repository", setup: `git init -q inner`, script: `evil > inner/.git/config`},
	{n: 95, name: "hook of an existing nested repository", setup: `git init -q inner; echo x > inner/x`, script: `pay inner/.git/hooks/post-commit; pay inner/.git/hooks/pre-commit`, victim: `cd inner; git add -A; git commit -qm x`},
	{n: 96, name: "nested repository swapped", setup: `git init -q inner`, script: `mkdir p; layout p/.git; mv inner i2; mv p inner`},
	{n: 97, name: "gitfile to a plain name", script: `layout plain; mkdir n; echo 'gitdir: ../plain' > n/.git`},
	{n: 98, name: ".git as a symlink in a directory", script: `layout plain; mkdir n; ln -s ../plain n/.git`},
	{n: 99, name: "prepared directory renamed", script: `mkdir n; layout n/x; mv n/x n/.git`},
	{n: 100, name: "spellings of .git", script: `mkdir n; for v in .GIT .Git git~1 .git. '.git ' $'.g\u200cit' '.git::$INDEX_ALLOCATION'; do layout "n/$v"; layout n/y; mv n/y "n/$v"; done`},
	{n: 101, name: "repository in an ignored directory", script: `mkdir -p node_modules/evil; layout node_modules/evil/.git`},
	{n: 102, name: "bare repository by rename", script: `layout d1 true; mkdir d2; mv d1/objects d2/; mv d1/refs d2/; mv d1/HEAD d2/; mv d1/config d2/`},
	{n: 103, name: "un-ignore", script: `cat .env > copy; sed -i '/env/d' .gitignore; cat .env >> copy; git add -A -f; echo stolen > .env`},
	{n: 104, name: "config lock renamed by hand", script: `evil > .git/config.lock; mv -f .git/config.lock .git/config`},
	{n: 105, name: "parent of a nested repository swapped", setup: `mkdir -p libs/a; git init -q libs/a/inner`, script: `mkdir -p l2/a/inner; layout l2/a/inner/.git; mv libs l3; mv l2 libs`},
	{n: 106, name: "existing bare repository", setup: `git init -q --bare mirror.git`, script: `evil true > mirror.git/config; pay mirror.git/hooks/post-receive; pay mirror.git/hooks/reference-transaction`, victim: `git push -q ./mirror.git main`},
	{n: 107, name: "rr-cache", script: `mkdir -p .git/rr-cache/x; echo x > .git/rr-cache/x/postimage`},
	{n: 108, name: "symlink out of the workspace", script: `ln -sf $H/.bashrc notes.txt; ln -s ../../../../../../../../../etc/passwd p; ln -s src/../../../x q`, victim: `echo "touch $C" >> notes.txt`},
	{n: 109, name: "object overwritten", script: `f=$(find .git/objects -type f -path '*/??/*' | head -1); chmod u+w $f; : > $f`, victim: `git fsck >/dev/null 2>&1 || touch $C`},
	{n: 110, name: ".envrc", setup: `echo true > .envrc`, script: `echo "touch $C" >> .envrc`, victim: `. ./.envrc`},
	{n: 111, name: ".envrc made", script: `echo "touch $C" > .envrc`, victim: `. ./.envrc`},
	{n: 112, name: ".vscode", script: `mkdir -p .vscode; echo '{}' > .vscode/tasks.json`},
	{n: 113, name: ".vscode by rename", script: `mkdir v; echo '{}' > v/tasks.json; mv v .vscode`},
	{n: 114, name: ".vscode by symlink", script: `mkdir v; echo '{}' > v/tasks.json; ln -s v .vscode`},
	{n: 115, name: ".idea in a subdirectory", script: `mkdir -p src/.idea; echo x > src/.idea/x`},
	{n: 116, name: ".mcp.json changed", setup: `echo '{}' > .mcp.json`, script: `echo '{"x":1}' > m; mv -f m .mcp.json; ln -f m .mcp.json; echo y > .mcp.json`},
	{n: 117, name: ".claude removed", setup: `mkdir .claude; echo x > .claude/settings.json`, script: `rm -rf .claude; mkdir .claude; echo evil > .claude/settings.json`},
	{n: 118, name: "hook through a work tree symlink", script: `ln -s .git/hooks/pre-commit out.txt`, victim: `printf '#!/bin/sh\ntouch %s\n' "$C" > out.txt; chmod +x .git/hooks/pre-commit; git commit -q --allow-empty -m x`},
	{n: 119, name: "set-id file", script: `printf x > s; chmod 6755 s; chown 0:0 s`, victim: `test -u s -o -g s && touch $C; true`},
	{n: 120, name: "device and whiteout", script: `mknod dev c 0 0; mknod dev2 c 1 3; mknod dev3 b 8 0`, quiet: true},
	{n: 121, name: "secret by a hard link", script: `ln .env l; echo stolen > l; echo stolen > .env`},
	{n: 122, name: "secret through a symlink", script: `ln -s .env s; echo stolen > s; ln -s ./.env s2; echo stolen > s2`},
	{n: 123, name: "secret by renaming its parent", setup: `mkdir anch; printf '/anch/secret.txt\n' >> .gitignore; git add -A; git commit -qm a; mkdir -p node_modules; echo s > anch/secret.txt; echo s > node_modules/secret`, script: `mv anch anch2; echo stolen > anch2/secret.txt; echo stolen > node_modules/secret`},
	{n: 124, name: "secret by a forged index", script: `h=$(echo x | git hash-object -w --stdin); git update-index --add --cacheinfo 100644,$h,.env; git update-index --add --cacheinfo 100644,$h,node_modules/a/index.js; git checkout -f -- .env node_modules; echo stolen > .env; rm -rf node_modules`},
	{n: 125, name: "nested rules un-ignore", script: `printf '!.env\n!node_modules/\n' >> .gitignore; rm .gitignore; echo '!*' > .gitignore; echo stolen > .env; echo stolen > node_modules/a/index.js`},
	{n: 126, name: "HEAD as a symlink, empty, and a directory", script: `ln -sf ../x .git/HEAD; : > .git/HEAD; rm -f .git/HEAD; mkdir .git/HEAD; printf 'garbage' > .git/HEAD.lock; mv .git/HEAD.lock .git/HEAD`, victim: `git rev-parse HEAD >/dev/null || touch $C`},
	{n: 127, name: "HEAD written after its rename", script: `exec 9>.git/HEAD.lock; echo 'ref: refs/heads/main' >&9; mv .git/HEAD.lock .git/HEAD; echo garbage >&9; echo garbage > /proc/self/fd/9`, victim: `git symbolic-ref HEAD; git rev-parse HEAD >/dev/null || touch $C`},
	{n: 128, name: "bare guard raced", script: `for i in $(seq 30); do mkdir r$i; (mkdir r$i/objects r$i/refs & echo 'ref: refs/heads/main' > r$i/HEAD & evil true > r$i/config & wait); done`},
	{n: 129, name: "bare repository below refs and objects", script: `layout .git/refs/heads/b true; layout .git/objects/b true; layout .git/logs/b true; cd .git/refs/heads/b`},
	{n: 130, name: "swapped directory race", script: `mkdir a b; ln -s $H b/l; for i in $(seq 40); do (mv a c; mv c a) & (echo x > a/f; rm -f a/f) & done; wait`, quiet: true},
}

// TestSR4AttacksLandWithoutProtection runs the attacks on a plain directory: were they harmless, TestSR4Attacks would
// prove nothing.
func TestSR4AttacksLandWithoutProtection(t *testing.T) {
	const sample = 6
	var ran atomic.Int64
	f := newField(t)
	atOnce(attacks, func(a attack) {
		p := f.prepare(a)
		p.onHost(a.script)
		changed := diffFingerprints(p.before, fingerprint(t, p.repo))
		if changed != "" && a.n%sample != 0 || a.quiet {
			return // seen already; that a victim runs what was planted is shown on some
		}
		if executed, also := p.after(t); !executed && changed+also == "" {
			t.Errorf("attack %d (%s) does nothing even without protection", a.n, a.name)
		} else if executed {
			ran.Add(1)
		}
	})
	if ran.Load() < 5 {
		t.Errorf("the victims ran the code of %d attacks: they are no victims", ran.Load())
	}
}

func TestSR4Attacks(t *testing.T) {
	f := newField(t)
	places := make([]*place, len(attacks))
	indices := make([]int, len(attacks))
	for i := range attacks {
		indices[i] = i
	}
	atOnce(indices, func(i int) { places[i] = f.prepare(attacks[i]) })
	var script strings.Builder
	script.WriteString(prelude)
	for _, p := range places {
		fmt.Fprintf(&script, "( export C=%s R=%s H=%s; cd $R; eval %s ) >/dev/null 2>&1 </dev/null\n", p.canary, p.repo, p.home, quote(p.script))
	}
	b := newBox(t, f.dir, f.ws)
	b.run(script.String())
	atOnce(places, func(p *place) {
		executed, changed := p.after(t)
		if executed {
			t.Errorf("attack %d (%s): CODE RAN ON THE HOST", p.n, p.name)
		}
		if changed != "" {
			t.Errorf("attack %d (%s) changed the host:\n%s", p.n, p.name, changed)
		}
	})
}

// field is a directory with one repository per attack.
type field struct {
	t            *testing.T
	dir, ws, tpl string
}

func newField(t *testing.T) *field {
	dir := shortTemp(t)
	f := &field{t: t, dir: dir, ws: dir + "/ws", tpl: dir + "/tpl"}
	must(t, os.MkdirAll(f.ws, 0o755))
	must(t, os.MkdirAll(dir+"/canary", 0o755))
	everydayProject(t, dir, f.tpl)
	hostGit(t, f.tpl, "branch", "feat")
	must(t, os.MkdirAll(dir+"/up/origin", 0o755))
	hostGit(t, dir+"/up/origin", "init", "-q", "--bare", ".")
	hostGit(t, f.tpl, "remote", "add", "origin", dir+"/up/origin")
	return f
}

// place is the scene of one attack.
type place struct {
	attack
	repo, canary, home string
	before             map[string]string
}

func (f *field) prepare(a attack) *place {
	p := &place{attack: a, repo: fmt.Sprintf("%s/a%03d", f.ws, a.n), canary: fmt.Sprintf("%s/canary/%d", f.dir, a.n)}
	p.home = p.canary + "-home"
	err := errors.Join(os.MkdirAll(p.home, 0o755), os.WriteFile(p.home+"/.bashrc", nil, 0o644))
	if out, cerr := exec.Command("cp", "-a", f.tpl, p.repo).CombinedOutput(); err != nil || cerr != nil {
		f.t.Errorf("prepare: %v %v: %s", err, cerr, out)
	}
	p.onHost(a.setup)
	if _, err := os.Stat(p.canary); err == nil {
		f.t.Errorf("attack %d: its setup made the canary", a.n)
	}
	must(f.t, os.WriteFile(p.canary+"-before", nil, 0o644))
	p.before = fingerprint(f.t, p.repo)
	return p
}

// after compares the host, lets the victim work, and looks for what the attack has left.
func (p *place) after(t *testing.T) (executed bool, changed string) {
	changed = diffFingerprints(p.before, fingerprint(t, p.repo))
	p.onHost(p.day())
	if st, err := os.Stat(p.home + "/.bashrc"); err != nil || st.Size() != 0 {
		changed += "written: the developer's .bashrc\n"
	}
	_, err := os.Stat(p.canary)
	return err == nil, changed
}

// atOnce calls f for each of the items, two at a time.
func atOnce[T any](items []T, f func(T)) {
	var wg sync.WaitGroup
	next := make(chan T)
	for range 2 {
		wg.Go(func() {
			for item := range next {
				f(item)
			}
		})
	}
	for _, item := range items {
		next <- item
	}
	close(next)
	wg.Wait()
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// onHost runs a script as the developer, in the repository.
func (p *place) onHost(script string) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-c", prelude+script)
	c.Dir = p.repo
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.home, "H=" + p.home, "C=" + p.canary, "R=" + p.repo, "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=D", "GIT_AUTHOR_EMAIL=d@e", "GIT_COMMITTER_NAME=D", "GIT_COMMITTER_EMAIL=d@e", "GIT_TERMINAL_PROMPT=0",
		"GIT_CONFIG_COUNT=2", "GIT_CONFIG_KEY_0=protocol.file.allow", "GIT_CONFIG_VALUE_0=always",
		"GIT_CONFIG_KEY_1=gc.auto", "GIT_CONFIG_VALUE_1=0"}
	_ = c.Run()
}
