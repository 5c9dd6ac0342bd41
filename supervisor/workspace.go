package supervisor

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
)

// Workspace is an Agent Workspace: a directory, named once by descriptor and known from then on by its identity.
type Workspace struct {
	Path     string // canonical: absolute, without symlinks
	Dev, Ino uint64
	Cwd      string // where the session starts: Path or below
}

// FindWorkspace finds the work tree around dir, or dir itself where there is none. With exact, dir is taken as it is.
func FindWorkspace(dir string, exact bool) (Workspace, error) {
	cwd, err := canonicalDir(dir)
	if err != nil {
		return Workspace{}, err
	}
	root := cwd
	if top := workTree(cwd); top != "" && !exact {
		root = top
	}
	if exact {
		if top := workTree(filepath.Dir(cwd)); top != "" && workTree(cwd) != cwd {
			return Workspace{}, refusal(fmt.Sprintf("workspace %s: it lies inside the work tree %s, whose other files Git would take for deleted", cwd, top),
				"enter the whole work tree: lazaret enter --workspace "+top)
		}
	}
	f, st, err := openExact(root)
	if err != nil {
		return Workspace{}, err
	}
	f.Close()
	return Workspace{Path: root, Dev: st.Dev, Ino: st.Ino, Cwd: cwd}, nil
}

// workTree returns the nearest directory, from dir upwards, that has a .git; "" if none has.
func workTree(dir string) string {
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(filepath.Join(dir, ".git")); err == nil {
			return dir
		}
		if dir == "/" {
			return ""
		}
	}
}

// canonicalDir opens dir and asks the kernel where that is.
func canonicalDir(dir string) (string, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", hint(&os.PathError{Op: "open workspace", Path: dir, Err: err}, "name a directory that exists: lazaret enter --workspace DIR")
	}
	defer unix.Close(fd)
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("resolve workspace %s: %w", dir, err)
	}
	if strings.HasSuffix(path, " (deleted)") || !strings.HasPrefix(path, "/") {
		if _, err := os.Stat(path); err != nil {
			return "", refusal(fmt.Sprintf("workspace %s: the directory was removed", dir), "change to a directory that exists")
		}
	}
	return path, nil
}

// openExact opens a canonical path; a symlink that has come in since is an error.
func openExact(path string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return nil, st, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, st, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return f, st, nil
}

// Open opens the workspace again, in whatever mount namespace, and refuses another directory of that name.
func (w Workspace) Open() (*os.File, error) {
	f, st, err := openExact(w.Path)
	if err != nil {
		return nil, err
	}
	if st.Dev != w.Dev || st.Ino != w.Ino {
		f.Close()
		return nil, fmt.Errorf("open workspace %s: it is another directory than before", w.Path)
	}
	return f, nil
}

// Check refuses what must not be mounted read-write in a sandbox, with the reason.
func (w Workspace) Check(dirs Dirs, ids nsenter.IDMap) error {
	for _, sys := range []string{"/proc", "/sys", "/dev"} {
		if within(w.Path, sys) {
			return refusal(fmt.Sprintf("workspace %s: %s is the kernel's", w.Path, sys), "work in a directory of your own")
		}
	}
	for _, kept := range []struct{ what, path string }{
		{"the home directory", dirs.Home}, {"Lazaret's configuration", dirs.Config}, {"the Storage Root", dirs.Storage},
		{"the runtime directory", dirs.Runtime},
	} {
		if within(kept.path, w.Path) {
			what := "contains " + kept.what
			if kept.path == w.Path {
				what = "is " + kept.what
			}
			return refusal(fmt.Sprintf("workspace %s: it %s, which a sandbox must not reach", w.Path, what),
				"enter a project directory, or name one: lazaret enter --workspace DIR")
		}
		if kept.path != dirs.Home && within(w.Path, kept.path) {
			return refusal(fmt.Sprintf("workspace %s: it lies in %s (%s), which a sandbox must not reach", w.Path, kept.what, kept.path),
				"work in a directory outside of it")
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(w.Path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: w.Path, Err: err}
	}
	if !nsenter.Maps(ids.UID, st.Uid) {
		return refusal(fmt.Sprintf("workspace %s: it belongs to uid %d, which is not mapped into the sandbox", w.Path, st.Uid),
			fmt.Sprintf("the agent acts as you: sudo chown -R %d %s", os.Getuid(), w.Path))
	}
	if !nsenter.Maps(ids.GID, st.Gid) {
		return refusal(fmt.Sprintf("workspace %s: it belongs to group %d, which is not mapped into the sandbox", w.Path, st.Gid),
			fmt.Sprintf("only your primary group is: chgrp -R %d %s", os.Getgid(), w.Path))
	}
	// The domain process gives up the developer's supplementary groups before it opens the workspace.
	for dir := filepath.Dir(w.Path); ; dir = filepath.Dir(dir) {
		if err := unix.Stat(dir, &st); err != nil {
			return &os.PathError{Op: "stat", Path: dir, Err: err}
		}
		if st.Mode&0o001 == 0 && (!nsenter.Maps(ids.UID, st.Uid) || !nsenter.Maps(ids.GID, st.Gid)) {
			return refusal(fmt.Sprintf("workspace %s: its parent %s can be entered through a group only, which the sandbox does not have", w.Path, dir),
				"sudo chmod o+x "+dir)
		}
		if dir == "/" {
			return nil
		}
	}
}

// CwdOf returns where a session starts, for a caller in dir: there if it lies in the workspace, else at its root.
func (w Workspace) CwdOf(dir string) string {
	if path, err := canonicalDir(dir); err == nil && within(path, w.Path) {
		return path
	}
	return w.Path
}

// DomainID is the Domain ID (FR-1): a digest of profile and canonical workspace, in lower-case letters and digits.
func DomainID(profile, workspace string) string {
	sum := sha256.Sum256([]byte("lazaret domain 1\x00" + profile + "\x00" + workspace))
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:16]))
}

// errGone is returned when a peer process went away.
var errGone = errors.New("it ended")
