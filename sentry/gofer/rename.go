package gofer

import (
	"path"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/lisafs"

	"lazaret.dev/lazaret/sentry/ignore"
	"lazaret.dev/lazaret/sentry/route"
)

const (
	maxMoved      = 100_000 // entries that are looked at before a host directory moves; beyond, it is copied
	maxMovedDepth = 128
	maxHead       = 4200 // bytes
)

// Unlink implements lisafs.ControlFDImpl.Unlink.
func (n *node) Unlink(name string, flags uint32) error {
	d := n.self
	var e entry
	if err := d.lookup(name, &e); err != nil {
		return err
	}
	op := route.Unlink
	if flags&unix.AT_REMOVEDIR != 0 {
		op = route.Rmdir
		if !isDir(&e.st) {
			return unix.ENOTDIR
		}
	} else if isDir(&e.st) {
		return unix.EISDIR
	}
	if err := e.kind.Check(op); err != nil {
		return d.denied(op, name, err)
	}
	how := int(flags & unix.AT_REMOVEDIR)
	again := e.showsThrough() && d.hostHas(name) != route.None
	switch {
	case e.private:
		err := unix.Unlinkat(d.twin(), name, how)
		if err == unix.ENOTEMPTY {
			err = d.t.purge(d.twin(), name, 0, false)
		}
		if err != nil {
			return err
		}
	case e.kind == route.Hold:
		if op == route.Rmdir {
			if err := n.vacate(name, &e); err != nil {
				return err
			}
		}
	default:
		if op == route.Rmdir && d.twin() >= 0 {
			if err := d.t.purge(d.twin(), name, 0, true); err != nil && err != unix.ENOENT && err != unix.ENOTDIR {
				return err
			}
		}
		if err := unix.Unlinkat(d.host, name, how); err != nil {
			return err
		}
		if op == route.Rmdir {
			if err := d.dropTwin(name); err != nil {
				return err
			}
		}
	}
	if op == route.Rmdir {
		d.t.forget(d, name)
	}
	if again {
		return d.hideRemoved(name)
	}
	return nil
}

// showsThrough reports whether removing the private entry would show the host's again.
func (e *entry) showsThrough() bool { return e.kind == route.Hold || e.seed != route.NoSeed }

// vacate checks that a held directory is empty as the sandbox sees it, and clears its twin.
func (n *node) vacate(name string, e *entry) error {
	c, err := n.self.enter(name, e)
	if err != nil {
		return err
	}
	defer n.t.drop(c)
	names, _, err := readNames(c.host, maxSeedEntries)
	if err != nil {
		return unix.ENOTEMPTY
	}
	for _, name := range names {
		var below entry
		if c.lookup(name, &below) != unix.ENOENT {
			return unix.ENOTEMPTY
		}
	}
	return n.self.dropTwin(name)
}

// RenameAt implements lisafs.ControlFDImpl.RenameAt.
func (n *node) RenameAt(oldName string, dir lisafs.ControlFDImpl, newName string) error {
	return n.RenameAt2(oldName, dir, newName, 0)
}

// RenameAt2 implements lisafs.ControlFDImpl.RenameAt2.
func (n *node) RenameAt2(oldName string, dir lisafs.ControlFDImpl, newName string, flags uint32) error {
	if flags&^unix.RENAME_NOREPLACE != 0 {
		return unix.EINVAL // an exchange would be two judgements in one, a whiteout is a device
	}
	to := dir.(*node)
	if err := n.rename(oldName, to, newName, int(flags)); err != nil {
		n.self.denied(route.RenameFrom, oldName, err)
		return to.self.denied(route.RenameTo, newName, err)
	}
	return nil
}

