package gofer

import (
	"bytes"
	"math"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/lisafs"

	"lazaret.dev/lazaret/sentry/route"
)

// node is a control FD: one file as the sandbox names it.
type node struct {
	lisafs.ControlFD

	t *tree

	// Where it is. Both change in a rename, under lisafs's global lock.
	parent *dir // a reference is held; nil for the root
	name   string

	self *dir         // the directory itself, a reference is held; nil for others
	fd   atomic.Int64 // O_PATH descriptor and side, see packed; for non-directories
	old  []int        // descriptors replaced by a copy-up, closed with the node; guarded by lisafs's write lock on the node
}

var _ lisafs.ControlFDImpl = (*node)(nil)

// A node's descriptor and its side change together when a held file is copied, so they share a word.
func packed(fd int, private bool) int64 {
	v := int64(fd) << 1
	if private {
		v |= 1
	}
	return v
}

func (n *node) file() (fd int, private bool) {
	v := n.fd.Load()
	return int(v >> 1), v&1 != 0
}

// stat fills st for the node itself.
func (n *node) stat(st *unix.Statx_t) error {
	if n.self != nil {
		return n.self.stat(st)
	}
	fd, _ := n.file()
	return statAt(fd, "", st)
}

func (d *dir) stat(st *unix.Statx_t) error {
	fd := d.host
	if fd < 0 {
		fd = d.twin()
	}
	return statAt(fd, "", st)
}

// newNode makes the control FD for name of d, with the descriptor fd for what is not a directory. It owns fd and the
// reference on self.
func (d *dir) newNode(conn *lisafs.Connection, up *lisafs.Node, name string, mode uint16, self *dir, fd int, private bool) *node {
	var n *node
	var at *lisafs.Node
	up.WithChildrenMu(func() {
		at = up.LookupChildLocked(name)
		if at == nil {
			both := &struct {
				at lisafs.Node
				n  node
			}{}
			at, n = &both.at, &both.n
			at.InitLocked(name, up)
		} else {
			at.IncRef()
			n = &node{}
		}
	})
	n.t, n.parent, n.name, n.self = d.t, d.t.ref(d), name, self
	n.fd.Store(packed(fd, private))
	n.ControlFD.Init(conn, at, linux.FileMode(mode), n)
	return n
}

// FD implements lisafs.ControlFDImpl.FD.
func (n *node) FD() *lisafs.ControlFD {
	if n == nil {
		return nil
	}
	return &n.ControlFD
}

// Close implements lisafs.ControlFDImpl.Close.
func (n *node) Close() {
	if n.self != nil {
		n.t.drop(n.self)
	} else if fd, _ := n.file(); fd >= 0 {
		unix.Close(fd)
	}
	for _, fd := range n.old {
		unix.Close(fd)
	}
	if n.parent != nil {
		n.t.drop(n.parent)
	}
}

// Stat implements lisafs.ControlFDImpl.Stat.
func (n *node) Stat() (lisafs.Statx, error) {
	var st unix.Statx_t
	if err := n.stat(&st); err != nil {
		return lisafs.Statx{}, err
	}
	return n.t.shown(&st), nil
}

// shown is what the sandbox sees of a file's attributes: what is the developer's is the agent's.
func (t *tree) shown(st *unix.Statx_t) lisafs.Statx {
	s := lisafs.Statx{
		Mask: st.Mask, Mode: st.Mode, DevMinor: st.Dev_minor, DevMajor: st.Dev_major, Ino: st.Ino, Nlink: st.Nlink,
		UID: st.Uid, GID: st.Gid, RdevMinor: st.Rdev_minor, RdevMajor: st.Rdev_major, Size: st.Size,
		Blksize: st.Blksize, Blocks: st.Blocks,
		Atime: lisafs.StatxTimestamp{Sec: st.Atime.Sec, Nsec: st.Atime.Nsec},
		Btime: lisafs.StatxTimestamp{Sec: st.Btime.Sec, Nsec: st.Btime.Nsec},
		Mtime: lisafs.StatxTimestamp{Sec: st.Mtime.Sec, Nsec: st.Mtime.Nsec},
		Ctime: lisafs.StatxTimestamp{Sec: st.Ctime.Sec, Nsec: st.Ctime.Nsec},
	}
	if st.Uid == t.owner || st.Uid == 0 && t.chown {
		s.UID = t.ws.AgentUID
	}
	if st.Gid == t.group || st.Gid == 0 && t.chown {
		s.GID = t.ws.AgentGID
	}
	s.Mode &^= unix.S_ISUID | unix.S_ISGID
	return s
}

