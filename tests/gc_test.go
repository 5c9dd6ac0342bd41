package tests

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// garbage is what lazaret gc prints.
type garbage struct {
	Actions []struct {
		Kind, ID, Error string
		Ask, Done, Left bool
	}
}

func (b *box) gc(args ...string) (g garbage) {
	b.t.Helper()
	out := b.ok(b.lazaret(append([]string{"gc", "--json"}, args...)...))
	if err := json.Unmarshal([]byte(out), &g); err != nil {
		b.t.Fatalf("gc: %v: %s", err, out)
	}
	return g
}

func (g garbage) kinds() (out []string) {
	for _, a := range g.Actions {
		out = append(out, a.Kind)
	}
	return out
}

// killAll kills all processes of the running Domain.
func (b *box) killAll(client *proc) {
	b.t.Helper()
	_ = syscall.Kill(b.theOne(coordinator).pid, syscall.SIGKILL)
	_ = client.Process.Kill()
	<-client.done
	b.wantNoProcess(gone)
}

// TestFR7GCAfterKill kills everything of a Domain on an image and lets gc clear it, at the first try and when gc itself is
// stopped at each of its steps.
func TestFR7GCAfterKill(t *testing.T) {
	b := newBox(t)
	busybox(t).WriteOCI(t, b.dir+"/img", "")
	ref := "oci:" + b.dir + "/img"
	b.ok(b.lazaret("image", "pull", "--no-podman", ref))
	b.useImage(ref, "")
	for _, step := range []string{"", "locked", "remove runtime entry", "remove lock", "remove runtime directory", "pin: remove"} {
		cmd := b.lazaret("enter", "img", "--", "sh", "-c", "echo kept >~/f; touch running; sleep 1000")
		client := b.start(cmd)
		b.waitFile("running")
		b.killAll(client)
		_ = os.Remove(filepath.Join(b.ws, "running"))
		if kinds := b.gc("--dry-run").kinds(); !slices.Equal(kinds, []string{"transient", "pin"}) {
			t.Errorf("gc would remove %q", kinds)
		}
		if step != "" {
			b.extra = []string{"LAZARET_FAIL_AT=" + step}
			if r := b.run(b.lazaret("gc")); r.status == 0 {
				t.Errorf("gc did not stop at %q: %v", step, r)
			}
			b.extra = nil
			b.wantNoProcess(gone)
		}
		b.gc()
		b.wantNoFile(0)
		if g := b.gc(); len(g.Actions) != 0 {
			t.Errorf("after gc, stopped at %q, gc finds %+v", step, g)
		}
	}
	b.want("cat ~/f", "kept\n")
	b.ok(b.lazaret("image", "rm", ref))
}

// TestGCBesideRunning runs gc beside a running Domain, and beside one that starts.
func TestGCBesideRunning(t *testing.T) {
	b := newBox(t)
	_, release := b.hold()
	if g := b.gc(); len(g.Actions) != 0 {
		t.Errorf("gc removes something of a running Domain: %+v", g)
	}
	b.ok(b.shell("echo still >~/f; cat ~/f"))
	id := filepath.Base(b.domainRoot())
	b.refused(b.lazaret("gc", "--state", id, "--force"), "its Domain runs", "hint: leave its sessions")
	release()
	b.wantNoProcess(gone)
	for range 3 {
		g := b.start(b.lazaret("gc"))
		b.ok(b.shell("cat ~/f"))
		if r := g.wait(patience); r.status != 0 {
			t.Errorf("gc beside a start: %v", r)
		}
	}
}

// domainRoot returns the only Domain Root.
func (b *box) domainRoot() string {
	b.t.Helper()
	roots, _ := filepath.Glob(filepath.Join(b.storage(), "domains/*"))
	if len(roots) != 1 {
		b.t.Fatalf("Domain Roots: %q", roots)
	}
	return roots[0]
}

// TestSR11GCState removes what persists only when it is named, whole, and also after an interruption.
func TestSR11GCState(t *testing.T) {
	b := newBox(t)
	ws := filepath.Join(b.dir, "old")
	for _, step := range []string{"", "rename state", "remove state"} {
		if err := os.Mkdir(ws, 0o700); err != nil {
			t.Fatal(err)
		}
		b.ok(b.lazaret("enter", "--workspace", ws, "--", "sh", "-c", "echo precious >~/f"))
		b.wantNoProcess(gone)
		b.refused(b.lazaret("gc", "--state", ws), "exists", "hint: add --force")
		b.refused(b.lazaret("gc", "--state", "nobody"), "no Domain has that ID", "hint:")
		if err := os.RemoveAll(ws); err != nil {
			t.Fatal(err)
		}
		g := b.gc()
		if len(g.Actions) != 1 || g.Actions[0].Kind != "state" || !g.Actions[0].Ask || g.Actions[0].Done {
			t.Errorf("want one thing that is kept until it is named: %+v", g)
		}
		root := b.domainRoot()
		if step != "" {
			b.extra = []string{"LAZARET_FAIL_AT=" + step}
			b.run(b.lazaret("gc", "--state", ws))
			b.extra = nil
			b.wantNoProcess(gone)
			b.gc("--dry-run")
			// Whole, or marked for removal.
			if _, err := os.Stat(root); (err == nil) != (step == "rename state") {
				t.Errorf("stopped at %q: %v", step, err)
			}
		}
		if _, err := os.Stat(root); err == nil {
			b.gc("--state", ws)
		} else {
			b.gc()
		}
		if left, _ := os.ReadDir(filepath.Join(b.storage(), "domains")); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
		b.wantNoFile(0)
	}
	if out := b.ok(b.lazaret("gc")); !strings.Contains(out, "nothing to remove") {
		t.Errorf("gc: %s", out)
	}
}
