package gofer

import (
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/route"
)

// parseIndex reads the index b of the repository directory gitdir.
func parseIndex(b []byte, gitdir int) (*gitindex.Set, error) {
	o := gitindex.Options{Shared: func(name string) ([]byte, error) {
		b, _, err := readFile(gitdir, name, gitindex.MaxIndex)
		return b, err
	}}
	set, err := gitindex.Parse(b, o)
	if err != nil {
		o.Hash = gitindex.SHA256
		set, err = gitindex.Parse(b, o)
	}
	return set, err
}

// repository is the open directory of a repository and its common directory; -1 where there is none that can be read.
type repository struct{ gitdir, common int }

func (r repository) close() {
	for _, fd := range []int{r.gitdir, r.common} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// openRepository opens the repository of the work tree whose root is d (gitrepository-layout(5)).
func (d *dir) openRepository(kind route.Host) repository {
	r := repository{-1, -1}
	open := func(dirfd int, name string) int {
		fd, err := openPath(dirfd, name, unix.O_DIRECTORY)
		if err != nil {
			return -1
		}
		return fd
	}
	switch {
	case kind == route.Dir:
		r.gitdir = open(d.host, ".git")
		r.common = open(d.host, ".git")
	case kind != route.File:
	case d.parent == nil && d.t.gitdir >= 0:
		r.gitdir = open(d.t.gitdir, ".")
		if d.t.common >= 0 {
			r.common = open(d.t.common, ".")
		}
	default:
		at, ok := d.t.pathIn(d.rel(), d.host, ".git", "gitdir: ")
		if !ok {
			return r
		}
		if r.gitdir = d.t.openBelow(at); r.gitdir < 0 {
			return r
		}
		if common, ok := d.t.pathIn(at, r.gitdir, "commondir", ""); ok {
			at = common
		}
		r.common = d.t.openBelow(at)
	}
	return r
}

// pathIn reads a path from the file name of dir, after prefix, and returns it from the workspace root; ok is false if
// there is none or it leads out of the workspace. at is dir's own path.
func (t *tree) pathIn(at string, dir int, name, prefix string) (rel string, ok bool) {
	b, _, err := readFile(dir, name, 4096)
	if err != nil {
		return "", false
	}
	target, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), prefix)
	if !ok {
		return "", false
	}
	if !path.IsAbs(target) {
		return path.Join(at, target), true // one that leads out begins with ".." and is not opened
	}
	for _, root := range []string{t.ws.Host, t.ws.Mount} { // the two differ where the workspace is staged
		if below, ok := strings.CutPrefix(path.Clean(target), root+"/"); ok {
			return below, true
		}
	}
	return "", false
}

// openBelow opens a directory by its path from the workspace root, one component at a time, or returns -1.
func (t *tree) openBelow(rel string) int {
	fd, err := openPath(t.root.host, ".", unix.O_DIRECTORY)
	if err != nil {
		return -1
	}
	for part := range strings.SplitSeq(rel, "/") {
		if part == ".." || part == "." || part == "" {
			unix.Close(fd)
			return -1
		}
		next, err := openPath(fd, part, unix.O_DIRECTORY)
		unix.Close(fd)
		if err != nil {
			return -1
		}
		fd = next
	}
	return fd
}

// admit remembers a file that the sandbox has made on the host though the snapshot ignores its path. The host's own file
// of that name, should one come, is another file and stays hidden.
func (t *tree) admit(d *dir, name string, st *unix.Statx_t) {
	rel := joinRel(d.rel(), name)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.guests == nil || len(t.guests) >= maxGuests {
		t.guests = make(map[string]identity)
	}
	t.guests[rel] = identOf(st)
	t.guestCount.Store(int64(len(t.guests)))
}

// maxGuests bounds the memory for admitted files; beyond, the earliest are hidden until the developer consents.
const maxGuests = 16384

func (t *tree) admitted(d *dir, name string, st *unix.Statx_t) bool {
	if t.guestCount.Load() == 0 {
		return false
	}
	rel := joinRel(d.rel(), name)
	t.mu.Lock()
	defer t.mu.Unlock()
	id, ok := t.guests[rel]
	return ok && id == identOf(st)
}

// foldsCase reads core.ignoreCase from the repository's own configuration, which only the host writes. What cannot be
// read counts as folding: more is ignored then.
func (r repository) foldsCase() bool {
	if r.common < 0 {
		return false
	}
	b, _, err := readFile(r.common, "config", gitconfig.MaxSource)
	if err == unix.ENOENT {
		return false
	}
	if err != nil {
		return true
	}
	f, err := gitconfig.Parse(b)
	if err != nil {
		return true
	}
	fold, ok := f.Bool("core.ignorecase", false)
	return fold || !ok
}
