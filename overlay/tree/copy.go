package tree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Copy makes dst, a directory that must not exist below parent, an equal copy of src: types, contents (shared by
// reflink where the file system can, holes kept otherwise), owners, modes with set-id bits, times,
// user.* and file capability attributes, hard links, whiteouts, FIFOs and sockets. It does not make the copy
// durable. On error a part of dst may exist: copy to a temporary name and rename.
// src must hold still: ErrChanged tells that it did not.
func Copy(src, parent *os.File, dst string) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	if err := unix.Mkdirat(int(parent.Fd()), dst, 0o700); err != nil {
		return fmt.Errorf("copy to %q: %w", dst, err)
	}
	root, err := openDir(int(parent.Fd()), dst)
	if err != nil {
		return fmt.Errorf("copy to %q: %w", dst, err)
	}
	c := copier{links: map[inode]string{}, root: root, cur: root}
	defer func() {
		if c.cur != c.root {
			c.cur.Close()
		}
		root.Close()
	}()
	if err := Walk(src, Visitor{Enter: c.enter, Leave: c.leave}); err != nil {
		return fmt.Errorf("copy to %q: %w", dst, err)
	}
	from, err := openDir(int(src.Fd()), ".")
	if err != nil {
		return fmt.Errorf("copy to %q: %w", dst, err)
	}
	defer from.Close()
	if err := errors.Join(copyXattrs(from, root), setMeta(root, st)); err != nil {
		return fmt.Errorf("copy to %q: %w", dst, err)
	}
	return nil
}

type inode struct{ dev, ino uint64 }

type copier struct {
	root  *os.File
	cur   *os.File // the copy of the directory being walked
	links map[inode]string
}

// enter runs in the order of Walk: the non-directories of a directory first, then each directory.
func (c *copier) enter(e Entry) error {
	if err := c.copyOne(e); err != nil {
		return fmt.Errorf("%q: %w", e.Name, err)
	}
	return nil
}

