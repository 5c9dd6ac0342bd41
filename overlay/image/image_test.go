package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/nstest"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	nstest.Main()
	if role := nstest.Role(); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(m.Run())
}

var roles = map[string]func() int{
	// pull ROOT RUN REFERENCE own|podman
	"pull": func() int {
		s, err := Open(Config{Root: os.Args[1], Run: os.Args[2], HostUID: 1001, HostGID: 1001})
		if err == nil {
			_, _, err = s.Pull(context.Background(), os.Args[3], PullOptions{Own: os.Args[4] == "own", Environ: os.Environ(), Progress: os.Stdout})
		}
		return status(err)
	},
	// pin ROOT RUN ID: holds a pin until killed
	"pin": func() int {
		s, err := Open(Config{Root: os.Args[1], Run: os.Args[2]})
		var p *Pin
		if err == nil {
			p, err = s.Pin(os.Args[3], "domain-x")
		}
		if err != nil {
			return status(err)
		}
		fmt.Println("pinned")
		time.Sleep(time.Hour)
		return status(p.Release())
	},
}

func status(err error) int {
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

var bg = context.Background()

// lowerDir is a directory whose path Podman accepts after oci: (it makes an image name of it).
func lowerDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lz")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

func newStore(t testing.TB) *Store {
	t.Helper()
	dir, err := os.MkdirTemp("", "lz")
	must(t, err)
	cfg := Config{Root: dir + "/s", Run: dir + "/r", HostUID: 1001, HostGID: 1001}
	s, err := Open(cfg)
	must(t, err)
	t.Cleanup(func() {
		must(t, s.Close(), os.RemoveAll(dir))
	})
	return s
}

func hostile(t testing.TB) nstest.Image {
	bottom := nstest.Busybox(t,
		nstest.File{Name: "opt/"}, nstest.File{Name: "opt/old/"}, nstest.File{Name: "opt/old/f", Body: "old"}, nstest.File{Name: "gone", Body: "x"},
		nstest.File{Name: "opt/su", Mode: 0o4755, Body: "#!"}, nstest.File{Name: "opt/hard", Mode: 0o4755, Type: tar.TypeLink, Link: "opt/su"},
		nstest.File{Name: "opt/owned", UID: 1000, GID: 33, Body: "o", Xattrs: map[string]string{"user.mine": "v"}},
		nstest.File{Name: "opt/high", UID: 65535, GID: 65535})
	top := nstest.Layer(t,
		nstest.File{Name: ".wh.gone"}, nstest.File{Name: "opt/old/.wh..wh..opq"}, nstest.File{Name: "opt/old/new", Body: "new"})
	return nstest.Image{Layers: [][]byte{bottom, top}, Gzip: true, Config: v1.ImageConfig{
		User: "agent", Env: []string{"PATH=/bin", "HOME=/x", "broken"}, WorkingDir: "/opt", Labels: map[string]string{"a": "b"}}}
}

func verifyImage(t testing.TB, s *Store, want nstest.Image, rec Record) {
	t.Helper()
	if rec.ImageID != want.ID() {
		t.Fatalf("image ID %s, want %s", rec.ImageID, want.ID())
	}
	img, err := s.Image(rec.ImageID)
	must(t, err)
	if len(img.Layers) != 2 || img.Config.Config.WorkingDir != "/opt" || img.Config.Config.Labels["a"] != "b" {
		t.Fatalf("image %+v", img)
	}
	for i, l := range want.Layers {
		if img.DiffIDs[i] != digest.FromBytes(l) {
			t.Fatal("diff ids differ")
		}
	}
	top, bottom := img.Layers[0], img.Layers[1]
	var st unix.Stat_t
	must(t, unix.Lstat(top+"/gone", &st))
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Fatalf("whiteout is %o", st.Mode)
	}
	buf := make([]byte, 8)
	if n, err := unix.Lgetxattr(top+"/opt/old", "user.overlay.opaque", buf); err != nil || string(buf[:n]) != "y" {
		t.Fatalf("opaque: %q %v", buf[:n], err)
	}
	must(t, unix.Lstat(bottom+"/opt/hard", &st))
	if st.Nlink != 2 || st.Mode&0o7777 != 0o4755 {
		t.Fatalf("set-id hard link: nlink %d mode %o", st.Nlink, st.Mode)
	}
	must(t, unix.Lstat(bottom+"/opt/owned", &st))
	if st.Uid != 1000 || st.Gid != 33 {
		t.Fatalf("owner %d:%d", st.Uid, st.Gid)
	}
	must(t, unix.Lstat(bottom+"/opt/high", &st))
	if st.Uid != 65535 {
		t.Fatalf("high owner %d", st.Uid)
	}
}

