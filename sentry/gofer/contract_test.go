package gofer

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/lisafs"
	"gvisor.dev/gvisor/pkg/unet"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// wire is a lisafs client on one end of a socket pair and this server on the other, over real directories.
type wire struct {
	t      testing.TB
	ctx    context.Context
	server *lisafs.Server
	client *lisafs.Client
	tree   *tree
	root   lisafs.ClientFD
	host   string
	twin   string
	closed bool
}

func newWire(t testing.TB, fill func(host string)) *wire {
	t.Helper()
	dir := shortTemp(t)
	host, private := dir+"/h", dir+"/p"
	must(t, os.Mkdir(host, 0o755))
	must(t, os.Mkdir(private, 0o700))
	if fill != nil {
		fill(host)
	}
	s, err := sentry.TakeSnapshot(host, nil)
	must(t, err)
	return dial(t, host, private, s)
}

func dial(t testing.TB, host, private string, s *sentry.Snapshot) *wire {
	t.Helper()
	return dialPlan(t, host, private, s, nil)
}

func dialPlan(t testing.TB, host, private string, s *sentry.Snapshot, alter func(*sentry.Workspace)) *wire {
	t.Helper()
	open := func(name string) int {
		fd, err := unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		return fd
	}
	self, err := unix.Open("/proc/self/fd", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	unix.Umask(0)
	ws := &sentry.Workspace{Mount: host, Host: host, Private: private, AgentUID: 1000, AgentGID: 1000, Held: route.DefaultHeld}
	if alter != nil {
		alter(ws)
	}
	tr, err := newTree(ws, open(host), open(private), self, os.Geteuid(), s)
	must(t, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	ours, err := unet.NewSocket(pair[0])
	must(t, err)
	theirs, err := unet.NewSocket(pair[1])
	must(t, err)
	w := &wire{t: t, ctx: context.Background(), server: lisafs.NewServer(), tree: tr, host: host, twin: private + "/tree"}
	conn, err := w.server.CreateConnection(theirs, "/ws", tr.options(false), &connection{t: tr})
	must(t, err)
	w.server.StartConnection(conn)
	client, root, donated, err := lisafs.NewClient(ours)
	must(t, err)
	if donated >= 0 {
		t.Fatal("SR-4: the mount gave a directory descriptor away")
	}
	w.client, w.root = client, client.NewFD(root.ControlFD)
	must(t, client.StartChannels())
	t.Cleanup(w.close)
	return w
}

func (w *wire) close() {
	if w.closed {
		return
	}
	w.closed = true
	w.client.Close()
	w.server.Wait()
	w.server.Destroy()
	for w.tree.lru.Len() > 0 {
		w.tree.mu.Lock()
		w.tree.uncache(w.tree.lru.Back())
		w.tree.mu.Unlock()
	}
	if w.tree.root.refs != 1 {
		w.t.Errorf("the root has %d references left, want 1", w.tree.root.refs)
	}
	w.tree.root.closeFDs()
	unix.Close(w.tree.self)
	unix.Close(w.tree.meta)
}

// at walks to a path.
func (w *wire) at(path string) (lisafs.ClientFD, lisafs.Statx, error) {
	fd := w.root
	var st lisafs.Statx
	if path == "" {
		return fd, st, nil
	}
	for name := range strings.SplitSeq(path, "/") {
		i, err := fd.Walk(w.ctx, name)
		if err != nil {
			return fd, st, err
		}
		fd, st = w.client.NewFD(i.ControlFD), i.Stat
	}
	return fd, st, nil
}

func (w *wire) must(path string) lisafs.ClientFD {
	w.t.Helper()
	fd, _, err := w.at(path)
	if err != nil {
		w.t.Fatalf("walk %q: %v", path, err)
	}
	return fd
}

func (w *wire) split(path string) (lisafs.ClientFD, string) {
	w.t.Helper()
	dir, name := filepath.Split(path)
	return w.must(strings.TrimSuffix(dir, "/")), name
}

func (w *wire) create(path, text string) error {
	dir, name := w.split(path)
	_, fd, host, err := dir.OpenCreateAt(w.ctx, name, unix.O_WRONLY, 0o644, 1000, 1000)
	if err != nil {
		return err
	}
	if host >= 0 {
		unix.Close(host)
	}
	f := w.client.NewFD(fd)
	_, err = f.Write(w.ctx, []byte(text), 0)
	f.Close(w.ctx, true)
	return err
}

func (w *wire) overwrite(path, text string) error {
	fd, _, err := w.at(path)
	if err != nil {
		return err
	}
	o, host, err := fd.OpenAt(w.ctx, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	if host >= 0 {
		unix.Close(host)
	}
	f := w.client.NewFD(o)
	_, err = f.Write(w.ctx, []byte(text), 0)
	f.Close(w.ctx, true)
	return err
}

func (w *wire) read(path string) (string, error) {
	fd, _, err := w.at(path)
	if err != nil {
		return "", err
	}
	o, host, err := fd.OpenAt(w.ctx, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	if host >= 0 {
		unix.Close(host)
	}
	f := w.client.NewFD(o)
	defer f.Close(w.ctx, true)
	b := make([]byte, 1<<16)
	n, err := f.Read(w.ctx, b, 0)
	return string(b[:n]), err
}

func (w *wire) mkdir(path string) error {
	dir, name := w.split(path)
	_, err := dir.MkdirAt(w.ctx, name, 0o755, 1000, 1000)
	return err
}

func (w *wire) unlink(path string, flags uint32) error {
	dir, name := w.split(path)
	return dir.UnlinkAt(w.ctx, name, flags)
}

func (w *wire) symlink(path, target string) error {
	dir, name := w.split(path)
	_, err := dir.SymlinkAt(w.ctx, name, target, 1000, 1000)
	return err
}

func (w *wire) link(from, to string) error {
	dir, name := w.split(to)
	fd, _, err := w.at(from)
	if err != nil {
		return err
	}
	_, err = dir.LinkAt(w.ctx, fd.ID(), name)
	return err
}

func (w *wire) rename(from, to string, flags uint32) error {
	a, oldName := w.split(from)
	b, newName := w.split(to)
	return a.RenameAt(w.ctx, oldName, b.ID(), newName, flags)
}

func (w *wire) list(path string) []string {
	w.t.Helper()
	fd := w.must(path)
	o, host, err := fd.OpenAt(w.ctx, unix.O_RDONLY)
	must(w.t, err)
	if host >= 0 {
		w.t.Fatalf("SR-4: a descriptor of the directory %q was given away", path)
	}
	f := w.client.NewFD(o)
	defer f.Close(w.ctx, true)
	var names []string
	for count := int32(-65536); ; count = 65536 {
		ents, err := f.Getdents64(w.ctx, count)
		must(w.t, err)
		if len(ents) == 0 {
			break
		}
		for _, e := range ents {
			names = append(names, string(e.Name))
		}
	}
	slices.Sort(names)
	return names
}

func (w *wire) want(what string, err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) {
		w.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (w *wire) onHost(path, want string) {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.host, path))
	if err != nil || string(b) != want {
		w.t.Errorf("host %q: %q, %v; want %q", path, b, err, want)
	}
}

func (w *wire) notOnHost(path string) {
	w.t.Helper()
	if _, err := os.Lstat(filepath.Join(w.host, path)); err == nil {
		w.t.Errorf("%q is on the host", path)
	}
}

// TestContract goes through the lisafs interface on an ordinary directory.
func TestContract(t *testing.T) {
	w := newWire(t, func(h string) { write(t, h+"/have", "host") })
	must(t, w.mkdir("d"))
	w.want("mkdir again", w.mkdir("d"), unix.EEXIST)
	must(t, w.create("d/f", "text"))
	w.onHost("d/f", "text")
	w.want("create again", w.create("d/f", ""), unix.EEXIST)
	must(t, w.overwrite("d/f", "new"))
	w.onHost("d/f", "new")
	if s, err := w.read("have"); s != "host" || err != nil {
		t.Errorf("read: %q, %v", s, err)
	}
	_, err := w.read("no")
	w.want("absent", err, unix.ENOENT)
	_, err = w.read("have/x")
	w.want("through a file", err, unix.ENOTDIR)
	for _, bad := range []string{"..", ".", "a/b"} {
		if _, err := w.root.Walk(w.ctx, bad); err == nil {
			t.Errorf("walk to %q", bad)
		}
	}

	must(t, w.symlink("l", "d/f"))
	target, err := func() (string, error) { fd := w.must("l"); return fd.ReadLinkAt(w.ctx) }()
	if target != "d/f" || err != nil {
		t.Errorf("readlink: %q, %v", target, err)
	}
	must(t, w.link("d/f", "hard"))
	a, _ := os.Stat(w.host + "/hard")
	b, _ := os.Stat(w.host + "/d/f")
	if !os.SameFile(a, b) {
		t.Error("the hard link is another file")
	}
	must(t, w.rename("hard", "d/g", 0))
	w.want("rename, no replace", w.rename("d/g", "have", unix.RENAME_NOREPLACE), unix.EEXIST)
	w.want("exchange", w.rename("d/g", "have", unix.RENAME_EXCHANGE), unix.EINVAL)
	w.want("file over directory", w.rename("have", "d", 0), unix.EISDIR)
	w.want("directory over file", w.rename("d", "have", 0), unix.ENOTDIR)
	must(t, w.rename("d", "e", 0))
	w.onHost("e/g", "new")
	w.want("rmdir of a full directory", w.unlink("e", unix.AT_REMOVEDIR), unix.ENOTEMPTY)
	w.want("unlink of a directory", w.unlink("e", 0), unix.EISDIR)
	w.want("rmdir of a file", w.unlink("have", unix.AT_REMOVEDIR), unix.ENOTDIR)
	must(t, w.unlink("e/f", 0))
	must(t, w.unlink("e/g", 0))
	must(t, w.unlink("e", unix.AT_REMOVEDIR))
	w.notOnHost("e")

	// Kinds of files that never reach the host.
	for _, mode := range []linux.FileMode{linux.S_IFIFO, linux.S_IFCHR, linux.S_IFBLK, linux.S_IFSOCK} {
		_, err := w.root.MknodAt(w.ctx, "node", mode|0o644, 1000, 1000, 0, 0)
		w.want(fmt.Sprintf("mknod %o", mode), err, unix.EPERM)
	}
	if _, _, err := w.root.BindAt(w.ctx, unix.SOCK_STREAM, "sock", 0o644, 1000, 1000); err == nil {
		t.Error("a socket was bound")
	}
	i, err := w.root.MknodAt(w.ctx, "reg", linux.S_IFREG|0o6755, 1000, 1000, 0, 0)
	must(t, err)
	if i.Stat.Mode&0o7777 != 0o755 {
		t.Errorf("mode %o", i.Stat.Mode)
	}

	// Attributes.
	f := w.must("reg")
	mask, ferr, err := f.SetStat(w.ctx, &linux.Statx{Mask: linux.STATX_MODE, Mode: 0o6700})
	if mask != 0 || ferr != nil || err != nil {
		t.Errorf("chmod: %x %v %v", mask, ferr, err)
	}
	st, _ := os.Stat(w.host + "/reg")
	if st.Mode() != 0o700 {
		t.Errorf("SR-4: mode on the host is %v", st.Mode())
	}
	mask, ferr, err = f.SetStat(w.ctx, &linux.Statx{Mask: linux.STATX_UID | linux.STATX_GID, UID: 0, GID: 0})
	if mask != 0 || ferr != nil || err != nil {
		t.Errorf("chown: %x %v %v", mask, ferr, err)
	}
	_, _, err = f.SetStat(w.ctx, &linux.Statx{Mask: linux.STATX_SIZE, Size: 100})
	must(t, err)
	if st, _ := os.Stat(w.host + "/reg"); st.Size() != 100 {
		t.Errorf("size %d", st.Size())
	}
	mtime := linux.StatxTimestamp{Sec: 1000, Nsec: 5}
	_, _, err = f.SetStat(w.ctx, &linux.Statx{Mask: linux.STATX_MTIME, Mtime: mtime})
	must(t, err)
	var sx lisafs.Statx
	must(t, f.StatTo(w.ctx, &sx))
	if sx.Mtime.Sec != 1000 || sx.Mtime.Nsec != 5 || sx.UID != 1000 || sx.GID != 1000 {
		t.Errorf("stat %+v", sx)
	}
	if err := f.SetXattr(w.ctx, "user.a", "v", 0); !errors.Is(err, unix.EOPNOTSUPP) {
		must(t, err)
		v, err := f.GetXattr(w.ctx, "user.a", 100)
		if v != "v" || err != nil {
			t.Errorf("attribute %q, %v", v, err)
		}
		names, err := f.ListXattr(w.ctx, 1000)
		if !slices.Equal(names, []string{"user.a"}) || err != nil {
			t.Errorf("attributes %q, %v", names, err)
		}
		must(t, f.RemoveXattr(w.ctx, "user.a"))
	}
	w.want("foreign attribute", f.SetXattr(w.ctx, "security.capability", "v", 0), unix.EOPNOTSUPP)
	w.want("own attribute", f.SetXattr(w.ctx, seedAttr, "v", 0), unix.EOPNOTSUPP)
	var fs lisafs.StatFS
	must(t, w.root.StatFSTo(w.ctx, &fs))

	// Multi-component walks.
	must(t, w.mkdir("x"))
	must(t, w.mkdir("x/y"))
	must(t, w.create("x/y/z", "z"))
	stats, err := w.root.WalkStat(w.ctx, []string{"", "x", "y", "z"})
	if len(stats) != 4 || err != nil {
		t.Errorf("WalkStat: %d, %v", len(stats), err)
	}
	stats, err = w.root.WalkStat(w.ctx, []string{"x", "no", "z"})
	if len(stats) != 1 || err != nil {
		t.Errorf("WalkStat over a gap: %d, %v", len(stats), err)
	}
	must(t, w.symlink("x/s", "y"))
	stats, err = w.root.WalkStat(w.ctx, []string{"x", "s", "z"})
	if len(stats) != 2 || err != nil {
		t.Errorf("WalkStat over a link: %d, %v", len(stats), err)
	}
	for i := range 300 {
		must(t, os.WriteFile(fmt.Sprintf("%s/x/y/n%d", w.host, i), nil, 0o644))
	}
	if n := len(w.list("x/y")); n != 301 {
		t.Errorf("%d entries", n)
	}

	// A held file stays itself when it is removed.
	o, hostFD, err := w.must2("x/y/z").OpenAt(w.ctx, unix.O_RDWR)
	must(t, err)
	unix.Close(hostFD)
	held := w.client.NewFD(o)
	must(t, w.unlink("x/y/z", 0))
	if _, err := held.Write(w.ctx, []byte("zz"), 0); err != nil {
		t.Errorf("write to a removed file: %v", err)
	}
	buf := make([]byte, 2)
	if n, err := held.Read(w.ctx, buf, 0); n != 2 || err != nil || !bytes.Equal(buf, []byte("zz")) {
		t.Errorf("read of a removed file: %d %v %q", n, err, buf)
	}
	held.Close(w.ctx, true)
}

func (w *wire) must2(path string) *lisafs.ClientFD { fd := w.must(path); return &fd }

// TestSR13Routing checks on which side each name lands.
func TestSR13Routing(t *testing.T) {
	w := newWire(t, func(h string) {
		hostGit(t, h, "init", "-q")
		write(t, h+"/.gitignore", "*.log\nbuild/\n/part/*\n.env\n")
		write(t, h+"/src/a.c", "a")
		write(t, h+"/part/tracked", "t")
		hostGit(t, h, "add", "-A", "-f")
		hostGit(t, h, "commit", "-qm", "x")
		write(t, h+"/.env", "secret")
		write(t, h+"/build/out", "host")
		write(t, h+"/part/hidden", "host")
		write(t, h+"/src/x.log", "host")
	})
	for _, hidden := range []string{".env", "build", "part/hidden", "src/x.log"} {
		_, _, err := w.at(hidden)
		w.want(hidden, err, unix.ENOENT)
	}
	if got := w.list("part"); !slices.Equal(got, []string{"tracked"}) {
		t.Errorf("merged directory shows %q", got)
	}
	if got := w.list("src"); !slices.Equal(got, []string{"a.c"}) {
		t.Errorf("src shows %q", got)
	}
	must(t, w.create(".env", "mine"))
	must(t, w.mkdir("build"))
	must(t, w.create("build/out", "mine"))
	must(t, w.create("part/hidden", "mine"))
	must(t, w.create("src/x.log", "mine"))
	must(t, w.create("src/new.c", "shared"))
	w.onHost(".env", "secret")
	w.onHost("build/out", "host")
	w.onHost("part/hidden", "host")
	w.onHost("src/x.log", "host")
	w.onHost("src/new.c", "shared")
	if got := w.list("src"); !slices.Equal(got, []string{"a.c", "new.c", "x.log"}) {
		t.Errorf("src shows %q", got)
	}
	if got := w.list(""); !slices.Equal(got, []string{".env", ".git", ".gitignore", "build", "part", "src"}) {
		t.Errorf("root shows %q", got)
	}
	w.want("out of the twin", w.rename(".env", "env", 0), unix.EXDEV)
	w.want("into the twin", w.rename("src/new.c", "src/new.log", 0), unix.EXDEV)
	w.want("link out of the twin", w.link(".env", "env"), unix.EXDEV)
	must(t, w.rename("src/x.log", "src/y.log", 0))
	must(t, w.rename("build", "src/build", 0))

	// Loosening inside changes nothing; tightening is at once.
	must(t, w.overwrite(".gitignore", "tight\n"))
	_, _, err := w.at("part/none")
	w.want("unlisted", err, unix.ENOENT)
	must(t, w.create("again.log", "mine"))
	w.notOnHost("again.log")
	must(t, w.create("tight", "mine"))
	w.notOnHost("tight")

	// A directory whose name anchors a rule does not move as one.
	must(t, w.overwrite(".gitignore", "*.log\nbuild/\n/part/*\n.env\n/anch/secret\n"))
	must(t, os.MkdirAll(w.host+"/anch", 0o755))
	must(t, os.WriteFile(w.host+"/anch/secret", []byte("s"), 0o600))
	w.want("directory over an anchor", w.rename("anch", "anch2", 0), unix.EXDEV)
	w.onHost("anch/secret", "s")
	must(t, os.MkdirAll(w.host+"/free/sub", 0o755))
	must(t, w.create("free/sub/a.log", "mine"))
	must(t, w.create("free/sub/a.c", "host"))
	must(t, w.rename("free", "moved", 0))
	w.onHost("moved/sub/a.c", "host")
	w.notOnHost("moved/sub/a.log")
	if s, err := w.read("moved/sub/a.log"); s != "mine" || err != nil {
		t.Errorf("the private part did not move along: %q, %v", s, err)
	}

	// What was visible and becomes ignored stays with the agent.
	must(t, w.create("notes.txt", "work"))
	time.Sleep(20 * time.Millisecond) // the kernel's clock for files is coarse
	must(t, w.overwrite(".gitignore", "*.log\nbuild/\n/part/*\n.env\nnotes.txt\n"))
	must(t, w.create("poke", ""))
	if s, err := w.read("notes.txt"); s != "work" || err != nil {
		t.Errorf("copy on tightening: %q, %v", s, err)
	}
	must(t, w.overwrite("notes.txt", "more"))
	w.onHost("notes.txt", "work")

	// After a restart everything is as it was.
	host, private := w.host, filepath.Dir(w.twin)
	s, err := sentry.TakeSnapshot(host, nil)
	must(t, err)
	w.close()
	w = dial(t, host, private, s)
	for path, want := range map[string]string{".env": "mine", "notes.txt": "more", "moved/sub/a.log": "mine", "src/build/out": "mine"} {
		if got, err := w.read(path); got != want || err != nil {
			t.Errorf("after a restart %q: %q, %v", path, got, err)
		}
	}
}

// TestHeldFiles checks copy on first write, removal and replacement of held names.
func TestHeldFiles(t *testing.T) {
	w := newWire(t, func(h string) {
		hostGit(t, h, "init", "-q")
		write(t, h+"/.envrc", "host")
		write(t, h+"/.vscode/a.json", "a")
		write(t, h+"/.vscode/b.json", "b")
	})
	if s, _ := w.read(".envrc"); s != "host" {
		t.Errorf("read through: %q", s)
	}
	fd := w.must(".envrc")
	must(t, w.overwrite(".envrc", "mine"))
	w.onHost(".envrc", "host")
	if s, _ := w.read(".envrc"); s != "mine" {
		t.Errorf("after the copy: %q", s)
	}
	_, _, err := fd.OpenAt(w.ctx, unix.O_WRONLY) // a control FD from before the copy
	must(t, err)
	w.onHost(".envrc", "host")
	must(t, w.unlink(".envrc", 0))
	_, err = w.read(".envrc")
	w.want("removed", err, unix.ENOENT)
	w.onHost(".envrc", "host")
	must(t, w.create(".envrc", "third"))
	w.onHost(".envrc", "host")
	must(t, w.unlink(".vscode/a.json", 0))
	must(t, w.create(".vscode/c.json", "c"))
	if got := w.list(".vscode"); !slices.Equal(got, []string{"b.json", "c.json"}) {
		t.Errorf(".vscode shows %q", got)
	}
	w.want("full", w.unlink(".vscode", unix.AT_REMOVEDIR), unix.ENOTEMPTY)
	must(t, w.unlink(".vscode/b.json", 0))
	must(t, w.unlink(".vscode/c.json", 0))
	must(t, w.unlink(".vscode", unix.AT_REMOVEDIR))
	_, _, err = w.at(".vscode")
	w.want("removed directory", err, unix.ENOENT)
	must(t, w.mkdir(".vscode"))
	if got := w.list(".vscode"); len(got) != 0 {
		t.Errorf("a new .vscode shows %q", got)
	}
	w.onHost(".vscode/a.json", "a")
	w.onHost(".vscode/b.json", "b")
}

// TestDescriptorsAreBounded walks far more directories than are cached, and counts.
func TestDescriptorsAreBounded(t *testing.T) {
	count := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(d)
	}
	before := count()
	w := newWire(t, func(h string) {
		for i := range 3 * maxCachedDirs {
			must(t, os.Mkdir(h+"/d"+strconv.Itoa(i), 0o755))
		}
	})
	for i := range 3 * maxCachedDirs {
		if _, err := w.root.WalkStat(w.ctx, []string{"d" + strconv.Itoa(i), "x"}); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(); n > before+maxCachedDirs+64 {
		t.Errorf("%d descriptors, %d before", n, before)
	}
	w.close()
	if n := count(); n > before+4 {
		t.Errorf("%d descriptors after the end, %d before", n, before)
	}
}

// TestLookupDoesNotAllocate holds for a cached, shared name: it is what every path lookup inside costs.
func TestLookupDoesNotAllocate(t *testing.T) {
	w := newWire(t, func(h string) { write(t, h+"/main.go", "x") })
	var e entry
	must(t, w.tree.root.lookup("main.go", &e))
	if n := testing.AllocsPerRun(200, func() { _ = w.tree.root.lookup("main.go", &e) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkLookup(b *testing.B) {
	w := newWire(b, func(h string) { write(b, h+"/main.go", "x") })
	var e entry
	for b.Loop() {
		_ = w.tree.root.lookup("main.go", &e)
	}
}
