package sentry

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/ignore"
)

const (
	maxRuleFile  = 1 << 20
	maxSnapshots = 1 << 20 // directories of one snapshot
)

// TakeSnapshot reads the rule files and tracked paths of the workspace at host, on the developer's side. excludes is the
// content of the developer's core.excludesFile. It follows no symbolic link below host and runs no Git.
//
// An index that cannot be read is an error for the root repository: with an empty set, tracked files that match a rule
// would vanish from the sandbox's view.
func TakeSnapshot(host string, excludes []byte) (*Snapshot, error) {
	root, err := os.OpenRoot(host)
	if err != nil {
		return nil, fmt.Errorf("snapshot workspace: %w", err)
	}
	defer root.Close()
	s := &Snapshot{Version: SnapshotVersion, Excludes: excludes, Rules: make(map[string][]byte)}
	w := &snapshotWalk{s: s, root: root, host: host, excludes: ignore.Parse(excludes)}
	if err := w.enter("", "", nil, nil); err != nil {
		return nil, fmt.Errorf("snapshot workspace %q: %w", host, err)
	}
	return s, nil
}

type snapshotWalk struct {
	s        *Snapshot
	root     *os.Root
	host     string
	excludes *ignore.Patterns
	dirs     int
}

// enter records directory rel, whose name is name in up.
func (w *snapshotWalk) enter(rel, name string, up *ignore.Dir, set *gitindex.Set) error {
	if w.dirs++; w.dirs > maxSnapshots {
		return fmt.Errorf("more than %d directories", maxSnapshots)
	}
	var own *ignore.Patterns
	b, err := w.read(path.Join(rel, ".gitignore"), maxRuleFile)
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNotRegular)
	switch {
	case err == nil:
		w.s.Rules[rel] = b
		own = ignore.Parse(b)
	case !absent:
		return err
	}
	var repo *SnapshotRepo
	inside := name // from its repository's root
	if up != nil {
		inside = path.Join(up.Path(), name)
	}
	if st, err := w.root.Lstat(path.Join(rel, ".git")); rel == "" || err == nil && (st.IsDir() || st.Mode().IsRegular()) {
		var tracked *gitindex.Set
		repo, tracked, err = w.repo(rel)
		if err != nil {
			if rel == "" {
				return err
			}
			repo, tracked = &SnapshotRepo{Root: rel}, nil // hides what a rule ignores: fail closed
		}
		w.s.Repos = append(w.s.Repos, *repo)
		set, inside = tracked, ""
	}
	if absent && set != nil && set.RulesElsewhere(inside) {
		w.s.Unknown = append(w.s.Unknown, rel)
		own = ignore.Unknown()
	}
	dir := up
	if repo != nil {
		info := ignore.Parse(repo.Exclude)
		if repo.ExcludeUnknown {
			info = ignore.Unknown()
		}
		dir = ignore.Root(ignore.Config{FoldCase: repo.FoldCase, Excludes: w.excludes, Info: info, Own: own})
	} else {
		dir = up.Child(name, own)
	}
	f, err := w.root.Open(path.Join(".", rel))
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || e.Name() == ".git" {
			continue
		}
		p := path.Join(dir.Path(), e.Name())
		if dir.Match(e.Name(), true).Ignored && (set == nil || !set.HasTrackedBelow(p)) {
			continue
		}
		if err := w.enter(path.Join(rel, e.Name()), e.Name(), dir, set); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// repo reads what one repository adds.
func (w *snapshotWalk) repo(rel string) (*SnapshotRepo, *gitindex.Set, error) {
	r := &SnapshotRepo{Root: rel}
	gitdir := filepath.Join(w.host, rel, ".git")
	st, err := os.Lstat(gitdir)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil, nil // no repository yet
	}
	if err != nil {
		return nil, nil, err
	}
	if st.Mode().IsRegular() {
		b, err := readRegular(gitdir, 4096)
		if err != nil {
			return nil, nil, err
		}
		target, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), "gitdir: ")
		if !ok {
			return nil, nil, fmt.Errorf("read %q: not a gitfile", gitdir)
		}
		if gitdir = target; !filepath.IsAbs(target) {
			gitdir = filepath.Join(w.host, rel, target)
		}
	}
	common := gitdir
	if b, err := readRegular(filepath.Join(gitdir, "commondir"), 4096); err == nil {
		if common = strings.TrimRight(string(b), "\r\n"); !filepath.IsAbs(common) {
			common = filepath.Join(gitdir, common)
		}
	}
	// Git follows links to this file, and the developer's own tools have made them. A loop of links is no file.
	if r.Exclude, err = readFollowed(filepath.Join(common, "info", "exclude"), maxRuleFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.Exclude, r.ExcludeUnknown = nil, true
	}
	r.FoldCase = foldsCase(gitdir, common)
	b, err := readRegular(filepath.Join(gitdir, "index"), gitindex.MaxIndex)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	o := gitindex.Options{Shared: func(name string) ([]byte, error) {
		return readRegular(filepath.Join(gitdir, name), gitindex.MaxIndex)
	}}
	set, err := gitindex.Parse(b, o)
	if err != nil {
		o.Hash = gitindex.SHA256
		if set, err = gitindex.Parse(b, o); err != nil {
			return nil, nil, fmt.Errorf("read index of %q: %w", filepath.Join(w.host, rel), err)
		}
	}
	for e := range set.All() {
		r.Tracked = append(r.Tracked, []byte(e.Path))
	}
	return r, set, nil
}

// foldsCase reads core.ignoreCase of a repository, which git init sets where the file system has no case. The machine's
// and the user's files are not asked: the setting describes one file system.
func foldsCase(gitdir, common string) bool {
	e := gitconfig.Resolve(gitconfig.Env{GitDir: gitdir, CommonDir: common, ReadFile: func(name string) ([]byte, error) {
		return readFollowed(name, gitconfig.MaxSource)
	}})
	o, ok := e.Last("core.ignorecase")
	if !ok {
		return false
	}
	fold, ok := o.Bool()
	return fold || !ok
}

var errNotRegular = errors.New("not a regular file")

func (w *snapshotWalk) read(rel string, limit int64) ([]byte, error) {
	st, err := w.root.Lstat(rel)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, errNotRegular
	}
	f, err := w.root.OpenFile(rel, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readLimited(f, limit)
}

func readRegular(name string, limit int64) ([]byte, error) {
	return readHost(name, limit, unix.O_NOFOLLOW)
}

// readFollowed reads a file that Git follows links to.
func readFollowed(name string, limit int64) ([]byte, error) { return readHost(name, limit, 0) }

func readHost(name string, limit int64, flags int) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|flags, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readLimited(f, limit)
}

func readLimited(f *os.File, limit int64) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, errNotRegular
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("read %q: over %d bytes", f.Name(), limit)
	}
	return b, err
}
