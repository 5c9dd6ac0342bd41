package sentry

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
)

// The directory Workspace.Private holds:
//
//	snapshot.json   the consented snapshot
//	tree/           the private twin, with the workspace's own relative paths
//	denials.log     what the sandbox was refused, see ParseDenials
//	tmp/            half-made copies; emptied when a gofer starts
//
// In the twin, FIFOs are marks and never content: the sandbox cannot make them there. A FIFO called MarkSkeleton says
// that its directory is there only to hold something deeper; MarkTree says that all content of the host's directory of
// that place is private; a FIFO of any other name says that the sandbox has removed a held or seeded name.
const (
	TreeDir      = "tree"
	TempDir      = "tmp"
	MarkSkeleton = ".lazaret-skeleton"
	MarkTree     = ".lazaret-tree"
)

// TwinEntry is one thing that the twin holds.
type TwinEntry struct {
	Path    string // from the workspace root
	Type    fs.FileMode
	Removed bool // removed inside; the host may have it
}

// WalkTwin calls f for everything in the private twin, parents first, without marks; a skeleton is no entry of its own.
// f may return fs.SkipDir for a directory. tree is Workspace.Private/TreeDir. No symbolic link is followed.
func WalkTwin(tree *os.Root, f func(TwinEntry) error) error {
	return walkTwin(tree, ".", f)
}

func walkTwin(tree *os.Root, dir string, f func(TwinEntry) error) error {
	d, err := tree.Open(dir)
	if err != nil {
		return err
	}
	entries, err := d.ReadDir(-1)
	d.Close()
	if err != nil {
		return fmt.Errorf("list private %q: %w", dir, err)
	}
	for _, e := range entries {
		p := path.Join(dir, e.Name())
		if e.Type()&fs.ModeNamedPipe != 0 {
			if e.Name() == MarkSkeleton || e.Name() == MarkTree {
				continue
			}
			if err := f(TwinEntry{Path: p, Removed: true}); err != nil {
				return err
			}
			continue
		}
		if _, err := tree.Lstat(path.Join(p, MarkSkeleton)); !e.IsDir() || err != nil {
			err := f(TwinEntry{Path: p, Type: e.Type()})
			if errors.Is(err, fs.SkipDir) {
				continue
			}
			if err != nil {
				return err
			}
		}
		if e.IsDir() {
			if err := walkTwin(tree, p, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// Rescan is what replacing a snapshot would change.
type Rescan struct {
	Appear []string // host paths that the sandbox would see; a directory stands for all in it and ends in "/"
	Land   []string // private paths that are no longer ignored: they stay private while they exist, and then the host's show
	More   bool     // the lists were cut at the limit
}

// CompareSnapshots lists what would change if next replaced old, for the developer to consent to. host is the workspace,
// tree the private twin; limit bounds each list.
func CompareSnapshots(old, next *Snapshot, host, tree *os.Root, limit int) (*Rescan, error) {
	was, err := old.View()
	if err != nil {
		return nil, err
	}
	will, err := next.View()
	if err != nil {
		return nil, err
	}
	r := &Rescan{}
	if err := r.appear(host, ".", was.Root(), will.Root(), limit); err != nil {
		return nil, fmt.Errorf("compare snapshots: %w", err)
	}
	err = WalkTwin(tree, func(e TwinEntry) error {
		if e.Removed {
			return nil
		}
		if len(r.Land) == limit {
			r.More = true
			return fs.SkipAll
		}
		a, b := was.hides(e), will.hides(e)
		if a && !b {
			r.Land = append(r.Land, e.Path)
		}
		if a && e.Type.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil && !errors.Is(err, fs.SkipAll) {
		return nil, fmt.Errorf("compare snapshots: %w", err)
	}
	return r, nil
}

// hides reports whether the view hides the entry's path.
func (v *View) hides(e TwinEntry) bool {
	d := v.Root()
	dir, name := path.Split(e.Path)
	for _, part := range splitPath(dir) {
		if d.Hidden(part)&HideDir != 0 {
			return true
		}
		d = d.Child(part)
	}
	h := d.Hidden(name)
	return h&HideDir != 0 && e.Type.IsDir() || h&HideFile != 0 && !e.Type.IsDir()
}

func splitPath(dir string) (parts []string) {
	for dir = path.Clean(dir); dir != "." && dir != "/"; dir = path.Dir(dir) {
		parts = append([]string{path.Base(dir)}, parts...)
	}
	return parts
}

func (r *Rescan) appear(host *os.Root, dir string, was, will *ViewDir, limit int) error {
	d, err := host.Open(dir)
	if err != nil {
		return err
	}
	entries, err := d.ReadDir(-1)
	d.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, p := e.Name(), path.Join(dir, e.Name())
		if name == ".git" {
			continue
		}
		a, b := was.Hidden(name), will.Hidden(name)
		hidden, shown := a&HideFile != 0, b&HideFile == 0
		if e.IsDir() {
			hidden, shown = a&HideDir != 0, b&HideDir == 0
			p += "/"
		}
		if hidden && shown && b&MergeDir == 0 {
			if len(r.Appear) == limit {
				r.More = true
				return nil
			}
			r.Appear = append(r.Appear, p)
			continue
		}
		if e.IsDir() && shown {
			err := r.appear(host, path.Clean(p), was.Child(name), will.Child(name), limit)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