// TestFR4ImageEveryTransport: the same ID and diff ids through Podman and through the own importer.
func TestFR4ImageEveryTransport(t *testing.T) {
	want := hostile(t)
	dir := lowerDir(t)
	want.WriteOCI(t, dir+"/oci", "v1")
	want.WriteOCIArchive(t, dir+"/oci.tar", "v1")
	want.WriteDockerArchive(t, dir+"/docker.tar", "localhost/test:v1")
	refs := []string{"oci:" + dir + "/oci:v1", "oci:" + dir + "/oci", "oci-archive:" + dir + "/oci.tar:v1", "docker-archive:" + dir + "/docker.tar:localhost/test:v1", "docker-archive:" + dir + "/docker.tar"}
	for _, own := range []bool{true, false} {
		for _, ref := range refs {
			t.Run(fmt.Sprintf("own=%v/%s", own, strings.ReplaceAll(ref, dir, "")), func(t *testing.T) {
				s := newStore(t)
				var log bytes.Buffer
				start := time.Now()
				rec, changed, err := s.Pull(bg, ref, PullOptions{Own: own, Environ: os.Environ(), Progress: &log})
				if errors.Is(err, ErrNoPodman) {
					nstest.Needs(t, "podman", err)
				}
				must(t, err)
				t.Logf("%v", time.Since(start).Round(time.Millisecond))
				if !changed || log.Len() == 0 {
					t.Fatalf("changed %v, progress %q", changed, log.String())
				}
				verifyImage(t, s, want, rec)
				again, err := s.Resolve(ref)
				must(t, err)
				if again.BaseKey() != rec.BaseKey() {
					t.Fatal("record changed")
				}
				if _, changed, err = s.Pull(bg, ref, PullOptions{Own: !own, Environ: os.Environ()}); err != nil || changed {
					t.Fatalf("second pull by the other way: changed %v, %v", changed, err)
				}
				ids, err := s.IDs()
				must(t, err)
				orphans, err := s.Orphans()
				must(t, err)
				if len(ids) != 1 || len(orphans) != 0 {
					t.Fatalf("images %v orphans %v", ids, orphans)
				}
			})
		}
	}
	t.Run("dir", func(t *testing.T) {
		s := newStore(t)
		_, _, err := s.Pull(bg, refs[0], PullOptions{Environ: os.Environ()})
		must(t, err)
		out, err := podmanCommand(s, "push", want.ID(), "dir:"+dir+"/plain").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		other := newStore(t)
		rec, _, err := other.Pull(bg, "dir:"+dir+"/plain", PullOptions{Environ: os.Environ()})
		must(t, err)
		verifyImage(t, other, want, rec)
	})
}

