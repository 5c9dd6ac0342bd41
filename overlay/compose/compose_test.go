package compose

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/nstest"
	"lazaret.dev/lazaret/overlay/volume"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	nstest.Main()
	if nstest.Role() == "crash" {
		os.Exit(crash(os.Args[1], os.Args[2:]))
	}
	os.Exit(m.Run())
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

var bg = context.Background()

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lz")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// imported imports img in a new store.
func imported(t testing.TB, img nstest.Image) (*image.Store, *image.Image) {
	t.Helper()
	dir := tempDir(t)
	img.WriteOCI(t, dir+"/oci", "")
	s, err := image.Open(image.Config{Root: dir + "/s", Run: dir + "/r", HostUID: 1001, HostGID: 1001})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	rec, _, err := s.Pull(bg, "oci:"+dir+"/oci", image.PullOptions{Own: true})
	must(t, err)
	got, err := s.Image(rec.ImageID)
	must(t, err)
	return s, got
}

func input(t testing.TB, img *image.Image) Input {
	t.Helper()
	dir := tempDir(t)
	for _, d := range []string{"domain", "work", "eph"} {
		must(t, os.Mkdir(dir+"/"+d, 0o700))
	}
	return Input{
		Base: anchor.Base{Key: image.BaseKey(img.DiffIDs), Image: "test"}, Layers: img.Layers,
		Agent:      Agent{UID: 1000, GID: 1000, Name: "agent", Home: "/home/agent"},
		Points:     []Point{{Path: "/proc"}, {Path: "/home/dev/src/app"}, {Path: "/etc/resolv.conf", File: true}},
		Anchor:     []Anchor{{Path: "/home/agent", Owner: &anchor.Owner{UID: 1000, GID: 1000, Mode: 0o755}}, {Path: "/usr/local"}},
		DomainRoot: dir + "/domain", Work: dir + "/work", ScratchDir: dir + "/eph", Scratch: 64 << 20,
		Now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}

func composed(t testing.TB, in Input) *Result {
	t.Helper()
	r, err := Compose(in)
	must(t, err)
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

func source(r *Result, dst string) string {
	for _, m := range r.Mounts {
		if m.Destination == dst {
			return m.Source
		}
	}
	return "/nonexistent"
}

func stat(t testing.TB, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
}

func codes(r *Result) string {
	var out []string
	for _, f := range r.Findings {
		out = append(out, f.Code)
	}
	return strings.Join(out, " ")
}

func TestFR4ComposeImage(t *testing.T) {
	_, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Busybox(t), nstest.Layer(t, nstest.File{Name: "home/", Mode: 0o711, UID: 7, GID: 8})}})
	in := input(t, img)
	fds := descriptors(t)
	defer func() {
		if now := descriptors(t); now != fds {
			t.Errorf("%d descriptors before, %d after", fds, now)
		}
	}()
	r := composed(t, in)
	for path, want := range map[string]string{
		"/home":                  "40711 7:8",
		"/home/dev/src/app":      "40755 0:0",
		"/home/agent":            "40755 1000:1000",
		"/etc/resolv.conf":       "100644 0:0",
		"/etc":                   "40755 0:0",
		"/bin/sh":                "120777 0:0",
		"/root":                  "40700 0:0",
		"/tmp":                   "41777 0:0",
		"/etc/passwd":            "100644 0:0",
		"/home/dev/src/app/none": "no such file or directory",
	} {
		if got := stat(t, r.Root+path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	passwd, err := os.ReadFile(r.Root + "/etc/passwd")
	must(t, err)
	if !strings.HasSuffix(string(passwd), "\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n") || !strings.HasPrefix(string(passwd), "root:") {
		t.Errorf("passwd %q", passwd)
	}
	if err := os.WriteFile(r.Root+"/x", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("the base is writable: %v", err)
	}
	if want := fmt.Sprintf("root:dir=%s,size=67108864", in.ScratchDir); r.Overlay2 != want {
		t.Errorf("overlay2 %q, want %q", r.Overlay2, want)
	}
	if codes(r) != "owner" { // /usr/local is root's
		t.Errorf("findings %+v", r.Findings)
	}
	if !slices.IsSortedFunc(r.Mounts, func(a, b Mount) int { return strings.Compare(a.Destination, b.Destination) }) || len(r.Mounts) != 2 {
		t.Errorf("mounts %+v", r.Mounts)
	}
	again := in
	if _, err := Compose(again); err == nil {
		t.Error("a used work directory was accepted")
	}
	again.Work = tempDir(t)
	if _, err := Compose(again); !errors.Is(err, anchor.ErrBusy) {
		t.Errorf("a second Domain got the anchors: %v", err)
	}
	must(t, r.Close(), r.Close())
	left, err := os.ReadDir(in.Work)
	must(t, err)
	if len(left) != 0 {
		t.Errorf("left in the work directory: %v", left)
	}
}

func TestComposeChangedBase(t *testing.T) {
	bottom := nstest.Busybox(t, nstest.File{Name: "usr/local/tool", Body: "v1"})
	_, one := imported(t, nstest.Image{Layers: [][]byte{bottom}})
	_, two := imported(t, nstest.Image{Layers: [][]byte{bottom, nstest.Layer(t, nstest.File{Name: "usr/local/tool", Body: "v2"})}})
	in := input(t, one)
	r := composed(t, in)
	must(t, os.WriteFile(source(r, "/usr/local")+"/tool", []byte("mine"), 0o755), r.Close())

	in.Layers, in.Base.Key = two.Layers, image.BaseKey(two.DiffIDs)
	in.Anchor[0].OnChange = Keep
	_, err := Compose(in)
	var changed *ChangedError
	if !errors.As(err, &changed) || changed.Path != "/usr/local" || !changed.Report.Shadows() || !errors.Is(err, anchor.ErrBaseChanged) {
		t.Fatalf("%v", err)
	}
	if left, _ := os.ReadDir(in.Work); len(left) != 0 {
		t.Fatalf("a refused start left %v", left)
	}
	in.Anchor[1].OnChange = Snapshot
	r = composed(t, in)
	if b, _ := os.ReadFile(source(r, "/usr/local") + "/tool"); string(b) != "mine" || codes(r) != "snapshot kept owner" {
		t.Fatalf("snapshot: %q, findings %v", b, r.Findings)
	}
	must(t, r.Close())
	in.Anchor[1].OnChange = Ask
	r = composed(t, in) // chosen once, not asked again
	must(t, r.Close())
	in.Layers, in.Base.Key = one.Layers, image.BaseKey(one.DiffIDs)
	in.Anchor[1].OnChange = Reset
	r = composed(t, in)
	if b, _ := os.ReadFile(source(r, "/usr/local") + "/tool"); string(b) != "v1" {
		t.Fatalf("reset: %q", b)
	}
}

// TestSR4AgentCannotMoveMountPoints: what the agent did to its anchor must not redirect a mount.
func TestSR4AgentCannotMoveMountPoints(t *testing.T) {
	_, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Busybox(t)}})
	in := input(t, img)
	in.Points = append(in.Points, Point{Path: "/home/agent/src/app"}, Point{Path: "/home/agent/.tool/bin", File: true})
	r := composed(t, in)
	home := source(r, "/home/agent")
	if got := stat(t, home+"/src/app") + stat(t, home+"/.tool/bin"); got != "40755 0:0100644 0:0" {
		t.Fatal(got)
	}
	must(t, os.RemoveAll(home+"/src"), os.RemoveAll(home+"/.tool"), r.Close())
	r = composed(t, in) // removed: made again
	home = source(r, "/home/agent")
	if got := stat(t, home+"/src/app") + stat(t, home+"/.tool/bin"); got != "40755 0:0100644 0:0" {
		t.Fatal(got)
	}
	for name, f := range map[string]func(home string) error{
		"link parent": func(h string) error { return errors.Join(os.RemoveAll(h+"/src"), os.Symlink("/etc", h+"/src")) },
		"link": func(h string) error {
			return errors.Join(os.RemoveAll(h+"/src"), os.Mkdir(h+"/src", 0o755), os.Symlink("/etc", h+"/src/app"))
		},
		"file": func(h string) error { return errors.Join(os.RemoveAll(h+"/src"), os.WriteFile(h+"/src", nil, 0o644)) },
		"fifo": func(h string) error {
			return errors.Join(os.RemoveAll(h+"/src"), os.RemoveAll(h+"/.tool"), os.Mkdir(h+"/.tool", 0o755), unix.Mkfifo(h+"/.tool/bin", 0o600))
		},
	} {
		must(t, f(home), r.Close())
		if _, err := Compose(in); !errors.Is(err, ErrObstructed) {
			t.Fatalf("%s: %v", name, err)
		}
		// Mend it as the developer would.
		in.Anchor[0].Path, in.Points = "/home/agent", in.Points[:3]
		fix, err := Compose(in)
		must(t, err)
		h := source(fix, "/home/agent")
		must(t, os.RemoveAll(h+"/src"), os.RemoveAll(h+"/.tool"), fix.Close())
		in.Points = append(in.Points, Point{Path: "/home/agent/src/app"}, Point{Path: "/home/agent/.tool/bin", File: true})
		r = composed(t, in)
		home = source(r, "/home/agent")
	}
}

