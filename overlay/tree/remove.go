package tree

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// flattenAt is the depth at which Remove brings a directory back to the top, so that one pass has
// a bounded path whatever the sandbox built.
const flattenAt = 64

// Remove deletes name below dir with everything in it. A missing name is not an error. Killed at
// any point, it can be called again: what it moves stays below name.
func Remove(dir *os.File, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return ignoreGone(unlink(dir, name, 0))
	}
	top, err := openDir(int(dir.Fd()), name)
	if err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	defer top.Close()
	for n := 0; ; {
		moved := 0
		err := Walk(top, Visitor{
			Enter: func(e Entry) error {
				if !e.IsDir() {
					return ignoreGone(unlink(e.Dir, e.Name, 0))
				}
				if e.Depth() < flattenAt {
					return nil
				}
				for { // the sandbox may have chosen our name for its own directory
					n++
					to := ".lazaret-removing-" + strconv.Itoa(n)
					err := unix.Renameat2(int(e.Dir.Fd()), e.Name, int(top.Fd()), to, unix.RENAME_NOREPLACE)
					if err == unix.EEXIST {
						continue
					}
					if err != nil {
						return fmt.Errorf("flatten %q: %w", e.Name, err)
					}
					moved++
					return ErrSkipDir
				}
			},
			Leave: func(e Entry) error { return ignoreGone(unlink(e.Dir, e.Name, unix.AT_REMOVEDIR)) },
		})
		if err != nil {
			return fmt.Errorf("remove %q: %w", name, err)
		}
		if moved == 0 {
			break
		}
	}
	return ignoreGone(unlink(dir, name, unix.AT_REMOVEDIR))
}

// RemovePath is Remove by path; the parent must not be a symbolic link.
func RemovePath(parent, name string) error {
	dir, err := OpenDir(parent)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return Remove(dir, name)
}

func unlink(dir *os.File, name string, flags int) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, flags); err != nil {
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func isPartial(err error) bool { return errors.Is(err, ErrChanged) || errors.Is(err, ErrTooLarge) }
