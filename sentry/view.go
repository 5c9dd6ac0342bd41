package sentry

import (
	"fmt"
	"path"

	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/ignore"
)

// View answers for a snapshot, directory by directory, which names it hides. Immutable.
type View struct {
	excludes *ignore.Patterns
	roots    map[string]*viewRepo        // by path from the workspace root
	files    map[string]*ignore.Patterns // .gitignore by directory
}

type viewRepo struct {
	info    *ignore.Patterns
	fold    bool
	tracked *gitindex.Set
}

// ViewDir is one directory of a view; it need not exist.
type ViewDir struct {
	v    *View
	path string // from the workspace root
	dir  *ignore.Dir
	repo *viewRepo
}

// Hide says how a name is hidden.
type Hide uint8

const (
	HideFile Hide = 1 << iota // a file of that name
	HideDir                   // a directory of that name, with all that is in it
	MergeDir                  // a directory of that name is ignored, but holds tracked files, which are not hidden
)

// View compiles the snapshot.
func (s *Snapshot) View() (*View, error) {
	v := &View{
		excludes: ignore.Parse(s.Excludes),
		roots:    make(map[string]*viewRepo),
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
		info := ignore.Parse(r.Exclude)
		if r.ExcludeUnknown {
			info = ignore.Unknown()
		}
		v.roots[r.Root] = &viewRepo{info: info, fold: r.FoldCase, tracked: set}
	}
	if v.roots[""] == nil {
		v.roots[""] = &viewRepo{tracked: &gitindex.Set{}}
	}
	for dir, b := range s.Rules {
		v.files[dir] = ignore.Parse(b)
	}
	for _, dir := range s.Unknown {
		v.files[dir] = ignore.Unknown()
	}
	return v, nil
}

// Root is the workspace root.
func (v *View) Root() *ViewDir { return v.enter("", nil, "") }

func (v *View) enter(p string, up *ViewDir, name string) *ViewDir {
	d := &ViewDir{v: v, path: p}
	if r := v.roots[p]; r != nil {
		d.repo = r
		d.dir = ignore.Root(ignore.Config{FoldCase: r.fold, Excludes: v.excludes, Info: r.info, Own: v.files[p]})
		return d
	}
	d.repo = up.repo
	d.dir = up.dir.Child(name, v.files[p])
	return d
}

// Child enters the directory name.
func (d *ViewDir) Child(name string) *ViewDir { return d.v.enter(path.Join(d.path, name), d, name) }

// Repository is what the snapshot knows of the repository whose work tree's root is this directory; ok is false if it
// knows none. It serves where the live one cannot be read.
func (d *ViewDir) Repository() (info *ignore.Patterns, fold bool, tracked *gitindex.Set, ok bool) {
	r := d.v.roots[d.path]
	if r == nil {
		return nil, false, nil, false
	}
	return r.info, r.fold, r.tracked, true
}

// Hidden says how name is hidden.
func (d *ViewDir) Hidden(name string) Hide { return Decide(d.dir, d.repo.tracked, name) }

// Tracked is what Decide asks an index.
type Tracked interface {
	Tracked(path string) bool
	HasTrackedBelow(dir string) bool
}

// Decide applies the rules of a directory to name; what is tracked is not ignored.
func Decide(rules *ignore.Dir, set Tracked, name string) (h Hide) {
	file, directory := rules.Match(name, false).Ignored, rules.Match(name, true).Ignored
	if !file && !directory {
		return 0
	}
	p := name
	if dir := rules.Path(); dir != "" {
		p = dir + "/" + name
	}
	if file && !set.Tracked(p) {
		h |= HideFile
	}
	if directory {
		switch {
		case set.Tracked(p): // a submodule
		case set.HasTrackedBelow(p):
			h |= MergeDir
		default:
			h |= HideDir
		}
	}
	return h
}
