// Package tree walks, measures, copies and removes directory trees that the sandbox filled.
//
// What is kept true, for anchor, gc and usage: no operation follows a symbolic link, opens a FIFO or
// device, leaves the tree it was given by descriptor, or crosses into another mount. The depth,
// breadth and names of the tree are the sandbox's choice, so the number of open descriptors does not grow with
// depth and remembered names are bounded by [MaxPending] ([ErrTooLarge]).
//
// Trees hold files of subordinate ids and directories without permission bits (overlay work
// directories): run inside the Domain's user namespace, as uid 0.
package tree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxPending bounds the directory names that one operation remembers.
const MaxPending = 4 << 20

var (
	// ErrTooLarge means that the tree has more directories than an operation may remember.
	ErrTooLarge = errors.New("too many directories in one tree")
	// ErrChanged means that the tree was moved while it was walked; the walk stops.
	ErrChanged = errors.New("directory was moved during the walk")
	// ErrSkipDir, returned by a visit of a directory, leaves out what is below it.
	ErrSkipDir = errors.New("skip this directory")
)

// Entry is one visited name. Dir is valid during the visit only.
type Entry struct {
	Dir  *os.File // the open parent directory
	Name string
	Stat unix.Stat_t
	// Closed is why a directory is not entered: EXDEV for one of another mount or device, EACCES
	// for one that this user namespace may not read.
	Closed error

	parents []string
}

// Path is the entry's path relative to the walked directory; it costs its length.
func (e Entry) Path() string { return path.Join(path.Join(e.parents...), e.Name) }

// Depth is 0 for the entries of the walked directory itself.
func (e Entry) Depth() int { return len(e.parents) }

// Type is the entry's S_IFMT bits.
func (e Entry) Type() uint32 { return e.Stat.Mode & unix.S_IFMT }

// IsDir tells whether the entry is a directory.
func (e Entry) IsDir() bool { return e.Type() == unix.S_IFDIR }

// Whiteout tells whether the entry is overlayfs's mark of a removed name.
func (e Entry) Whiteout() bool { return IsWhiteout(e.Stat) }

