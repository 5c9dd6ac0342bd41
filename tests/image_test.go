package tests

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"lazaret.dev/lazaret/overlay/nstest"
)

// busybox is a small image; extra members are added to it.
func busybox(t *testing.T, extra ...nstest.File) nstest.Image {
	extra = append(extra, nstest.File{Name: "usr/local/bin/"}, nstest.File{Name: "etc/skel/"}, nstest.File{Name: "etc/skel/.profile", Body: "# of the image\n"})
	return nstest.Image{Layers: [][]byte{nstest.Busybox(t, extra...)}, Gzip: true, Config: v1.ImageConfig{Env: []string{"PATH=/bin:/usr/local/bin", "FROM_IMAGE=yes", "HOME=/wrong"}}}
}

// useImage writes the profile "img" on a reference.
func (b *box) useImage(ref string, more string) {
	b.profile("img", fmt.Sprintf("image = %q\n%s", ref, more))
}

func (b *box) inImage(script string) result {
	b.t.Helper()
	return b.run(b.lazaret("enter", "img", "--", "sh", "-c", script))
}

// want runs a script on the image, which must print exactly out.
func (b *box) want(script, out string) {
	b.t.Helper()
	if r := b.inImage(script); r.status != 0 || r.out != out {
		b.t.Errorf("%s: want %q: %v", script, out, r)
	}
}

