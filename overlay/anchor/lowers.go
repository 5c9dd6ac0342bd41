package anchor

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/tree"
)

// ErrBasePath means that the base has something else than a directory at an anchor's path.
var ErrBasePath = errors.New("not a directory in the base image")

// SubLowers finds the directories that the overlay of layers, topmost first, merges at path. A
// whiteout or an opaque directory on the way hides the layers below it, as overlayfs does it. No
// layer having the path is an empty result. A symbolic link on the way is ErrBasePath: following
// it could leave the layer, and the anchor would lie elsewhere than the sandbox looks.
func SubLowers(layers []string, path string) ([]string, error) {
	var out []string
	for _, layer := range layers {
		found, stop, err := inLayer(layer, path)
		if err != nil {
			return nil, fmt.Errorf("%q in the base: %w", path, err)
		}
		if found {
			out = append(out, layer+path)
		}
		if stop {
			break
		}
	}
	return out, nil
}

// inLayer walks path in one layer; stop tells that no layer below may show through.
func inLayer(layer, path string) (found, stop bool, err error) {
	dir, err := tree.OpenDir(layer)
	if err != nil {
		return false, false, err
	}
	defer func() { dir.Close() }()
	for name := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		var st unix.Stat_t
		switch err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); {
		case err == unix.ENOENT:
			return false, stop, nil
		case err != nil:
			return false, false, &os.PathError{Op: "stat", Path: name, Err: err}
		case tree.IsWhiteout(st):
			return false, true, nil
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			return false, false, fmt.Errorf("%w: %q is a symbolic link", ErrBasePath, name)
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return false, false, fmt.Errorf("%w: %q is a file", ErrBasePath, name)
		}
		next, err := tree.OpenDirAt(dir, name)
		if err != nil {
			return false, false, err
		}
		dir.Close()
		dir = next
		stop = stop || tree.Opaque(dir)
	}
	return true, stop, nil
}