func TestImageLifeCycle(t *testing.T) {
	s, dir := newStore(t), t.TempDir()
	one := hostile(t)
	one.WriteOCI(t, dir+"/a", "")
	refA, refB := "oci:"+dir+"/a", "oci-archive:"+dir+"/b.tar"
	one.WriteOCIArchive(t, dir+"/b.tar", "")
	for _, ref := range []string{refA, refB} {
		_, _, err := s.Pull(bg, ref, PullOptions{Own: true})
		must(t, err)
	}
	if _, err := s.Resolve("oci:" + dir + "/none"); !errors.Is(err, ErrNotPulled) {
		t.Fatal(err)
	}
	pin, err := s.Pin(one.ID(), "domain-1")
	must(t, err)
	must(t, s.Remove(bg, refB)) // the other reference holds the image
	ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
	defer cancel()
	if err := s.Remove(ctx, refA); !errors.Is(err, ErrInUse) || Hint(err) == "" {
		t.Fatalf("removed under a pin: %v", err)
	}
	if err := s.DeleteImage(one.ID()); !errors.Is(err, ErrInUse) {
		t.Fatalf("deleted under a pin: %v", err)
	}
	l, err := s.List()
	must(t, err)
	if len(l) != 1 || l[0].Pins != 1 || l[0].Size == 0 || l[0].Missing {
		t.Fatalf("list %+v", l)
	}
	must(t, pin.Release(), pin.Release())

	// An update: same reference, another image; the old one stays for whoever runs on it.
	two := one
	two.Layers = append([][]byte{}, one.Layers[0], nstest.Layer(t, nstest.File{Name: "v2", Body: "2"}))
	must(t, os.RemoveAll(dir+"/a"))
	two.WriteOCI(t, dir+"/a", "")
	rec, changed, err := s.Pull(bg, refA, PullOptions{Own: true})
	must(t, err)
	if !changed || rec.ImageID != two.ID() {
		t.Fatalf("update: %v %s", changed, rec.ImageID)
	}
	if _, err := s.Image(one.ID()); err != nil {
		t.Fatalf("the old image went with the update: %v", err)
	}
	must(t, s.Remove(bg, refA), s.DeleteImage(one.ID()), s.DeleteImage(one.ID()))
	layers, err := s.store.Layers()
	must(t, err)
	if len(layers) != 0 {
		t.Fatalf("%d layers are left", len(layers))
	}
	if _, err := s.Image(two.ID()); !errors.Is(err, ErrNotPulled) {
		t.Fatal(err)
	}
}

func TestSR11PinEndsWithItsProcess(t *testing.T) {
	s, dir := newStore(t), t.TempDir()
	img := hostile(t)
	img.WriteOCI(t, dir, "")
	_, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Own: true})
	must(t, err)
	child := nstest.Child("pin", s.cfg.Root, s.cfg.Run, img.ID())
	out, err := child.StdoutPipe()
	must(t, err, child.Start())
	said := make([]byte, 512)
	if n, err := out.Read(said); err != nil || string(said[:n]) != "pinned\n" {
		t.Fatalf("%v %s", err, said[:n])
	}
	pins, err := s.Pins()
	must(t, err)
	if len(pins) != 1 || !pins[0].Live || pins[0].Owner != "domain-x" || pins[0].ImageID != img.ID() {
		t.Fatalf("pins %+v", pins)
	}
	if err := s.DropDeadPin(pins[0].ID); !errors.Is(err, ErrInUse) {
		t.Fatalf("dropped a live pin: %v", err)
	}
	must(t, child.Process.Kill())
	_ = child.Wait()
	must(t, s.DropDeadPin(pins[0].ID), s.DropDeadPin(pins[0].ID), s.Remove(bg, "oci:"+dir))
	if stray, err := s.StrayLocks(); err != nil || len(stray) != 0 {
		t.Fatalf("stray %v %v", stray, err)
	}
}

