package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// HostBase is the root directory of profile image "host": the host's /usr, read-only, with what merges into it, and a
// curated /etc. It holds nothing that not every user of the host may read (docs/threat-model.md, "host base").
//
// [HostBase.Compose] works in the caller's mount namespace, in which it needs CAP_SYS_ADMIN; what it mounts goes with
// that namespace.
type HostBase struct {
	Dir      string   // empty directory on a file system of the caller's own
	Agent    Identity // the agent
	Hostname string
	// Dirs are further mount points to provide, absolute; parents are made as needed.
	Dirs []string
	// Files are further mount points for single files.
	Files []string
	// Usr, if not nil, is a detached mount of /usr to use in place of a bind mount (open_tree(2)). Real root passes one in
	// which its own files are nobody's, so that the agent, who is root outside then, cannot read root's private files.
	Usr *os.File
}

// Identity is the agent's entry in the sandbox's passwd(5).
type Identity struct {
	UID, GID    uint32
	Name        string
	Home, Shell string
}

// merged are the top-level names that a merged-/usr system keeps as symlinks (file-hierarchy(7)); elsewhere they are
// directories of their own.
var merged = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec"}

// baseDirs are made in every base, owned by root.
var baseDirs = []struct {
	name string
	mode os.FileMode
}{
	{"dev", 0o755}, {"etc", 0o755}, {"home", 0o755}, {"media", 0o755}, {"mnt", 0o755}, {"opt", 0o755}, {"proc", 0o555},
	{"root", 0o755}, {"run", 0o755}, {"run/lock", 0o777 | os.ModeSticky}, {"srv", 0o755}, {"sys", 0o555},
	{"tmp", 0o777 | os.ModeSticky}, {"usr", 0o755}, {"var", 0o755}, {"var/cache", 0o755}, {"var/lib", 0o755},
	{"var/log", 0o755}, {"var/tmp", 0o777 | os.ModeSticky},
}

// Compose fills Dir. On failure the mounts made so far remain; the caller gives up the namespace.
func (b HostBase) Compose() error {
	for _, d := range baseDirs {
		if err := makeDir(filepath.Join(b.Dir, d.name), d.mode); err != nil {
			return err
		}
	}
	if err := os.Symlink("../run", filepath.Join(b.Dir, "var/run")); err != nil {
		return err
	}
	if err := b.mountUsr(); err != nil {
		return err
	}
	for _, name := range merged {
		if err := b.addMerged(name); err != nil {
			return err
		}
	}
	if err := b.writeEtc(); err != nil {
		return fmt.Errorf("compose /etc: %w", err)
	}
	home := filepath.Join(b.Dir, b.Agent.Home)
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil {
		return err
	}
	if err := makeDir(home, 0o755); err != nil {
		return err
	}
	if err := os.Chown(home, int(b.Agent.UID), int(b.Agent.GID)); err != nil {
		return fmt.Errorf("give the home to the agent: %w", err)
	}
	return b.addMountPoints()
}

func makeDir(path string, mode os.FileMode) error {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.Chmod(path, mode) // the umask does not apply
}

func (b HostBase) mountUsr() error {
	usr := filepath.Join(b.Dir, "usr")
	if b.Usr == nil {
		return BindReadOnly("/usr", usr)
	}
	if err := unix.MoveMount(int(b.Usr.Fd()), "", unix.AT_FDCWD, usr, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount /usr of root on %q: %w", usr, err)
	}
	return setReadOnly(usr)
}

// addMerged copies the symlink of a merged-/usr system, or binds the directory of another.
func (b HostBase) addMerged(name string) error {
	host, here := "/"+name, filepath.Join(b.Dir, name)
	st, err := os.Lstat(host)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case st.Mode()&os.ModeSymlink != 0:
		target, err := os.Readlink(host)
		if err != nil {
			return err
		}
		return os.Symlink(target, here)
	case b.Usr != nil:
		return fmt.Errorf("compose the host base: /%s is not merged into /usr, which real root needs", name)
	}
	if err := os.Mkdir(here, 0o755); err != nil {
		return err
	}
	return BindReadOnly(host, here)
}

func (b HostBase) addMountPoints() error {
	for _, d := range b.Dirs {
		if err := os.MkdirAll(filepath.Join(b.Dir, d), 0o755); err != nil {
			return fmt.Errorf("make mount point %q in the host base: %w", d, err)
		}
	}
	for _, f := range b.Files {
		path := filepath.Join(b.Dir, f)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make mount point %q in the host base: %w", f, err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			return fmt.Errorf("make mount point %q in the host base: %w", f, err)
		}
	}
	return nil
}

// BindReadOnly shows source, with all that is mounted below it, at target: read-only, without set-id or devices.
func BindReadOnly(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %q on %q: %w", source, target, err)
	}
	return setReadOnly(target)
}

// setReadOnly makes the mount at target, and those below it, read-only (mount_setattr(2), Linux 5.12).
func setReadOnly(target string) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("make %q read-only: %w", target, err)
	}
	return nil
}

// IdmappedClone returns a detached copy of the mount at path, with all below it, whose files have the ids that the user
// namespace maps theirs to (mount_setattr(2), MOUNT_ATTR_IDMAP). It needs CAP_SYS_ADMIN where the file system was mounted.
func IdmappedClone(path string, userns *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of %q: %w", path, err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("map the ids of %q: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// FirstPrivate returns a file or directory below dir that not everybody may read, "" if there is none.
func FirstPrivate(dir string) (private string) {
	_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type()&os.ModeSymlink == 0 {
			var st os.FileInfo
			if st, err = e.Info(); err == nil && st.Mode().Perm()&0o004 != 0 {
				return nil
			}
		} else if err == nil {
			return nil
		}
		private = path // in doubt too
		return filepath.SkipAll
	})
	return private
}

// HasShell returns the first of the shells that the host base will have.
func HasShell(shells ...string) string {
	for _, s := range shells {
		real, err := filepath.EvalSymlinks(s)
		if err == nil && (strings.HasPrefix(real, "/usr/") || strings.HasPrefix(real, "/bin/")) {
			return s
		}
	}
	return ""
}
