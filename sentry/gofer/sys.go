package gofer

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The gofer runs behind a seccomp filter without epoll, so nothing here may use os.File; and it works below
// descriptors only: every function takes a directory and one name, and none follows a symbolic link.

const statMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME

// nameBuf holds a NUL-terminated name on the stack, so that a lookup does not allocate.
type nameBuf [unix.NAME_MAX + 1]byte

func (b *nameBuf) set(name string) error {
	if len(name) >= len(b) {
		return unix.ENAMETOOLONG
	}
	copy(b[:], name)
	b[len(name)] = 0
	return nil
}

// statAt is statx(2) of name in dir, or of dir itself when name is "". AT_EMPTY_PATH is what the filter asks for.
func statAt(dir int, name string, st *unix.Statx_t) error {
	var buf nameBuf
	if err := buf.set(name); err != nil {
		return err
	}
	for {
		_, _, e := unix.Syscall6(unix.SYS_STATX, uintptr(dir), uintptr(unsafe.Pointer(&buf)),
			unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, statMask, uintptr(unsafe.Pointer(st)), 0)
		switch e {
		case 0:
			return nil
		case unix.EINTR:
		case unix.ENOENT:
			return unix.ENOENT // a constant converts without allocating
		default:
			return e
		}
	}
}

// openPath opens name in dir as a location only: no permission on the file is needed and nothing happens to it.
func openPath(dir int, name string, more int) (int, error) {
	return openAt(dir, name, unix.O_PATH|unix.O_NOFOLLOW|more, 0)
}

func openAt(dir int, name string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// identity tells files apart while a descriptor keeps them from being reused.
type identity struct {
	major, minor uint32
	ino          uint64
}

func identOf(st *unix.Statx_t) identity { return identity{st.Dev_major, st.Dev_minor, st.Ino} }

// stamp changes when the content of a file may have changed. ctime cannot be set by anyone.
type stamp struct {
	id           identity
	size         uint64
	mtime, ctime unix.StatxTimestamp
}

func stampOf(st *unix.Statx_t) stamp {
	return stamp{id: identOf(st), size: st.Size, mtime: st.Mtime, ctime: st.Ctime}
}

func isDir(st *unix.Statx_t) bool     { return st.Mode&unix.S_IFMT == unix.S_IFDIR }
func isRegular(st *unix.Statx_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFREG }
func isFIFO(st *unix.Statx_t) bool    { return st.Mode&unix.S_IFMT == unix.S_IFIFO }
func isLink(st *unix.Statx_t) bool    { return st.Mode&unix.S_IFMT == unix.S_IFLNK }

// readFile reads the regular file name in dir, at most limit bytes; ok is false when it is not a regular file or larger.
func readFile(dir int, name string, limit int) (b []byte, st unix.Statx_t, err error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, st, err
	}
	defer unix.Close(fd)
	if err := statAt(fd, "", &st); err != nil {
		return nil, st, err
	}
	if !isRegular(&st) {
		return nil, st, unix.EINVAL
	}
	if st.Size > uint64(limit) {
		return nil, st, unix.EFBIG
	}
	b = make([]byte, st.Size+1)
	n := 0
	for n < len(b) {
		m, err := unix.Read(fd, b[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, st, err
		}
		if m == 0 {
			return b[:n], st, nil
		}
		n += m
		if n == len(b) {
			if n > limit {
				return nil, st, unix.EFBIG
			}
			b = append(b, make([]byte, len(b))...)
		}
	}
	return b[:n], st, nil
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// dirents calls f for each entry of the open directory fd from its present position, until f returns false.
func dirents(fd int, buf []byte, f func(ino uint64, typ uint8, name []byte) bool) error {
	for {
		n, err := unix.Getdents(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		for b := buf[:n]; len(b) >= 19; {
			ino := *(*uint64)(unsafe.Pointer(&b[0]))
			reclen := int(*(*uint16)(unsafe.Pointer(&b[16])))
			typ := b[18]
			name := b[19:reclen]
			for i, c := range name {
				if c == 0 {
					name = name[:i]
					break
				}
			}
			b = b[reclen:]
			if string(name) == "." || string(name) == ".." {
				continue
			}
			if !f(ino, typ, name) {
				return nil
			}
		}
	}
}

// list returns the names in the directory dir (an O_PATH descriptor will do), at most limit of them.
func list(dir, limit int) (names []string, types []uint8, err error) {
	fd, err := openAt(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(fd)
	var over error
	err = dirents(fd, make([]byte, 8192), func(_ uint64, typ uint8, name []byte) bool {
		if len(names) == limit {
			over = unix.EFBIG
			return false
		}
		names, types = append(names, string(name)), append(types, typ)
		return true
	})
	if err == nil {
		err = over
	}
	runtime.KeepAlive(fd)
	return names, types, err
}