// TestImportVerifies: every kind of damage is refused and leaves nothing that is believed later.
func TestImportVerifies(t *testing.T) {
	good := hostile(t)
	blob := func(dir string, d digest.Digest) string { return dir + "/blobs/sha256/" + d.Encoded() }
	gz := func(data []byte) []byte {
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		_, _ = w.Write(data)
		must(t, w.Close())
		return z.Bytes()
	}
	other := nstest.Layer(t, nstest.File{Name: "evil", Mode: 0o4755, Body: "evil"})
	plain := good
	plain.Gzip = false
	for name, c := range map[string]struct {
		img    nstest.Image
		damage func(t *testing.T, dir string)
		want   error
	}{
		"layer replaced": {good, func(t *testing.T, dir string) {
			must(t, os.WriteFile(blob(dir, digest.FromBytes(gz(good.Layers[0]))), gz(other), 0o644))
		}, ErrDigest},
		"plain layer replaced": {plain, func(t *testing.T, dir string) {
			must(t, os.WriteFile(blob(dir, digest.FromBytes(good.Layers[0])), other, 0o644))
		}, ErrDigest},
		"tail added": {good, func(t *testing.T, dir string) {
			must(t, os.WriteFile(blob(dir, digest.FromBytes(gz(good.Layers[1]))), append(gz(good.Layers[1]), gz([]byte("more"))...), 0o644))
		}, ErrDigest},
		"truncated": {good, func(t *testing.T, dir string) {
			must(t, os.Truncate(blob(dir, digest.FromBytes(gz(good.Layers[0]))), 100000))
		}, nil},
		"config changed": {good, func(t *testing.T, dir string) {
			must(t, os.WriteFile(blob(dir, digest.Digest("sha256:"+good.ID())), []byte("{}"), 0o644))
		}, ErrDigest},
		"layer is a fifo": {good, func(t *testing.T, dir string) {
			p := blob(dir, digest.FromBytes(gz(good.Layers[0])))
			must(t, os.Remove(p), unix.Mkfifo(p, 0o600))
		}, nil},
		"compressed twice": {nstest.Image{Layers: [][]byte{gz(other)}, Gzip: true}, func(*testing.T, string) {}, nil},
		"no layers":        {nstest.Image{}, func(*testing.T, string) {}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, dir := newStore(t), t.TempDir()
			c.img.WriteOCI(t, dir, "")
			c.damage(t, dir)
			_, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Own: true})
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			ids, err := s.IDs()
			must(t, err)
			if len(ids) != 0 {
				t.Fatalf("images %v", ids)
			}
			layers, err := s.store.Layers()
			must(t, err)
			for _, l := range layers {
				if l.UncompressedDigest != digest.FromBytes(good.Layers[0]) {
					t.Fatalf("unverified layer %s is left", l.ID)
				}
			}
			if recs, _ := s.Records(); len(recs) != 0 {
				t.Fatal("recorded")
			}
		})
	}
	t.Run("too large", func(t *testing.T) {
		s, dir := newStore(t), t.TempDir()
		good.WriteOCI(t, dir, "")
		_, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Own: true, MaxBytes: 1 << 20})
		if !errors.Is(err, ErrTooLarge) {
			t.Fatal(err)
		}
	})
	t.Run("docker layer replaced", func(t *testing.T) {
		s, dir := newStore(t), t.TempDir()
		good.WriteDockerArchive(t, dir+"/d.tar", "x:1")
		data, err := os.ReadFile(dir + "/d.tar")
		must(t, err)
		data = bytes.Replace(data, []byte("old\x00"), []byte("evi\x00"), 1)
		must(t, os.WriteFile(dir+"/d.tar", data, 0o644))
		if _, _, err := s.Pull(bg, "docker-archive:"+dir+"/d.tar", PullOptions{Own: true}); !errors.Is(err, ErrDigest) {
			t.Fatal(err)
		}
	})
	t.Run("names leave the layout", func(t *testing.T) {
		s, dir := newStore(t), t.TempDir()
		man := `[{"Config":"../../etc/passwd","RepoTags":[],"Layers":["/etc/shadow"]}]`
		must(t, os.WriteFile(dir+"/d.tar", nstest.Layer(t, nstest.File{Name: "manifest.json", Body: man}), 0o600))
		if _, _, err := s.Pull(bg, "docker-archive:"+dir+"/d.tar", PullOptions{Own: true}); !os.IsNotExist(errors.Unwrap(errors.Unwrap(err))) && err == nil {
			t.Fatal(err)
		}
	})
}

