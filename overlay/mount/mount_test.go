package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/nstest"
)

func TestMain(m *testing.M) {
	nstest.Main()
	os.Exit(m.Run())
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func mounts(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "\n")
}

// TestFR4OverlayBothAPIs runs the same overlay through the new mount API and through mount(2),
// with names that mount(2) would have to escape.
func TestFR4OverlayBothAPIs(t *testing.T) {
	before := mounts(t)
	for name, attach := range map[string]func(Overlay, string) error{
		"new": Overlay.Attach, "legacy": Overlay.legacy,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			o := Overlay{Upper: filepath.Join(dir, "up,per"), Work: filepath.Join(dir, "wo:rk")}
			for i := range 60 {
				l := filepath.Join(dir, fmt.Sprintf("a rather long, colon:rich directory name number %d", i))
				write(t, filepath.Join(l, fmt.Sprint("f", i)), "low")
				o.Lower = append(o.Lower, l)
			}
			write(t, filepath.Join(o.Upper, "own"), "x")
			if err := os.Mkdir(o.Work, 0o700); err != nil {
				t.Fatal(err)
			}
			target := t.TempDir()
			if err := attach(o, target); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(target, "f59")); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(target, "f0"), "changed")
			var st unix.Stat_t
			if err := unix.Lstat(filepath.Join(o.Upper, "f59"), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
				t.Fatalf("whiteout: %v %o", err, st.Mode)
			}
			if b, _ := os.ReadFile(filepath.Join(o.Lower[0], "f0")); string(b) != "low" {
				t.Fatal("lower was written")
			}
			if err := Detach(target); err != nil {
				t.Fatal(err)
			}
			if err := Detach(target); err != nil {
				t.Fatalf("second detach: %v", err)
			}
		})
	}
	if after := mounts(t); after != before {
		t.Fatalf("%d mounts before, %d after", before, after)
	}
}

// TestOpenLeavesNoMount reads a detached overlay and finds the mount table unchanged.
func TestOpenLeavesNoMount(t *testing.T) {
	for name, open := range map[string]func(Overlay, string) (*os.File, error){
		"new": Overlay.Open, "legacy": Overlay.openLegacy,
	} {
		t.Run(name, func(t *testing.T) {
			a, b, scratch := t.TempDir(), t.TempDir(), t.TempDir()
			write(t, a+"/x", "upper one")
			write(t, b+"/x", "lower one")
			before := mounts(t)
			f, err := open(Overlay{Lower: []string{a, b}}, scratch)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if names, err := f.Readdirnames(-1); err != nil || len(names) != 1 {
				t.Fatalf("names %v, %v", names, err)
			}
			fd, err := unix.Openat(int(f.Fd()), "x", unix.O_RDONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 32)
			n, _ := unix.Read(fd, buf)
			unix.Close(fd)
			if string(buf[:n]) != "upper one" {
				t.Fatalf("read %q", buf[:n])
			}
			if _, err := unix.Openat(int(f.Fd()), "y", unix.O_CREAT|unix.O_WRONLY, 0o600); err != unix.EROFS {
				t.Fatalf("create in a read-only overlay: %v", err)
			}
			if mounts(t) != before {
				t.Fatal("a mount was left")
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	for name, o := range map[string]Overlay{
		"none":         {},
		"one lower":    {Lower: []string{dir}},
		"upper alone":  {Lower: []string{dir}, Upper: dir},
		"too many":     {Lower: make([]string, MaxLowers+1)},
		"missing dir":  {Lower: []string{dir + "/no", dir}},
		"missing work": {Lower: []string{dir}, Upper: dir, Work: dir + "/no"},
	} {
		if err := o.Attach(dir); err == nil {
			t.Errorf("%s: mounted", name)
		}
	}
	// Upper and work on different mounts: the kernel tells its log alone, we add the usual causes.
	tmp := t.TempDir()
	if err := unix.Mount("tmpfs", tmp, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer Detach(tmp)
	err := Overlay{Lower: []string{t.TempDir()}, Upper: t.TempDir(), Work: tmp}.Attach(dir)
	if !errors.Is(err, ErrOverlay) || !strings.Contains(err.Error(), "Storage Root") {
		t.Fatalf("error without a cause: %v", err)
	}
}
