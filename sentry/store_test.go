package sentry

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func snap(t *testing.T, dir string) *Snapshot {
	t.Helper()
	s, err := TakeSnapshot(dir, []byte("*.glob\n"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSR13RescanShowsWhatConsentMeans loosens and tightens rules between two snapshots.
func TestSR13RescanShowsWhatConsentMeans(t *testing.T) {
	host, private := t.TempDir(), t.TempDir()
	put(t, host+"/.gitignore", ".env\nbuild/\n*.log\n")
	put(t, host+"/sub/.gitignore", "local\n")
	for _, f := range []string{".env", "build/out", "a.log", "sub/local", "sub/x.log", "src/a.c", "x.glob"} {
		put(t, filepath.Join(host, f), "x")
	}
	for _, f := range []string{".env", "build/out", "sub/local", "b.log"} {
		put(t, filepath.Join(private, f), "mine")
	}
	mark := func(name string) {
		if err := unix.Mkfifo(filepath.Join(private, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	mark("sub/" + MarkSkeleton)
	mark("gone")
	old := snap(t, host)
	put(t, host+"/.gitignore", "*.log\n!a.log\nsrc/\n")
	if err := os.Remove(host + "/sub/.gitignore"); err != nil {
		t.Fatal(err)
	}
	next := snap(t, host)
	h, err := os.OpenRoot(host)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	p, err := os.OpenRoot(private)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()

	var entries []string
	if err := WalkTwin(p, func(e TwinEntry) error {
		s := e.Path
		if e.Removed {
			s = "-" + s
		}
		entries = append(entries, s)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(entries)
	if want := []string{"-gone", ".env", "b.log", "build", "build/out", "sub/local"}; !slices.Equal(entries, want) {
		t.Errorf("the twin holds %q, want %q", entries, want)
	}

	r, err := CompareSnapshots(old, next, h, p, 100)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(r.Appear)
	if want := []string{".env", "a.log", "build/", "sub/local"}; !slices.Equal(r.Appear, want) {
		t.Errorf("appear %q, want %q", r.Appear, want)
	}
	slices.Sort(r.Land)
	if want := []string{".env", "build", "sub/local"}; !slices.Equal(r.Land, want) {
		t.Errorf("land %q, want %q", r.Land, want)
	}
	same, err := CompareSnapshots(old, old, h, p, 100)
	if err != nil || len(same.Appear) != 0 || len(same.Land) != 0 {
		t.Errorf("nothing has changed, and yet %+v, %v", same, err)
	}
	if cut, err := CompareSnapshots(old, next, h, p, 1); err != nil || !cut.More || len(cut.Appear) != 1 {
		t.Errorf("limit: %+v, %v", cut, err)
	}
}

func TestPlanIsChecked(t *testing.T) {
	good := `{"Version":1,"Workspaces":[{"Mount":"/w","Host":"/w","Private":"/p"}]}`
	if _, err := ParsePlan([]byte(good)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{
		``, `{}`, `{"Version":2}`, `{"Version":1,"Workspaces":[{"Mount":"w","Host":"/w","Private":"/p"}]}`,
		`{"Version":1,"Workspaces":[{"Mount":"/w","Host":"/w/","Private":"/p"}]}`,
		`{"Version":1,"Workspaces":[{"Mount":"/w","Host":"/w","Private":"/w/p"}]}`,
		`{"Version":1,"Workspaces":[{"Mount":"/w","Host":"/p/w","Private":"/p"}]}`,
		`{"Version":1,"Workspaces":[{"Mount":"/w","Host":"/","Private":"/p"}]}`,
	} {
		if _, err := ParsePlan([]byte(bad)); err == nil {
			t.Errorf("took %s", bad)
		}
	}
}

// TestSR13SnapshotSources takes snapshots of rules that are not plain files in the tree.
func TestSR13SnapshotSources(t *testing.T) {
	host, elsewhere := t.TempDir(), t.TempDir()
	put(t, host+"/.git/config", "[core]\n\tignoreCase = true\n")
	put(t, host+"/.git/HEAD", "ref: refs/heads/main\n")
	put(t, host+"/.gitignore", "*.key\n")
	put(t, elsewhere+"/exclude", "*.pem\n")
	if err := os.Mkdir(host+"/.git/info", 0o755); err != nil {
		t.Fatal(err)
	}
	link := host + "/.git/info/exclude"
	if err := os.Symlink(elsewhere+"/exclude", link); err != nil {
		t.Fatal(err)
	}
	hides := func(name string) bool {
		t.Helper()
		v, err := snap(t, host).View()
		if err != nil {
			t.Fatal(err)
		}
		return v.Root().Hidden(name)&HideFile != 0
	}
	for name, want := range map[string]bool{"a.key": true, "A.KEY": true, "a.pem": true, "B.pem": true, "x.glob": true, "README": false} {
		if hides(name) != want {
			t.Errorf("%s is hidden: %v, want %v", name, !want, want)
		}
	}
	// A link to nothing is no rule file; one that cannot be read may hold any rule.
	if err := os.Remove(elsewhere + "/exclude"); err != nil {
		t.Fatal(err)
	}
	if hides("a.pem") {
		t.Error("rules out of nowhere")
	}
	if err := os.Mkdir(elsewhere+"/exclude", 0o755); err != nil {
		t.Fatal(err)
	}
	if !hides("README") {
		t.Error("an info/exclude that cannot be read hides nothing")
	}
}
