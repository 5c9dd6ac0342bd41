package tree

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/nstest"
)

func TestMain(m *testing.M) {
	nstest.Main()
	os.Exit(m.Run())
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// hostile fills dir with everything an upper directory can hold.
func hostile(t *testing.T, dir string) {
	t.Helper()
	p := func(s string) string { return filepath.Join(dir, s) }
	must(t,
		os.MkdirAll(p("d/opaque"), 0o755),
		os.WriteFile(p("d/plain"), []byte("content"), 0o640),
		os.Chown(p("d/plain"), 1000, 7),
		os.WriteFile(p("d/setuid"), []byte("x"), 0o755),
		os.Chown(p("d/setuid"), 3, 4),
		os.Chmod(p("d/setuid"), 0o755|os.ModeSetuid|os.ModeSetgid),
		unix.Setxattr(p("d/opaque"), "user.overlay.opaque", []byte("y"), 0),
		unix.Setxattr(p("d/plain"), "user.mine", []byte("v"), 0),
		unix.Mknod(p("whiteout"), unix.S_IFCHR, 0),
		unix.Mkfifo(p("fifo"), 0o622),
		os.Symlink("/etc/passwd", p("link")),
		os.Lchown(p("link"), 5, 6),
		os.Link(p("d/plain"), p("hard")),
		os.Link(p("d/plain"), p("d/opaque/hard2")),
		os.Mkdir(p("locked"), 0),
		os.WriteFile(p("d/sparse"), nil, 0o600),
		os.Truncate(p("d/sparse"), 1<<30),
		unix.UtimesNanoAt(unix.AT_FDCWD, p("d"), []unix.Timespec{{Sec: 1}, {Sec: 2, Nsec: 3}}, 0),
	)
	f, err := os.OpenFile(p("d/sparse"), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("end"), 1<<30-3)
	must(t, err, f.Close())
	must(t, os.Chmod(p("d"), 0o1770), unix.UtimesNanoAt(unix.AT_FDCWD, p("d"), []unix.Timespec{{Sec: 1}, {Sec: 2, Nsec: 3}}, 0))
}

// describe lists all that Copy promises to keep.
func describe(t *testing.T, dir string) []string {
	t.Helper()
	f, err := OpenDir(dir)
	must(t, err)
	defer f.Close()
	ids := map[uint64]string{}
	var out []string
	must(t, Walk(f, Visitor{Enter: func(e Entry) error {
		line := fmt.Sprintf("%s mode=%o uid=%d gid=%d rdev=%d mtime=%d.%d", e.Path(), e.Stat.Mode, e.Stat.Uid, e.Stat.Gid, e.Stat.Rdev, e.Stat.Mtim.Sec, e.Stat.Mtim.Nsec)
		switch e.Type() {
		case unix.S_IFLNK:
			to, err := readlink(e.Dir, e.Name)
			if err != nil {
				return err
			}
			line += " -> " + to
		case unix.S_IFREG:
			line += fmt.Sprintf(" size=%d nlink=%d", e.Stat.Size, e.Stat.Nlink)
		}
		if e.Stat.Nlink > 1 && !e.IsDir() {
			ids[e.Stat.Ino] += e.Path() + "="
		}
		if e.Type() == unix.S_IFREG || e.IsDir() {
			h, err := os.Open(filepath.Join(dir, e.Path()))
			if err != nil {
				return err
			}
			defer h.Close()
			names, err := xattrNames(h)
			if err != nil {
				return err
			}
			sort.Strings(names)
			line += fmt.Sprint(" ", names)
		}
		out = append(out, line)
		return nil
	}}))
	for _, v := range ids {
		parts := strings.Split(v, "=")
		sort.Strings(parts)
		out = append(out, "links"+strings.Join(parts, "="))
	}
	sort.Strings(out)
	return out
}

func TestFR4CopyKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/src", 0o751), os.Chown(dir+"/src", 1000, 1000))
	hostile(t, dir+"/src")
	src, err := OpenDir(dir + "/src")
	must(t, err)
	defer src.Close()
	parent, err := OpenDir(dir)
	must(t, err)
	defer parent.Close()
	must(t, Copy(src, parent, "dst"))
	want, got := describe(t, dir+"/src"), describe(t, dir+"/dst")
	if strings.Join(want, "\n") != strings.Join(got, "\n") {
		t.Fatalf("want\n%s\ngot\n%s", strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
	st, err := os.Stat(dir + "/dst")
	must(t, err)
	if st.Mode().Perm() != 0o751 {
		t.Fatalf("top directory mode %v", st.Mode())
	}
	a, err := MeasurePath(dir + "/src")
	must(t, err)
	b, err := MeasurePath(dir + "/dst")
	must(t, err)
	if a != b || a.Bytes > 1<<20 {
		t.Fatalf("usage %+v, copy %+v: holes were filled or links broken", a, b)
	}
	if err := Copy(src, parent, "dst"); err == nil {
		t.Fatal("copied over an existing directory")
	}
}

// TestSR8DeepTree: 1500 levels, far beyond PATH_MAX and the descriptor limit's comfort.
func TestSR8DeepTree(t *testing.T) {
	var lim unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &lim))
	low := lim
	low.Cur = 64
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)

	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/deep", 0o700))
	at, err := OpenDir(dir + "/deep")
	must(t, err)
	const depth = 1500
	for range depth {
		must(t, unix.Mkdirat(int(at.Fd()), "directory", 0o700), unix.Mkdirat(int(at.Fd()), ".lazaret-removing-1", 0o700))
		next, err := openDir(int(at.Fd()), "directory")
		must(t, err)
		at.Close()
		at = next
	}
	at.Close()
	parent, err := OpenDir(dir)
	must(t, err)
	defer parent.Close()
	src, err := OpenDir(dir + "/deep")
	must(t, err)
	defer src.Close()
	must(t, Copy(src, parent, "copy"))
	u, err := MeasurePath(dir + "/copy")
	must(t, err)
	if u.Entries != 2*depth {
		t.Fatalf("%d entries, want %d", u.Entries, 2*depth)
	}
	for _, name := range []string{"deep", "copy", "never was"} {
		must(t, Remove(parent, name))
	}
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) != 0 {
		t.Fatalf("left: %v", left)
	}
}