// rename runs while lisafs excludes every other call.
func (n *node) rename(oldName string, toNode *node, newName string, flags int) error {
	from, to := n.self, toNode.self
	var src, dst entry
	if err := from.lookup(oldName, &src); err != nil {
		return err
	}
	if err := src.kind.Check(route.RenameFrom); err != nil {
		return err
	}
	directory := isDir(&src.st)
	h := to.homeOf(newName, directory)
	if err := h.kind.Check(route.RenameTo); err != nil {
		return err
	}
	switch err := to.lookup(newName, &dst); err {
	case nil:
		if flags&unix.RENAME_NOREPLACE != 0 {
			return unix.EEXIST
		}
		if err := dst.kind.Check(route.RenameTo); err != nil {
			return err
		}
		if isDir(&dst.st) != directory {
			if directory {
				return unix.ENOTDIR
			}
			return unix.EISDIR
		}
		if dst.private && !h.private {
			return unix.EXDEV
		}
	case unix.ENOENT:
	default:
		return err
	}
	n.t.moved.from, n.t.moved.oldName, n.t.moved.to, n.t.moved.newName = from, oldName, to, newName
	if h.kind == route.Head {
		if from != to || oldName != "HEAD.lock" || src.private {
			return unix.EBUSY
		}
		return from.replaceHead()
	}
	if src.private != h.private {
		return unix.EXDEV
	}
	if h.private {
		return n.renamePrivate(oldName, to, newName, flags, &src, &h)
	}
	if src.kind != h.kind || src.kind == route.G && from.gitdir() != to.gitdir() {
		return unix.EXDEV
	}
	return n.renameHost(oldName, to, newName, flags, &src, &dst)
}

func (n *node) renamePrivate(oldName string, to *dir, newName string, flags int, src *entry, h *home) error {
	from := n.self
	p, err := to.prepare(newName, route.RenameTo, h)
	if err != nil {
		return err
	}
	again := src.showsThrough() && from.hostHas(oldName) != route.None
	if err := unix.Renameat2(from.twin(), oldName, p, newName, uint(flags)); err != nil {
		return err
	}
	n.t.move(from, oldName, to, newName, isDir(&src.st))
	if again {
		return from.hideRemoved(oldName)
	}
	return nil
}

func (n *node) renameHost(oldName string, to *dir, newName string, flags int, src, dst *entry) error {
	from, t := n.self, n.t
	if to.completes(newName) {
		return unix.EPERM
	}
	directory := isDir(&src.st)
	if isLink(&src.st) {
		b := make([]byte, 4096)
		m, err := unix.Readlinkat(from.host, oldName, b)
		if err != nil {
			return err
		}
		if t.leaves(to.rel(), string(b[:m])) {
			return unix.EPERM
		}
	}
	if directory && src.kind == route.W {
		if err := from.movable(oldName, to, newName); err != nil {
			return err
		}
		if to.twin() >= 0 {
			if err := t.purge(to.twin(), newName, 0, false); err != nil && err != unix.ENOENT {
				return err
			}
			t.forget(to, newName)
		}
	}
	if err := unix.Renameat2(from.host, oldName, to.host, newName, uint(flags)); err != nil {
		return err
	}
	if directory && from.twin() >= 0 {
		// What is private in the directory moves along.
		p, err := to.ensureTwin()
		if err == nil {
			err = unix.Renameat2(from.twin(), oldName, p, newName, unix.RENAME_NOREPLACE)
		}
		if err != nil && err != unix.ENOENT {
			unix.Renameat2(to.host, newName, from.host, oldName, unix.RENAME_NOREPLACE)
			return err
		}
	}
	t.move(from, oldName, to, newName, directory)
	return nil
}

