package gofer

import (
	"bytes"
	"encoding/binary"
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
	b, err = readAll(fd, limit)
	return b, st, err
}

// readAll reads fd from its present offset to its end, at most limit bytes.
func readAll(fd, limit int) ([]byte, error) {
	b := make([]byte, 0, 4096)
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := unix.Read(fd, b[len(b):cap(b)])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, err
		case n == 0:
			return b, nil
		}
		if b = b[:len(b)+n]; len(b) > limit {
			return nil, unix.EFBIG
		}
	}
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

// each calls f for the entries in b, which getdents64(2) has filled.
func each(b []byte, f func(ino uint64, typ uint8, name string)) {
	const header = 19 // ino, off, reclen, type
	for len(b) >= header {
		ino := binary.NativeEndian.Uint64(b)
		size := int(binary.NativeEndian.Uint16(b[16:]))
		name := b[header:size]
		if i := bytes.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		if s := string(name); s != "." && s != ".." {
			f(ino, b[18], s)
		}
		b = b[size:]
	}
}

// readNames returns the names in the directory dir (an O_PATH descriptor will do), at most limit of them.
func readNames(dir, limit int) (names []string, types []uint8, err error) {
	fd, err := openAt(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, 8192)
	for {
		n, err := unix.Getdents(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return names, types, err
		}
		if len(names) > limit {
			return names, types, unix.EFBIG
		}
		each(buf[:n], func(_ uint64, typ uint8, name string) {
			names, types = append(names, name), append(types, typ)
		})
	}
}
