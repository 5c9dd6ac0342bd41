package gofer

import (
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/lisafs"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// home is where a name belongs when it is made now.
type home struct {
	kind    route.Kind
	zone    route.Zone // of a directory of that name
	private bool
	admit   bool // on the host though the snapshot ignores it: newly tracked, and the host has nothing there
}

// homeOf decides where name would be made as a file or directory. The rule files are asked now, not from memory.
func (d *dir) homeOf(name string, directory bool) home {
	private := home{kind: route.P, zone: route.Private, private: true}
	if name == sentry.MarkSkeleton || name == sentry.MarkTree {
		return home{kind: route.No}
	}
	z := d.Zone()
	switch z {
	case route.Private:
		return private
	case route.HeldTree:
		return home{kind: route.Hold, zone: route.Private, private: true}
	case route.Work:
		host := d.hostHas(name)
		switch route.Classify(name) {
		case route.DotGit:
			switch host {
			case route.None:
				return private
			case route.Dir:
				return home{kind: route.Pin, zone: route.Gitdir}
			}
			return home{kind: route.RO, zone: route.ReadOnly}
		case route.Variant:
			if host == route.None {
				return home{kind: route.No}
			}
			return home{kind: route.RO, zone: route.ReadOnly}
		case route.Layout:
			if d.isRepository() {
				return repoHome(route.Gitdir, name, host)
			}
		}
		h := d.current(true).hidden(name)
		switch {
		case h&holdFile != 0 || directory && h&holdDir != 0:
			return home{kind: route.Hold, zone: route.Private, private: true}
		case d.twinHas(name):
			return private
		case directory && h&hideDir != 0 || !directory && h&hideFile != 0:
			if h&newlyTracked != 0 && host == route.None {
				return home{kind: route.W, zone: route.Work, admit: true}
			}
			return private
		case host == route.Dir && h&hideDir != 0 || host != route.None && host != route.Dir && h&hideFile != 0:
			return private // the host's hidden content of the other type has the name
		}
		return home{kind: route.W, zone: route.Work}
	}
	return repoHome(z, name, d.hostHas(name))
}

func repoHome(z route.Zone, name string, host route.Host) home {
	v := route.Git(z, name, host)
	return home{kind: v.Kind, zone: v.Child, private: v.Kind == route.P}
}

// twinHas reports whether the twin has an entry of its own at name: content, or a whiteout.
func (d *dir) twinHas(name string) bool {
	p := d.twin()
	var st unix.Statx_t
	return p >= 0 && statAt(p, name, &st) == nil && !(isDir(&st) && marked(p, name, sentry.MarkSkeleton))
}

// exclusively makes asking and making one step for the names that could complete a repository. lisafs holds the directory
// for writing already; this holds where the host's renames have given one directory two nodes.
func (t *tree) exclusively(name string) (done func()) {
	switch name {
	case "HEAD", "objects", "refs", "commondir", ".git":
		t.guard.Lock()
		return t.guard.Unlock
	}
	return func() {}
}

// place decides where name is made, and refuses what may not be. lisafs holds the directory for writing, so nothing else
// is created in it meanwhile: asking and making are one step.
func (d *dir) place(name string, op route.Op) (at int, h home, err error) {
	if d.Zone() == route.Work {
		d.current(true) // before the look, so that it sees what the creation will obey
	}
	var e entry
	switch err := d.lookup(name, &e); err {
	case unix.ENOENT:
	case nil:
		return -1, h, unix.EEXIST
	default:
		return -1, h, err
	}
	h = d.homeOf(name, op == route.Mkdir)
	at, err = d.prepare(name, op, &h)
	return at, h, d.denied(op, name, err)
}

// prepare checks op on a name that belongs at h, and returns the directory to make it in.
func (d *dir) prepare(name string, op route.Op, h *home) (int, error) {
	if err := h.kind.Check(op); err != nil {
		return -1, err
	}
	if !h.private {
		if d.host < 0 {
			return -1, unix.ENOENT
		}
		if d.completes(name) {
			return -1, unix.EPERM
		}
		return d.host, nil
	}
	if name == ".git" && d.Zone() == route.Work {
		if err := d.becomePrivateTree(); err != nil {
			return -1, err
		}
	}
	p, err := d.ensureTwin()
	if err != nil {
		return -1, err
	}
	return p, d.clearWhiteout(p, name)
}

// completes is the bare guard: it reports whether the host would take d for a repository once it has name.
func (d *dir) completes(name string) bool {
	switch name {
	case "HEAD", "objects", "refs", "commondir":
	default:
		return false
	}
	if z := d.Zone(); z == route.Gitdir || z == route.WorktreeDir || z == route.Work && d.isRepository() {
		return false // it is one already, and governed
	}
	has := func(n string) bool { return d.hostHas(n) != route.None }
	return route.Completes(name, has("HEAD"), has("objects"), has("refs"), has("commondir"))
}

// becomePrivateTree makes all further content of d private if the host has nothing in it: a repository that the agent
// makes in an empty directory lives in the twin as a whole. The workspace root never becomes one.
func (d *dir) becomePrivateTree() error {
	if d.parent == nil {
		return nil
	}
	names, _, err := readNames(d.host, 1)
	if err != nil && err != unix.EFBIG {
		return err
	}
	if len(names) != 0 {
		return nil
	}
	p, err := d.ensureTwin()
	if err != nil {
		return err
	}
	if err := d.t.mark(p, sentry.MarkTree); err != nil {
		return err
	}
	d.zone.Store(uint32(route.Private))
	return nil
}

// leaves reports whether a symbolic link in the directory rel would lead a program on the host out of the workspace, or
// into a repository directory or held file. Only leading ".." are counted on: further in they cannot be without knowing
// where the components before them lead.
func (t *tree) leaves(rel, target string) bool {
	if target == "" {
		return true
	}
	if path.IsAbs(target) {
		// The workspace has the same path inside and on the host; Host may be where it is staged.
		below, ok := strings.CutPrefix(path.Clean(target), t.ws.Mount+"/")
		if !ok || strings.Contains(target, "/../") || strings.HasSuffix(target, "/..") {
			return true
		}
		rel, target = "", below
	}
	depth := 0
	if rel != "" {
		depth = strings.Count(rel, "/") + 1
	}
	inner := false
	at := rel
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; depth < 0 || inner {
				return true
			}
			if at = path.Dir(at); at == "." {
				at = ""
			}
		default:
			inner = true
			if c := route.Classify(part); c == route.DotGit || c == route.Variant {
				return true
			}
			if file, directory := t.held.Match(at, part); file || directory {
				return true
			}
			at = joinRel(at, part)
		}
	}
	return false
}

