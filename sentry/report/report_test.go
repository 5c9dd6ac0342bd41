package report

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry/gitindex"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// gitdir makes a repository directory with the given files.
func gitdir(t *testing.T, files map[string]string) (string, *os.File) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(content), 0o644))
	}
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return dir, f
}

func descriptors(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

func TestSR4ScanFindsWhatIsLeft(t *testing.T) {
	id := strings.Repeat("ab", 20)
	dir, f := gitdir(t, map[string]string{
		"HEAD": "ref: refs/heads/main\n", "index.lock": "", "gc.pid": "1", "refs/heads/main": id, "refs/heads/main.lock": "",
		"refs/heads/x$(id)": id, "refs/replace/" + id: id, "objects/ab/cd": "", "objects/ab/tmp.lock": "", "objects/pack/p.pack": "",
		"packed-refs": "# pack-refs with: peeled\n" + id + " refs/heads/ok\n^" + id + "\n" + id + " refs/heads/a\u202eb\n" + id + " refs/replace/" + strings.Repeat("cd", 20) + "\n" + id + " refs/tags/-x\n" + id + " refs/heads/\x1b[31m\n",
	})
	before, err := Scan(f)
	must(t, err)
	must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "FETCH_HEAD")))
	must(t, os.Symlink("/etc", filepath.Join(dir, "logs")))
	must(t, unix.Mkfifo(filepath.Join(dir, "MERGE_MSG"), 0o600))
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	must(t, err)
	defer l.Close()
	open := descriptors(t)
	found, err := Scan(f)
	must(t, err)
	if n := descriptors(t); n != open {
		t.Errorf("%d descriptors left open", n-open)
	}
	var have []string
	for _, l := range found.Locks {
		have = append(have, "lock "+l.Path)
	}
	for _, id := range found.Replaced {
		have = append(have, "replaced "+id[:2])
	}
	for _, o := range append(slices.Clone(found.OddRefs), found.Special...) {
		have = append(have, fmt.Sprintf("%q %s", o.Name, o.Why))
	}
	want := []string{"lock gc.pid", "lock index.lock", "lock refs/heads/main.lock", "replaced ab", "replaced cd",
		`"refs/heads/\x1b[31m" control character`, `"refs/heads/a\u202eb" invisible or direction-changing character`, `"refs/heads/x$(id)" shell metacharacter`, `"refs/tags/-x" looks like an option`,
		`"FETCH_HEAD" symbolic link`, `"MERGE_MSG" FIFO`, `"logs" symbolic link`, `"s" socket`}
	if !slices.Equal(have, want) || len(found.Partial) > 0 {
		t.Errorf("have %q\nwant %q\npartial %q", have, want, found.Partial)
	}
	since := found.Since(before)
	if len(since.Locks)+len(since.Replaced)+len(since.OddRefs) != 0 || len(since.Special) != 4 {
		t.Errorf("since the start: %+v", since)
	}
	for _, line := range found.Lines(time.Now()) {
		if strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("line is not safe to print: %q", line)
		}
	}
}

func TestSR4ScanIsBounded(t *testing.T) {
	dir, f := gitdir(t, map[string]string{"HEAD": "x", "packed-refs": strings.Repeat("a", 2*maxLine)})
	deep := filepath.Join(dir, "logs", strings.Repeat("d/", maxDepth+3))
	must(t, os.MkdirAll(deep, 0o755))
	for i := range maxFound + 20 {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.lock", i)), nil, 0o644))
	}
	found, err := Scan(f)
	must(t, err)
	if len(found.Locks) != maxFound || len(found.Partial) != 3 {
		t.Errorf("%d locks, partial %q", len(found.Locks), found.Partial)
	}
	for _, name := range []string{"packed-refs", "refs"} { // swapped for what must not be opened or followed
		must(t, os.RemoveAll(filepath.Join(dir, name)))
		must(t, os.Symlink("/etc", filepath.Join(dir, name)))
	}
	if found, err = Scan(f); err != nil || len(found.Special) != 2 {
		t.Errorf("%v, %+v", err, found.Special)
	}
	must(t, os.Remove(filepath.Join(dir, "packed-refs")))
	must(t, unix.Mkfifo(filepath.Join(dir, "packed-refs"), 0o600))
	if _, err = Scan(f); err != nil { // and does not hang
		t.Error(err)
	}
}

func TestOddName(t *testing.T) {
	for name, odd := range map[string]bool{
		"refs/heads/main": false, "refs/heads/größe-1.2_x": false, "refs/heads/a+b@c": false, "refs/heads/中文": false,
		"refs/heads/`id`": true, "refs/heads/a;b": true, "refs/heads/a|b": true, "refs/heads/\x7f": true, "refs/heads/\xff": true, "refs/heads/\u200b": true, "refs/heads/\u00a0": true, "-f": true,
	} {
		if why := OddName(name); (why != "") != odd {
			t.Errorf("%q: %q", name, why)
		}
	}
}

func TestSR13HiddenTracked(t *testing.T) {
	set, err := gitindex.FromPaths([]string{"a", ".env", "sub/.env", "sparse/", "z"})
	must(t, err)
	paths, total := HiddenTracked(set, func(p string) bool { return filepath.Base(p) == ".env" || p == "sparse/" }, 1)
	if total != 2 || !slices.Equal(paths, []string{".env"}) {
		t.Errorf("%d, %q", total, paths)
	}
}