// servable reports whether a file of this type may be shown at all.
func servable(mode uint16) bool { return mode&unix.S_IFMT != unix.S_IFBLK }

// Walk implements lisafs.ControlFDImpl.Walk.
func (n *node) Walk(name string) (*lisafs.ControlFD, lisafs.Statx, error) {
	d := n.self
	for range 3 {
		var e entry
		if err := d.lookup(name, &e); err != nil {
			return nil, lisafs.Statx{}, err
		}
		if !servable(e.st.Mode) {
			return nil, lisafs.Statx{}, unix.EPERM
		}
		c, err := n.open(name, &e)
		if err == unix.ENOENT || err == unix.ESTALE {
			continue // the host replaced it between the two looks
		}
		if err != nil {
			return nil, lisafs.Statx{}, err
		}
		return c.FD(), n.t.shown(&e.st), nil
	}
	return nil, lisafs.Statx{}, unix.ENOENT
}

// open makes the control FD for what lookup has found.
func (n *node) open(name string, e *entry) (*node, error) {
	d := n.self
	if isDir(&e.st) {
		self, err := d.enter(name, e)
		if err != nil {
			return nil, err
		}
		return d.newNode(n.Conn(), n.Node(), name, e.st.Mode, self, -1, e.private), nil
	}
	from := d.host
	if e.private {
		from = d.twin()
	}
	fd, err := openPath(from, name, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil || identOf(&st) != identOf(&e.st) {
		unix.Close(fd)
		return nil, unix.ESTALE
	}
	return d.newNode(n.Conn(), n.Node(), name, e.st.Mode, nil, fd, e.private), nil
}

// WalkStat implements lisafs.ControlFDImpl.WalkStat. It is the call behind every path lookup in the sandbox: one
// statx(2) per component where nothing private is near.
func (n *node) WalkStat(path lisafs.StringArray, record func(lisafs.Statx)) error {
	if len(path) > 0 && path[0] == "" {
		st, err := n.Stat()
		if err != nil {
			return err
		}
		record(st)
		path = path[1:]
	}
	d := n.self
	if d == nil || len(path) == 0 {
		return nil
	}
	n.t.ref(d)
	defer func() { n.t.drop(d) }()
	var e entry
	for i, name := range path {
		switch err := d.lookup(name, &e); err {
		case nil:
		case unix.ENOENT, unix.ENOTDIR:
			return nil
		default:
			return err
		}
		if !servable(e.st.Mode) {
			return unix.EPERM
		}
		record(n.t.shown(&e.st))
		if i == len(path)-1 || !isDir(&e.st) {
			return nil
		}
		next, err := d.enter(name, &e)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return err
		}
		n.t.drop(d)
		d = next
	}
	return nil
}

// verdict is the node's own kind, by its name now.
func (n *node) verdict() (route.Kind, bool) {
	if n.parent == nil {
		return route.Pin, false
	}
	if n.self != nil {
		var e entry
		if n.parent.lookup(n.name, &e) != nil {
			return route.No, false
		}
		return e.kind, e.private
	}
	_, private := n.file()
	if private {
		return route.P, true
	}
	return n.parent.hostKind(n.name, route.HostOf(uint32(n.FileType()))), false
}

// hostKind is the kind of a host file called name in d, without looking at it.
func (d *dir) hostKind(name string, host route.Host) route.Kind {
	switch z := d.Zone(); z {
	case route.Private:
		return route.No // a host file in a directory that has become private: a held descriptor
	case route.HeldTree:
		return route.Hold
	case route.Work:
		switch route.Classify(name) {
		case route.DotGit, route.Variant:
			return route.RO
		case route.Layout:
			if d.isRepository() {
				return hostOnly(route.Git(route.Gitdir, name, host).Kind)
			}
		}
		h := d.current(false).hidden(name)
		if h&holdFile != 0 || h&holdDir != 0 && host == route.Dir {
			return route.Hold
		}
		return route.W
	default:
		return hostOnly(route.Git(z, name, host).Kind)
	}
}

