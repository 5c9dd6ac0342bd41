package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFR4HomePersists makes all kinds of changes in the home, and looks at them after a restart.
func TestFR4HomePersists(t *testing.T) {
	b := newBox(t)
	b.ok(b.shell(`set -e; cd; test -f .profile; mkdir -p d/sub e; echo a >d/f; ln d/f hard; ln -s d/f soft; chmod 4755 d/f
		echo b >e/f; touch -d @1000000000 e; rm .bashrc; echo mine >>.profile; mkfifo p || true`))
	b.ok(b.shell(`set -e; cd; rm -r d/sub; mv d dd; rm -r e; mkdir e; echo c >e/g`))
	want := "dd e hard soft\nf\ng\n4755 2 1000\na\nmine\nno .bashrc\n"
	got := b.ok(b.shell(`cd; rm -f p; echo *; echo $(ls dd); ls e; stat -c '%a %h %u' dd/f; cat hard; tail -n 1 .profile; test -e .bashrc || echo no .bashrc`))
	if got != want {
		t.Errorf("after two restarts the home holds\n%s\nwant\n%s", got, want)
	}
	if entries, _ := os.ReadDir(b.home); len(entries) > 2 {
		t.Errorf("the developer's own home has %v", entries)
	}
	out := b.ok(b.lazaret("anchor", "diff"))
	for _, line := range []string{`removed  ".bashrc"`, `changed  ".profile"`, `added    "dd/f"`} {
		if !strings.Contains(out, line+"\n") {
			t.Errorf("want %q in: %s", line, out)
		}
	}
	// Another workspace is another Domain.
	other := filepath.Join(b.dir, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if out := b.ok(b.lazaret("enter", "--workspace", other, "--", "sh", "-c", "echo ~/* ; ls ~/.bashrc")); out != "/home/agent/*\n/home/agent/.bashrc\n" {
		t.Errorf("another Domain's home: %s", out)
	}
}

// TestFR4OnlyThatPersists writes beside the persistent paths.
func TestFR4OnlyThatPersists(t *testing.T) {
	b := newBox(t)
	b.profile("default", "persist = [\"/opt/kept\"]\n")
	b.ok(b.shell("echo a >/opt/kept/f; echo b >~/lost; echo c >/var/tmp/lost"))
	if out := b.ok(b.shell("cat /opt/kept/f; ls -A ~/lost /var/tmp/lost 2>/dev/null; true")); out != "a\n" {
		t.Errorf("after a restart: %q", out)
	}
}

// TestFR4GlobalInstall installs a package where the host keeps its own, and finds it after a restart.
func TestFR4GlobalInstall(t *testing.T) {
	needsProgram(t, "npm")
	b := newBox(t)
	b.profile("default", "persist = [\"/home/agent\", \"/usr/local\"]\n")
	pkg := filepath.Join(b.ws, "pkg")
	if err := os.Mkdir(pkg, 0o755); err != nil {
		t.Fatal(err)
	}
	b.write(filepath.Join(pkg, "package.json"), `{"name": "lazaret-probe", "version": "1.0.0", "bin": {"lazaret-probe": "run.js"}}`)
	b.write(filepath.Join(pkg, "run.js"), "#!/usr/bin/env node\nconsole.log('installed')\n")
	b.ok(b.shell("npm install --offline --no-audit --no-fund --global --prefix /usr/local --install-links ./pkg && lazaret-probe"))
	if err := os.RemoveAll(pkg); err != nil {
		t.Fatal(err)
	}
	if out := b.ok(b.shell("command -v lazaret-probe && lazaret-probe")); out != "/usr/local/bin/lazaret-probe\ninstalled\n" {
		t.Errorf("after a restart: %q", out)
	}
	if _, err := os.Lstat("/usr/local/bin/lazaret-probe"); err == nil {
		t.Error("it is on the host")
	}
	b.ok(b.lazaret("anchor", "reset", "--yes", "/usr/local"))
	if r := b.run(b.enter("lazaret-probe")); r.status == 0 {
		t.Errorf("after a reset it is still there: %v", r)
	}
}

// TestSR11AnchorInUse works on the anchor of a running Domain: nothing but looking is allowed.
func TestSR11AnchorInUse(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	b.ok(b.shell("echo a >~/f"))
	for _, args := range [][]string{{"reset", "--yes", "/home/agent"}, {"snapshot", "/home/agent", "x"}, {"restore", "--yes", "/home/agent", "x"}, {"keep", "/home/agent"}} {
		b.refused(b.lazaret(append([]string{"anchor"}, args...)...), "the State Anchor is in use", "hint:")
	}
	if out := b.ok(b.lazaret("anchor", "ls")); !strings.Contains(out, "in use") {
		t.Errorf("anchor ls: %s", out)
	}
	if out := b.ok(b.lazaret("anchor", "diff")); out != "added    \"f\"\n" {
		t.Errorf("anchor diff: %s", out)
	}
	release()
	b.wantNoProcess(gone)
	b.ok(b.lazaret("anchor", "snapshot", "/home/agent", "x"))
	b.ok(b.shell("echo b >~/f"))
	b.refused(b.lazaret("anchor", "restore", "/home/agent", "x"), "no terminal to ask on", "hint: add --yes")
	b.ok(b.lazaret("anchor", "restore", "--yes", "/home/agent", "x"))
	if out := b.ok(b.shell("cat ~/f")); out != "a\n" {
		t.Errorf("restored: %q", out)
	}
	b.ok(b.lazaret("anchor", "drop", "--yes", "/home/agent", "x"))
	b.refused(b.lazaret("anchor", "restore", "--yes", "/home/agent", "x"), "no such snapshot")
	b.refused(b.lazaret("anchor", "reset", "--yes", "/nowhere"), "there is none in this Domain", "hint: lazaret anchor ls")
}

// TestFR4Volumes mounts further host paths.
func TestFR4Volumes(t *testing.T) {
	b := newBox(t)
	for _, d := range []string{"ro", "rw"} {
		if err := os.Mkdir(filepath.Join(b.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
		b.write(filepath.Join(b.dir, d, "f"), d+"\n")
	}
	b.write(filepath.Join(b.dir, "file"), "single\n")
	b.profile("default", fmt.Sprintf("[[volume]]\nhost = %q\ntarget = \"/mnt/ro\"\n[[volume]]\nhost = %q\ntarget = \"/home/agent/rw\"\nmode = \"rw\"\n[[volume]]\nhost = %q\ntarget = \"/opt/file\"\n",
		b.dir+"/ro", b.dir+"/rw", b.dir+"/file"))
	r := b.run(b.shell("cat /mnt/ro/f ~/rw/f /opt/file; echo x >~/rw/made; for f in /mnt/ro/made /mnt/ro/f /opt/file; do echo x >$f; done"))
	if r.out != "ro\nrw\nsingle\n" || strings.Count(r.err, "Read-only file system") != 3 {
		t.Errorf("want three refusals to write: %v", r)
	}
	if made, err := os.ReadFile(b.dir + "/rw/made"); err != nil || string(made) != "x\n" {
		t.Errorf("the writable volume holds %q, %v", made, err)
	}
	if text, _ := os.ReadFile(b.dir + "/ro/f"); string(text) != "ro\n" {
		t.Errorf("the read-only volume was written: %q", text)
	}
}

// TestSR5VolumeRefusals names what must not be shown.
func TestSR5VolumeRefusals(t *testing.T) {
	b := newBox(t)
	if err := os.MkdirAll(filepath.Join(b.ws, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(b.config(), filepath.Join(b.dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ host, target, want string }{
		{b.home, "/mnt/x", "home directory"},
		{"/", "/mnt/x", "home directory"},
		{b.config(), "/mnt/x", "Lazaret's own"},
		{b.dir + "/link", "/mnt/x", "Lazaret's own"},
		{b.ws, "/mnt/x", "overlaps the workspace"},
		{b.ws + "/sub", "/mnt/x", "overlaps the workspace"},
		{"/usr/share", b.ws + "/sub", "lies in the workspace"},
		{"/usr/share", "/home", "would hide"},
		{"/usr/share", "/proc/x", "reserved"},
		{"/proc", "/mnt/x", "no plain files"},
		{b.dir + "/nowhere", "/mnt/x", "no such file"},
		{"relative", "/mnt/x", "not absolute"},
	} {
		b.profile("default", fmt.Sprintf("[[volume]]\nhost = %q\ntarget = %q\n", c.host, c.target))
		b.refused(b.enter("true"), c.want, "hint:")
	}
	for persist, want := range map[string]string{`["/"]`: "not an absolute, clean path", `["/proc/x"]`: "made anew", `["/opt", "/opt/x"]`: "overlap", `["/usr"]`: "hold back every update", `["x"]`: "not an absolute"} {
		b.profile("default", "persist = "+persist+"\n")
		b.refused(b.enter("true"), want, "hint:")
	}
}