func (c *copier) copyOne(e Entry) error {
	to := int(c.cur.Fd())
	if !e.IsDir() && e.Stat.Nlink > 1 {
		id := inode{e.Stat.Dev, e.Stat.Ino}
		if first, ok := c.links[id]; ok {
			return c.link(first, e.Name)
		}
		if len(c.links) >= maxLinks {
			return fmt.Errorf("more than %d hard-linked files", maxLinks)
		}
		c.links[id] = e.Path()
	}
	switch e.Type() {
	case unix.S_IFDIR:
		if e.Closed != nil {
			return e.Closed
		}
		if err := unix.Mkdirat(to, e.Name, 0o700); err != nil {
			return err
		}
		next, err := openDir(to, e.Name)
		if err != nil {
			return err
		}
		if c.cur != c.root {
			c.cur.Close()
		}
		c.cur = next
		return nil
	case unix.S_IFREG:
		return c.file(e)
	case unix.S_IFLNK:
		target, err := readlink(e.Dir, e.Name)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(target, to, e.Name); err != nil {
			return err
		}
	case unix.S_IFIFO, unix.S_IFSOCK:
		if err := unix.Mknodat(to, e.Name, e.Type()|0o600, 0); err != nil {
			return err
		}
	case unix.S_IFCHR:
		if !e.Whiteout() {
			return errors.New("a device node cannot be copied")
		}
		if err := unix.Mknodat(to, e.Name, unix.S_IFCHR, 0); err != nil {
			return err
		}
	default:
		return fmt.Errorf("unknown file type %#o", e.Type())
	}
	if err := unix.Fchownat(to, e.Name, int(e.Stat.Uid), int(e.Stat.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if e.Type() != unix.S_IFLNK {
		// No symbolic link can be here: this process just made the node in a private directory.
		if err := unix.Fchmodat(to, e.Name, e.Stat.Mode&0o7777, 0); err != nil {
			return err
		}
	}
	return setTimes(to, e.Name, e.Stat, unix.AT_SYMLINK_NOFOLLOW)
}

// link gives the copy made at the relative path first another name in the current directory.
func (c *copier) link(first, name string) error {
	dir, base := c.root, first
	if i := strings.LastIndexByte(first, '/'); i >= 0 {
		f, err := c.reach(first[:i])
		if err != nil {
			return err
		}
		defer f.Close()
		dir, base = f, first[i+1:]
	}
	return unix.Linkat(int(dir.Fd()), base, int(c.cur.Fd()), name, 0)
}

// reach opens a directory of the copy by a path of any length.
func (c *copier) reach(rel string) (*os.File, error) {
	dir, err := openDir(int(c.root.Fd()), ".")
	for _, part := range strings.Split(rel, "/") {
		if err != nil {
			return nil, err
		}
		var next *os.File
		next, err = openDir(int(dir.Fd()), part)
		dir.Close()
		dir = next
	}
	return dir, err
}

func (c *copier) file(e Entry) error {
	fd, err := unix.Openat(int(e.Dir.Fd()), e.Name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	in := os.NewFile(uintptr(fd), e.Name)
	defer in.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Ino != e.Stat.Ino || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return ErrChanged
	}
	fd, err = unix.Openat(int(c.cur.Fd()), e.Name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(fd), e.Name)
	defer out.Close()
	if err := copyData(in, out, st.Size); err != nil {
		return err
	}
	// Owner before mode and attributes: chown clears set-id bits and file capabilities.
	return errors.Join(setMeta(out, st), copyXattrs(in, out), setMeta(out, st))
}

// copyData shares the extents where possible, else copies them without filling holes.
func copyData(in, out *os.File, size int64) error {
	if size == 0 || unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	if err := out.Truncate(size); err != nil {
		return err
	}
	for pos := int64(0); pos < size; {
		data, err := unix.Seek(int(in.Fd()), pos, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		end := size
		if err != nil {
			data = pos
		} else if hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE); err == nil {
			end = hole
		}
		if _, err := unix.Seek(int(in.Fd()), data, io.SeekStart); err != nil {
			return err
		}
		if _, err := unix.Seek(int(out.Fd()), data, io.SeekStart); err != nil {
			return err
		}
		n, err := io.CopyN(out, in, end-data) // copy_file_range where the kernel can
		if err == io.EOF {
			return ErrChanged
		}
		if err != nil {
			return err
		}
		pos = data + n
	}
	return nil
}

func (c *copier) leave(e Entry) error {
	from, err := openDir(int(e.Dir.Fd()), e.Name)
	if err != nil {
		return fmt.Errorf("%q: %w", e.Name, err)
	}
	defer from.Close()
	if err := errors.Join(copyXattrs(from, c.cur), setMeta(c.cur, e.Stat)); err != nil {
		return fmt.Errorf("%q: %w", e.Name, err)
	}
	var parent *os.File
	if e.Depth() == 0 {
		parent = c.root
	} else {
		fd, err := unix.Openat(int(c.cur.Fd()), "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("return from %q: %w", e.Name, err)
		}
		parent = os.NewFile(uintptr(fd), "..")
	}
	c.cur.Close()
	c.cur = parent
	return nil
}

func setMeta(f *os.File, st unix.Stat_t) error {
	fd := int(f.Fd())
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
		return fmt.Errorf("set owner: %w", err)
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return fmt.Errorf("set mode: %w", err)
	}
	return setTimes(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), st, 0)
}

func setTimes(dirfd int, name string, st unix.Stat_t, flags int) error {
	if err := unix.UtimesNanoAt(dirfd, name, []unix.Timespec{st.Atim, st.Mtim}, flags); err != nil {
		return fmt.Errorf("set times: %w", err)
	}
	return nil
}

// maxXattrs is the kernel's bound on a list of names and on one value.
const maxXattrs = 64 << 10

func copyXattrs(from, to *os.File) error {
	names, err := xattrNames(from)
	if err != nil {
		return err
	}
	value := make([]byte, maxXattrs)
	for _, name := range names {
		if !strings.HasPrefix(name, "user.") && name != "security.capability" && !strings.HasPrefix(name, "system.posix_acl_") {
			continue
		}
		n, err := unix.Fgetxattr(int(from.Fd()), name, value)
		if err != nil {
			return fmt.Errorf("read attribute %q: %w", name, err)
		}
		if err := unix.Fsetxattr(int(to.Fd()), name, value[:n], 0); err != nil {
			return fmt.Errorf("set attribute %q: %w", name, err)
		}
	}
	return nil
}

func xattrNames(f *os.File) ([]string, error) {
	buf := make([]byte, maxXattrs)
	n, err := unix.Flistxattr(int(f.Fd()), buf)
	if err == unix.ENOTSUP {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list attributes: %w", err)
	}
	if n == 0 {
		return nil, nil
	}
	return strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00"), nil
}

func readlink(dir *os.File, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// Opaque tells whether overlayfs shows nothing below the layer that dir belongs to.
func Opaque(dir *os.File) bool {
	buf := make([]byte, 8)
	n, err := unix.Fgetxattr(int(dir.Fd()), "user.overlay.opaque", buf)
	return err == nil && n == 1 && buf[0] == 'y'
}
