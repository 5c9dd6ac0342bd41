package route

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSR4Table is the policy table, row by row: zone, name, what the host has, and the verdict.
func TestSR4Table(t *testing.T) {
	for _, row := range []struct {
		zone Zone
		name string
		host Host
		want Verdict
	}{
		{Gitdir, "config", File, Verdict{P, Private, SeedConfig}},
		{Gitdir, "config.lock", None, Verdict{P, Private, NoSeed}},
		{Gitdir, "config.worktree", None, Verdict{P, Private, SeedConfig}},
		{Gitdir, "hooks", Dir, Verdict{P, Private, SeedCopy}},
		{Gitdir, "info", Dir, Verdict{P, Private, SeedCopy}},
		{Gitdir, "rebase-merge", None, Verdict{P, Private, SeedCopy}},
		{Gitdir, "rebase-apply", Dir, Verdict{P, Private, SeedCopy}},
		{Gitdir, "sequencer", None, Verdict{P, Private, SeedCopy}},
		{Gitdir, "commondir", None, Verdict{No, ReadOnly, NoSeed}},
		{Gitdir, "commondir.lock", None, Verdict{No, ReadOnly, NoSeed}},
		{Gitdir, "gitdir", None, Verdict{No, ReadOnly, NoSeed}},
		{WorktreeDir, "commondir", File, Verdict{RO, ReadOnly, NoSeed}},
		{WorktreeDir, "gitdir", File, Verdict{RO, ReadOnly, NoSeed}},
		{WorktreeDir, "locked", None, Verdict{No, ReadOnly, NoSeed}},
		{WorktreeDir, "modules", Dir, Verdict{P, Private, NoSeed}},
		{Gitdir, "branches", Dir, Verdict{RO, ReadOnly, NoSeed}},
		{Gitdir, "branches", None, Verdict{No, ReadOnly, NoSeed}},
		{ReadOnly, "x", None, Verdict{No, ReadOnly, NoSeed}},
		{ReadOnly, "x", File, Verdict{RO, ReadOnly, NoSeed}},
		{Gitdir, "HEAD", File, Verdict{Kind: Head}},
		{Gitdir, "HEAD", Link, Verdict{RO, ReadOnly, NoSeed}},
		{Gitdir, "HEAD.lock", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "objects", Dir, Verdict{Pin, Objects, NoSeed}},
		{Gitdir, "refs", Dir, Verdict{Pin, Refs, NoSeed}},
		{Gitdir, "logs", None, Verdict{Pin, Logs, NoSeed}},
		{Refs, "heads", Dir, Verdict{Pin, Shared, NoSeed}},
		{Refs, "stash", None, Verdict{G, Shared, NoSeed}},
		{Logs, "refs", Dir, Verdict{Pin, LogsBelow, NoSeed}},
		{Logs, "HEAD", File, Verdict{G, LogsBelow, NoSeed}},
		{Logs, "HEAD", Link, Verdict{RO, ReadOnly, NoSeed}},
		{Objects, "info", Dir, Verdict{Pin, ObjectsInfo, NoSeed}},
		{Objects, "pack", Dir, Verdict{Pin, ObjectsBelow, NoSeed}},
		{Objects, "ab", None, Verdict{G, ObjectsBelow, NoSeed}},
		{ObjectsInfo, "alternates", None, Verdict{No, ReadOnly, NoSeed}},
		{ObjectsInfo, "alternates.lock", None, Verdict{No, ReadOnly, NoSeed}},
		{ObjectsInfo, "http-alternates", File, Verdict{RO, ReadOnly, NoSeed}},
		{ObjectsInfo, "packs", None, Verdict{G, ObjectsBelow, NoSeed}},
		{Gitdir, "index", File, Verdict{G, Shared, NoSeed}},
		{Gitdir, "index.stash.7", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "sharedindex_Ab", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "packed-refs.new", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "MERGE_MSG.lock", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "ORIG_HEAD", None, Verdict{G, Shared, NoSeed}},
		{Gitdir, "FETCH_HEAD", Link, Verdict{RO, ReadOnly, NoSeed}},
		{Gitdir, "FETCH_HEAD", Special, Verdict{RO, ReadOnly, NoSeed}},
		{Gitdir, "shallow", None, Verdict{No, ReadOnly, NoSeed}},
		{Gitdir, "shallow", File, Verdict{G, Shared, NoSeed}},
		{Gitdir, "shallow.lock", None, Verdict{No, ReadOnly, NoSeed}},
		{Gitdir, "modules", None, Verdict{P, Private, NoSeed}},
		{Gitdir, "modules", Dir, Verdict{Pin, Modules, NoSeed}},
		{Modules, "new", None, Verdict{P, Private, NoSeed}},
		{Gitdir, "worktrees", Dir, Verdict{Pin, Worktrees, NoSeed}},
		{Worktrees, "wt", Dir, Verdict{Pin, WorktreeDir, NoSeed}},
		{Worktrees, "new", None, Verdict{P, Private, NoSeed}},
		{Gitdir, "rr-cache", None, Verdict{P, Private, NoSeed}},
		{Gitdir, "fsmonitor--daemon.ipc", None, Verdict{P, Private, NoSeed}},
		{Gitdir, ".git", None, Verdict{No, ReadOnly, NoSeed}},
		{Shared, ".git", None, Verdict{No, ReadOnly, NoSeed}},
		{ObjectsBelow, ".GIT", None, Verdict{No, ReadOnly, NoSeed}},
	} {
		if got := Git(row.zone, row.name, row.host); got != row.want {
			t.Errorf("zone %d, %q, host %d: got %+v, want %+v", row.zone, row.name, row.host, got, row.want)
		}
	}
}

