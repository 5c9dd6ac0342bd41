package anchor

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/tree"
)

// Kind of a difference.
type Kind string

// The kinds. What is below an added or removed directory is listed for added, not for removed.
const (
	Added   Kind = "added"
	Changed Kind = "changed" // content, type, owner or mode
	Removed Kind = "removed"
)

// Change is one difference. Path is relative to the anchor; it is the sandbox's text: quote it.
type Change struct {
	Kind Kind   `json:"kind"`
	Path string `json:"path"`
	Size int64  `json:"size,omitempty"` // bytes, of the anchor's regular file
}

// Report is a sorted list of differences.
type Report struct {
	Changes   []Change `json:"changes"`
	Truncated bool     `json:"truncated,omitempty"` // there are more than the caller's limit
}

// Shadows tells whether the anchor hides or replaces anything of the base.
func (r Report) Shadows() bool {
	return slices.ContainsFunc(r.Changes, func(c Change) bool { return c.Kind != Added })
}

// Diff lists at most limit differences of the anchor at dir (see [Info]) from the base's lowers.
// It needs no lock; beside a running Domain it shows a moment, or fails with tree.ErrChanged.
// With lowers of a new base it is the list of what the anchor would shadow there: drop Added.
// scratch is an empty directory, see mount.Overlay.Open.
func Diff(dir string, lowers []string, limit int, scratch string) (Report, error) {
	r, err := diff(dir+"/current/upper", lowers, limit, scratch)
	if err != nil {
		return r, fmt.Errorf("compare State Anchor: %w", err)
	}
	return r, nil
}

