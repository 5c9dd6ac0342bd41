package gitindex

import (
	"fmt"
	"iter"
	"slices"
	"sort"
	"strings"
)

// Flags of an index entry. AssumeUnchanged and SkipWorktree hide changes from git status.
type Flags uint8

const (
	AssumeUnchanged Flags = 1 << iota
	SkipWorktree
	IntentToAdd
	Unmerged   // listed with a stage other than 0
	SparseTree // a directory whose files the index does not list
)

func (f Flags) String() string {
	var names []string
	for i, name := range []string{"assume-unchanged", "skip-worktree", "intent-to-add", "unmerged", "sparse-directory"} {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// Modes of entries that are not ordinary files.
const (
	ModeTree    = 0o040000 // sparse directory
	ModeSymlink = 0o120000
	ModeGitlink = 0o160000 // submodule
)

// Entry is one tracked path. Of an unmerged path it shows the lowest stage.
type Entry struct {
	Path  string // bytes, not text; that of a sparse directory ends in a slash, so that no one takes it for a file
	Mode  uint32 // as in a tree object; 0 in a Set from paths
	Flags Flags  // of all stages together
	ID    []byte // object name; read only, valid as long as the Set
}

// Set is the tracked paths of one index, sorted by their bytes. The zero value is empty. Immutable.
type Set struct {
	names   string   // all paths, one after the other; a sparse directory keeps its trailing slash
	ends    []uint32 // end of each path in names
	modes   []uint32
	flags   []Flags
	ids     []byte // idLen bytes per entry
	idLen   int
	shared  string
	version int
}

// Len is the number of paths.
func (s *Set) Len() int { return len(s.ends) }

// SharedName is the name of the shared index file in use, or "".
func (s *Set) SharedName() string { return s.shared }

// Version is that of the index file, or 0 for a Set made otherwise.
func (s *Set) Version() int { return s.version }

func (s *Set) name(i int) string {
	start := uint32(0)
	if i > 0 {
		start = s.ends[i-1]
	}
	return s.names[start:s.ends[i]]
}

func (s *Set) entry(i int) Entry {
	e := Entry{Path: s.name(i), Mode: s.modes[i], Flags: s.flags[i]}
	if s.idLen > 0 {
		e.ID = s.ids[i*s.idLen : (i+1)*s.idLen : (i+1)*s.idLen]
	}
	return e
}

// search finds the first name that does not sort before path plus suffix ("" or "/").
func (s *Set) search(path, suffix string) int {
	return sort.Search(s.Len(), func(i int) bool {
		name := s.name(i)
		if n := min(len(name), len(path)); name[:n] != path[:n] || len(name) < len(path) {
			return name >= path
		}
		return name[len(path):] >= suffix
	})
}

// Tracked reports whether the index lists path (relative to the work tree, no slash at its ends). For a
// submodule that is the path of its directory.
func (s *Set) Tracked(path string) bool {
	i := s.search(path, "")
	return i < s.Len() && s.name(i) == path && s.flags[i]&SparseTree == 0
}

// Lookup returns the entry of path.
func (s *Set) Lookup(path string) (Entry, bool) {
	if s.Tracked(path) {
		return s.entry(s.search(path, "")), true
	}
	return Entry{}, false
}

// HasTrackedBelow reports whether the index lists something below the directory dir; "" is the root.
// A sparse directory has something below it; a submodule's directory has not.
func (s *Set) HasTrackedBelow(dir string) bool {
	if dir == "" {
		return s.Len() > 0
	}
	i := s.search(dir, "/")
	if i == s.Len() {
		return false
	}
	name := s.name(i)
	return len(name) > len(dir) && name[:len(dir)] == dir && name[len(dir)] == '/'
}

// Sparse reports whether dir lies in (or is) a sparse directory, whose files the index does not list.
func (s *Set) Sparse(dir string) bool {
	for at := 0; at <= len(dir); at++ {
		if at < len(dir) && dir[at] != '/' {
			continue
		}
		i := s.search(dir[:at], "/")
		if name := dir[:at]; i < s.Len() && s.flags[i]&SparseTree != 0 && strings.TrimSuffix(s.name(i), "/") == name {
			return true
		}
	}
	return false
}

// RulesElsewhere reports whether Git takes the ".gitignore" of dir from the index when the work tree has
// none: it is listed as skip-worktree, or dir is sparse. Its content is not here, so a caller that finds
// no such file must treat the rules as unknown.
func (s *Set) RulesElsewhere(dir string) bool {
	name := ".gitignore"
	if dir != "" {
		name = dir + "/" + name
	}
	e, ok := s.Lookup(name)
	return ok && e.Flags&SkipWorktree != 0 || s.Sparse(dir)
}

// All yields the entries in order.
func (s *Set) All() iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		for i := range s.Len() {
			if !yield(s.entry(i)) {
				return
			}
		}
	}
}

// Hidden yields the entries whose changes git status does not show.
func (s *Set) Hidden() iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		for i := range s.Len() {
			if s.flags[i]&(AssumeUnchanged|SkipWorktree) != 0 && !yield(s.entry(i)) {
				return
			}
		}
	}
}

// FromPaths makes a Set of the paths of entries, as kept in a snapshot, in any order.
func FromPaths(paths []string) (*Set, error) {
	s := &Set{}
	var names strings.Builder
	for _, path := range slices.Compact(slices.Sorted(slices.Values(paths))) {
		name, sparse := strings.CutSuffix(path, "/")
		if !cleanPath(name) {
			return nil, fmt.Errorf("tracked path %q: not a clean relative path", path)
		}
		if names.Len()+len(path) > MaxNames {
			return nil, fmt.Errorf("tracked paths: more than %d bytes", MaxNames)
		}
		names.WriteString(path)
		s.ends = append(s.ends, uint32(names.Len()))
		flags, mode := Flags(0), uint32(0)
		if sparse {
			flags, mode = SparseTree, ModeTree
		}
		s.flags, s.modes = append(s.flags, flags), append(s.modes, mode)
	}
	s.names = names.String()
	return s, nil
}

// cleanPath reports whether path is relative and without empty, ".", ".." or ".git" components, as
// every path in an index written by Git is.
func cleanPath(path string) bool {
	if path == "" || len(path) > maxName {
		return false
	}
	start := 0
	for i := 0; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			if path[i] == 0 {
				return false
			}
			continue
		}
		switch part := path[start:i]; {
		case part == "", part == ".", part == "..", len(part) == 4 && strings.EqualFold(part, ".git"):
			return false
		}
		start = i + 1
	}
	return true
}