// hostOnly turns the verdict for a name into that for a host file that holds it: what belongs into the twin cannot be
// touched on the host.
func hostOnly(k route.Kind) route.Kind {
	if k == route.P {
		return route.RO
	}
	return k
}

// mayChange checks op on the node, and copies a held file first.
func (n *node) mayChange(op route.Op) error {
	err := n.judgeChange(op)
	if err != nil && n.parent != nil {
		return n.parent.denied(op, n.name, err)
	}
	return err
}

func (n *node) judgeChange(op route.Op) error {
	kind, private := n.verdict()
	if err := kind.Check(op); err != nil {
		return err
	}
	if kind == route.Hold && !private {
		if n.self != nil {
			return unix.EPERM // a held directory's own attributes have no copy
		}
		return n.copyUp()
	}
	if op == route.OpenWrite && kind == route.G && n.parent.Zone().OnceWritten() && !route.MayRewrite(n.name) {
		return unix.EPERM
	}
	return nil
}

// copyUp moves the node of a held file to a private copy.
func (n *node) copyUp() error {
	d := n.parent
	p, err := d.ensureTwin()
	if err != nil {
		return err
	}
	fd, _ := n.file()
	src, err := n.t.reopen(fd, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	tmp := n.t.tmpName()
	if err := n.t.copyOpen(src, n.t.meta, tmp); err != nil {
		unix.Unlinkat(n.t.meta, tmp, 0)
		return err
	}
	err = unix.Renameat2(n.t.meta, tmp, p, n.name, unix.RENAME_NOREPLACE)
	if err != nil {
		unix.Unlinkat(n.t.meta, tmp, 0)
		if err != unix.EEXIST {
			return err
		}
	}
	fresh, err := openPath(p, n.name, 0)
	if err != nil {
		return err
	}
	n.t.mu.Lock()
	n.old = append(n.old, fd)
	n.fd.Store(packed(fresh, true))
	n.t.mu.Unlock()
	return nil
}

// SetStat implements lisafs.ControlFDImpl.SetStat.
func (n *node) SetStat(req lisafs.SetStatReq) (failed uint32, err error) {
	op := route.SetAttr
	if req.Mask&unix.STATX_SIZE != 0 {
		op = route.OpenWrite
	}
	if e := n.mayChange(op); e != nil {
		// Ownership is squashed either way; changing only that succeeds and does nothing.
		if rest := req.Mask &^ (unix.STATX_UID | unix.STATX_GID); rest != 0 {
			return rest, e
		}
		return 0, nil
	}
	fd, _ := n.file()
	if n.self != nil {
		if fd = n.self.host; fd < 0 {
			fd = n.self.twin()
		}
	}
	fail := func(mask uint32, e error) {
		if e != nil {
			failed |= req.Mask & mask
			err = e
		}
	}
	link := n.IsSymlink()
	if req.Mask&unix.STATX_MODE != 0 {
		if link {
			fail(unix.STATX_MODE, unix.EOPNOTSUPP)
		} else {
			fail(unix.STATX_MODE, n.t.chmod(fd, req.Mode&0o1777))
		}
	}
	if req.Mask&unix.STATX_SIZE != 0 {
		fail(unix.STATX_SIZE, n.truncate(fd, req.Size))
	}
	if req.Mask&(unix.STATX_ATIME|unix.STATX_MTIME) != 0 {
		ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
		if req.Mask&unix.STATX_ATIME != 0 {
			ts[0] = unix.Timespec{Sec: req.Atime.Sec, Nsec: req.Atime.Nsec}
		}
		if req.Mask&unix.STATX_MTIME != 0 {
			ts[1] = unix.Timespec{Sec: req.Mtime.Sec, Nsec: req.Mtime.Nsec}
		}
		fail(unix.STATX_ATIME|unix.STATX_MTIME, unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW))
	}
	return failed, err
}