var allOps = []Op{OpenWrite, SetAttr, CreateFile, Mkdir, Symlink, Unlink, Rmdir, RenameFrom, RenameTo, LinkFrom, LinkTo}

// TestSR4EveryCell asks every zone, name, host state and operation for what must hold everywhere.
func TestSR4EveryCell(t *testing.T) {
	names := []string{
		"config", "config.lock", "config.worktree", "hooks", "info", "commondir", "commondir.lock", "gitdir", "locked", "branches",
		"remotes", "HEAD", "HEAD.lock", "objects", "refs", "logs", "modules", "worktrees", "shallow", "index", "packed-refs", "rr-cache",
		"rebase-merge", "sequencer", "reftable", "lfs", "tmp_x", "alternates", "alternates.lock", ".git", ".GIT", "git~1", "pack", "heads", "x",
	}
	executable := map[string]bool{ // Git obeys these at the top of a repository
		"config": true, "config.lock": true, "config.worktree": true, "hooks": true, "info": true, "commondir": true, "commondir.lock": true,
		"gitdir": true, "locked": true, "branches": true, "remotes": true, "rebase-merge": true, "sequencer": true, "rr-cache": true,
	}
	for z := ReadOnly; z <= Worktrees; z++ {
		for _, name := range names {
			for host := None; host <= Special; host++ {
				v := Git(z, name, host)
				at := fmt.Sprintf("zone %d, %q, host %d: %+v", z, name, host, v)
				if v.Kind == W || v.Kind == Hold {
					t.Errorf("%s: a repository has no work tree", at)
				}
				if (z == Gitdir || z == WorktreeDir) && executable[name] {
					switch v.Kind {
					case P, RO, No:
					default:
						t.Errorf("%s: Git obeys this name", at)
					}
				}
				if v.Kind == No && host != None {
					t.Errorf("%s: the host has it", at)
				}
				if (host == Link || host == Special) && v.Kind != RO && v.Kind != P {
					t.Errorf("%s: a host link or special file must be read only", at)
				}
				if v.Kind == P && v.Child != Private {
					t.Errorf("%s: a private name has a private directory", at)
				}
				for _, op := range allOps {
					err := v.Kind.Check(op)
					if err == nil && v.Kind != P && op == Symlink {
						t.Errorf("%s: symbolic link in a repository", at)
					}
					if err == nil && v.Kind == Pin && op != SetAttr && op != Mkdir {
						t.Errorf("%s: op %d on a pinned name", at, op)
					}
					if err == nil && (v.Kind == RO || v.Kind == No) {
						t.Errorf("%s: op %d", at, op)
					}
					if err == nil && v.Kind == Head && op != RenameTo {
						t.Errorf("%s: op %d on HEAD", at, op)
					}
				}
			}
		}
	}
}

func TestSR4NoSpellingOfDotGit(t *testing.T) {
	for _, name := range []string{
		".GIT", ".Git", ".gIt", "git~1", "GIT~2", "git~10", ".git.", ".git..", ".git ", ".git . .", ".git::$INDEX_ALLOCATION", ".git:x",
		".g\u200cit", "\u200c.git", ".git\ufeff", ".GI\u200dT", ".g\u0131t", ".git\u202e", "git~1.", ".Git::$DATA",
	} {
		if got := Classify(name); got != Variant {
			t.Errorf("%q: class %d", name, got)
		}
	}
	for _, name := range []string{".gitignore", ".gitattributes", ".gitmodules", "git", ".gi", "git~", "git~x", ".github", "x.git", ".git-x", "..git", "", "g", "ß.git"} {
		if got := Classify(name); got == Variant || got == DotGit {
			t.Errorf("%q: class %d", name, got)
		}
	}
	if Classify(".git") != DotGit {
		t.Error("the name itself")
	}
}

