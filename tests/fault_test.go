package tests

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// gone is within what time nothing of a killed Domain may be left.
const gone = 2 * time.Second

// startSteps reads the steps of a Domain's start from the source, so that a new one is tested too.
func startSteps(t *testing.T) (names []string) {
	src, err := os.ReadFile("../supervisor/domain.go")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(src), ") steps() []step {")
	body, _, _ = strings.Cut(body, "\n}\n")
	for _, m := range regexp.MustCompile(`(?m)^\s*\{"([^"]+)", `).FindAllStringSubmatch(body, -1) {
		names = append(names, m[1])
	}
	if len(names) < 5 {
		t.Fatalf("found no steps in domain.go: %q", names)
	}
	return names
}

// TestFaultStartFailsAtEachStep fails the start at every step: the cause is told, nothing is left, the next start works.
func TestFaultStartFailsAtEachStep(t *testing.T) {
	b := newBox(t)
	for _, step := range startSteps(t) {
		b.extra = []string{"LAZARET_FAIL_AT=" + step}
		b.refused(b.enter("true"), "start sandbox: "+step+": failed on request", "lazaret: hint:")
		b.wantNoProcess(gone)
		b.wantNoMount()
		b.wantNoFile(0)
	}
	b.extra = nil
	b.ok(b.enter("true"))
}

// TestFaultKill kills each process of a running Domain.
func TestFaultKill(t *testing.T) {
	b := newBox(t)
	for _, title := range []string{coordinator, domain, sandbox, gofer, "lazaret enter"} {
		t.Run(strings.Trim(strings.TrimPrefix(title, "lazaret "), "[]"), func(t *testing.T) {
			_ = os.Remove(filepath.Join(b.ws, "running"))
			cmd := b.shell("echo x >>/var/tmp/lost; touch running; exec sleep 1000")
			var said bytes.Buffer
			cmd.Stderr = &said
			p := b.start(cmd)
			b.waitFile("running")
			victim := p.Process.Pid
			if title != "lazaret enter" {
				victim = b.theOne(title).pid
			}
			begin := time.Now()
			if err := kill(b, victim); err != nil {
				t.Fatal(err)
			}
			r := p.wait(patience)
			if title != "lazaret enter" {
				text := said.String()
				if r.status != 125 || !strings.Contains(text, "lazaret: error:") || !strings.Contains(text, "lazaret: hint:") {
					t.Errorf("want an error and advice: %v\n%s", r, text)
				}
				t.Logf("the client says: %s", strings.TrimPrefix(text, warnings()))
			}
			b.wantNoProcess(gone + 3*time.Second) // the orderly end of a session takes some runs of runsc
			t.Logf("all gone after %v", time.Since(begin).Round(time.Millisecond))
			b.wantNoMount()
			if title != coordinator { // nobody is left to remove files; the next start does
				b.wantNoFile(gone)
			}
		})
		if t.Failed() {
			return
		}
	}
	if out := b.ok(b.shell("cat /var/tmp/lost 2>&1; true")); !strings.Contains(out, "No such file") {
		t.Errorf("the throw-away layer of a killed Domain came back: %q", out)
	}
	b.wantNothingLeft()
}

// kill sends SIGKILL, as the owner of the Domain's user namespace where that is needed.
func kill(b *box, pid int) error {
	if err := syscall.Kill(pid, syscall.SIGKILL); err == nil {
		return nil
	}
	b.host("nsenter", "-U", "-t", fmt.Sprint(b.theOne(domain).pid), "--", "kill", "-9", fmt.Sprint(pid))
	return nil
}

// TestFaultKillAtRandom kills the coordinator, or the client, at random moments of the start.
func TestFaultKillAtRandom(t *testing.T) {
	b := newBox(t)
	begin := time.Now()
	b.ok(b.enter("true"))
	cold := time.Since(begin)
	rounds, seed := 12, uint64(time.Now().UnixNano())
	if testing.Short() {
		rounds = 4
	}
	t.Logf("seed %d, a start and end take %v", seed, cold)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for i := range rounds {
		victim := []string{coordinator, "client", domain}[i%3]
		at := time.Duration(rnd.Int64N(int64(cold)))
		p := b.start(b.enter("sleep", "1000"))
		time.Sleep(at)
		if victim == "client" {
			_ = p.Process.Kill()
		} else {
			for deadline := time.Now().Add(5 * time.Second); len(find(victim)) == 0 && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			for _, v := range find(victim) {
				_ = kill(b, v.pid)
			}
		}
		killed := time.Now()
		limit := gone
		if victim != coordinator {
			limit += 5 * time.Second // the coordinator ends the start first
		}
		if r := p.wait(patience); victim != "client" && r.status != 125 {
			t.Errorf("%s killed after %v: want an error of the client: %v", victim, at, r)
		}
		b.wantNoProcess(limit)
		t.Logf("%s killed after %v: all gone after %v", victim, at.Round(time.Millisecond), time.Since(killed).Round(time.Millisecond))
		b.wantNoMount()
		if victim != coordinator {
			b.wantNoFile(0)
		}
		if t.Failed() {
			return
		}
	}
	b.ok(b.enter("true"))
}