func diff(upperDir string, lowers []string, limit int, scratch string) (Report, error) {
	upper, err := tree.OpenDir(upperDir)
	if os.IsNotExist(err) {
		return Report{}, nil
	}
	if err != nil {
		return Report{}, err
	}
	defer upper.Close()
	var lower *os.File // nil: the base has nothing here
	switch len(lowers) {
	case 0:
	case 1:
		lower, err = tree.OpenDir(lowers[0])
	default:
		lower, err = mount.Overlay{Lower: lowers}.Open(scratch)
	}
	if err != nil {
		return Report{}, err
	}
	if lower != nil {
		defer lower.Close()
	}
	c := comparison{limit: limit, at: []*os.File{lower}}
	if err := unix.Fstat(int(upper.Fd()), &c.own); err != nil {
		return Report{}, err
	}
	defer c.close()
	if tree.Opaque(upper) {
		err = c.hiddenBy(upper, "")
	}
	if err == nil {
		err = tree.Walk(upper, tree.Visitor{Enter: c.enter, Leave: c.leave})
	}
	if err != nil && !errors.Is(err, errLimit) {
		return Report{}, err
	}
	slices.SortFunc(c.report.Changes, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return c.report, nil
}

var errLimit = errors.New("limit reached")

// maxHeld bounds the open directories of the base; below that depth everything is looked up anew.
const maxHeld = 128

type comparison struct {
	report Report
	own    unix.Stat_t // the anchor's own directory
	limit  int
	at     []*os.File // base directory per level of the walk; nil where the base has none
}

func (c *comparison) close() {
	for _, f := range c.at[1:] {
		if f != nil {
			f.Close()
		}
	}
}

// seeded tells whether the difference in owner of a directory is what seed makes.
func (c *comparison) seeded(lower, upper unix.Stat_t) bool {
	return unmapped(lower) || lower.Uid == 0 && upper.Uid == c.own.Uid
}

func (c *comparison) add(k Kind, path string, st unix.Stat_t) error {
	if len(c.report.Changes) >= c.limit {
		c.report.Truncated = true
		return errLimit
	}
	ch := Change{Kind: k, Path: path}
	if k != Removed && st.Mode&unix.S_IFMT == unix.S_IFREG {
		ch.Size = st.Size
	}
	c.report.Changes = append(c.report.Changes, ch)
	return nil
}

func (c *comparison) enter(e tree.Entry) error {
	lower := c.at[len(c.at)-1]
	var st unix.Stat_t
	have := lower != nil && unix.Fstatat(int(lower.Fd()), e.Name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
	if e.Whiteout() {
		if !have {
			return nil
		}
		return c.add(Removed, e.Path(), st)
	}
	if !e.IsDir() {
		if !have {
			return c.add(Added, e.Path(), e.Stat)
		}
		same, err := equal(e, lower, st)
		if err != nil || same {
			return err
		}
		return c.add(Changed, e.Path(), e.Stat)
	}
	if e.Closed != nil {
		return tree.ErrSkipDir
	}
	var next *os.File
	if have && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if len(c.at) > maxHeld {
			return fmt.Errorf("%q: the base is nested deeper than %d directories", e.Name, maxHeld)
		}
		var err error
		if next, err = tree.OpenDirAt(lower, e.Name); err != nil {
			return err
		}
	}
	c.at = append(c.at, next)
	switch {
	case !have:
		return c.add(Added, e.Path(), e.Stat)
	case next == nil:
		return c.add(Changed, e.Path(), e.Stat)
	case st.Mode != e.Stat.Mode, !c.seeded(st, e.Stat) && (st.Uid != e.Stat.Uid || st.Gid != e.Stat.Gid):
		if err := c.add(Changed, e.Path(), e.Stat); err != nil {
			return err
		}
	}
	dir, err := tree.OpenDirAt(e.Dir, e.Name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if tree.Opaque(dir) {
		return c.hiddenBy(dir, e.Path()+"/")
	}
	return nil
}

func (c *comparison) leave(tree.Entry) error {
	last := c.at[len(c.at)-1]
	c.at = c.at[:len(c.at)-1]
	if last != nil {
		last.Close()
	}
	return nil
}

// hiddenBy lists the base's entries that an opaque directory hides without replacing them.
func (c *comparison) hiddenBy(dir *os.File, prefix string) error {
	lower := c.at[len(c.at)-1]
	if lower == nil {
		return nil
	}
	names, err := tree.OpenDirAt(lower, ".")
	if err != nil {
		return err
	}
	defer names.Close()
	for {
		batch, err := names.Readdirnames(1024)
		for _, name := range batch {
			var st unix.Stat_t
			if unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
				continue
			}
			if err := c.add(Removed, prefix+name, st); err != nil {
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

// equal compares contents too: the sandbox can set any time stamp.
func equal(e tree.Entry, lower *os.File, st unix.Stat_t) (bool, error) {
	if st.Mode != e.Stat.Mode || st.Uid != e.Stat.Uid || st.Gid != e.Stat.Gid || st.Size != e.Stat.Size {
		return false, nil
	}
	switch e.Type() {
	case unix.S_IFREG:
		return equalFiles(e, lower)
	case unix.S_IFLNK:
		return equalLinks(e, lower)
	}
	return true, nil
}

func equalLinks(e tree.Entry, lower *os.File) (bool, error) {
	var a, b [unix.PathMax]byte
	n, err := unix.Readlinkat(int(e.Dir.Fd()), e.Name, a[:])
	if err != nil {
		return false, err
	}
	m, err := unix.Readlinkat(int(lower.Fd()), e.Name, b[:])
	if err != nil {
		return false, err
	}
	return bytes.Equal(a[:n], b[:m]), nil
}

func equalFiles(e tree.Entry, lower *os.File) (bool, error) {
	a, err := openRegular(e.Dir, e.Name)
	if err != nil {
		return false, err
	}
	defer a.Close()
	b, err := openRegular(lower, e.Name)
	if err != nil {
		return false, err
	}
	defer b.Close()
	x, y := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(a, x)
		m, err2 := io.ReadFull(b, y)
		if !bytes.Equal(x[:n], y[:m]) {
			return false, nil
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return true, nil
		}
		if err := errors.Join(err, err2); err != nil {
			return false, err
		}
	}
}

func openRegular(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
