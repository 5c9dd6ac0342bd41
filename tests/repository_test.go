package tests

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// goTool returns the host's Go tool, if the sandbox sees it too: the host base is /usr.
func goTool(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if root := strings.TrimSpace(string(out)); err == nil {
		tool, lerr := filepath.EvalSymlinks(filepath.Join(root, "bin/go"))
		if err = lerr; err == nil && !strings.HasPrefix(tool, "/usr/") {
			err = fmt.Errorf("the Go tool is %s, and the sandbox has what is in /usr", tool)
		}
		if err == nil {
			return tool
		}
	}
	needs(t, "Go in /usr", err)
	return ""
}

// TestRealRepository works in a clone of this repository as an agent would, offline.
//
// What is built there is every package that needs nothing but the standard library, from an empty cache: to compile all of
// gVisor in the sandbox would take many minutes, and the module cache of the host is not in the sandbox.
func TestRealRepository(t *testing.T) {
	b := newBox(t)
	source, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(source, ".git")); err != nil {
		needs(t, "a Git work tree of this repository", err)
	}
	b.write(filepath.Join(b.home, ".gitconfig"), "[safe]\n\tdirectory = *\n") // the tests may run as another user
	b.host("git", "clone", "-q", "--no-hardlinks", source, ".")
	b.host("git", "config", "user.name", "Developer")
	b.host("git", "config", "user.email", "developer@example.org")
	_, release := b.hold()

	if out := b.ok(b.enter("git", "status", "--porcelain")); out != "" {
		t.Errorf("DX-3: git status inside: %q", out)
	}
	b.ok(b.shell("echo '// edited by the agent' >>nsenter/nsenter.go && git diff --stat && git add nsenter && git commit -q -m 'edit in the sandbox'"))
	if out := b.host("git", "log", "-1", "--format=%s"); out != "edit in the sandbox\n" {
		t.Errorf("FR-3: the host's last commit: %q", out)
	}
	if out := b.host("git", "status", "--porcelain"); out != "" {
		t.Errorf("FR-3: the host's status after the commit: %q", out)
	}
	b.write(filepath.Join(b.ws, "from-host"), "host\n")
	b.host("git", "add", "from-host")
	b.host("git", "commit", "-q", "-m", "edit on the host")
	if out := b.ok(b.shell("git log -1 --format=%s; cat from-host; git status --porcelain")); out != "edit on the host\nhost\n" {
		t.Errorf("FR-3: inside, after a commit of the host: %q", out)
	}
	b.ok(b.shell("git checkout -q -b topic && git mv from-host moved && git commit -q -m moved && git checkout -q - && git merge -q topic && git branch -d topic && git gc -q"))
	b.host("git", "fsck", "--strict", "--no-dangling")

	out := b.ok(b.enter("/usr/bin/python3", "-c", `
import json, pathlib, subprocess
p = pathlib.Path("data.json"); p.write_text(json.dumps({"n": list(range(1000))}))
print(sum(json.loads(p.read_text())["n"]), subprocess.run(["git", "rev-parse", "--is-inside-work-tree"], capture_output=True, text=True).stdout.strip())`))
	if out != "499500 true\n" {
		t.Errorf("python inside: %q", out)
	}
	out = b.ok(b.shell("i=0; while [ $i -lt 200 ]; do { sleep 0.2; echo $i >>lines; } & i=$((i+1)); done; wait; sort -n lines | uniq | wc -l"))
	if strings.TrimSpace(out) != "200" {
		t.Errorf("want a line of each of 200 parallel processes: %q", out)
	}
	release()

	err = filepath.WalkDir(b.ws, func(path string, e fs.DirEntry, err error) error {
		var st syscall.Stat_t
		if err == nil {
			err = syscall.Lstat(path, &st)
		}
		if err == nil && (int(st.Uid) != os.Getuid() || int(st.Gid) != os.Getgid()) {
			err = fmt.Errorf("%s belongs to %d:%d, not to the developer", path, st.Uid, st.Gid)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestRealRepositoryGoBuild builds with the host's toolchain. The standard library comes from a cache in the workspace that
// the host's Go filled: to compile that too takes minutes in the sandbox of a loaded machine. What is compiled and linked
// inside is a program of this repository that the agent has changed.
func TestRealRepositoryGoBuild(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles a part of the standard library")
	}
	tool := goTool(t)
	b := newBox(t)
	source, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	b.write(filepath.Join(b.home, ".gitconfig"), "[safe]\n\tdirectory = *\n") // the tests may run as another user
	b.host("git", "clone", "-q", "--no-hardlinks", source, ".")
	cache := filepath.Join(b.ws, "gocache")
	env := []string{"env", "GOCACHE=" + cache, "GOPROXY=off", "GOFLAGS=-buildvcs=false", "GOTOOLCHAIN=local", "CGO_ENABLED=0"}
	if r := b.start(b.command(append(env, tool, "build", "-o", "/dev/null", "./cmd/lazaret-init")...)).wait(5 * time.Minute); r.status != 0 {
		t.Fatalf("go build on the host: %v", r)
	}
	cmd := b.enter(append(env, "sh", "-ec", "echo 'var edited = 1' >>cmd/lazaret-init/main.go; "+
		tool+" build -v -o /tmp/init ./cmd/lazaret-init; "+tool+" version /tmp/init")...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	r := b.start(cmd).wait(5 * time.Minute) // on a machine that may be loaded
	r.out, r.err = out.String(), errs.String()
	if r.status != 0 || !strings.Contains(r.out, "/tmp/init: go") {
		t.Errorf("go build inside: %v", r)
	}
	t.Logf("took %v", r.took)
}