// with makes a directory of programs in which some are replaced by scripts.
func (b *box) with(scripts map[string]string) {
	b.t.Helper()
	dir := filepath.Join(b.dir, "bin")
	if err := os.Mkdir(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	for _, name := range []string{"lazaret", "lazaret-runsc", "lazaret-init", "lazaret-escalate"} {
		path := filepath.Join(dir, name)
		if text, ok := scripts[name]; ok {
			if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
				b.t.Fatal(err)
			}
			continue
		}
		b.host("cp", filepath.Join(binDir, name), path)
	}
	b.bin = dir
}

// TestSR2ForeignRuntime replaces lazaret-runsc by another program, and by one of another version.
func TestSR2ForeignRuntime(t *testing.T) {
	for name, c := range map[string]struct{ script, want string }{
		"silent": {"#!/bin/sh\nexec sleep 0\n", "it does not answer with a stamp"},
		"hangs":  {"#!/bin/sh\nexec sleep 1000 3>&-\n", "it does not answer with a stamp"},
		"older":  {"#!/bin/sh\nprintf v0.0.1 >&3\nexec cat\n", `it is "v0.0.1"`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.with(map[string]string{"lazaret-runsc": c.script})
			b.refused(b.enter("true"), "not the lazaret-runsc of this lazaret", c.want)
		})
	}
	b := newBox(t)
	b.with(nil)
	if err := os.Remove(filepath.Join(b.bin, "lazaret-runsc")); err != nil {
		t.Fatal(err)
	}
	b.refused(b.enter("true"), "find lazaret-runsc", "lazaret: hint:")
}

// TestBootFailureShowsCause breaks the bundle between Lazaret and runsc, and the init that runsc starts: what the
// developer reads is the reason of the gofer or of the sandbox.
func TestBootFailureShowsCause(t *testing.T) {
	const edit = "#!/bin/sh\nfor a; do [ \"$b\" = --bundle ] && sed -i '%s' $a/config.json; b=$a; done\nexec %s/lazaret-runsc \"$@\"\n"
	for name, c := range map[string]struct {
		programs map[string]string
		want     []string
	}{
		"mount point in a file": {map[string]string{"lazaret-runsc": fmt.Sprintf(edit, `s#"/dev/shm"#"/proc/version/shm"#`, binDir)}, []string{"start", "/proc/version/shm"}},
		"root is gone":          {map[string]string{"lazaret-runsc": fmt.Sprintf(edit, `s#/stage/base"#/stage/missing"#`, binDir)}, []string{"create", "missing", "no such file"}},
		"init is no program":    {map[string]string{"lazaret-init": "no program\n"}, []string{"start", "exec"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.with(c.programs)
			b.refused(b.enter("true"), append(c.want, "start sandbox: ")...)
			r := b.run(b.enter("true"))
			t.Logf("%s", r.err)
			if strings.Contains(r.err, "EOF") {
				t.Errorf("the cause is hidden: %v", r)
			}
		})
	}
}

// TestSingleID enters as a user who has no subordinate ids: nobody, or an unknown user of a namespace of ours.
func TestSingleID(t *testing.T) {
	b := newBox(t)
	unshare := needsProgram(t, "unshare")
	if os.Getuid() == 0 {
		b.wrap = []string{needsProgram(t, "setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", "--"}
		b.host("chown", "-R", "65534:65534", b.home, b.ws, b.runtime)
		defer b.host("chown", "-R", "0:0", b.home, b.ws, b.runtime)
	} else {
		b.wrap = []string{unshare, "--user", "--map-user=4242", "--map-group=4242", "--"}
	}
	if r := b.run(b.command("true")); r.status != 0 {
		needs(t, "unshare --map-user", fmt.Errorf("%v", r))
	}
	r := b.run(b.shell("id -u; id -un; cat /proc/self/uid_map; echo made >made; touch /etc/x; git init -q . && git status --short"))
	if !strings.HasPrefix(r.out, "0\nagent\n") || !strings.Contains(r.err, "warning: only your own id is mapped") || !strings.Contains(r.err, "subordinate ids") {
		t.Errorf("want a warning and the agent as uid 0: %v", r)
	}
	if r.status != 0 || b.readFile("made") != "made\n" {
		t.Errorf("the workspace is not usable: %v", r)
	}
	var own, ws syscall.Stat_t
	if err := syscall.Stat(filepath.Join(b.ws, "made"), &own); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Stat(b.ws, &ws)
	if own.Uid != ws.Uid || own.Gid != ws.Gid {
		t.Errorf("the file belongs to %d:%d, not to the developer %d:%d", own.Uid, own.Gid, ws.Uid, ws.Gid)
	}
}
