package review

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	maxNames = 1 << 16 // entries of one directory that are looked at
	maxDepth = 64
)

// openAt opens name, which may be a path, below dir without leaving it and without following any link. It cannot block.
// The caller closes the result.
func openAt(dir *os.File, name string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_NOFOLLOW | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	if name == "" {
		name = "."
	}
	for {
		fd, err := unix.Openat2(int(dir.Fd()), name, &how)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EINTR && err != unix.EAGAIN { // EAGAIN: a rename somewhere; ask again (openat2(2))
			return nil, &os.PathError{Op: "open", Path: Show(name), Err: err}
		}
	}
}

func openDir(dir *os.File, name string) (*os.File, error) {
	return openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
}

var errNotRegular = errors.New("it is not a regular file")

// openRegular opens a regular file for reading and returns what it is.
func openRegular(dir *os.File, name string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	f, err := openAt(dir, name, unix.O_RDONLY)
	if err != nil {
		return nil, st, err
	}
	if err = unix.Fstat(int(f.Fd()), &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errNotRegular
	}
	if err != nil {
		f.Close()
		return nil, st, &os.PathError{Op: "open", Path: Show(name), Err: err}
	}
	return f, st, nil
}

// statAt looks at name itself. dir may be nil: then nothing is there.
func statAt(dir *os.File, name string, st *unix.Stat_t) error {
	if dir == nil {
		return unix.ENOENT
	}
	return unix.Fstatat(int(dir.Fd()), name, st, unix.AT_SYMLINK_NOFOLLOW)
}

// kindAt is the file type of name, 0 if it is not there.
func kindAt(dir *os.File, name string) uint32 {
	var st unix.Stat_t
	if statAt(dir, name, &st) != nil {
		return 0
	}
	return st.Mode & unix.S_IFMT
}

// listNames returns the sorted names in an open directory.
func listNames(dir *os.File) (names []string, all bool, err error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return nil, false, err
	}
	for len(names) <= maxNames {
		some, err := dir.Readdirnames(1024)
		names = append(names, some...)
		if err == io.EOF {
			slices.Sort(names)
			return names, true, nil
		}
		if err != nil {
			return nil, false, err
		}
	}
	slices.Sort(names)
	return names[:maxNames], false, nil
}

// readFile reads a regular file of at most limit bytes.
func readFile(dir *os.File, name string, limit int64) ([]byte, unix.Stat_t, error) {
	f, st, err := openRegular(dir, name)
	if err != nil {
		return nil, st, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("read %s: over %d bytes", Show(name), limit)
	}
	return b, st, err
}

func readLink(dir *os.File, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
	if err != nil {
		return "", &os.PathError{Op: "readlink", Path: Show(name), Err: err}
	}
	return string(buf[:n]), nil
}

// sameObject compares identities, not content.
func sameObject(a, b unix.Stat_t) bool { return a.Dev == b.Dev && a.Ino == b.Ino }
