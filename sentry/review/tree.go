package review

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/route"
)

// Tree is one served tree, seen by the developer: the host's files, and the private twin.
type Tree struct {
	Path    string // of the tree on the host; canonical
	Private string // Workspace.Private

	ws   *sentry.Workspace
	host *os.File // its root
	twin *os.File // root of the private twin; nil while there is none
	held *route.Held
	view *sentry.View // consented rules; nil if ignored paths are shown

	roots []string // of the repositories that the snapshot has, but the first
}

// OpenTree opens a served tree. The caller opens the host directory, which OpenTree owns from here on, and closes the Tree.
func OpenTree(hostPath string, host *os.File, ws *sentry.Workspace) (*Tree, error) {
	t := &Tree{Path: hostPath, Private: ws.Private, ws: ws, host: host}
	err := t.open()
	if err != nil {
		t.Close()
		return nil, fmt.Errorf("review %s: %w", hostPath, err)
	}
	return t, nil
}

func (t *Tree) open() (err error) {
	if t.held, err = route.NewHeld(t.ws.Held, t.ws.HeldPaths); err != nil {
		return err
	}
	private, err := os.Open(t.Private)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer private.Close()
	if t.twin, err = openDir(private, sentry.TreeDir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if t.ws.ShowIgnored {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(t.Private, sentry.SnapshotFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := sentry.ParseSnapshot(b)
	if err != nil {
		return err
	}
	for _, r := range s.Repos {
		if r.Root != "" {
			t.roots = append(t.roots, r.Root)
		}
	}
	t.view, err = s.View()
	return err
}

// Close releases the descriptors.
func (t *Tree) Close() {
	t.host.Close()
	if t.twin != nil {
		t.twin.Close()
	}
}

// Abs is the host path of rel.
func (t *Tree) Abs(rel string) string { return path.Join(t.Path, rel) }

// hiddenPath reports whether the consented rules hide the file rel.
func (t *Tree) hiddenPath(rel string) bool {
	if t.view == nil {
		return false
	}
	d := t.view.Root()
	for at := 0; ; {
		end := at
		for end < len(rel) && rel[end] != '/' {
			end++
		}
		name := rel[at:end]
		if end == len(rel) {
			return d.Hidden(name)&sentry.HideFile != 0
		}
		if d.Hidden(name)&sentry.HideDir != 0 {
			return true
		}
		d, at = d.Child(name), end+1
	}
}

// isRepository reports whether the open directory has the layout of a repository directory.
func isRepository(dir *os.File) bool {
	has := func(name string) bool { return kindAt(dir, name) != 0 }
	return has("HEAD") && (has("objects") && has("refs") || has("commondir"))
}

// seedOf is the private copy of a configuration file as it starts: what the server would make of the host's file now.
func (t *Tree) seedOf(host []byte) (*gitconfig.File, error) {
	b, err := t.ws.SanitiseConfig(host)
	if err != nil {
		return nil, err
	}
	return gitconfig.Parse(b)
}

// hostOf translates a file type.
func hostOf(kind uint32) route.Host {
	if kind == 0 {
		return route.None
	}
	return route.HostOf(kind)
}

const (
	fifo    = unix.S_IFIFO
	regular = unix.S_IFREG
	symlink = unix.S_IFLNK
	folder  = unix.S_IFDIR
)
