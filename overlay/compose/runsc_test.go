package compose

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/nstest"
)

// runsc runs a shell script on a composed file system, as the product does, and returns its output.
func runsc(t testing.TB, r *Result, uid uint32, script string) (string, error) {
	t.Helper()
	program, err := filepath.Abs("../../bin/lazaret-runsc")
	if err == nil {
		_, err = os.Stat(program)
	}
	nstest.Needs(t, "bin/lazaret-runsc", err)
	dir := tempDir(t)
	t.Cleanup(func() { must(t, mount.Detach(dir+"/root/null-netns")) }) // runsc's own, gone with the namespace in the product
	spec := specs.Spec{
		Version:  "1.0.2",
		Root:     &specs.Root{Path: r.Root},
		Hostname: "sandbox",
		Process: &specs.Process{Args: []string{"/bin/sh", "-c", script}, Cwd: "/", Env: []string{"PATH=/bin", "HOME=/home/agent"},
			User: specs.User{UID: uid, GID: uid}},
		Mounts: []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
			{Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace}}},
	}
	if uid == 0 {
		caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID"}
		spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
	}
	for _, m := range r.Mounts {
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: m.Destination, Type: "bind", Source: m.Source, Options: m.Options})
	}
	data, err := json.Marshal(spec)
	must(t, err, os.Mkdir(dir+"/root", 0o700), os.WriteFile(dir+"/config.json", data, 0o600))
	cmd := exec.Command(program, "--root", dir+"/root", "--ignore-cgroups", "--network=none", "--overlay2="+r.Overlay2,
		"--debug-log", dir+"/log/", "run", "--bundle", dir, fmt.Sprint("t", time.Now().UnixNano()))
	out, err := cmd.CombinedOutput()
	if err != nil && len(out) == 0 {
		logs, _ := filepath.Glob(dir + "/log/*")
		for _, l := range logs {
			b, _ := os.ReadFile(l)
			t.Logf("%s: …%s", l, b[max(0, len(b)-2000):])
		}
	}
	return string(out), err
}

func persistentImage(t testing.TB) nstest.Image {
	return nstest.Image{Layers: [][]byte{
		nstest.Busybox(t,
			nstest.File{Name: "home/agent/", UID: 1000, GID: 1000}, nstest.File{Name: "home/agent/.profile", UID: 1000, GID: 1000, Body: "profile"},
			nstest.File{Name: "home/agent/dir/", UID: 1000, GID: 1000}, nstest.File{Name: "home/agent/dir/one", UID: 1000, GID: 1000, Body: "1"},
			nstest.File{Name: "home/agent/dir/two", UID: 1000, GID: 1000, Body: "2"}, nstest.File{Name: "home/agent/gone", Body: "x"},
			nstest.File{Name: "usr/local/tool", Mode: 0o755, Body: "#!/bin/sh\necho v1\n"}),
		nstest.Layer(t, nstest.File{Name: "home/agent/.wh.gone"}),
	}}
}

// TestDX2PersistsThroughRunsc: deletions, renames, links, set-id bits and owners in anchors
// survive a restart in the real sandbox; all else vanishes.
func TestDX2PersistsThroughRunsc(t *testing.T) {
	_, img := imported(t, persistentImage(t))
	in := input(t, img)
	in.Points = in.Points[:2]
	r := composed(t, in)
	out, err := runsc(t, r, 1000, `set -e
		cd /home/agent; id -un; test ! -e gone
		rm .profile; mv dir/two dir/three; echo new > dir/one; echo mine > mine; ln mine mine2; rm -r dir; mkdir dir; echo again > dir/four
		mkdir sub; echo a > sub/a; mv sub moved; ln -s /etc/passwd link; touch -d @1000000000 mine
		echo x > /tmp/t && ! echo x 2>/dev/null > /usr/local/no; echo first done`)
	if err != nil || !strings.HasSuffix(out, "first done\n") || !strings.HasPrefix(out, "agent\n") {
		t.Fatalf("%v: %s", err, out)
	}
	must(t, r.Close())
	r = composed(t, in)
	out, err = runsc(t, r, 0, `set -e
		echo tool > /usr/local/tool; mkdir -p /usr/local/bin; cp /bin/busybox /usr/local/bin/su2; chown 1000:50 /usr/local/bin/su2; chmod 4750 /usr/local/bin/su2
		rm -r /opt 2>/dev/null || true; rm /bin/cat; echo e > /ephemeral; echo e > /etc/e; mkdir /usr/other; echo second done`)
	if err != nil || out != "second done\n" {
		t.Fatalf("%v: %s", err, out)
	}
	must(t, r.Close())
	r = composed(t, in)
	out, err = runsc(t, r, 1000, `cd /home/agent; ls -A; ls dir; /bin/cat dir/four mine2 moved/a /usr/local/tool; stat -c '%h %u:%g %a %Y' mine; stat -c '%u:%g %a' /usr/local/bin/su2
		ls -d /ephemeral /etc/e /usr/other /bin/cat /tmp/t 2>/dev/null`)
	want := "dir\nlink\nmine\nmine2\nmoved\nfour\nagain\nmine\na\ntool\n2 1000:1000 644 1000000000\n1000:50 4750\n/bin/cat\n"
	if out != want {
		t.Fatalf("%v\n%s\nwant\n%s", err, out, want)
	}
	// A full ephemeral layer is ENOSPC inside, and the anchors still work.
	out, _ = runsc(t, r, 0, `dd if=/dev/zero of=/fill bs=1M count=100 2>&1 | grep -o 'No space left on device'; echo ok > /home/agent/ok && cat /home/agent/ok`)
	if out != "No space left on device\nok\n" && out != "ok\n" {
		t.Fatalf("%s", out)
	}
	if !strings.HasPrefix(out, "No space") {
		out, _ = runsc(t, r, 0, `dd if=/dev/zero of=/fill bs=1M count=100; echo $?; ls -l /fill`)
		t.Fatalf("no limit: %s", out)
	}
	// The host's disk has nothing of it afterwards.
	must(t, r.Close())
	if left, _ := os.ReadDir(in.ScratchDir); len(left) != 0 {
		t.Fatalf("left in the scratch directory: %v", left)
	}
}

// BenchmarkRunscSmallFiles compares small-file work in an ephemeral and an anchored path.
func BenchmarkRunscSmallFiles(b *testing.B) {
	_, img := imported(b, persistentImage(b))
	for name, where := range map[string]string{"ephemeral": "/root", "anchored": "/home/agent"} {
		b.Run(name, func(b *testing.B) {
			in := input(b, img)
			r := composed(b, in)
			for b.Loop() {
				out, err := runsc(b, r, 0, `cd `+where+`; for i in 1 2 3 4 5 6 7 8 9 10; do mkdir d$i; for j in 0 1 2 3 4 5 6 7 8 9; do for k in 0 1 2 3 4 5 6 7 8 9; do echo x > d$i/f$j$k; done; done; done; rm -r d*; echo ok`)
				if err != nil || out != "ok\n" {
					b.Fatal(err, out)
				}
			}
		})
	}
	b.Run("start only", func(b *testing.B) {
		r := composed(b, input(b, img))
		for b.Loop() {
			if out, err := runsc(b, r, 0, "echo ok"); err != nil || out != "ok\n" {
				b.Fatal(err, out)
			}
		}
	})
}
