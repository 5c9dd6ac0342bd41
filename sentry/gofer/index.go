package gofer

import (
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry/gitindex"
)

// parseIndex reads the index b of the repository directory gitdir.
func parseIndex(b []byte, gitdir int) (*gitindex.Set, error) {
	o := gitindex.Options{Shared: func(name string) ([]byte, error) {
		b, _, err := readFile(gitdir, name, maxIndexFile)
		return b, err
	}}
	set, err := gitindex.Parse(b, o)
	if err != nil {
		o.Hash = gitindex.SHA256
		set, err = gitindex.Parse(b, o)
	}
	return set, err
}

// openGitfile opens the repository directory that the host's `.git` file of d names, if it lies in the workspace. The
// path is walked below the workspace root, one component at a time.
func (d *dir) openGitfile() int {
	b, _, err := readFile(d.host, ".git", 4096)
	if err != nil {
		return -1
	}
	target, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), "gitdir: ")
	if !ok {
		return -1
	}
	if path.IsAbs(target) {
		if target, ok = strings.CutPrefix(path.Clean(target), d.t.ws.Host+"/"); !ok {
			return -1
		}
	} else {
		target = path.Join(d.rel(), target)
	}
	fd, err := openPath(d.t.root.host, ".", unix.O_DIRECTORY)
	if err != nil {
		return -1
	}
	for part := range strings.SplitSeq(target, "/") {
		next := -1
		if part != ".." && part != "." && part != "" {
			next, err = openPath(fd, part, unix.O_DIRECTORY)
		} else {
			err = unix.ENOENT
		}
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