func (t *tree) chmod(fd int, mode uint32) error {
	return unix.Fchmodat(t.self, strconv.Itoa(fd), mode, 0)
}

// made opens what has just been made as name in at, and enters it.
func (n *node) made(at int, name string, h home) (*node, lisafs.Statx, error) {
	var e entry
	e.kind, e.zone, e.private = h.kind, h.zone, h.private
	if err := statAt(at, name, &e.st); err != nil {
		return nil, lisafs.Statx{}, err
	}
	if h.admit {
		n.t.admit(n.self, name, &e.st)
	}
	c, err := n.open(name, &e)
	if err != nil {
		return nil, lisafs.Statx{}, err
	}
	return c, n.t.shown(&e.st), nil
}

// OpenCreate implements lisafs.ControlFDImpl.OpenCreate.
func (n *node) OpenCreate(mode linux.FileMode, _ lisafs.UID, _ lisafs.GID, name string, flags uint32) (*lisafs.ControlFD, lisafs.Statx, *lisafs.OpenFD, int, error) {
	fail := func(err error) (*lisafs.ControlFD, lisafs.Statx, *lisafs.OpenFD, int, error) {
		return nil, lisafs.Statx{}, nil, -1, err
	}
	d := n.self
	defer n.t.exclusively(name)()
	at, h, err := d.place(name, route.CreateFile)
	if err != nil {
		return fail(err)
	}
	open := int(flags)&(unix.O_ACCMODE|unix.O_TRUNC) | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_NONBLOCK
	if !h.private && d.Zone().Appended() {
		open |= unix.O_APPEND
	}
	fd, err := openAt(at, name, open, uint32(mode)&0o1777)
	if err != nil {
		return fail(err)
	}
	undo := func(err error) (*lisafs.ControlFD, lisafs.Statx, *lisafs.OpenFD, int, error) {
		unix.Close(fd)
		unix.Unlinkat(at, name, 0)
		return fail(err)
	}
	if err := n.t.own(fd, ""); err != nil {
		return undo(err)
	}
	c, st, err := n.made(at, name, h)
	if err != nil {
		return undo(err)
	}
	donated, derr := unix.Dup(fd)
	if derr != nil {
		donated = -1 // slower, but it works without
	}
	return c.FD(), st, c.newHandle(fd, flags).FD(), donated, nil
}