func TestComposeOddImages(t *testing.T) {
	for name, c := range map[string]struct {
		files []nstest.File
		edit  func(*Input)
		codes string
		err   string
	}{
		"no shell":           {[]nstest.File{{Name: "app", Mode: 0o755, Body: "x"}}, nil, "no-shell owner", ""},
		"shell is a dir":     {[]nstest.File{{Name: "bin/"}, {Name: "bin/sh/"}}, nil, "no-shell owner", ""},
		"etc is a link":      {[]nstest.File{{Name: "usr/etc/"}, {Name: "etc", Type: tar.TypeSymlink, Link: "usr/etc"}}, func(in *Input) { in.Points = nil }, "no-shell no-agent owner", ""},
		"home is a link":     {[]nstest.File{{Name: "var/home/"}, {Name: "home", Type: tar.TypeSymlink, Link: "/var/home"}}, nil, "", "obstructed"},
		"anchor is a file":   {[]nstest.File{{Name: "usr/"}, {Name: "usr/local"}}, nil, "", "obstructed"},
		"point is a dir":     {[]nstest.File{{Name: "etc/"}, {Name: "etc/resolv.conf/"}}, nil, "", "obstructed"},
		"workspace in usr":   {[]nstest.File{{Name: "usr"}}, func(in *Input) { in.Points = append(in.Points, Point{Path: "/usr/src"}) }, "", "obstructed"},
		"passwd is a device": {[]nstest.File{{Name: "etc/"}, {Name: "etc/passwd", Type: tar.TypeFifo}}, nil, "no-shell no-agent owner", ""},
		"user there":         {[]nstest.File{{Name: "etc/"}, {Name: "etc/passwd", Body: "node:x:1000:1000::/home/node:/bin/sh"}}, nil, "no-shell owner", ""},
		"anchors overlap":    {[]nstest.File{{Name: "x"}}, func(in *Input) { in.Anchor = append(in.Anchor, Anchor{Path: "/home/agent/.cache"}) }, "", "overlap"},
		"anchor on proc":     {[]nstest.File{{Name: "x"}}, func(in *Input) { in.Anchor = append(in.Anchor, Anchor{Path: "/proc/x"}) }, "", "lies within"},
		"anchor of all":      {[]nstest.File{{Name: "x"}}, func(in *Input) { in.Anchor = []Anchor{{Path: "/"}} }, "", "persistent path"},
		"agent's name taken": {[]nstest.File{{Name: "etc/"}, {Name: "etc/passwd", Body: "agent:x:5:5::/:/bin/sh"}}, nil, "no-shell owner", ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Layer(t, c.files...)}})
			in := input(t, img)
			if c.edit != nil {
				c.edit(&in)
			}
			r, err := Compose(in)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("error %v, want %q", err, c.err)
				}
				return
			}
			must(t, err)
			defer r.Close()
			if codes(r) != c.codes {
				t.Errorf("findings %q, want %q", codes(r), c.codes)
			}
			if name == "agent's name taken" {
				b, _ := os.ReadFile(r.Root + "/etc/passwd")
				if !strings.Contains(string(b), "\nagent1000:x:1000:") {
					t.Errorf("passwd %q", b)
				}
			}
		})
	}
}

