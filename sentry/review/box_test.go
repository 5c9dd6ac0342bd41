package review

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// box is a workspace and its private twin, both as files of the test.
type box struct {
	t             testing.TB
	host, private string
}

func newBox(t testing.TB) *box {
	b := &box{t: t, host: t.TempDir(), private: t.TempDir()}
	must(t, os.Mkdir(filepath.Join(b.private, sentry.TreeDir), 0o700))
	must(t, os.Mkdir(filepath.Join(b.private, sentry.TempDir), 0o700))
	return b
}

func (b *box) tree() *Tree {
	b.t.Helper()
	return b.with(sentry.Workspace{Held: route.DefaultHeld})
}

func (b *box) with(ws sentry.Workspace) *Tree {
	b.t.Helper()
	ws.Private, ws.Mount, ws.Host = b.private, b.host, "/staged"
	f, err := os.Open(b.host)
	must(b.t, err)
	t, err := OpenTree(b.host, f, &ws)
	must(b.t, err)
	b.t.Cleanup(t.Close)
	return t
}

func (b *box) twin(name string) string { return filepath.Join(b.private, sentry.TreeDir, name) }

// hostFile and twinFile write a file with its directories; those of the twin are skeletons.
func (b *box) hostFile(name, text string) {
	b.t.Helper()
	p := filepath.Join(b.host, name)
	must(b.t, os.MkdirAll(filepath.Dir(p), 0o755))
	must(b.t, os.WriteFile(p, []byte(text), 0o644))
}

func (b *box) twinFile(name, text string) {
	b.t.Helper()
	b.skeleton(filepath.Dir(name))
	must(b.t, os.WriteFile(b.twin(name), []byte(text), 0o644))
}

func (b *box) skeleton(dir string) {
	b.t.Helper()
	if dir == "." {
		return
	}
	b.skeleton(filepath.Dir(dir))
	if os.Mkdir(b.twin(dir), 0o755) == nil {
		b.fifo(filepath.Join(dir, sentry.MarkSkeleton))
	}
}

func (b *box) fifo(name string) {
	b.t.Helper()
	must(b.t, unix.Mkfifo(b.twin(name), 0o600))
}

func (b *box) read(name string) string {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.host, name))
	must(b.t, err)
	return string(text)
}

func find(t *testing.T, tree *Tree, path string) *Item {
	t.Helper()
	items, _ := tree.Items()
	for _, i := range items {
		if i.Path == path {
			return i
		}
	}
	t.Fatalf("%q is not among the %d items", path, len(items))
	return nil
}

func descriptors(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}