// move follows a rename in the tree of directories.
func (t *tree) move(from *dir, oldName string, to *dir, newName string, directory bool) {
	t.forget(to, newName)
	t.epoch.Add(1)
	if !directory {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	d := from.kids[oldName]
	if d == nil {
		return
	}
	delete(from.kids, oldName)
	if to.kids == nil {
		to.kids = make(map[string]*dir)
	}
	to.kids[newName] = d
	to.refs++
	d.parent, d.name = to, newName
	t.dropLocked(from)
}

// Renamed implements lisafs.ControlFDImpl.Renamed.
func (n *node) Renamed() {
	m := &n.t.moved
	if n.parent != m.from || n.name != m.oldName {
		return // somewhere below
	}
	n.t.ref(m.to)
	n.t.drop(n.parent)
	n.parent, n.name = m.to, m.newName
}

// gitdir is the repository directory that d lies in, or nil.
func (d *dir) gitdir() *dir {
	for ; d != nil; d = d.parent {
		if z := d.Zone(); z == route.Gitdir || z == route.WorktreeDir {
			return d
		} else if !z.InGitdir() {
			if d.isRepository() {
				return d
			}
			return nil
		}
	}
	return nil
}

// replaceHead puts the content of HEAD.lock at HEAD, if it is what Git writes there. The file is made anew: whoever still
// holds the lock file open inside writes to a file that nobody reads.
func (d *dir) replaceHead() error {
	b, st, err := readFile(d.host, "HEAD.lock", maxHead)
	if err != nil {
		return unix.EPERM
	}
	if !route.ValidHead(b) {
		return unix.EPERM
	}
	tmp := "tmp_head." + d.t.tmpName()
	if err := d.t.writeFile(d.host, tmp, b, st.Mode&0o777); err != nil {
		return err
	}
	if err := unix.Renameat2(d.host, tmp, d.host, "HEAD", 0); err != nil {
		unix.Unlinkat(d.host, tmp, 0)
		return err
	}
	return unix.Unlinkat(d.host, "HEAD.lock", 0)
}

// movable reports whether the host directory oldName may become newName of to in one step: nothing in it is pinned, and
// no verdict on anything in it changes. EXDEV makes the caller copy, and every copied name is judged by itself.
func (d *dir) movable(oldName string, to *dir, newName string) error {
	if d.t.held.Below(joinRel(d.rel(), oldName)) {
		return unix.EBUSY
	}
	left := maxMoved
	return d.t.sameBelow(d.host, oldName, d.current(true), to.current(true), newName, &left, 0)
}

func (t *tree) sameBelow(at int, name string, was, will *rules, as string, left *int, depth int) error {
	if depth > maxMovedDepth {
		return unix.EXDEV
	}
	fd, err := openPath(at, name, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var own *ignore.Patterns
	probe := &dir{t: t, host: fd}
	var st unix.Statx_t
	if statAt(fd, ".gitignore", &st) == nil && isRegular(&st) {
		own = parseRules(fd, ".gitignore")
	}
	if probe.isRepository() {
		return unix.EBUSY
	}
	was, will = was.below(name, own), will.below(as, own)
	names, types, err := readNames(fd, *left)
	if err != nil {
		return unix.EXDEV
	}
	*left -= len(names)
	for i, n := range names {
		if route.Classify(n) == route.DotGit {
			return unix.EBUSY
		}
		directory := types[i] == unix.DT_DIR
		if types[i] == unix.DT_UNKNOWN {
			if statAt(fd, n, &st) != nil {
				continue
			}
			directory = isDir(&st)
		}
		mask := hideFile | holdFile
		if directory {
			mask = hideDir | mergeDir | holdDir
		}
		a, b := was.decide(n), will.decide(n)
		if a&mask != b&mask {
			return unix.EXDEV
		}
		if directory && a&(hideDir|holdDir) == 0 {
			if err := t.sameBelow(fd, n, was, will, n, left, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// below is what r would be for its directory name, for asking only.
func (r *rules) below(name string, own *ignore.Patterns) *rules {
	if own == nil && r.index != nil && r.index.set.RulesElsewhere(joinRel(r.live.Path(), name)) {
		own = ignore.Unknown()
	}
	return &rules{t: r.t, path: path.Join(r.path, name), live: r.live.Child(name, own), ice: r.ice.Child(name), index: r.index}
}
