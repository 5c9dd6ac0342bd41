package review

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/report"
)

const (
	maxRepos  = 256
	maxHidden = 1000 // paths of each list
)

// Repo is what is odd about one repository that the host has.
type Repo struct {
	Root     string // of its work tree, from the workspace root; bytes
	Findings *report.Findings
	Tracked  []string // paths that the index lists although the consented rules hide them
	Flagged  []string // paths whose changes git status does not show, with the flag
	Partial  []string
}

// Repos looks at the repositories of the work tree that the snapshot has. gitdir is the repository directory of the root
// where it lies outside of the tree (a linked worktree), else nil.
func (t *Tree) Repos(gitdir *os.File) (repos []*Repo) {
	for _, root := range append([]string{""}, t.roots[:min(len(t.roots), maxRepos)]...) {
		r := &Repo{Root: root}
		dir := gitdir
		if root != "" || gitdir == nil {
			d, err := t.openGitdir(root)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				r.Partial = append(r.Partial, err.Error())
				repos = append(repos, r)
				continue
			}
			dir = d
		}
		t.look(r, dir)
		if dir != gitdir {
			dir.Close()
		}
		repos = append(repos, r)
	}
	return repos
}

// openGitdir opens the repository directory of the work tree at root. A gitfile is followed within the tree.
func (t *Tree) openGitdir(root string) (*os.File, error) {
	name := path.Join(root, ".git")
	parent, err := openDir(t.host, root)
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if kindAt(parent, ".git") != regular {
		return openDir(parent, ".git")
	}
	b, _, err := readFile(parent, ".git", 4096)
	if err != nil {
		return nil, err
	}
	target, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), "gitdir: ")
	if !ok {
		return nil, fmt.Errorf("%s: it is no gitfile", Show(name))
	}
	if path.IsAbs(target) {
		if target, ok = strings.CutPrefix(path.Clean(target), t.Path+"/"); !ok {
			return nil, fmt.Errorf("%s: its repository lies outside of the workspace and was not looked at", Show(name))
		}
	} else {
		target = path.Join(root, target)
	}
	return openDir(t.host, target)
}

func (t *Tree) look(r *Repo, gitdir *os.File) {
	var err error
	if r.Findings, err = report.Scan(gitdir); err != nil {
		r.Partial = append(r.Partial, err.Error())
		r.Findings = &report.Findings{}
	}
	set, err := readIndex(gitdir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			r.Partial = append(r.Partial, fmt.Sprintf("index: %v", err))
		}
		return
	}
	if t.view != nil {
		hidden := func(p string) bool { return t.hiddenPath(path.Join(r.Root, p)) }
		total := 0
		if r.Tracked, total = report.HiddenTracked(set, hidden, maxHidden); total > len(r.Tracked) {
			r.Partial = append(r.Partial, fmt.Sprintf("%d hidden paths are tracked; the first %d are listed", total, len(r.Tracked)))
		}
	}
	for e := range set.Hidden() {
		if len(r.Flagged) == maxHidden {
			r.Partial = append(r.Partial, "more paths have flags that hide changes")
			break
		}
		r.Flagged = append(r.Flagged, fmt.Sprintf("%s (%s)", e.Path, e.Flags&(gitindex.AssumeUnchanged|gitindex.SkipWorktree)))
	}
}

// readIndex reads a repository's index without Git.
func readIndex(gitdir *os.File) (*gitindex.Set, error) {
	b, _, err := readFile(gitdir, "index", gitindex.MaxIndex)
	if err != nil {
		return nil, err
	}
	o := gitindex.Options{Shared: func(name string) ([]byte, error) {
		b, _, err := readFile(gitdir, name, gitindex.MaxIndex)
		return b, err
	}}
	set, err := gitindex.Parse(b, o)
	if err != nil {
		o.Hash = gitindex.SHA256
		if other, err2 := gitindex.Parse(b, o); err2 == nil {
			return other, nil
		}
	}
	return set, err
}

// since returns what was not there before.
func (r *Repo) since(before *Repo) *Repo {
	if before == nil {
		return r
	}
	n := &Repo{Root: r.Root, Findings: r.Findings, Partial: r.Partial,
		Tracked: without(r.Tracked, before.Tracked), Flagged: without(r.Flagged, before.Flagged)}
	if r.Findings != nil && before.Findings != nil {
		n.Findings = r.Findings.Since(before.Findings)
	}
	return n
}

func without(list, known []string) (out []string) {
	had := make(map[string]bool, len(known))
	for _, s := range known {
		had[s] = true
	}
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return had[s] })
}
