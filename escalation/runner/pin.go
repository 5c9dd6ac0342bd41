package runner

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Bounds of what is hashed and copied, in bytes.
const (
	maxProgram = 256 << 20
	maxFile    = 16 << 20
	maxFiles   = 16
)

var (
	// ErrOutside means that the sandbox's working directory is not in the workspace, or not on the host.
	ErrOutside = errors.New("working directory is not a directory of the workspace on the host")
	// ErrChanged means that something is no longer what was shown and approved.
	ErrChanged = errors.New("changed after it was shown")
	// ErrTooLarge means that a program or script in the workspace is too large to be pinned.
	ErrTooLarge = errors.New("too large to be pinned")
)

// Identity tells whether a file is still the same, unchanged.
type Identity struct {
	Dev, Ino     uint64
	Size         int64
	Mtime, Ctime int64 // nanoseconds
}

func identity(f *os.File) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Identity{}, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return Identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}, nil
}

// sameFile compares what stays when a directory's content changes.
func (i Identity) sameFile(j Identity) bool { return i.Dev == j.Dev && i.Ino == j.Ino }

// Workspace is the Agent Workspace, by descriptor and by name.
type Workspace struct {
	Root *os.File // O_PATH directory
	Path string   // its canonical path, the same inside and outside
}

// OpenWorkspace opens the workspace at its canonical path. The caller closes Root.
func OpenWorkspace(path string) (Workspace, error) {
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Workspace{}, fmt.Errorf("open workspace: %w", err)
	}
	return Workspace{f, path}, nil
}