// TestComposeHostRoot uses a base that the caller composed, with a bind mount in it.
func TestComposeHostRoot(t *testing.T) {
	root, usr := tempDir(t), tempDir(t)
	for _, d := range []string{"/usr", "/proc", "/home/dev/src/app", "/home/agent", "/etc", "/bin"} {
		must(t, os.MkdirAll(root+d, 0o755))
	}
	must(t, os.MkdirAll(usr+"/local/bin", 0o755), os.WriteFile(usr+"/local/bin/tool", []byte("host"), 0o755),
		os.WriteFile(root+"/etc/resolv.conf", nil, 0o644), os.WriteFile(root+"/bin/sh", nil, 0o755))
	must(t, unix.Mount(usr, root+"/usr", "", unix.MS_BIND, ""))
	defer unix.Unmount(root+"/usr", unix.MNT_DETACH)
	in := input(t, &image.Image{})
	in.Layers, in.HostRoot, in.Base = nil, root, anchor.Base{Key: "host:1"}
	r := composed(t, in)
	if r.Root != root || codes(r) != "owner" {
		t.Fatalf("%+v", r)
	}
	local := source(r, "/usr/local")
	if b, _ := os.ReadFile(local + "/bin/tool"); string(b) != "host" {
		t.Fatalf("tool %q", b)
	}
	must(t, os.WriteFile(local+"/bin/tool", []byte("agent"), 0o755))
	if b, _ := os.ReadFile(usr + "/local/bin/tool"); string(b) != "host" {
		t.Fatal("the host's file was written")
	}
	must(t, r.Close())
	in.Points = append(in.Points, Point{Path: "/missing"})
	if _, err := Compose(in); !errors.Is(err, ErrObstructed) {
		t.Fatal(err)
	}
}