// Mkdir implements lisafs.ControlFDImpl.Mkdir.
func (n *node) Mkdir(mode linux.FileMode, _ lisafs.UID, _ lisafs.GID, name string) (*lisafs.ControlFD, lisafs.Statx, error) {
	defer n.t.exclusively(name)()
	at, h, err := n.self.place(name, route.Mkdir)
	if err != nil {
		return nil, lisafs.Statx{}, err
	}
	if err := unix.Mkdirat(at, name, uint32(mode)&0o1777); err != nil {
		return nil, lisafs.Statx{}, err
	}
	return n.finish(at, name, h, unix.AT_REMOVEDIR)
}

// finish gives what has been made to the developer and enters it, or removes it.
func (n *node) finish(at int, name string, h home, remove int) (*lisafs.ControlFD, lisafs.Statx, error) {
	err := n.t.own(at, name)
	if err == nil {
		var c *node
		var st lisafs.Statx
		if c, st, err = n.made(at, name, h); err == nil {
			return c.FD(), st, nil
		}
	}
	unix.Unlinkat(at, name, remove)
	return nil, lisafs.Statx{}, err
}

// Mknod implements lisafs.ControlFDImpl.Mknod. The Sentry keeps FIFOs and sockets to itself when they are refused here;
// devices and whiteouts do not exist in a workspace.
func (n *node) Mknod(mode linux.FileMode, _ lisafs.UID, _ lisafs.GID, name string, _, _ uint32) (*lisafs.ControlFD, lisafs.Statx, error) {
	if mode.FileType() != linux.S_IFREG {
		return nil, lisafs.Statx{}, unix.EPERM
	}
	defer n.t.exclusively(name)()
	at, h, err := n.self.place(name, route.CreateFile)
	if err != nil {
		return nil, lisafs.Statx{}, err
	}
	if err := unix.Mknodat(at, name, unix.S_IFREG|uint32(mode)&0o1777, 0); err != nil {
		return nil, lisafs.Statx{}, err
	}
	return n.finish(at, name, h, 0)
}

// Symlink implements lisafs.ControlFDImpl.Symlink.
func (n *node) Symlink(name, target string, _ lisafs.UID, _ lisafs.GID) (*lisafs.ControlFD, lisafs.Statx, error) {
	defer n.t.exclusively(name)()
	at, h, err := n.self.place(name, route.Symlink)
	if err != nil {
		return nil, lisafs.Statx{}, err
	}
	if !h.private && n.t.leaves(n.self.rel(), target) {
		return nil, lisafs.Statx{}, n.self.denied(route.Symlink, name, unix.EPERM)
	}
	if err := unix.Symlinkat(target, at, name); err != nil {
		return nil, lisafs.Statx{}, err
	}
	return n.finish(at, name, h, 0)
}

// Link implements lisafs.ControlFDImpl.Link.
func (n *node) Link(dst lisafs.ControlFDImpl, name string) (*lisafs.ControlFD, lisafs.Statx, error) {
	to := dst.(*node)
	if !n.IsRegular() {
		return nil, lisafs.Statx{}, unix.EPERM
	}
	kind, private := n.verdict()
	if err := kind.Check(route.LinkFrom); err != nil {
		return nil, lisafs.Statx{}, n.parent.denied(route.LinkFrom, n.name, err)
	}
	defer n.t.exclusively(name)()
	at, h, err := to.self.place(name, route.LinkTo)
	if err != nil {
		return nil, lisafs.Statx{}, err
	}
	switch {
	case private && h.private && kind != route.Hold:
	case kind == route.W && h.kind == route.W:
	case kind == route.G && h.kind == route.G && n.parent.Zone().OnceWritten() && to.self.Zone().OnceWritten():
	default:
		return nil, lisafs.Statx{}, unix.EXDEV
	}
	fd, _ := n.file()
	if err := unix.Linkat(n.t.self, strconv.Itoa(fd), at, name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return nil, lisafs.Statx{}, err
	}
	c, st, err := to.made(at, name, h)
	if err != nil {
		unix.Unlinkat(at, name, 0)
		return nil, lisafs.Statx{}, err
	}
	return c.FD(), st, nil
}
