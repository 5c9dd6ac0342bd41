package report

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of one scan.
const (
	maxNames  = 1 << 19 // names looked at
	maxDepth  = 64
	maxFound  = 1000     // of each kind
	maxPacked = 64 << 20 // bytes of packed-refs
	maxLine   = 8 << 10  // bytes of one of its lines
)

// Lock is a lock file, or gc.pid, which has the same effect.
type Lock struct {
	Path    string // below the repository directory
	ModTime time.Time
}

// Oddity is a name with what is remarkable about it.
type Oddity struct{ Name, Why string }

// Findings is what one repository directory shows.
type Findings struct {
	Locks    []Lock
	Replaced []string // names of objects that Git shows as others (refs/replace)
	OddRefs  []Oddity // full reference names
	Special  []Oddity // symbolic links, FIFOs, sockets and devices, by path below the repository directory
	Partial  []string // what was not looked at, and why
}

// Scan looks through a repository directory. It borrows gitdir. An error means that the directory itself
// could not be read; anything below that fails is in Partial.
func Scan(gitdir *os.File) (*Findings, error) {
	s := &scan{f: &Findings{}, refs: map[string]bool{}}
	root, err := openBeneath(gitdir, ".", unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("scan repository %q: %w", gitdir.Name(), err)
	}
	defer root.Close()
	if err := s.dir(root, "", 0); err != nil {
		return nil, fmt.Errorf("scan repository %q: %w", gitdir.Name(), err)
	}
	s.packed(root)
	s.judgeRefs()
	return s.f, nil
}

type scan struct {
	f     *Findings
	names int
	full  bool            // the limit on names was reported
	refs  map[string]bool // full names, loose and packed
}

// openBeneath opens name in dir without leaving it and without following any link. It cannot block.
func openBeneath(dir *os.File, name string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(int(dir.Fd()), name, &how)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EINTR && err != unix.EAGAIN {
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
	}
}

func (s *scan) partial(format string, args ...any) {
	if len(s.f.Partial) < maxFound {
		s.f.Partial = append(s.f.Partial, fmt.Sprintf(format, args...))
	}
}

// keep appends to one of the lists, within limits.
func keep[T any](s *scan, list *[]T, v T, what string) {
	switch len(*list) {
	case maxFound:
	case maxFound - 1:
		s.partial("%s: only the first %d are listed", what, maxFound)
		fallthrough
	default:
		*list = append(*list, v)
	}
}

func (s *scan) dir(d *os.File, rel string, depth int) error {
	for {
		names, err := d.Readdirnames(1024)
		for _, name := range names {
			if s.names++; s.names > maxNames {
				if !s.full {
					s.full = true
					s.partial("more than %d names in the repository directory", maxNames)
				}
				return nil
			}
			s.entry(d, rel, name, depth)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *scan) entry(d *os.File, rel, name string, depth int) {
	path := rel + name
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if err != unix.ENOENT { // gone again
			s.partial("%q: %v", path, err)
		}
		return
	}
	switch kind := st.Mode & unix.S_IFMT; kind {
	case unix.S_IFREG:
		s.file(path, &st)
	case unix.S_IFDIR:
		s.enter(d, name, path, depth)
	default:
		keep(s, &s.f.Special, Oddity{path, kinds[kind]}, "links and special files")
	}
}

var kinds = map[uint32]string{
	unix.S_IFLNK: "symbolic link", unix.S_IFIFO: "FIFO", unix.S_IFSOCK: "socket", unix.S_IFCHR: "device", unix.S_IFBLK: "device",
}

func (s *scan) file(path string, st *unix.Stat_t) {
	if strings.HasSuffix(path, ".lock") || path == "gc.pid" {
		keep(s, &s.f.Locks, Lock{path, time.Unix(st.Mtim.Unix())}, "locks")
		return
	}
	if strings.HasPrefix(path, "refs/") {
		s.refs[path] = true
	}
}

func (s *scan) enter(d *os.File, name, path string, depth int) {
	switch {
	case strings.HasPrefix(path, "objects/") && len(name) == 2:
		return
	case path == "reftable":
		s.partial("references are kept in a reftable, which is not read")
	case depth >= maxDepth:
		s.partial("%q: too deep", path)
		return
	}
	sub, err := openBeneath(d, name, unix.O_DIRECTORY)
	if err == nil {
		err = s.dir(sub, path+"/", depth+1)
		sub.Close()
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		s.partial("%q: %v", path, err)
	}
}

// packed reads the names in packed-refs: lines of an object name, a blank and a reference name.
func (s *scan) packed(root *os.File) {
	f, err := openBeneath(root, "packed-refs", 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return // a link is among the special files
	}
	if err != nil {
		s.partial("packed-refs: %v", err)
		return
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return
	}
	lines := bufio.NewScanner(io.LimitReader(f, maxPacked))
	lines.Buffer(nil, maxLine)
	size := int64(0)
	for lines.Scan() {
		size += int64(len(lines.Bytes())) + 1
		line := lines.Text()
		if _, name, ok := strings.Cut(line, " "); ok && line[0] != '#' && line[0] != '^' {
			if s.names++; s.names > maxNames {
				s.partial("packed-refs: more than %d names in all", maxNames)
				return
			}
			s.refs[name] = true
		}
	}
	if err := lines.Err(); err != nil {
		s.partial("packed-refs: %v", err)
	} else if size >= maxPacked {
		s.partial("packed-refs: only the first %d bytes", maxPacked)
	}
}

func (s *scan) judgeRefs() {
	names := make([]string, 0, len(s.refs))
	for name := range s.refs {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if id, ok := strings.CutPrefix(name, "refs/replace/"); ok {
			keep(s, &s.f.Replaced, id, "replaced objects")
		}
		if why := OddName(name); why != "" {
			keep(s, &s.f.OddRefs, Oddity{name, why}, "odd reference names")
		}
	}
	slices.SortFunc(s.f.Locks, func(a, b Lock) int { return strings.Compare(a.Path, b.Path) })
	slices.SortFunc(s.f.Special, func(a, b Oddity) int { return strings.Compare(a.Name, b.Name) })
}

// Since returns what was not there at an earlier scan of the same directory. Partial is that of f.
func (f *Findings) Since(before *Findings) *Findings {
	return &Findings{
		Locks:    without(f.Locks, before.Locks),
		Replaced: without(f.Replaced, before.Replaced),
		OddRefs:  without(f.OddRefs, before.OddRefs),
		Special:  without(f.Special, before.Special),
		Partial:  f.Partial,
	}
}

func without[T comparable](list, known []T) []T {
	had := make(map[T]bool, len(known))
	for _, v := range known {
		had[v] = true
	}
	return slices.DeleteFunc(slices.Clone(list), func(v T) bool { return had[v] })
}

// Lines says what was found in sentences that are safe to print. now gives the age of locks.
func (f *Findings) Lines(now time.Time) []string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for _, l := range f.Locks {
		say("lock left behind for %v: %+q (Git refuses to work until it is removed)", max(now.Sub(l.ModTime), 0).Round(time.Second), l.Path)
	}
	for _, id := range f.Replaced {
		say("object %+q is shown as another one by refs/replace; review with GIT_NO_REPLACE_OBJECTS=1", id)
	}
	for _, r := range f.OddRefs {
		say("reference %+q: %s", r.Name, r.Why)
	}
	for _, o := range f.Special {
		say("%s in the repository directory: %+q", o.Why, o.Name)
	}
	for _, p := range f.Partial {
		say("not looked at: %s", p)
	}
	return lines
}
