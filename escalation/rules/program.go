package rules

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Program is a program name resolved on the host.
type Program struct {
	Name  string   // as asked for: argv[0]
	Path  string   // absolute, without symbolic links: the file that would run
	Names []string // base names of Name, of each link on the way, and of Path
	Ours  bool     // lies where the sandbox can write: its content is the agent's
}

// Resolver finds programs on the host's PATH.
type Resolver struct {
	Path     []string // absolute directories, in order
	Writable []string // canonical directories that the sandbox can write (workspace, volumes)
}

// ErrNoProgram means that no executable file of that name was found.
var ErrNoProgram = errors.New("no such program on the host")

// SearchPath splits a PATH; entries that are not absolute are dropped, as they would mean the working directory.
func SearchPath(path string) []string {
	var dirs []string
	for _, d := range filepath.SplitList(path) {
		if filepath.IsAbs(d) {
			dirs = append(dirs, filepath.Clean(d))
		}
	}
	return dirs
}

// Within reports whether the canonical path p is root or below it.
func Within(root, p string) bool {
	return p == root || strings.HasPrefix(p, strings.TrimSuffix(root, "/")+"/")
}

func (r Resolver) writable(p string) bool {
	return slices.ContainsFunc(r.Writable, func(root string) bool { return Within(root, p) })
}

// Resolve finds the program name. A name without a slash is searched for on the PATH, where directories that the sandbox
// can write are passed over; a name with one is taken relative to dir, an absolute directory.
func (r Resolver) Resolve(name, dir string) (Program, error) {
	if !strings.Contains(name, "/") {
		for _, d := range r.Path {
			if real, err := filepath.EvalSymlinks(d); err != nil || r.writable(real) {
				continue
			}
			if p, err := r.follow(name, filepath.Join(d, name)); err == nil {
				return p, nil
			}
		}
		return Program{}, fmt.Errorf("resolve %q: %w", name, ErrNoProgram)
	}
	at := name
	if !filepath.IsAbs(at) {
		at = dir + "/" + at // not cleaned: ".." after a symbolic link is the kernel's to resolve
	}
	return r.follow(name, at)
}

// follow walks the links from at to a file, and keeps their names: /bin/sh may be a link to a program that goes by argv[0].
func (r Resolver) follow(name, at string) (Program, error) {
	p := Program{Name: name, Names: []string{filepath.Base(name)}}
	for range 40 {
		parent, err := filepath.EvalSymlinks(filepath.Dir(at))
		if err != nil {
			return p, fmt.Errorf("resolve %q: %w", name, errors.Join(ErrNoProgram, err))
		}
		at = filepath.Join(parent, filepath.Base(at))
		if base := filepath.Base(at); !slices.Contains(p.Names, base) {
			p.Names = append(p.Names, base)
		}
		p.Ours = p.Ours || r.writable(at)
		info, err := os.Lstat(at)
		if err != nil {
			return p, fmt.Errorf("resolve %q: %w", name, errors.Join(ErrNoProgram, err))
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
				return p, fmt.Errorf("resolve %q: %s is not an executable file: %w", name, at, ErrNoProgram)
			}
			p.Path = at
			return p, nil
		}
		target, err := os.Readlink(at)
		if err != nil {
			return p, fmt.Errorf("resolve %q: %w", name, err)
		}
		if !filepath.IsAbs(target) {
			target = parent + "/" + target
		}
		at = target
	}
	return p, fmt.Errorf("resolve %q: too many symbolic links", name)
}