func (n *node) truncate(fd int, size uint64) error {
	if size > math.MaxInt64 {
		return unix.EFBIG
	}
	w, err := n.t.reopen(fd, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer unix.Close(w)
	return unix.Ftruncate(w, int64(size))
}

// StatFS implements lisafs.ControlFDImpl.StatFS.
func (n *node) StatFS() (lisafs.StatFS, error) {
	fd, _ := n.file()
	if n.self != nil {
		if fd = n.self.host; fd < 0 {
			fd = n.self.twin()
		}
	}
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil {
		return lisafs.StatFS{}, err
	}
	return lisafs.StatFS{
		Type: uint64(s.Type), BlockSize: s.Bsize, Blocks: s.Blocks, BlocksFree: s.Bfree, BlocksAvailable: s.Bavail,
		Files: s.Files, FilesFree: s.Ffree, NameLength: uint64(s.Namelen),
	}, nil
}

// Readlink implements lisafs.ControlFDImpl.Readlink. The target is data: the sandbox resolves it on its own side.
func (n *node) Readlink(buf func(uint32) []byte) (uint16, error) {
	fd, _ := n.file()
	for size := 256; size < math.MaxUint16; size *= 2 {
		b := buf(uint32(size))
		m, err := unix.Readlinkat(fd, "", b)
		if err != nil {
			return 0, err
		}
		if m < size {
			return uint16(m), nil
		}
	}
	return 0, unix.ENAMETOOLONG
}

// Connect implements lisafs.ControlFDImpl.Connect. Sockets of the host are never reached from inside.
func (n *node) Connect(uint32) (int, error) { return -1, unix.EPERM }

// ConnectWithCreds implements lisafs.ControlFDImpl.ConnectWithCreds.
func (n *node) ConnectWithCreds(uint32, lisafs.UID, lisafs.GID) (int, error) { return -1, unix.EPERM }

// BindAt implements lisafs.ControlFDImpl.BindAt. The Sentry then keeps the socket to itself.
func (n *node) BindAt(string, uint32, linux.FileMode, lisafs.UID, lisafs.GID) (*lisafs.ControlFD, lisafs.Statx, *lisafs.BoundSocketFD, int, error) {
	return nil, lisafs.Statx{}, nil, -1, unix.EPERM
}

// ownAttr reports the attributes that this server keeps for itself.
func ownAttr(name string) bool { return strings.HasPrefix(name, "user.lazaret.") }

// attrFile opens what an attribute call needs: an O_PATH descriptor will not do. Only user attributes exist inside.
func (n *node) attrFile(name string) (int, error) {
	if name != "" && (!strings.HasPrefix(name, "user.") || ownAttr(name)) {
		return -1, unix.EOPNOTSUPP
	}
	fd, _ := n.file()
	switch {
	case n.self != nil:
		if fd = n.self.host; fd < 0 {
			fd = n.self.twin()
		}
	case !n.IsRegular():
		return -1, unix.EOPNOTSUPP
	}
	return n.t.reopen(fd, unix.O_RDONLY)
}

// GetXattr implements lisafs.ControlFDImpl.GetXattr.
func (n *node) GetXattr(name string, size uint32, buf func(uint32) []byte) (uint16, error) {
	fd, err := n.attrFile(name)
	if err == unix.EOPNOTSUPP {
		return 0, unix.ENODATA
	}
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if size == 0 || size > linux.XATTR_SIZE_MAX-1 {
		size = linux.XATTR_SIZE_MAX - 1
	}
	m, err := unix.Fgetxattr(fd, name, buf(size))
	if err != nil {
		return 0, err
	}
	return uint16(m), nil
}

// SetXattr implements lisafs.ControlFDImpl.SetXattr.
func (n *node) SetXattr(name, value string, flags uint32) error {
	if err := n.mayChange(route.SetAttr); err != nil {
		return err
	}
	fd, err := n.attrFile(name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsetxattr(fd, name, []byte(value), int(flags))
}

// ListXattr implements lisafs.ControlFDImpl.ListXattr.
func (n *node) ListXattr(uint64) (lisafs.StringArray, error) {
	fd, err := n.attrFile("")
	if err == unix.EOPNOTSUPP {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	b := make([]byte, linux.XATTR_LIST_MAX)
	m, err := unix.Flistxattr(fd, b)
	if err != nil {
		return nil, err
	}
	var names lisafs.StringArray
	for _, name := range bytes.Split(b[:m], []byte{0}) {
		if s := string(name); strings.HasPrefix(s, "user.") && !ownAttr(s) {
			names = append(names, s)
		}
	}
	return names, nil
}

// RemoveXattr implements lisafs.ControlFDImpl.RemoveXattr.
func (n *node) RemoveXattr(name string) error {
	if err := n.mayChange(route.SetAttr); err != nil {
		return err
	}
	fd, err := n.attrFile(name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fremovexattr(fd, name)
}
