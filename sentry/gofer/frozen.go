package gofer

import (
	"fmt"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/ignore"
)

// frozen is the snapshot of rules and tracked paths that the developer consented to. nil rules never exist: without a
// snapshot the server does not start.
type frozen struct {
	excludes *ignore.Patterns
	roots    map[string]*frozenRepo      // by path from the workspace root
	files    map[string]*ignore.Patterns // .gitignore by directory
	off      bool                        // ignored paths are shown (FR-9)
}

type frozenRepo struct {
	info    *ignore.Patterns
	fold    bool
	tracked tracked
}

// frozenDir is a directory in the snapshot's view.
type frozenDir struct {
	f    *frozen
	path string // from the workspace root
	dir  *ignore.Dir
	repo *frozenRepo
}

func newFrozen(s *sentry.Snapshot) (*frozen, error) {
	f := &frozen{
		excludes: ignore.Parse(s.Excludes),
		roots:    make(map[string]*frozenRepo),
		files:    make(map[string]*ignore.Patterns),
	}
	for i := range s.Repos {
		r := &s.Repos[i]
		paths := make([]string, len(r.Tracked))
		for i, p := range r.Tracked {
			paths[i] = string(p)
		}
		set, err := gitindex.FromPaths(paths)
		if err != nil {
			return nil, fmt.Errorf("snapshot of repository %q: %w", r.Root, err)
		}
		f.roots[r.Root] = &frozenRepo{info: ignore.Parse(r.Exclude), fold: r.FoldCase, tracked: set}
	}
	if f.roots[""] == nil {
		f.roots[""] = &frozenRepo{}
	}
	for dir, b := range s.Rules {
		f.files[dir] = ignore.Parse(b)
	}
	return f, nil
}

func (f *frozen) rootDir() *frozenDir { return f.enter("", nil, "") }

func (f *frozen) enter(path string, up *frozenDir, name string) *frozenDir {
	d := &frozenDir{f: f, path: path}
	if r := f.roots[path]; r != nil {
		d.repo = r
		d.dir = ignore.Root(ignore.Config{FoldCase: r.fold, Excludes: f.excludes, Info: r.info, Own: f.files[path]})
		return d
	}
	d.repo = up.repo
	d.dir = up.dir.Child(name, f.files[path])
	return d
}

func (d *frozenDir) child(name string) *frozenDir { return d.f.enter(joinRel(d.path, name), d, name) }

func (d *frozenDir) decide(name string) hide { return decideOne(d.dir, d.repo.tracked, name) }
