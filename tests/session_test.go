package tests

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestSessionExitStatus(t *testing.T) {
	b := newBox(t)
	_, release := b.hold() // so that the others only join
	for script, want := range map[string]int{
		"true": 0, "false": 1, "exit 42": 42, "exit 255": 255, "kill -TERM $$": 128 + 15, "kill -KILL $$": 128 + 9, "kill -SEGV $$": 128 + 11,
	} {
		if r := b.run(b.shell(script)); r.status != want || r.out+r.err != "" {
			t.Errorf("%q: want status %d and silence: %v", script, want, r)
		}
	}
	b.refused(b.enter("no-such-command"), `command "no-such-command"`, "not found in the sandbox", "lazaret: hint:")
	b.write(filepath.Join(b.ws, "plain"), "echo no\n")
	b.refused(b.enter("./plain"), `command "./plain"`, "may not execute", "chmod +x")
	release()
}

func TestSessionStreamsAreSeparate(t *testing.T) {
	b := newBox(t)
	cmd := b.shell("cat; echo to-err >&2; echo to-out; test -t 0 || echo no terminal")
	cmd.Stdin = strings.NewReader("from stdin\n")
	if r := b.run(cmd); r.status != 0 || r.out != "from stdin\nto-out\nno terminal\n" || r.err != warnings()+"to-err\n" {
		t.Errorf("streams are mixed or changed: %v", r)
	}
}

// warnings is what Lazaret tells this user at each start: one line for real root, nothing for others.
func warnings() string {
	if os.Getuid() == 0 {
		return "lazaret: warning: you are root: files that the agent makes in the workspace belong to root; run Lazaret as an ordinary user if you can\n"
	}
	return ""
}

// TestSessionIsBinarySafe pipes 100 MB through stdin and stdout and compares digests.
func TestSessionIsBinarySafe(t *testing.T) {
	size := int64(100 << 20)
	if testing.Short() {
		size = 8 << 20
	}
	b := newBox(t)
	sent, got := sha256.New(), sha256.New()
	cmd := b.enter("cat")
	cmd.Stdin = io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
	var n counter
	cmd.Stdout = io.MultiWriter(got, &n)
	r := b.run(cmd)
	if r.status != 0 || int64(n) != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("%d of %d bytes came back, %x became %x: %v", n, size, sent.Sum(nil), got.Sum(nil), r)
	}
	t.Logf("%d MB in and out in %v", size>>20, r.took)
}

type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

// TestSessionBackPressure stops reading: the writer in the sandbox must stop soon, and nobody may collect what it wrote.
func TestSessionBackPressure(t *testing.T) {
	b := newBox(t)
	cmd := b.shell(`i=0; while :; do head -c 65536 /dev/zero; i=$((i+1)); echo $i >blocks; done`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := b.start(cmd)
	if _, err := io.ReadFull(out, make([]byte, 256<<10)); err != nil {
		t.Fatal(err)
	}
	blocks := func() int {
		n, _ := strconv.Atoi(strings.TrimSpace(b.readFile("blocks")))
		return n
	}
	b.waitFile("blocks")
	for last := -1; last != blocks(); time.Sleep(500 * time.Millisecond) {
		last = blocks()
		if last > 256 {
			t.Fatalf("the writer wrote %d blocks of 64 KiB that nobody reads", last)
		}
	}
	var rss int
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Process.Pid))
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, _ = fmt.Sscan(v, &rss)
		}
	}
	if rss == 0 || rss > 64<<10 {
		t.Errorf("the client has %d KiB resident while its reader is slow", rss)
	}
	_ = p.Process.Signal(syscall.SIGTERM)
	go func() { _, _ = io.Copy(io.Discard, out) }()
	if r := p.wait(patience); r.status != 128+15 {
		t.Errorf("want the end by SIGTERM: %v", r)
	}
}

