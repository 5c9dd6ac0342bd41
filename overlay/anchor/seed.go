package anchor

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/tree"
)

// maxSeeded bounds the directories that are made for one anchor over a host directory.
const maxSeeded = 50_000

// nobody is how ids outside the user namespace look inside (overflowuid's default). An image's own
// uid 65534 looks the same; seeding its directories is harmless.
const nobody = 65534

func unmapped(st unix.Stat_t) bool { return st.Uid == nobody || st.Gid == nobody }

// seed gives upper its own directory for each directory of from that is foreign: of an unmapped id, as the host's are below
// a host base, or root's in a path that is the agent's. The kernel cannot copy the first up (EACCES, EOVERFLOW), and the
// agent may not write in the second, so nothing could be made or removed in it. The base's files there can be removed and
// replaced, but not changed in place. What the agent removed or replaced stays so.
func seed(upper string, from *os.File, owner Owner, foreign func(unix.Stat_t) bool) error {
	n := 0
	return tree.Walk(from, tree.Visitor{Enter: func(e tree.Entry) error {
		if !e.IsDir() {
			return nil
		}
		if e.Closed != nil || !foreign(e.Stat) {
			return tree.ErrSkipDir
		}
		if n++; n > maxSeeded {
			return fmt.Errorf("more than %d directories", maxSeeded)
		}
		at := filepath.Join(upper, e.Path()) // every parent was seen to be a directory of our own
		var st unix.Stat_t
		switch err := unix.Lstat(at, &st); {
		case err == unix.ENOENT:
			if err := unix.Mkdir(at, 0o700); err != nil {
				return err
			}
			return own(at, Owner{owner.UID, owner.GID, e.Stat.Mode & 0o7777})
		case err != nil:
			return err
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return tree.ErrSkipDir
		}
		dir, err := tree.OpenDir(at)
		if err != nil {
			return err
		}
		defer dir.Close()
		if tree.Opaque(dir) {
			return tree.ErrSkipDir
		}
		return nil
	}})
}

func own(dir string, o Owner) error {
	if err := unix.Lchown(dir, o.UID, o.GID); err != nil {
		return err
	}
	return unix.Chmod(dir, o.Mode)
}