func TestSR4HeadContent(t *testing.T) {
	good := []string{"ref: refs/heads/main\n", "ref: refs/heads/a/b-c_d\n", "0123456789012345678901234567890123456789\n",
		"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n"}
	bad := []string{"", "garbage", "ref: refs/heads/main", "ref: HEAD\n", "ref: refs/heads/../x\n", "ref: refs/heads/a b\n", "ref: /etc/passwd\n",
		"ref: refs/heads/x.lock\n", "ref: refs/heads/x\n\n", "ref: refs/heads/\x1b[m\n", "ref: refs//x\n", "ref: refs/heads/.x\n",
		"012345678901234567890123456789012345678X\n", "0123\n", "ref: refs/heads/x\nref: refs/heads/y\n", "ref: refs/heads/a@{b\n"}
	for _, s := range good {
		if !ValidHead([]byte(s)) {
			t.Errorf("refused %q", s)
		}
	}
	for _, s := range bad {
		if ValidHead([]byte(s)) {
			t.Errorf("took %q", s)
		}
	}
}

func TestSR4BareGuard(t *testing.T) {
	for bits := range 16 {
		have := func(i int) bool { return bits>>i&1 != 0 }
		for i, name := range []string{"HEAD", "objects", "refs", "commondir", "config"} {
			then := bits
			if i < 4 {
				then |= 1 << i
			}
			is := func(i int) bool { return then>>i&1 != 0 }
			want := i < 4 && is(0) && (is(1) && is(2) || is(3))
			if got := Completes(name, have(0), have(1), have(2), have(3)); got != want {
				t.Errorf("%s with %04b: %v", name, bits, got)
			}
		}
	}
}

func TestHeldNames(t *testing.T) {
	h, err := NewHeld(append([]string{"a/b/*.x", "*/q"}, DefaultHeld...), []string{"tools/tc"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir, name       string
		file, directory bool
	}{
		{"", ".envrc", true, true}, {"deep/er", ".envrc", true, true}, {"", ".vscode", true, true}, {"src", ".vscode", true, true},
		{"", "x.code-workspace", true, true}, {".github", "copilot-instructions.md", true, true}, {"z/.github", "copilot.md", true, true},
		{"github", "copilot.md", false, false}, {"", "copilot.md", false, false}, {"a/b", "1.x", true, true}, {"y/a/b", "1.x", true, true},
		{"b", "1.x", false, false}, {"any", "q", true, true}, {"", "q", false, false}, {"tools", "tc", true, true}, {"", "tc", false, false},
		{"other/tools", "tc", false, false}, {"", "README.md", false, false},
	} {
		if f, d := h.Match(c.dir, c.name); f != c.file || d != c.directory {
			t.Errorf("%q in %q: %v %v", c.name, c.dir, f, d)
		}
	}
	if !h.Below("tools") || h.Below("tool") {
		t.Error("Below")
	}
	for _, bad := range []string{"", "/", "/x", "../x", "a//b", "[", "./x"} {
		if _, err := NewHeld([]string{bad}, nil); err == nil {
			t.Errorf("pattern %q was taken", bad)
		}
	}
	for _, bad := range []string{"", "/x", "../x", "a/../b", ".."} {
		if _, err := NewHeld(nil, []string{bad}); err == nil {
			t.Errorf("path %q was taken", bad)
		}
	}
}

func TestErrnosThatGitKnows(t *testing.T) {
	for _, c := range []struct {
		kind Kind
		op   Op
		want error
	}{
		{Pin, Rmdir, unix.EBUSY}, {Pin, RenameFrom, unix.EBUSY}, {RO, OpenWrite, unix.EROFS}, {RO, RenameTo, unix.EBUSY},
		{No, CreateFile, unix.EPERM}, {Head, OpenWrite, unix.EPERM}, {Head, RenameTo, nil}, {G, Symlink, unix.EPERM}, {G, CreateFile, nil},
	} {
		if got := c.kind.Check(c.op); got != c.want {
			t.Errorf("%v, op %d: %v, want %v", c.kind, c.op, got, c.want)
		}
	}
}

func TestClassifyDoesNotAllocate(t *testing.T) {
	h, _ := NewHeld(DefaultHeld, nil)
	if n := testing.AllocsPerRun(100, func() { Classify("main.go"); Classify(".gitignore"); h.Match("src", "main.go") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