func TestSessionReaderLeavesEarly(t *testing.T) {
	b := newBox(t)
	cmd := b.enter("cat", "/dev/zero")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := b.start(cmd)
	if _, err := io.ReadFull(out, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	out.Close()
	// gVisor gives EPIPE for a pipe of the host, and no SIGPIPE: cat says so and ends with 1.
	if r := p.wait(patience); r.status != 128+13 && r.status != 1 {
		t.Errorf("want the writer to end: %v", r)
	}
}

func TestSessionSignalsAreForwarded(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	for sig, name := range map[syscall.Signal]string{
		syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP", syscall.SIGQUIT: "QUIT", syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2",
	} {
		cmd := b.shell(`trap "echo got; exit 7" ` + name + `; touch trap-` + name + `; while :; do sleep 0.05; done`)
		var out bytes.Buffer
		cmd.Stdout = &out
		p := b.start(cmd)
		b.waitFile("trap-" + name)
		_ = p.Process.Signal(sig)
		if r := p.wait(patience); r.status != 7 || out.String() != "got\n" {
			t.Errorf("SIG%s handled: want status 7: %v %q", name, r, out.String())
		}
	}
	p := b.start(b.shell("touch plain; exec sleep 1000"))
	b.waitFile("plain")
	_ = p.Process.Signal(syscall.SIGTERM)
	if r := p.wait(patience); r.status != 128+15 {
		t.Errorf("SIGTERM not handled: want status 143: %v", r)
	}
	release()
}

// TestSessionJoin is FR-2: all sessions of a Domain share one coordinator and one sandbox, and are told apart.
func TestSessionJoin(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	b.ok(b.shell("echo shared >/tmp/note; echo more >/var/tmp/note"))
	if out := b.ok(b.shell("cat /tmp/note /var/tmp/note")); out != "shared\nmore\n" {
		t.Errorf("a second session does not see the first one's files: %q", out)
	}
	b.theOne(coordinator)
	b.theOne(sandbox)
	ids := map[string]bool{}
	for range 3 {
		ids[b.ok(b.shell("echo $LAZARET_SESSION"))] = true
	}
	if len(ids) != 3 {
		t.Errorf("sessions have the same ID: %v", ids)
	}
	release()
	b.wantNoProcess(10 * time.Second)
	if out := b.ok(b.shell("ls /tmp /var/tmp")); strings.Contains(out, "note") {
		t.Errorf("FR-6: the throw-away files are still there: %q", out)
	}
}

// TestSessionSimultaneousStart has two clients start one Domain: each waits in /tmp for the other.
func TestSessionSimultaneousStart(t *testing.T) {
	b := newBox(t)
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	for range rounds {
		one := b.start(b.shell("touch /tmp/one; until [ -e /tmp/two ]; do sleep 0.05; done"))
		two := b.start(b.shell("touch /tmp/two; until [ -e /tmp/one ]; do sleep 0.05; done"))
		if r1, r2 := one.wait(patience), two.wait(patience); r1.status != 0 || r2.status != 0 {
			t.Errorf("want both in one sandbox: %v, %v", r1, r2)
		}
	}
}

// TestSessionLeavesProcessBehind: a daemon that holds the streams does not keep the client, and goes with the Domain.
func TestSessionLeavesProcessBehind(t *testing.T) {
	b := newBox(t)
	r := b.run(b.shell("sleep 1000 & echo done"))
	if r.status != 0 || r.out != "done\n" {
		t.Errorf("want the shell's end only: %v", r)
	}
	b.wantNothingLeft()
}

func TestSessionLinger(t *testing.T) {
	b := newBox(t)
	b.profile("default", "linger = \"60s\"\n")
	b.ok(b.shell("echo kept >/tmp/note"))
	if out := b.ok(b.shell("cat /tmp/note")); out != "kept\n" {
		t.Errorf("the Domain did not linger: %q", out)
	}
	_ = syscall.Kill(b.theOne(coordinator).pid, syscall.SIGKILL)
	b.wantNoProcess(2 * time.Second)
	b.profile("default", "linger = \"0s\"\n")
	b.ok(b.enter("true")) // clears what the killed one left
}

// TestFingerprintMismatch refuses to join with another configuration, and names what differs.
func TestFingerprintMismatch(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	b.profile("default", "tmp_size = \"64m\"\n")
	b.refused(b.enter("true"), "join the running Domain", `tmp_size is 1g, now 64m`, "lazaret: hint: leave its other sessions first")
	if err := os.RemoveAll(b.config()); err != nil {
		t.Fatal(err)
	}
	b.ok(b.enter("true"))
	release()
}

func TestSessionStartsInCurrentDirectory(t *testing.T) {
	b := newBox(t)
	b.host("git", "init", "-q", ".")
	sub := filepath.Join(b.ws, "a", "b c")
	if err := os.MkdirAll(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := b.shell("pwd; ls -d ../../.git")
	cmd.Dir = sub
	if out := b.ok(cmd); out != sub+"\n../../.git\n" {
		t.Errorf("want to start in %s, in the work tree: %q", sub, out)
	}
	link := filepath.Join(b.dir, "link")
	if err := os.Symlink(b.ws, link); err != nil {
		t.Fatal(err)
	}
	cmd = b.lazaret("enter", "--workspace", link, "--", "pwd")
	cmd.Dir = b.home
	if out := b.ok(cmd); out != b.ws+"\n" {
		t.Errorf("want the workspace's canonical name %s: %q", b.ws, out)
	}
}

// TestWorkspaceBelowTmp puts the workspace where the sandbox has a file system of its own.
func TestWorkspaceBelowTmp(t *testing.T) {
	b := newBoxIn(t, "/tmp")
	if out := b.ok(b.shell("echo x >made; pwd; touch /tmp/other; ls -a ..")); out != b.ws+"\n.\n..\nws\n" {
		t.Errorf("got %q", out)
	}
	if b.readFile("made") != "x\n" {
		t.Error("the file is not on the host")
	}
}

func TestProfileErrors(t *testing.T) {
	b := newBox(t)
	for text, want := range map[string][]string{
		"linger = \"1s\"\nimgae = \"host\"\n":    {"default.toml:2", `there is no key "imgae"`},
		"\n\nlinger = \"sometimes\"\n":           {"default.toml:3", `"sometimes" is no duration`},
		"tmp_size = [\n":                         {"default.toml:"},
		"image = \"no such image\"\n":            {"default.toml", "image"},
		"ephemeral_size = \"1k\"\n":              {"ephemeral_size", "at least"},
		"pass_env = [\"*\"]\n":                   {"pass_env", "every secret of the host"},
		"[env]\n\"A=B\" = \"1\"\n":               {"env:", `"A=B"`},
		"open_files = 1\n":                       {"open_files"},
		"tmp_size = \"99999999999999999999g\"\n": {"default.toml:1", "is no size"},
	} {
		b.profile("default", text)
		b.refused(b.enter("true"), append(want, "lazaret: hint:")...)
	}
	b.refused(b.lazaret("enter", "other", "--", "true"), `profile "other"`, "there is no")
	b.refused(b.lazaret("enter", "../default"), `profile "../default"`)
	b.refused(b.lazaret("enter", "default", "true"), "one word too many", "after --")
	b.profile("default", "")
	if err := os.Chmod(filepath.Join(b.config(), "profiles/default.toml"), 0o666); err != nil {
		t.Fatal(err)
	}
	b.refused(b.enter("true"), "others can write it")
}

// TestSR5WorkspaceRefusals tries each place that a sandbox must not get.
func TestSR5WorkspaceRefusals(t *testing.T) {
	b := newBox(t)
	lz := func(dir string) *exec.Cmd { return b.lazaret("enter", "--workspace", dir, "--", "true") }
	for _, d := range []string{b.config(), b.storage() + "/domains/x", b.runtime + "/lazaret/x"} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(b.ws, "link")
	if err := os.Symlink(b.home, link); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{
		"/":                           "contains the home directory",
		b.home:                        "is the home directory",
		link:                          "is the home directory",
		b.ws + "/../home":             "is the home directory",
		b.dir:                         "contains the home directory",
		b.home + "/.config":           "contains Lazaret's configuration",
		b.config():                    "is Lazaret's configuration",
		b.home + "/.local":            "contains the Storage Root",
		b.storage():                   "is the Storage Root",
		b.storage() + "/domains/x":    "lies in the Storage Root",
		b.runtime:                     "contains the runtime directory",
		b.runtime + "/lazaret":        "is the runtime directory",
		b.runtime + "/lazaret/x":      "lies in the runtime directory",
		"/proc/self":                  "is the kernel's",
		"/sys":                        "is the kernel's",
		"/dev/shm":                    "is the kernel's",
		filepath.Join(b.ws, "absent"): "no such file or directory",
	} {
		b.refused(lz(dir), want, "lazaret: hint:")
	}
	// The directories are made by Lazaret only; these two were made for the test.
	_ = os.Remove(b.runtime + "/lazaret/x")
	_ = os.Remove(b.storage() + "/domains/x")

	// A work tree of the home directory itself, found from below.
	b.host("git", "init", "-q", b.home)
	below := filepath.Join(b.home, "project")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := b.enter("true")
	cmd.Dir = below
	b.refused(cmd, "is the home directory")

	// What is not mapped: for an ordinary user root's, for root the ids above the map.
	alien := "/usr/share"
	if os.Getuid() == 0 {
		alien = filepath.Join(b.dir, "alien")
		if err := os.Mkdir(alien, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(alien, 3_000_000_000, 0); err != nil {
			t.Fatal(err)
		}
	}
	b.refused(lz(alien), "not mapped into the sandbox", "lazaret: hint:")
}
