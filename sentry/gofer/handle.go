package gofer

import (
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/lisafs"
	"gvisor.dev/gvisor/pkg/marshal/primitive"

	"lazaret.dev/lazaret/sentry/route"
)

// handle is an open file, or a directory being listed.
type handle struct {
	lisafs.OpenFD

	fd     int // of the file, or of the host directory; -1 if there is none
	lister *lister
}

var _ lisafs.OpenFDImpl = (*handle)(nil)

func (n *node) newHandle(fd int, flags uint32) *handle {
	h := &handle{fd: fd}
	h.OpenFD.Init(n.FD(), flags, h)
	return h
}

// Open implements lisafs.ControlFDImpl.Open. A directory's descriptor is never given away.
func (n *node) Open(flags uint32) (*lisafs.OpenFD, int, error) {
	if n.self != nil {
		h := n.newHandle(-1, flags)
		h.lister = &lister{d: n.t.ref(n.self), host: -1, twin: -1}
		return h.FD(), -1, nil
	}
	if !n.IsRegular() {
		return nil, -1, unix.EPERM
	}
	open := int(flags) & (unix.O_ACCMODE | unix.O_TRUNC)
	if open != unix.O_RDONLY {
		if err := n.mayChange(route.OpenWrite); err != nil {
			return nil, -1, err
		}
	}
	fd, private := n.file()
	if open&unix.O_ACCMODE != unix.O_RDONLY && !private && n.parent.Zone().Appended() {
		open |= unix.O_APPEND // both sides write to a log's end; the Sentry's offsets would race with the host's
	}
	f, err := n.t.reopen(fd, open)
	if err != nil {
		return nil, -1, err
	}
	donated, err := unix.Dup(f)
	if err != nil {
		donated = -1
	}
	return n.newHandle(f, flags).FD(), donated, nil
}

// FD implements lisafs.OpenFDImpl.FD.
func (h *handle) FD() *lisafs.OpenFD {
	if h == nil {
		return nil
	}
	return &h.OpenFD
}

// Close implements lisafs.OpenFDImpl.Close.
func (h *handle) Close() {
	if h.fd >= 0 {
		unix.Close(h.fd)
	}
	if h.lister != nil {
		h.lister.close()
	}
}

// Stat implements lisafs.OpenFDImpl.Stat.
func (h *handle) Stat() (lisafs.Statx, error) {
	n := h.ControlFD().(*node)
	if h.lister != nil {
		return n.Stat()
	}
	var st unix.Statx_t
	if err := statAt(h.fd, "", &st); err != nil {
		return lisafs.Statx{}, err
	}
	return n.t.shown(&st), nil
}

// Sync implements lisafs.OpenFDImpl.Sync.
func (h *handle) Sync() error {
	if h.fd < 0 {
		return nil
	}
	return unix.Fsync(h.fd)
}

// Write implements lisafs.OpenFDImpl.Write.
func (h *handle) Write(buf []byte, off uint64) (uint64, error) {
	var done uint64
	for len(buf) > 0 {
		n, err := unix.Pwrite(h.fd, buf, int64(off+done))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			if done > 0 {
				return done, nil
			}
			return 0, err
		}
		done += uint64(n)
		buf = buf[n:]
	}
	return done, nil
}

// Read implements lisafs.OpenFDImpl.Read.
func (h *handle) Read(buf []byte, off uint64) (uint64, error) {
	var done uint64
	for len(buf) > 0 {
		n, err := unix.Pread(h.fd, buf, int64(off+done))
		if err == unix.EINTR {
			continue
		}
		if err != nil && done == 0 {
			return 0, err
		}
		if err != nil || n == 0 {
			break
		}
		done += uint64(n)
		buf = buf[n:]
	}
	return done, nil
}

// Allocate implements lisafs.OpenFDImpl.Allocate.
func (h *handle) Allocate(mode, off, length uint64) error {
	return unix.Fallocate(h.fd, uint32(mode), int64(off), int64(length))
}

// Flush implements lisafs.OpenFDImpl.Flush.
func (h *handle) Flush() error { return nil }