func TestComposeVolumes(t *testing.T) {
	_, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Busybox(t)}})
	in, host := input(t, img), tempDir(t)
	must(t, os.WriteFile(host+"/file", nil, 0o644))
	in.Volume = []volume.Volume{{Host: host, Target: "/srv/z"}, {Host: host + "/file", Target: "/home/agent/file", Writable: true}}
	r := composed(t, in)
	var got []string
	for _, m := range r.Mounts {
		got = append(got, m.Destination+" "+m.Options[1])
	}
	if s := strings.Join(got, ","); s != "/home/agent rw,/home/agent/file rw,/srv/z ro,/usr/local rw" {
		t.Fatal(s)
	}
	if got := stat(t, r.Root+"/srv/z") + stat(t, source(r, "/home/agent")+"/file"); got != "40755 0:0100644 0:0" {
		t.Fatal(got)
	}
}

// TestTwentyDomainsOnOneImage composes them at the same time and keeps all of them.
func TestTwentyDomainsOnOneImage(t *testing.T) {
	s, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Busybox(t), nstest.Layer(t, nstest.File{Name: "v", Body: "1"})}})
	before := mountCount(t)
	results := make(chan *Result, 20)
	errs := make(chan error, 20)
	for i := range 20 {
		in := input(t, img)
		go func() {
			p, err := s.Pin(img.ID, fmt.Sprint("domain-", i))
			if err != nil {
				errs <- err
				return
			}
			r, err := Compose(in)
			if err == nil {
				err = os.WriteFile(source(r, "/home/agent")+"/me", []byte(fmt.Sprint(i)), 0o600)
				results <- r
			}
			errs <- errors.Join(err, p.Release())
		}()
	}
	for range 20 {
		must(t, <-errs)
	}
	close(results)
	seen := map[string]bool{}
	for r := range results {
		b, err := os.ReadFile(source(r, "/home/agent") + "/me")
		must(t, err, r.Close())
		seen[string(b)] = true
	}
	if len(seen) != 20 {
		t.Fatalf("%d distinct homes", len(seen))
	}
	if after := mountCount(t); after != before {
		t.Fatalf("%d mounts before, %d after", before, after)
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(d)
}