// TestFR4ImageEveryWay pulls the same image by each way and starts on it after its source is gone: no start needs the network.
func TestFR4ImageEveryWay(t *testing.T) {
	b := newBox(t)
	img := busybox(t, nstest.File{Name: "marker", Body: "from the image\n"})
	for _, way := range []struct {
		name, ref string
		write     func(path string)
		own       bool
	}{
		{"oci through Podman", "oci:" + b.dir + "/oci:v1", func(p string) { img.WriteOCI(t, p, "v1") }, false},
		{"oci-archive through Podman", "oci-archive:" + b.dir + "/oci.tar:v1", func(p string) { img.WriteOCIArchive(t, p, "v1") }, false},
		{"oci by ourselves", "oci:" + b.dir + "/own", func(p string) { img.WriteOCI(t, p, "v1") }, true},
		{"docker-archive by ourselves", "docker-archive:" + b.dir + "/docker.tar", func(p string) { img.WriteDockerArchive(t, p, "localhost/x:1") }, true},
	} {
		t.Run(way.name, func(t *testing.T) {
			args := []string{"image", "pull", way.ref}
			if way.own {
				args = append(args, "--no-podman")
			} else {
				needsProgram(t, "podman")
			}
			_, path, _ := strings.Cut(strings.TrimSuffix(way.ref, ":v1"), ":")
			way.write(path)
			b.useImage(way.ref, "")
			b.refused(b.lazaret("enter", "img", "--", "true"), "image is not pulled", "hint: lazaret image pull "+way.ref)
			r := b.run(b.lazaret(args...))
			if r.status != 0 || !strings.HasPrefix(r.out, img.ID()[:12]) || r.err == "" {
				t.Fatalf("want the image's ID and progress: %v", r)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			b.want(`cat /marker; id -u; id -un; echo $FROM_IMAGE $HOME $PATH; cat ~/.profile; echo w >made; cat /proc/1/stat | { read a; test -n "$a"; }`,
				"from the image\n1000\nagent\nyes /home/agent /home/agent/.local/bin:/run/lazaret/bin:/bin:/usr/local/bin\n# of the image\n")
			if b.readFile("made") != "w\n" {
				t.Error("the workspace is not the host's")
			}
			b.ok(b.lazaret("image", "rm", way.ref))
		})
	}
	if out := b.ok(b.lazaret("image", "ls", "--json")); strings.TrimSpace(out) != "null" {
		t.Errorf("images left: %s", out)
	}
}

// TestFR4ImageContract starts on images that lack something.
func TestFR4ImageContract(t *testing.T) {
	b := newBox(t)
	bin, err := os.ReadFile("/bin/busybox")
	needs(t, "static busybox", err)
	pull := func(name string, files ...nstest.File) {
		img := nstest.Image{Layers: [][]byte{nstest.Layer(t, files...)}}
		img.WriteOCI(t, filepath.Join(b.dir, name), "")
		b.ok(b.lazaret("image", "pull", "--no-podman", "oci:"+filepath.Join(b.dir, name)))
		b.useImage("oci:"+filepath.Join(b.dir, name), "")
	}
	pull("noshell", nstest.File{Name: "id", Mode: 0o755, Body: string(bin)})
	b.refused(b.lazaret("enter", "img"), "has no shell", "hint: name a program")
	r := b.run(b.lazaret("enter", "img", "--", "/id", "-un"))
	if r.status != 0 || r.out != "agent\n" || !strings.Contains(r.err, "no usable /bin/sh") {
		t.Errorf("want the agent's name and a note about the shell: %v", r)
	}
	b.refused(b.lazaret("enter", "img", "--", "missing"), "not found in the sandbox", "programs of the image")
	pull("link", nstest.File{Name: "bin/"}, nstest.File{Name: "bin/sh", Mode: 0o755, Body: string(bin)}, nstest.File{Name: "home", Type: tar.TypeSymlink, Link: "/srv"})
	b.refused(b.lazaret("enter", "img", "--", "true"), "home", "symbolic link", "hint:")
	pull("named", nstest.File{Name: "bin/"}, nstest.File{Name: "bin/sh", Mode: 0o755, Body: string(bin)}, nstest.File{Name: "etc/"},
		nstest.File{Name: "etc/passwd", Body: "root:x:0:0::/:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"})
	b.want("echo $USER; /bin/sh -c 'echo $HOME'", "node\n/home/agent\n")
}

// TestFR4ManyDomains runs five Domains on one image, which cannot be removed meanwhile.
func TestFR4ManyDomains(t *testing.T) {
	b := newBox(t)
	busybox(t).WriteOCI(t, b.dir+"/img", "")
	ref := "oci:" + b.dir + "/img"
	b.ok(b.lazaret("image", "pull", "--no-podman", ref))
	b.useImage(ref, "")
	var release []func()
	for i := range 5 {
		ws := filepath.Join(b.dir, fmt.Sprint("ws", i))
		if err := os.Mkdir(ws, 0o700); err != nil {
			t.Fatal(err)
		}
		cmd := b.lazaret("enter", "img", "--workspace", ws, "--", "sh", "-c", fmt.Sprintf("echo %d >~/mine; echo ready; cat; cat ~/mine >back", i))
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		p := b.start(cmd)
		release = append(release, func() {
			in.Close()
			if r := p.wait(patience); r.status != 0 {
				t.Errorf("Domain %d: %v", i, r)
			}
			if back, err := os.ReadFile(filepath.Join(ws, "back")); err != nil || string(back) != fmt.Sprintln(i) {
				t.Errorf("Domain %d has %q in its home: %v", i, back, err)
			}
		})
	}
	eventually(t, patience, "five Domains on the image", func() bool {
		return strings.Contains(b.ok(b.lazaret("image", "ls", "--json")), `"pins": 5`)
	})
	b.refused(b.lazaret("image", "rm", ref), "image is in use", "hint: end the sessions")
	b.ok(b.lazaret("gc"))
	for _, f := range release {
		f()
	}
	eventually(t, patience, "nobody on the image", func() bool {
		return strings.Contains(b.ok(b.lazaret("image", "ls", "--json")), `"pins": 0`)
	})
	b.wantNoProcess(patience)
	b.ok(b.lazaret("image", "rm", ref))
}

// TestFR4UpdateUnderAnchor updates an image under what the agent has put over it: nothing starts before a choice.
func TestFR4UpdateUnderAnchor(t *testing.T) {
	b := newBox(t)
	ref := "oci:" + b.dir + "/img"
	busybox(t, nstest.File{Name: "usr/local/bin/tool", Mode: 0o755, Body: "#!/bin/sh\necho one\n"}).WriteOCI(t, b.dir+"/img", "")
	b.ok(b.lazaret("image", "pull", "--no-podman", ref))
	b.useImage(ref, `persist = ["/home/agent", "/usr/local"]`)
	b.want("tool; rm /usr/local/bin/tool; echo 'echo mine' >/usr/local/bin/tool; chmod +x /usr/local/bin/tool; echo kept >~/note; tool", "one\nmine\n")
	b.want("tool", "mine\n")

	if err := os.RemoveAll(b.dir + "/img"); err != nil {
		t.Fatal(err)
	}
	busybox(t, nstest.File{Name: "usr/local/bin/tool", Mode: 0o755, Body: "#!/bin/sh\necho two\n"}).WriteOCI(t, b.dir+"/img", "")
	b.want("tool", "mine\n") // an image stays as it was until it is updated
	if out := b.ok(b.lazaret("image", "update", ref)); !strings.Contains(out, "(new)") {
		t.Errorf("update: %s", out)
	}
	b.refused(b.lazaret("enter", "img", "--", "true"), "written over another base image and shadows 1", "lazaret anchor keep /usr/local")
	if out := b.ok(b.lazaret("anchor", "ls", "--profile", "img")); !strings.Contains(out, "of another base") {
		t.Errorf("anchor ls: %s", out)
	}
	if out := b.ok(b.lazaret("anchor", "diff", "--profile", "img", "/usr/local")); out != "changed  \"bin/tool\"\n" {
		t.Errorf("anchor diff: %s", out)
	}
	name := strings.TrimSpace(b.ok(b.lazaret("anchor", "snapshot", "--profile", "img", "/usr/local", "--keep")))
	b.want("tool; cat ~/note", "mine\nkept\n")
	b.ok(b.lazaret("anchor", "reset", "--yes", "--profile", "img", "/usr/local"))
	b.want("tool; cat ~/note", "two\nkept\n")
	b.ok(b.lazaret("anchor", "restore", "--yes", "--profile", "img", "/usr/local", name))
	b.refused(b.lazaret("enter", "img", "--", "true"), "another base image") // the snapshot is of the old one
	b.ok(b.lazaret("anchor", "keep", "--profile", "img", "/usr/local"))
	b.want("tool", "mine\n")
	if out := b.ok(b.lazaret("gc")); !strings.Contains(out, "image  ") || !strings.Contains(out, "removed") {
		t.Errorf("gc did not remove the old image: %s", out)
	}
	b.want("tool", "mine\n")
}

// TestFR4AskOnTerminal lets the developer choose at the start.
func TestFR4AskOnTerminal(t *testing.T) {
	b := newBox(t)
	ref := "oci:" + b.dir + "/img"
	release := func(version string) {
		b.t.Helper()
		if err := os.RemoveAll(b.dir + "/img"); err != nil {
			t.Fatal(err)
		}
		busybox(t, nstest.File{Name: "usr/local/bin/tool", Mode: 0o755, Body: "#!/bin/sh\necho " + version + "\n"}).WriteOCI(t, b.dir+"/img", "")
		b.ok(b.lazaret("image", "pull", "--no-podman", ref))
	}
	release("one")
	b.useImage(ref, `persist = ["/usr/local"]`)
	b.want("rm /usr/local/bin/tool; echo 'echo mine' >/usr/local/bin/tool; chmod +x /usr/local/bin/tool; tool", "mine\n")
	for _, c := range []struct{ version, answer, want string }{
		{"two", "what\nsnapshot\n", "<mine>"}, {"three", "a\n", "nothing was chosen for /usr/local"}, {"four", "k\n", "<mine>"}, {"five", "r\n", "<five>"},
	} {
		release(c.version)
		s, p := b.onTerminal(b.lazaret("enter", "img", "--", "sh", "-c", "echo \"<$(tool)>\""))
		for answer := range strings.Lines(c.answer) {
			s.wait("[a]bort?")
			if !strings.Contains(s.text(), `changed "bin/tool"`) && answer != "snapshot\n" {
				t.Errorf("what is shadowed is not shown: %q", s.text())
			}
			s.clear()
			s.typeIn(answer)
		}
		s.wait(c.want)
		p.wait(patience)
	}
	if out := b.ok(b.lazaret("anchor", "ls", "--profile", "img")); strings.Count(out, "snapshot") != 1 {
		t.Errorf("anchor ls: %s", out)
	}
}

// TestPullInterrupted stops a pull with Ctrl-C: it ends soon, nothing runs on, and the image store can be used again.
func TestPullInterrupted(t *testing.T) {
	b := newBox(t)
	fake := filepath.Join(b.dir, "fake")
	if err := os.Mkdir(fake, 0o755); err != nil {
		t.Fatal(err)
	}
	b.write(filepath.Join(fake, "podman"), "#!/bin/sh\necho Copying blob >&2\nsleep 1000 &\nwait\n")
	if err := os.Chmod(filepath.Join(fake, "podman"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.extra = []string{"PATH=" + fake + ":" + os.Getenv("PATH")}
	cmd := b.lazaret("image", "pull", "docker.io/library/none:1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := b.start(cmd)
	line := make([]byte, 64)
	if n, err := stderr.Read(line); err != nil || string(line[:n]) != "Copying blob\n" {
		t.Fatalf("progress: %q, %v", line[:n], err)
	}
	_ = p.Process.Signal(os.Interrupt)
	if r := p.wait(patience); r.status != 125 {
		t.Errorf("interrupted: %v", r)
	}
	b.wantNoProcess(gone)
	b.extra = []string{"PATH=/nonexistent"}
	b.refused(b.lazaret("image", "pull", "docker.io/library/none:1"), "podman is not installed", "hint: install podman")
	b.extra = nil
	if out := b.ok(b.lazaret("image", "ls", "--json")); strings.TrimSpace(out) != "null" {
		t.Errorf("images: %s", out)
	}
}