// TestFR7PullKilled kills a pull again and again; the last one succeeds and believes nothing bad.
func TestFR7PullKilled(t *testing.T) {
	img := hostile(t)
	dir := lowerDir(t)
	for i := range 4 {
		body := strings.Repeat(fmt.Sprint("data ", i), 4<<20)
		img.Layers = append(img.Layers, nstest.Layer(t, nstest.File{Name: fmt.Sprint("big", i), Body: body}))
	}
	img.WriteOCI(t, dir, "")
	for _, how := range []string{"own", "podman"} {
		t.Run(how, func(t *testing.T) {
			s := newStore(t)
			for n := range 8 {
				child := nstest.Child("pull", s.cfg.Root, s.cfg.Run, "oci:"+dir, how)
				var out bytes.Buffer
				child.Stdout, child.Stderr = &out, &out
				must(t, child.Start())
				timer := time.AfterFunc(time.Duration(n*60)*time.Millisecond, func() { _ = child.Process.Kill() })
				err := child.Wait()
				timer.Stop()
				if err != nil && !nstest.Killed(err) {
					t.Fatal(err, out.String())
				}
			}
			var log bytes.Buffer
			rec, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Own: how == "own", Environ: os.Environ(), Progress: &log})
			must(t, err)
			got, err := s.Image(rec.ImageID)
			must(t, err)
			if len(got.Layers) != 6 {
				t.Fatalf("%d layers", len(got.Layers))
			}
			for i := range 4 {
				b, err := os.ReadFile(filepath.Join(got.Layers[3-i], fmt.Sprint("big", i)))
				must(t, err)
				if len(b) != 6*4<<20 {
					t.Fatalf("layer %d holds %d bytes", i, len(b))
				}
			}
			must(t, s.Remove(bg, "oci:"+dir))
			orphans, err := s.Orphans()
			must(t, err)
			for _, o := range orphans {
				must(t, s.DeleteLayer(o))
			}
			if l, _ := s.store.Layers(); len(l) != 0 {
				t.Fatalf("%d layers are left", len(l))
			}
		})
	}
}

func TestPullCancelled(t *testing.T) {
	dir := lowerDir(t)
	img := hostile(t)
	img.WriteOCI(t, dir, "")
	fake := dir + "/podman"
	must(t, os.WriteFile(fake, []byte("#!/bin/sh\necho 'Copying \033[31mblob' >&2\nsleep 100 &\nwait\n"), 0o755))
	s := newStore(t)
	ctx, cancel := context.WithCancelCause(bg)
	reason := errors.New("developer pressed Ctrl-C")
	time.AfterFunc(200*time.Millisecond, func() { cancel(reason) })
	var log bytes.Buffer
	start := time.Now()
	_, _, err := s.Pull(ctx, "oci:"+dir, PullOptions{Podman: fake, Progress: &log})
	if !errors.Is(err, reason) || time.Since(start) > 3*time.Second {
		t.Fatalf("%v after %v", err, time.Since(start))
	}
	if log.String() != "Copying ?[31mblob\n" {
		t.Fatalf("progress %q", log.String())
	}
	ctx, cancel = context.WithCancelCause(bg)
	cancel(reason)
	if _, _, err := s.Pull(ctx, "oci:"+dir, PullOptions{Own: true}); err == nil {
		t.Fatal("cancelled import went on")
	}
}

func TestDX5PullErrorsExplained(t *testing.T) {
	for text, want := range map[string]error{
		"Error: initializing source docker://r.example/x:1: pinging container registry r.example: Get \"https://r.example/v2/\": dial tcp: lookup r.example: no such host": ErrNetwork,
		"Error: writing blob: storing blob to file \"/tmp/x\": write /tmp/x: no space left on device":                                                                      ErrDiskFull,
		"Error: initializing source docker://r.example/x:1: Requesting bearer token: invalid status code from registry 403 (Forbidden)":                                    ErrUnauthorized,
		"Error: initializing source docker://r.example/x:1: reading manifest 1 in r.example/x: unauthorized: authentication required":                                      ErrUnauthorized,
		"Error: initializing source docker://r.example/x:1: reading manifest 1 in r.example/x: manifest unknown":                                                           ErrNoImage,
		"Error: short-name \"x\" did not resolve to an alias and no unqualified-search registries are defined in \"/etc/containers/registries.conf\"":                      ErrPolicy,
		"Error: open /etc/containers/policy.json: no such file or directory":                                                                                               ErrPolicy,
	} {
		err := explainPodman(errors.New("exit status 125"), "Trying to pull\n"+text+"\n")
		if !errors.Is(err, want) || Hint(err) == "" || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", text, err)
		}
	}
	s := newStore(t)
	if _, _, err := s.Pull(bg, "docker.io/library/x", PullOptions{Environ: []string{"PATH=/nonexistent"}}); !errors.Is(err, ErrNoPodman) {
		t.Fatal(err)
	}
	dir := t.TempDir()
	img := hostile(t)
	img.WriteOCI(t, dir, "")
	rec, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Environ: []string{"PATH=/nonexistent"}})
	must(t, err) // without Podman the own importer serves layouts
	verifyImage(t, s, img, rec)
	// Podman cannot name this path (capitals), so the own importer takes it.
	rec, _, err = newStore(t).Pull(bg, "oci:"+dir, PullOptions{Environ: os.Environ()})
	must(t, err)
	if rec.ImageID != img.ID() {
		t.Fatal(rec.ImageID)
	}
	if _, _, err := s.Pull(bg, "oci:"+lowerDir(t)+"/none", PullOptions{Environ: os.Environ()}); err == nil {
		t.Fatal("pulled nothing")
	}
}