// open opens the path below the workspace without following any link, so that nothing there can lead elsewhere.
func (w Workspace) open(path string, flags uint64) (*os.File, error) {
	rel, ok := strings.CutPrefix(path, strings.TrimSuffix(w.Path, "/")+"/")
	if path == w.Path {
		rel, ok = ".", true
	}
	if !ok {
		return nil, fmt.Errorf("%q: %w", path, ErrOutside)
	}
	fd, err := unix.Openat2(int(w.Root.Fd()), rel, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, fmt.Errorf("open %q in the workspace: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Dir is a pinned working directory.
type Dir struct {
	Path string
	File *os.File // O_PATH
	ID   Identity
	in   *Workspace // nil: fixed by a rule, outside the workspace
}

// PinDir pins a directory of the workspace; path comes from the sandbox. Its error wraps [ErrOutside] for any path that
// is not plainly one.
func (w Workspace) PinDir(path string) (*Dir, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return nil, fmt.Errorf("%q: %w", path, ErrOutside)
	}
	f, err := w.open(path, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, errors.Join(ErrOutside, err)
	}
	return pinned(path, f, &w)
}

// PinFixedDir pins a directory that a rule names.
func (w Workspace) PinFixedDir(path string) (*Dir, error) {
	if d, err := w.PinDir(path); err == nil {
		return d, nil
	}
	f, err := openFixed(path)
	if err != nil {
		return nil, err
	}
	return pinned(path, f, nil)
}

func openFixed(path string) (*os.File, error) {
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the rule's directory: %w", err)
	}
	return f, nil
}

func pinned(path string, f *os.File, in *Workspace) (*Dir, error) {
	id, err := identity(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &Dir{path, f, id, in}, nil
}

// verify looks the directory up again by name.
func (d *Dir) verify() error {
	var f *os.File
	var err error
	if d.in != nil {
		f, err = d.in.open(d.Path, unix.O_PATH|unix.O_DIRECTORY)
	} else {
		f, err = openFixed(d.Path)
	}
	if err != nil {
		return fmt.Errorf("working directory %q: %w (%v)", d.Path, ErrChanged, err)
	}
	defer f.Close()
	id, err := identity(f)
	if err != nil {
		return err
	}
	if !id.sameFile(d.ID) {
		return fmt.Errorf("working directory %q: %w", d.Path, ErrChanged)
	}
	return nil
}

// Program is a pinned program.
type Program struct {
	Path   string
	File   *os.File // readable if the developer may read it, else O_PATH
	ID     Identity
	Sum    [32]byte // of the content; zero unless Script or Ours
	Script bool     // starts with "#!"
	Ours   bool     // lies where the sandbox can write
}

// PinProgram pins the program at a canonical path.
func PinProgram(path string, ours bool) (*Program, error) {
	f, err := openRegular(path, unix.O_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	p := &Program{Path: path, File: f, Ours: ours}
	if err := p.examine(); err != nil {
		f.Close()
		return nil, fmt.Errorf("pin program: %w", err)
	}
	return p, nil
}

func (p *Program) examine() (err error) {
	if p.ID, err = identity(p.File); err != nil {
		return err
	}
	start := make([]byte, 2)
	n, err := p.File.ReadAt(start, 0)
	if errors.Is(err, unix.EBADF) && !p.Ours { // may be executed, not read: nobody's to change either
		return nil
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", p.Path, err)
	}
	p.Script = bytes.Equal(start[:n], []byte("#!"))
	if p.Script || p.Ours {
		p.Sum, err = sum(p.File, maxProgram, nil)
	}
	return err
}

// openRegular opens a regular file for reading, or as O_PATH if it may not be read. It never blocks on a FIFO and never
// opens a device: the type is checked on a descriptor that does neither. flags may hold O_NOFOLLOW.
func openRegular(path string, flags int) (*os.File, error) {
	at, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(at)
		return nil, fmt.Errorf("open %s: not a regular file", path)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EACCES) {
		return os.NewFile(uintptr(at), path), nil
	}
	unix.Close(at)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// sum hashes f from its start, up to limit bytes, and copies it to w if that is not nil.
func sum(f *os.File, limit int64, w io.Writer) (s [32]byte, err error) {
	h := sha256.New()
	var to io.Writer = h
	if w != nil {
		to = io.MultiWriter(h, w)
	}
	n, err := io.Copy(to, io.NewSectionReader(f, 0, limit+1))
	if err != nil {
		return s, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	if n > limit {
		return s, fmt.Errorf("%s: over %d bytes: %w", f.Name(), limit, ErrTooLarge)
	}
	return [32]byte(h.Sum(nil)), nil
}

// verify looks at the program again, through the descriptor and by name.
func (p *Program) verify() error {
	now, err := identity(p.File)
	if err != nil {
		return err
	}
	f, err := openRegular(p.Path, unix.O_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("program %s: %w (%v)", p.Path, ErrChanged, err)
	}
	defer f.Close()
	named, err := identity(f)
	if err != nil {
		return err
	}
	if now != p.ID || named != p.ID {
		return fmt.Errorf("program %s: %w", p.Path, ErrChanged)
	}
	if p.Sum != [32]byte{} {
		if s, err := sum(p.File, maxProgram, nil); err != nil || s != p.Sum {
			return errors.Join(fmt.Errorf("program %s: %w", p.Path, ErrChanged), err)
		}
	}
	return nil
}

// seal copies the program into memory that nobody can write, and checks that this is what was shown.
func (p *Program) seal() (*os.File, error) {
	fd, err := unix.MemfdCreate("lazaret-program", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3 every memfd is executable
		fd, err = unix.MemfdCreate("lazaret-program", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("copy program: %w", err)
	}
	m := os.NewFile(uintptr(fd), p.Path)
	s, err := sum(p.File, maxProgram, m)
	if err == nil && s != p.Sum {
		err = fmt.Errorf("program %s: %w", p.Path, ErrChanged)
	}
	if err == nil {
		_, err = unix.FcntlInt(m.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err == nil {
		err = unix.Fchmod(int(m.Fd()), 0o500)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	// A descriptor open for writing would make the kernel refuse to execute the file.
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", m.Fd()))
	m.Close()
	return ro, err
}

// File is an argument that names a file with code: its content is part of what is approved.
type File struct {
	Arg  int // index in the argument vector
	Path string
	Sum  [32]byte
}

// pinFiles finds the arguments that name regular files, relative to dir.
func pinFiles(argv []string, dir *Dir) ([]File, error) {
	var files []File
	for i, a := range argv[1:] {
		if a == "" || len(files) == maxFiles {
			continue
		}
		f, err := openArgument(a, dir)
		if err != nil {
			continue // not a file now; if it is one later, it was not part of what was shown
		}
		s, err := sum(f, maxFile, nil)
		f.Close()
		if errors.Is(err, ErrTooLarge) {
			continue // data, not a script
		}
		if err != nil {
			return nil, err
		}
		files = append(files, File{i + 1, a, s})
	}
	return files, nil
}

func openArgument(name string, dir *Dir) (*os.File, error) {
	if !filepath.IsAbs(name) {
		name = fmt.Sprintf("/proc/self/fd/%d/%s", dir.File.Fd(), name)
	}
	return openRegular(name, 0)
}

func (f File) verify(dir *Dir) error {
	g, err := openArgument(f.Path, dir)
	if err != nil {
		return fmt.Errorf("file %q: %w (%v)", f.Path, ErrChanged, err)
	}
	defer g.Close()
	if s, err := sum(g, maxFile, nil); err != nil || s != f.Sum {
		return fmt.Errorf("file %q: %w", f.Path, ErrChanged)
	}
	return nil
}
