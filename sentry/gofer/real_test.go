package gofer

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// hostGit runs Git as the developer, with no configuration of the machine.
func hostGit(t testing.TB, dir string, args ...string) string {
	t.Helper()
	out, err := hostGitErr(dir, args...)
	if err != nil {
		t.Fatalf("host git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func hostGitErr(dir string, args ...string) (string, error) {
	c := exec.Command("git", args...)
	c.Dir = dir
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + filepath.Dir(dir), "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=Dev", "GIT_AUTHOR_EMAIL=dev@example.com", "GIT_COMMITTER_NAME=Dev", "GIT_COMMITTER_EMAIL=dev@example.com",
		"GIT_TERMINAL_PROMPT=0", "GIT_EDITOR=true"}
	out, err := c.CombinedOutput()
	return string(out), err
}

// shortTemp is a temporary directory with a short name, away from TMPDIR's own rules.
func shortTemp(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lz")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func write(t testing.TB, name, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	must(t, os.WriteFile(name, []byte(text), 0o644))
}

func read(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

// project makes a small repository with ignored content.
func project(t testing.TB, ws string) {
	t.Helper()
	must(t, os.MkdirAll(ws, 0o755))
	hostGit(t, ws, "init", "-q", "-b", "main")
	write(t, ws+"/.gitignore", "node_modules/\n.env\n*.log\n/dist/\n")
	write(t, ws+"/README.md", "hello\n")
	write(t, ws+"/src/main.c", "int main(void) { return 0; }\n")
	hostGit(t, ws, "add", "-A")
	hostGit(t, ws, "commit", "-qm", "first")
	write(t, ws+"/.env", "SECRET=host\n")
	write(t, ws+"/node_modules/a/index.js", "host\n")
}

func TestSR4DX3RealGitInside(t *testing.T) {
	dir := shortTemp(t)
	ws := dir + "/ws"
	project(t, ws)
	config := read(t, ws+"/.git/config")
	b := newBox(t, dir, ws)
	t.Log(b.do("ls -la; git status --short --branch"))
	b.do("echo more >> README.md && git add -A && git commit -qm inside && git log --oneline")
	if got := hostGit(t, ws, "log", "-1", "--format=%s"); got != "inside\n" {
		t.Errorf("the host sees %q", got)
	}
	b.do("git config foo.bar baz && test $(git config foo.bar) = baz")
	if read(t, ws+"/.git/config") != config {
		t.Error("the host's configuration has changed")
	}
	b.do("test ! -e .env && echo SECRET=mine > .env && mkdir -p node_modules/b && echo x > node_modules/b/i.js && test ! -e node_modules/a")
	if got := read(t, ws+"/.env"); got != "SECRET=host\n" {
		t.Errorf("host secret is now %q", got)
	}
	t.Log(hostGit(t, ws, "status", "--short"))
	hostGit(t, ws, "fsck", "--strict")
}