func TestRemoveFollowsNothing(t *testing.T) {
	outside := t.TempDir()
	must(t, os.WriteFile(outside+"/keep", nil, 0o600))
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/x/work/work", 0o700), os.Symlink(outside, dir+"/x/ln"), os.Symlink(outside, dir+"/top"), os.Mkdir(dir+"/x/mnt", 0o700))
	hostile(t, dir+"/x")
	must(t, os.Chmod(dir+"/x/work/work", 0))
	must(t, unix.Mount(outside, dir+"/x/mnt", "", unix.MS_BIND, ""))
	if err := RemovePath(dir, "x"); err == nil {
		t.Fatal("removed through a mount")
	}
	must(t, unix.Unmount(dir+"/x/mnt", 0), RemovePath(dir, "x"), RemovePath(dir, "top"))
	if _, err := os.Stat(outside + "/keep"); err != nil {
		t.Fatal("followed a link or a mount out of the tree")
	}
	if err := RemovePath(dir+"/missing", "x"); err != nil {
		t.Fatal(err)
	}
}

func TestWalkNoticesMove(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/t/a/b/c", 0o700), os.Mkdir(dir+"/elsewhere", 0o700))
	f, err := OpenDir(dir + "/t")
	must(t, err)
	defer f.Close()
	err = Walk(f, Visitor{Enter: func(e Entry) error {
		if e.Name == "c" {
			return os.Rename(dir+"/t/a/b", dir+"/elsewhere/b")
		}
		return nil
	}})
	if !errors.Is(err, ErrChanged) {
		t.Fatalf("walk went on after a move: %v", err)
	}
}

func TestLimitsCheck(t *testing.T) {
	const g = 1 << 30
	for _, c := range []struct {
		l    Limits
		s    State
		want string
	}{
		{Limits{}, State{Anchors: math.MaxInt64}, ""},
		{Limits{Anchors: g}, State{Anchors: g / 2}, ""},
		{Limits{Anchors: g}, State{Anchors: g - g/20}, "anchors near"},
		{Limits{Anchors: g, Ignored: g}, State{Anchors: g, Ignored: 2 * g}, "anchors full ignored full"},
		{Limits{Reserve: g}, State{Free: g}, "disk full"},
		{Limits{Reserve: g}, State{Free: g + g/8}, "disk near"},
		{Limits{Reserve: g}, State{Free: 2 * g}, ""},
		{Limits{Anchors: math.MaxInt64}, State{Anchors: 1}, ""},
	} {
		var got []string
		for _, f := range c.l.Check(c.s) {
			got = append(got, f.What, f.Level.String())
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%+v %+v: %q, want %q", c.l, c.s, s, c.want)
		}
	}
}