func mountCount(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	return strings.Count(string(b), "\n")
}

// crash composes and is killed at the n-th step.
func crash(at string, args []string) int {
	n, _ := strconv.Atoi(at)
	in := Input{Base: anchor.Base{Key: "k"}, Agent: Agent{1000, 1000, "agent", "/home/agent", ""}, Points: []Point{{Path: "/a/b"}},
		Anchor: []Anchor{{Path: "/home/agent"}, {Path: "/usr/local"}}, DomainRoot: args[0], Work: args[1], Layers: args[2:], Now: time.Unix(0, 0)}
	in.hook = func(string) {
		if n--; n < 0 {
			nstest.KillSelf()
		}
	}
	// The product is pid 1 of its namespaces; here a mount namespace of its own goes with the process.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		fmt.Println(err)
		return 1
	}
	r, err := Compose(in)
	if err == nil {
		err = r.Close()
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// TestFR7ComposeKilledAtEveryStep: afterwards nothing is mounted and a new start works.
func TestFR7ComposeKilledAtEveryStep(t *testing.T) {
	_, img := imported(t, nstest.Image{Layers: [][]byte{nstest.Busybox(t)}})
	before := mountCount(t)
	for step := 0; ; step++ {
		dir := tempDir(t)
		must(t, os.Mkdir(dir+"/d", 0o700), os.Mkdir(dir+"/w", 0o700))
		run := func(n int) error {
			out, err := nstest.Child("crash", append([]string{strconv.Itoa(n), dir + "/d", dir + "/w"}, img.Layers...)...).CombinedOutput()
			if err != nil && !nstest.Killed(err) {
				t.Fatalf("step %d: %v %s", n, err, out)
			}
			return err
		}
		first := run(step)
		// What gc does for the transient directory of a dead Domain:
		must(t, clear(dir+"/w"))
		if err := run(1000); err != nil {
			t.Fatalf("start after a kill at step %d: %v", step, err)
		}
		if left, _ := os.ReadDir(dir + "/w"); len(left) != 0 {
			t.Fatalf("step %d: left %v", step, left)
		}
		if mountCount(t) != before {
			t.Fatalf("step %d: mounts are left", step)
		}
		if first == nil {
			if step < 5 {
				t.Fatalf("only %d steps", step)
			}
			return
		}
	}
}

// BenchmarkCompose is a start's share of the file system: pin, look up, mount, undo.
func BenchmarkCompose(b *testing.B) {
	layers := [][]byte{nstest.Busybox(b)}
	for i := range 7 {
		layers = append(layers, nstest.Layer(b, nstest.File{Name: fmt.Sprint("l", i)}))
	}
	s, img := imported(b, nstest.Image{Layers: layers, Config: v1.ImageConfig{}})
	b.Run("mounts", func(b *testing.B) {
		in := input(b, img)
		for b.Loop() {
			r, err := Compose(in)
			must(b, err)
			b.StopTimer()
			must(b, r.Close())
			b.StartTimer()
		}
	})
	b.Run("lookup+pin+mounts", func(b *testing.B) {
		in := input(b, img)
		for b.Loop() {
			g, err := s.Share(bg)
			must(b, err)
			i, err := s.Image(img.ID)
			must(b, err)
			p, err := s.Pin(i.ID, "bench")
			must(b, err)
			g.Release()
			in.Layers = i.Layers
			r, err := Compose(in)
			must(b, err)
			b.StopTimer()
			must(b, r.Close(), p.Release())
			b.StartTimer()
		}
	})
	b.Run("open store", func(b *testing.B) {
		dir := filepath.Dir(filepath.Dir(img.Layers[0]))
		root := strings.TrimSuffix(dir, "/graph/overlay")
		for b.Loop() {
			o, err := image.Open(image.Config{Root: root, Run: filepath.Dir(root) + "/r"})
			must(b, err)
			_, err = o.Image(img.ID)
			must(b, err)
		}
	})
}