// IsWhiteout tells whether st is a 0:0 character device.
func IsWhiteout(st unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// Visitor receives a walk's entries. A directory is visited by Enter before what is below it, and
// by Leave after it. The first error ends the walk.
type Visitor struct {
	Enter func(Entry) error // ErrSkipDir is understood for directories; then Leave is not called
	Leave func(Entry) error // optional
}

type frame struct {
	name     string
	stat     unix.Stat_t
	pending  []string // subdirectories still to be entered
	dev, ino uint64
}

// Walk visits everything below dir, which stays the caller's. Entries on another mount or device
// than dir are visited, but not entered.
func Walk(dir *os.File, v Visitor) error {
	cur, err := openDir(int(dir.Fd()), ".")
	if err != nil {
		return fmt.Errorf("walk %s: %w", dir.Name(), err)
	}
	w := walk{v: v, cur: cur}
	defer func() { w.cur.Close() }()
	if err := w.run(); err != nil {
		return err
	}
	return nil
}

type walk struct {
	v       Visitor
	cur     *os.File
	stack   []frame  // the walked directory first
	names   []string // names of stack[1:]
	pending int
}

func (w *walk) run() error {
	var st unix.Stat_t
	if err := unix.Fstat(int(w.cur.Fd()), &st); err != nil {
		return err
	}
	w.stack = []frame{{stat: st, dev: st.Dev, ino: st.Ino}}
	if err := w.list(); err != nil {
		return err
	}
	for {
		top := &w.stack[len(w.stack)-1]
		if len(top.pending) == 0 {
			if len(w.stack) == 1 {
				return nil
			}
			if err := w.up(); err != nil {
				return err
			}
			continue
		}
		name := top.pending[len(top.pending)-1]
		top.pending = top.pending[:len(top.pending)-1]
		w.pending--
		if err := w.down(name); err != nil {
			return err
		}
	}
}

// list visits the non-directories of the current directory and remembers its directories.
func (w *walk) list() error {
	top := &w.stack[len(w.stack)-1]
	for {
		names, err := w.cur.Readdirnames(1024)
		for _, name := range names {
			e := Entry{Dir: w.cur, Name: name, parents: w.names}
			if err := unix.Fstatat(int(w.cur.Fd()), name, &e.Stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				if err == unix.ENOENT {
					continue
				}
				return fmt.Errorf("stat %q: %w", name, err)
			}
			if e.IsDir() {
				if w.pending++; w.pending > MaxPending {
					return ErrTooLarge
				}
				top.pending = append(top.pending, name)
				continue
			}
			if err := w.enter(e); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (w *walk) down(name string) error {
	e := Entry{Dir: w.cur, Name: name, parents: w.names}
	if err := unix.Fstatat(int(w.cur.Fd()), name, &e.Stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if err == unix.ENOENT {
			return nil
		}
		return fmt.Errorf("stat %q: %w", name, err)
	}
	if !e.IsDir() {
		return w.enter(e)
	}
	// Opened before it is shown: every directory that Enter accepts is left again.
	next, err := openDir(int(w.cur.Fd()), name)
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil
	}
	if err == nil && e.Stat.Dev != w.stack[0].dev {
		next.Close()
		err = unix.EXDEV
	}
	if err == unix.EXDEV || err == unix.EACCES {
		e.Closed = err
		return w.enter(e)
	}
	if err != nil {
		return fmt.Errorf("open directory %q: %w", name, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(next.Fd()), &st); err != nil {
		next.Close()
		return err
	}
	if err := w.v.Enter(e); err != nil {
		next.Close()
		if errors.Is(err, ErrSkipDir) {
			return nil
		}
		return err
	}
	w.cur.Close()
	w.cur = next
	w.stack = append(w.stack, frame{name: name, stat: e.Stat, dev: st.Dev, ino: st.Ino})
	w.names = append(w.names, name)
	return w.list()
}

// enter shows an entry that is not descended into.
func (w *walk) enter(e Entry) error {
	if err := w.v.Enter(e); err != nil && !errors.Is(err, ErrSkipDir) {
		return err
	}
	return nil
}

func (w *walk) up() error {
	done := w.stack[len(w.stack)-1]
	want := w.stack[len(w.stack)-2]
	fd, err := unix.Openat(int(w.cur.Fd()), "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("return from %q: %w", done.name, err)
	}
	parent := os.NewFile(uintptr(fd), "..")
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Ino != want.ino || st.Dev != want.dev {
		parent.Close()
		return fmt.Errorf("return from %q: %w", done.name, ErrChanged)
	}
	w.cur.Close()
	w.cur = parent
	w.stack = w.stack[:len(w.stack)-1]
	w.names = w.names[:len(w.names)-1]
	if w.v.Leave == nil {
		return nil
	}
	return w.v.Leave(Entry{Dir: w.cur, Name: done.name, Stat: done.stat, parents: w.names})
}

// openDir opens the directory name below dirfd for reading: no symbolic link, no other mount.
func openDir(dirfd int, name string) (*os.File, error) {
	fd, err := unix.Openat2(dirfd, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// OpenDir opens the directory dir, which must not be a symbolic link itself.
func OpenDir(dir string) (*os.File, error) {
	return os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// OpenDirAt opens the directory at the relative path rel below dir; no component may be a symbolic link.
func OpenDirAt(dir *os.File, rel string) (*os.File, error) {
	f, err := openDir(int(dir.Fd()), rel)
	if err != nil {
		return nil, &os.PathError{Op: "open directory", Path: strings.TrimSuffix(dir.Name(), "/") + "/" + rel, Err: err}
	}
	return f, nil
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	f, err := OpenDir(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
