package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Dirs are the host directories that Lazaret keeps for one developer. None of them may be reachable from a sandbox (SR-5).
type Dirs struct {
	Home    string // the developer's home; never a workspace
	Config  string // $XDG_CONFIG_HOME/lazaret: profiles
	Storage string // $XDG_DATA_HOME/lazaret: the Storage Root
	Runtime string // $XDG_RUNTIME_DIR/lazaret: locks, sockets
}

// domains is the parent of the Domain Roots.
func (d Dirs) domains() string { return filepath.Join(d.Storage, "domains") }

// transients is the parent of the throw-away layers, one directory per running Domain.
func (d Dirs) transients() string { return filepath.Join(d.Storage, "transient") }

// FindDirs names the directories from an environment; it makes none.
func FindDirs(getenv func(string) string) (Dirs, error) {
	home := getenv("HOME")
	if !filepath.IsAbs(home) {
		return Dirs{}, refusal(fmt.Sprintf("find the home directory: HOME is %q", home), "set HOME to your home directory")
	}
	xdg := func(name, fallback string) string {
		if v := getenv(name); filepath.IsAbs(v) {
			return v // relative values are to be ignored (XDG Base Directory Specification)
		}
		return fallback
	}
	uid := strconv.Itoa(os.Getuid())
	runtime := "/run/user/" + uid
	if st, err := os.Stat(runtime); err != nil || !ownedByUs(st) {
		runtime = filepath.Join(os.TempDir(), "lazaret-"+uid) // no login session, as under su or in CI
	}
	d := Dirs{
		Home:    home,
		Config:  filepath.Join(xdg("XDG_CONFIG_HOME", filepath.Join(home, ".config")), "lazaret"),
		Storage: filepath.Join(xdg("XDG_DATA_HOME", filepath.Join(home, ".local/share")), "lazaret"),
		Runtime: filepath.Join(xdg("XDG_RUNTIME_DIR", runtime), "lazaret"),
	}
	for _, p := range []*string{&d.Home, &d.Config, &d.Storage, &d.Runtime} {
		c, err := canonicalPrefix(*p)
		if err != nil {
			return d, fmt.Errorf("resolve %s: %w", *p, err)
		}
		*p = c
	}
	return d, nil
}

// canonicalPrefix resolves the symlinks of the part of path that exists.
func canonicalPrefix(path string) (string, error) {
	path = filepath.Clean(path)
	real, err := filepath.EvalSymlinks(path)
	if err == nil || !errors.Is(err, os.ErrNotExist) || path == "/" {
		return real, err
	}
	dir, err := canonicalPrefix(filepath.Dir(path))
	return filepath.Join(dir, filepath.Base(path)), err
}

// PrivateDir makes path if it is absent, checks that it is a directory of the developer that nobody else can enter, and
// returns it opened (SR-10). The check is of the opened object, so nothing can be swapped in between.
func PrivateDir(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, hint(fmt.Errorf("make %s: %w", filepath.Dir(path), err), "see that you can write there, or set the XDG variable that names it")
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, hint(fmt.Errorf("make %s: %w", path, err), "see that you can write in %s", filepath.Dir(path))
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, hint(&os.PathError{Op: "open", Path: path, Err: err}, "remove what is there; it must be a directory of yours")
	}
	dir := os.NewFile(uintptr(fd), path)
	st, err := dir.Stat()
	if err == nil && (!ownedByUs(st) || st.Mode().Perm() != 0o700) {
		err = refusal(fmt.Sprintf("use %s: it must be yours alone, and is mode %v of uid %d", path, st.Mode().Perm(), st.Sys().(*syscall.Stat_t).Uid),
			fmt.Sprintf("if you made it: chmod 700 %s; if not, find out who did", path))
	}
	if err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

func ownedByUs(st os.FileInfo) bool { return st.Sys().(*syscall.Stat_t).Uid == uint32(os.Getuid()) }

// within reports whether path is dir or lies below it; both are canonical.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