func TestReference(t *testing.T) {
	for in, want := range map[string]string{
		"docker.io/library/node:22":     "docker://docker.io/library/node:22",
		"docker://quay.io/x@sha256:ab":  "docker://quay.io/x@sha256:ab",
		"oci:/a/b":                      "oci:/a/b",
		"oci:/a/b:ref":                  "oci:/a/b:ref",
		"docker-archive:/a.tar:h/x:tag": "docker-archive:/a.tar:h/x:tag",
		"dir:/a:b":                      "dir:/a:b",
		"oci:a":                         "", "oci:/a/../b": "", "-v": "", "docker://-v": "", "a b": "", "": "", "http://x": "", "/etc": "", "x\x1b[": "",
		"containers-storage://x": "",
	} {
		r, err := ParseReference(in)
		if got := r.String(); err == nil && got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestResolveUser(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/usr/etc", 0o755), os.Symlink("usr/etc", dir+"/etc"),
		os.WriteFile(dir+"/usr/etc/real", []byte("root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\nbroken:x:y\nhuge:x:4294967295:1::/:\n"), 0o644),
		os.Symlink("/usr/etc/real", dir+"/usr/etc/passwd"), // absolute: must stay inside the image
		os.WriteFile(dir+"/usr/etc/group", []byte("root:x:0:\nnode:x:1000:\nstaff:x:50:agent,node\nwheel:x:10:node\n"), 0o644))
	root, err := os.Open(dir)
	must(t, err)
	defer root.Close()
	for spec, want := range map[string]string{
		"":           "{0 0 root /root []}",
		"node":       "{1000 1000 node /home/node [50 10]}",
		"1000":       "{1000 1000 node /home/node [50 10]}",
		"node:staff": "{1000 50 node /home/node []}",
		"7:8":        "{7 8   []}",
		"7":          "{7 0   []}",
		"nobody":     "err", "node:none": "err", "huge": "err", "-1": "err", "70000": "err",
	} {
		u, err := ResolveUser(root, spec)
		got := fmt.Sprint(u)
		if err != nil {
			got = "err"
		}
		if got != want {
			t.Errorf("%q: %s (%v), want %s", spec, got, err, want)
		}
	}
	must(t, os.Remove(dir+"/usr/etc/passwd"), unix.Mkfifo(dir+"/usr/etc/passwd", 0o600))
	if _, err := ResolveUser(root, "node"); err == nil {
		t.Fatal("read a fifo")
	}
}

func TestAgentEnv(t *testing.T) {
	got := AgentEnv([]string{"PATH=/bin", "HOME=/x", "broken", "=x", "A=b=c", "N=\x00", "LONG=" + strings.Repeat("x", 64<<10), "B=1"})
	if fmt.Sprint(got) != "[PATH=/bin A=b=c]" {
		t.Fatal(got)
	}
}

// TestStoreLock: gc excludes a lookup until its pin, and the reverse.
func TestStoreLock(t *testing.T) {
	s := newStore(t)
	a, err := s.Share(bg)
	must(t, err)
	b, err := s.Share(bg)
	must(t, err)
	if _, err := s.Exclude(); !errors.Is(err, ErrBusy) {
		t.Fatal(err)
	}
	a.Release()
	b.Release()
	x, err := s.Exclude()
	must(t, err)
	ctx, cancel := context.WithTimeout(bg, 30*time.Millisecond)
	defer cancel()
	if _, err := s.Share(ctx); !errors.Is(err, ErrBusy) {
		t.Fatal(err)
	}
	time.AfterFunc(30*time.Millisecond, x.Release)
	a, err = s.Share(bg)
	must(t, err)
	a.Release()
}
