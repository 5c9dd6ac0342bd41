package anchor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/nstest"
	"lazaret.dev/lazaret/overlay/tree"
)

func TestMain(m *testing.M) {
	nstest.Main()
	switch nstest.Role() {
	case "crash":
		crash(os.Args[1], os.Args[2], os.Args[3])
	case "hold":
		a, err := Lock(os.Args[1], "/home/agent")
		if err != nil {
			os.Exit(1)
		}
		fmt.Println("held")
		_, _ = os.Stdin.Read(make([]byte, 1))
		_ = a.Close()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var (
	base1 = Base{Key: "sha256:one", Image: "img:1"}
	base2 = Base{Key: "sha256:two", Image: "img:2"}
	day   = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
)

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func put(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
}

func get(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "!" + errors.Unwrap(err).Error()
	}
	return string(b)
}

func lock(t testing.TB, root string) *Anchor {
	t.Helper()
	a, err := Lock(root, "/home/agent")
	must(t, err)
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// image makes two layers: the lower one has the path, the upper one removes and replaces in it.
func image(t testing.TB) []string {
	dir := t.TempDir()
	top, bottom := dir+"/top", dir+"/bottom"
	put(t, bottom+"/home/agent/.profile", "profile")
	put(t, bottom+"/home/agent/gone", "gone")
	put(t, bottom+"/home/agent/tool/old", "old")
	put(t, bottom+"/home/agent/dir/one", "1")
	put(t, bottom+"/home/agent/dir/two", "2")
	put(t, top+"/home/agent/tool/new", "new")
	must(t,
		unix.Setxattr(top+"/home/agent/tool", "user.overlay.opaque", []byte("y"), 0),
		unix.Mknod(top+"/home/agent/gone", unix.S_IFCHR, 0),
		os.Chown(bottom+"/home/agent", 1000, 1000), os.Chown(top+"/home/agent", 1000, 1000), os.Chmod(top+"/home/agent", 0o750))
	return []string{top, bottom}
}

func mounted(t testing.TB, a *Anchor, base Base, lowers []string) string {
	t.Helper()
	target := t.TempDir()
	must(t, a.Mount(base, lowers, nil, target, day))
	t.Cleanup(func() { _ = mount.Detach(target) })
	return target
}

func TestFR4AnchorPersists(t *testing.T) {
	root, layers := t.TempDir(), image(t)
	lowers, err := SubLowers(layers, "/home/agent")
	must(t, err)
	a := lock(t, root)
	at := mounted(t, a, base1, lowers)
	if get(at+"/gone") != "!no such file or directory" || get(at+"/tool/old") != "!no such file or directory" {
		t.Fatal("the image's own removals do not hold in the anchor")
	}
	st, err := os.Stat(at)
	must(t, err)
	if st.Mode().Perm() != 0o750 {
		t.Fatalf("anchor mode %v", st.Mode())
	}
	put(t, at+"/dir/one", "changed")
	put(t, at+"/mine", "mine")
	must(t, os.Remove(at+"/.profile"), os.Rename(at+"/dir/two", at+"/dir/three"), os.RemoveAll(at+"/tool"), os.Mkdir(at+"/tool", 0o700),
		os.Link(at+"/mine", at+"/mine2"), os.Chown(at+"/mine", 1000, 5), os.Chmod(at+"/mine", 0o755|os.ModeSetuid))
	must(t, mount.Detach(at), a.Close())
	if err := a.Reset(); !errors.Is(err, ErrClosed) {
		t.Fatalf("reset after close: %v", err)
	}

	a = lock(t, root)
	at = mounted(t, a, base1, lowers)
	for path, want := range map[string]string{
		".profile": "!no such file or directory", "dir/two": "!no such file or directory", "tool/new": "!no such file or directory",
		"dir/one": "changed", "dir/three": "2", "mine2": "mine",
	} {
		if got := get(at + "/" + path); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	var x unix.Stat_t
	must(t, unix.Stat(at+"/mine2", &x))
	if x.Nlink != 2 || x.Mode&0o7777 != 0o4755 || x.Uid != 1000 || x.Gid != 5 {
		t.Errorf("hard link, set-id or owner lost: %+v", x)
	}
	rep, err := Diff(a.dir, lowers, 100, t.TempDir())
	must(t, err)
	var got []string
	for _, c := range rep.Changes {
		got = append(got, string(c.Kind)+" "+c.Path)
	}
	want := "removed .profile,changed dir/one,added dir/three,removed dir/two,added mine,added mine2,changed tool,removed tool/new"
	if s := strings.Join(got, ","); s != want {
		t.Errorf("diff\n%s\nwant\n%s", s, want)
	}
	rep, err = Diff(a.dir, lowers, 3, t.TempDir())
	must(t, err)
	if len(rep.Changes) != 3 || !rep.Truncated {
		t.Errorf("limit: %+v", rep)
	}
}

func TestFR4AnchorOnChangedBase(t *testing.T) {
	root, layers := t.TempDir(), image(t)
	lowers, err := SubLowers(layers, "/home/agent")
	must(t, err)
	a := lock(t, root)
	at := mounted(t, a, base1, lowers)
	put(t, at+"/.profile", "agent's")
	put(t, at+"/new", "agent's")
	must(t, mount.Detach(at))
	// The new base comes with its own file at a name that the agent made, and a new one beside.
	next := t.TempDir()
	put(t, next+"/home/agent/new", "image's")
	put(t, next+"/home/agent/other", "image's")
	lowers2, err := SubLowers(append([]string{next}, layers...), "/home/agent")
	must(t, err)
	target := t.TempDir()
	if err := a.Mount(base2, lowers2, nil, target, day); !errors.Is(err, ErrBaseChanged) {
		t.Fatalf("mounted over another base: %v", err)
	}
	rep, err := Diff(a.dir, lowers2, 10, t.TempDir())
	must(t, err)
	if s := fmt.Sprint(rep.Changes); !rep.Shadows() || s != "[{changed .profile 7} {changed new 7}]" {
		t.Fatalf("shadow report %s", s)
	}
	must(t, a.Snapshot("before"))
	if err := a.Snapshot("before"); err == nil {
		t.Fatal("a snapshot was overwritten")
	}
	must(t, a.Keep(base2))
	at = mounted(t, a, base2, lowers2)
	if get(at+"/new") != "agent's" || get(at+"/other") != "image's" {
		t.Fatal("keep: wrong content")
	}
	put(t, at+"/after", "x")
	must(t, mount.Detach(at), a.Reset(), a.Reset())
	at = mounted(t, a, base2, lowers2)
	if get(at+"/new") != "image's" || get(at + "/after")[0] != '!' {
		t.Fatal("reset: wrong content")
	}
	must(t, mount.Detach(at), a.Restore("before"))
	m, err := a.Meta()
	must(t, err)
	if m.Base.Key != base1.Key {
		t.Fatalf("restored generation belongs to %q", m.Base.Key)
	}
	at = mounted(t, a, base1, lowers)
	if get(at+"/new") != "agent's" || get(at+"/.profile") != "agent's" {
		t.Fatal("restore: wrong content")
	}
	must(t, mount.Detach(at))
	list, err := List(root)
	must(t, err)
	if len(list) != 1 || !list[0].InUse || list[0].Path != "/home/agent" || len(list[0].Snapshots) != 1 || list[0].Meta.Base.Key != base1.Key {
		t.Fatalf("list %+v", list)
	}
	must(t, a.DropSnapshot("before"), a.DropSnapshot("before"))
	if err := a.Restore("before"); !errors.Is(err, ErrNoSnapshot) {
		t.Fatal(err)
	}
	if err := a.Restore("../current"); err == nil {
		t.Fatal("a snapshot name left its directory")
	}
}

func TestSR11AnchorLockedAcrossProcesses(t *testing.T) {
	root := t.TempDir()
	child := nstest.Child("hold", root)
	in, err := child.StdinPipe()
	must(t, err)
	out, err := child.StdoutPipe()
	must(t, err, child.Start())
	_, err = out.Read(make([]byte, 5))
	must(t, err)
	if _, err := Lock(root, "/home/agent"); !errors.Is(err, ErrBusy) {
		t.Fatalf("second holder: %v", err)
	}
	if l, err := List(root); err != nil || !l[0].InUse {
		t.Fatalf("list beside a holder: %+v, %v", l, err)
	}
	must(t, child.Process.Kill())
	_ = child.Wait()
	in.Close()
	lock(t, root)
}

func TestAnchorDamagedIsNotStartedOver(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"record lost":  func(d string) error { return os.Remove(d + "/current/meta.json") },
		"record empty": func(d string) error { return os.Truncate(d+"/current/meta.json", 0) },
		"upper lost":   func(d string) error { return tree.RemovePath(d+"/current", "upper") },
		"upper is a link": func(d string) error {
			return errors.Join(tree.RemovePath(d+"/current", "upper"), os.Symlink("/etc", d+"/current/upper"))
		},
		"record is a fifo": func(d string) error {
			return errors.Join(os.Remove(d+"/current/meta.json"), unix.Mkfifo(d+"/current/meta.json", 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, low := t.TempDir(), t.TempDir()
			a := lock(t, root)
			at := mounted(t, a, base1, []string{low})
			put(t, at+"/x", "precious")
			must(t, mount.Detach(at), damage(a.dir))
			if err := a.Mount(base1, []string{low}, nil, t.TempDir(), day); !errors.Is(err, ErrDamaged) {
				t.Fatalf("mount: %v", err)
			}
			if l, _ := List(root); !l[0].Damaged {
				t.Fatal("list hides the damage")
			}
			must(t, a.Reset())
			mounted(t, a, base1, []string{low})
		})
	}
}

// TestFR4AnchorOverHostDirectory uses a directory of the host's root, whose ids have no mapping here.
func TestFR4AnchorOverHostDirectory(t *testing.T) {
	const low = "/etc" // small, everywhere, root's
	var st unix.Stat_t
	must(t, unix.Lstat(low+"/profile.d", &st))
	if st.Uid != nobody {
		t.Fatalf("%s belongs to uid %d", low, st.Uid)
	}
	root := t.TempDir()
	a := lock(t, root)
	target := t.TempDir()
	mountIt := func(b Base) {
		must(t, a.Mount(b, []string{low}, &Owner{1000, 1000, 0o755}, target, day))
		t.Cleanup(func() { _ = mount.Detach(target) })
	}
	mountIt(base1)
	host, err := os.ReadFile(low + "/passwd")
	must(t, err)
	must(t, os.WriteFile(target+"/profile.d/mine", []byte("x"), 0o600), os.Mkdir(target+"/profile.d/dir", 0o700), os.RemoveAll(target+"/skel"),
		os.WriteFile(target+"/new", []byte("replaced"), 0o644), os.Rename(target+"/new", target+"/passwd"))
	must(t, unix.Lstat(target+"/profile.d", &st))
	if st.Uid != 1000 || get(target+"/passwd") != "replaced" {
		t.Fatalf("owner %d", st.Uid)
	}
	if now, _ := os.ReadFile(low + "/passwd"); string(now) != string(host) {
		t.Fatal("the host's file changed")
	}
	must(t, mount.Detach(target))
	rep, err := Diff(a.dir, []string{low}, 100, t.TempDir())
	must(t, err)
	if s := fmt.Sprint(rep.Changes); s != "[{changed passwd 8} {added profile.d/dir 0} {added profile.d/mine 1} {removed skel 0}]" {
		t.Fatal(s)
	}
	must(t, a.Keep(base2)) // an upgraded host: seeded again, the agent's removal stays
	mountIt(base2)
	if get(target+"/profile.d/mine") != "x" || get(target + "/skel/.bashrc")[0] != '!' {
		t.Fatal("seeding again changed what the agent did")
	}
	must(t, mount.Detach(target))
}

func TestSubLowers(t *testing.T) {
	dir := t.TempDir()
	l := func(n int) string { return fmt.Sprintf("%s/l%d", dir, n) }
	put(t, l(0)+"/a/b/f", "")
	put(t, l(1)+"/a/f", "")
	put(t, l(2)+"/a/b/f", "")
	put(t, l(3)+"/a/b", "a file")
	put(t, l(4)+"/a/b/f", "")
	must(t, os.MkdirAll(l(5)+"/a", 0o755), unix.Mknod(l(5)+"/a/b", unix.S_IFCHR, 0))
	must(t, os.MkdirAll(l(6)+"/a", 0o755), unix.Setxattr(l(6)+"/a", "user.overlay.opaque", []byte("y"), 0))
	must(t, os.MkdirAll(l(7), 0o755), os.Symlink("/", l(7)+"/a"))
	must(t, os.MkdirAll(l(8)+"/a/b", 0o755), unix.Setxattr(l(8)+"/a/b", "user.overlay.opaque", []byte("y"), 0))
	for _, c := range []struct {
		layers []int
		want   string
	}{
		{[]int{0, 1, 2}, "0 2"},
		{[]int{1}, ""},
		{[]int{0, 5, 2}, "0"},
		{[]int{5, 2}, ""},
		{[]int{0, 6, 2}, "0"},
		{[]int{8, 2}, "8"},
		{[]int{3, 4}, "err"},
		{[]int{0, 7}, "err"},
		{[]int{8, 7}, "8"},
	} {
		var layers, got []string
		for _, n := range c.layers {
			layers = append(layers, l(n))
		}
		out, err := SubLowers(layers, "/a/b")
		for _, o := range out {
			got = append(got, strings.TrimSuffix(strings.TrimPrefix(o, dir+"/l"), "/a/b"))
		}
		s := strings.Join(got, " ")
		if err != nil {
			s = "err"
			if !errors.Is(err, ErrBasePath) {
				t.Error(err)
			}
		}
		if s != c.want {
			t.Errorf("layers %v: %q, want %q", c.layers, s, c.want)
		}
		if c.want == "err" || len(layers) < 2 {
			continue
		}
		// The kernel is the reference.
		f, err := mount.Overlay{Lower: layers}.Open(t.TempDir())
		must(t, err)
		_, err = tree.OpenDirAt(f, "a/b")
		f.Close()
		if (err == nil) != (c.want != "") {
			t.Errorf("layers %v: kernel says %v", c.layers, err)
		}
	}
}

func FuzzEscape(f *testing.F) {
	for _, s := range []string{"/home/agent", "/usr/local", "/a b/ü.%2F+", "/.", "/..", "//", "/a/../b", "relative", "/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		name, err := Escape(path)
		if err != nil {
			return
		}
		if strings.ContainsAny(name, "/\x00.") || name == "" {
			t.Fatalf("%q gives the name %q", path, name)
		}
		if back, ok := unescape(name); !ok || back != path {
			t.Fatalf("%q gives %q gives %q", path, name, back)
		}
	})
}

// crash runs one operation and kills this process at its n-th step.
func crash(op, root, at string) {
	n, _ := strconv.Atoi(at)
	a, err := Lock(root, "/home/agent")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	a.hook = func(string) {
		if n--; n < 0 {
			nstest.KillSelf()
		}
	}
	if err := operations[op](a); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

var operations = map[string]func(a *Anchor) error{
	"begin": func(a *Anchor) error {
		low, err := os.MkdirTemp(a.dir, ".tmp-low")
		if err != nil {
			return err
		}
		return a.begin(base1, []string{low}, nil, day)
	},
	"keep":     func(a *Anchor) error { return a.Keep(base2) },
	"reset":    (*Anchor).Reset,
	"snapshot": func(a *Anchor) error { return a.Snapshot("second") },
	"restore":  func(a *Anchor) error { return a.Restore("first") },
	"restore without exchange": func(a *Anchor) error {
		m, err := readGeneration(a.file("snapshots", "first"), a.path)
		if err != nil {
			return err
		}
		tmp, err := a.copyGeneration(a.file("snapshots", "first"), *m)
		if err != nil {
			return err
		}
		return a.swapInTwoSteps(tmp)
	},
}

// TestFR7AnchorKilledAtEveryStep: after each kill the anchor is in the state before or after.
func TestFR7AnchorKilledAtEveryStep(t *testing.T) {
	for op := range operations {
		t.Run(op, func(t *testing.T) {
			for step := 0; ; step++ {
				root, low := t.TempDir(), t.TempDir()
				before := []string{"none"}
				a := lock(t, root)
				if op != "begin" {
					at := mounted(t, a, base1, []string{low})
					put(t, at+"/f", "first")
					must(t, mount.Detach(at), a.Snapshot("first"))
					at = mounted(t, a, base1, []string{low})
					put(t, at+"/f", "now")
					must(t, mount.Detach(at))
					before = []string{"now"}
				}
				after := map[string]string{"begin": "!no such file or directory", "keep": "now", "reset": "none", "snapshot": "now"}[op]
				if after == "" {
					after = "first"
				}
				must(t, a.Close())
				out, err := nstest.Child("crash", op, root, strconv.Itoa(step)).CombinedOutput()
				if err != nil && !nstest.Killed(err) {
					t.Fatalf("step %d: %v %s", step, err, out)
				}
				a = lock(t, root)
				m, merr := a.Meta()
				must(t, merr)
				state := "none"
				if m != nil {
					state = get(a.file("current", "upper", "f"))
				}
				if state != before[0] && state != after {
					t.Fatalf("step %d: state %q, before %q, after %q", step, state, before[0], after)
				}
				if err == nil && state != after {
					t.Fatalf("finished in state %q", state)
				}
				entries, rerr := os.ReadDir(a.dir)
				must(t, rerr)
				for _, e := range entries {
					if strings.HasPrefix(e.Name(), ".") {
						t.Fatalf("step %d: %s is left", step, e.Name())
					}
				}
				must(t, a.Close())
				if err == nil {
					if step == 0 {
						t.Fatal("no step was killed")
					}
					return
				}
			}
		})
	}
}