// Renamed implements lisafs.OpenFDImpl.Renamed.
func (h *handle) Renamed() {}

// Getdent64 implements lisafs.OpenFDImpl.Getdent64.
func (h *handle) Getdent64(count uint32, seek0 bool, record func(lisafs.Dirent64)) error {
	if h.lister == nil {
		return unix.ENOTDIR
	}
	return h.lister.next(int(count), seek0, record)
}

// lister walks a directory's host entries and then its twin's, in constant memory.
type lister struct {
	d          *dir // a reference is held
	host, twin int  // descriptors being read, -1 before and after
	phase      int  // 0 not begun, 1 host, 2 twin, 3 done
	off        uint64
	devMajor   [2]uint32 // of the host directory, of the twin
	devMinor   [2]uint32
}

func (l *lister) close() {
	l.closeFDs()
	l.d.t.drop(l.d)
}

func (l *lister) closeFDs() {
	for _, fd := range []*int{&l.host, &l.twin} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

func (l *lister) begin(side, fd int) (int, error) {
	if fd < 0 {
		return -1, nil
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return -1, err
	}
	l.devMajor[side], l.devMinor[side] = st.Dev_major, st.Dev_minor
	return openAt(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

func (l *lister) next(count int, seek0 bool, record func(lisafs.Dirent64)) (err error) {
	if seek0 || l.phase == 0 {
		l.closeFDs()
		l.phase, l.off = 1, 0
		if l.d.Zone() != route.Private || l.d.twin() < 0 {
			if l.host, err = l.begin(0, l.d.host); err != nil {
				return err
			}
		}
	}
	const most = 280 // bytes of one entry
	var buf [8192]byte
	for done := 0; done < count && l.phase < 3; {
		fd, side := l.host, 0
		if l.phase == 2 {
			fd, side = l.twin, 1
		}
		size := min(len(buf), count-done)
		if size < most {
			return nil
		}
		n := 0
		if fd >= 0 {
			if n, err = unix.Getdents(fd, buf[:size]); err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
		}
		if n == 0 {
			if l.phase++; l.phase == 2 {
				if l.twin, err = l.begin(1, l.d.twin()); err != nil {
					return err
				}
			}
			continue
		}
		done += n
		each(buf[:n], func(ino uint64, typ uint8, name string) {
			if !l.shows(side, name, &typ, &ino) {
				return
			}
			l.off++
			record(lisafs.Dirent64{
				Ino: primitive.Uint64(ino), DevMajor: primitive.Uint32(l.devMajor[side]), DevMinor: primitive.Uint32(l.devMinor[side]),
				Off: primitive.Uint64(l.off), Type: primitive.Uint8(typ), Name: lisafs.SizedString(name),
			})
		})
	}
	return nil
}

// shows decides about one entry of a side.
func (l *lister) shows(side int, name string, typ *uint8, ino *uint64) bool {
	d := l.d
	if side == 1 {
		if *typ == unix.DT_FIFO {
			return false
		}
		if d.Zone() == route.Private {
			return true
		}
		var e entry
		return d.lookup(name, &e) == nil && e.private
	}
	if *typ == unix.DT_UNKNOWN {
		var st unix.Statx_t
		if statAt(d.host, name, &st) != nil {
			return false
		}
		*typ = uint8(st.Mode >> 12)
	}
	if *typ == unix.DT_BLK {
		return false
	}
	var e entry
	switch z := d.Zone(); z {
	case route.Work:
		if d.twin() < 0 && route.Classify(name) == route.Plain {
			h := d.current(false).hidden(name)
			if h&(hideFile|hideDir|holdFile|holdDir) == 0 {
				return true // the common case costs no system call
			}
		}
	case route.HeldTree:
	default:
		if v := route.Git(z, name, route.HostOf(uint32(*typ)<<12)); v.Kind != route.P {
			return true
		} else if v.Seed != route.NoSeed {
			_ = d.lookup(name, &e) // makes the private copy, which the twin's listing shows
		}
		return false
	}
	return d.lookup(name, &e) == nil && !e.private
}
