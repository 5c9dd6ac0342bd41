package compose

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/mount"
)

// base is the view of what is there before anything is added.
type base struct {
	root *os.File // merged layers, or the host base
}

func openBase(in Input) (*base, error) {
	if in.HostRoot != "" {
		f, err := os.OpenFile(in.HostRoot, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil, err
		}
		return &base{f}, nil
	}
	lowers := append([]string{filepath.Join(in.Work, "empty")}, in.Layers...)
	// The topmost directory gives the merged root its owner and mode; see skeletonRoot.
	f, err := mount.Overlay{Lower: lowers}.Open(filepath.Join(in.Work, "scratch"))
	if err != nil {
		return nil, err
	}
	return &base{f}, nil
}

func (b *base) close() { b.root.Close() }

// look finds the entry at rel without following links. Missing: (nil, nil). A link or file on
// the way is ErrObstructed.
func (b *base) look(rel string) (*unix.Stat_t, error) {
	return look(b.root, rel)
}

func look(root *os.File, rel string) (*unix.Stat_t, error) {
	dir := "."
	if i := strings.LastIndexByte(rel, '/'); i >= 0 {
		dir = rel[:i]
	}
	fd, err := unix.Openat2(int(root.Fd()), dir, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	switch err {
	case nil:
	case unix.ENOENT:
		return nil, nil
	case unix.ELOOP, unix.ENOTDIR:
		return nil, fmt.Errorf("%w: a symbolic link or file is in the way of %q", ErrObstructed, "/"+rel)
	default:
		return nil, &os.PathError{Op: "look up in the base", Path: "/" + rel, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstatat(fd, path.Base(rel), &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "stat in the base", Path: "/" + rel, Err: err}
	}
	return &st, nil
}

// prepare checks the base and, for an image, fills the skeleton.
func (b *base) prepare(in Input, points []Point, r *Result) error {
	if err := b.checkShell(r); err != nil {
		return err
	}
	if in.HostRoot != "" {
		return b.requirePoints(points)
	}
	s := skeleton{b, filepath.Join(in.Work, "skeleton")}
	if err := s.root(in.Layers[0]); err != nil {
		return err
	}
	for _, p := range points {
		if err := s.point(p); err != nil {
			return err
		}
	}
	return s.account(in.Agent, r)
}

func (b *base) checkShell(r *Result) error {
	f, err := image.OpenInRoot(b.root, "bin/sh")
	if err == nil {
		defer f.Close()
		if st, err := f.Stat(); err == nil && st.Mode()&0o111 != 0 {
			return nil
		}
	}
	r.find("no-shell", "only a profile whose command is a static program can run on it", "the base image has no usable /bin/sh")
	return nil
}

func (b *base) requirePoints(points []Point) error {
	for _, p := range points {
		st, err := b.look(p.Path[1:])
		if err != nil {
			return err
		}
		if st == nil || !p.fits(*st) {
			return fmt.Errorf("%w: the host base lacks %q", ErrObstructed, p.Path)
		}
	}
	return nil
}

func (p Point) fits(st unix.Stat_t) bool {
	if p.File {
		return st.Mode&unix.S_IFMT == unix.S_IFREG
	}
	return st.Mode&unix.S_IFMT == unix.S_IFDIR
}

// lowers finds the directories that an anchor is laid over. There is always one.
func (b *base) lowers(in Input, spec Anchor) ([]string, error) {
	if in.HostRoot != "" {
		return []string{in.HostRoot + spec.Path}, nil // requirePoints has seen it
	}
	// The skeleton holds the anchor's own mount point, when the image lacks it, and those within it.
	return anchor.SubLowers(append([]string{filepath.Join(in.Work, "skeleton")}, in.Layers...), spec.Path)
}

// skeleton is the topmost read-only layer: what the image lacks.
type skeleton struct {
	base *base
	dir  string
}

// root gives the skeleton the owner and mode of the image's root directory.
func (s skeleton) root(topLayer string) error {
	var st unix.Stat_t
	if err := unix.Lstat(topLayer, &st); err != nil {
		return &os.PathError{Op: "stat", Path: topLayer, Err: err}
	}
	return own(s.dir, anchor.Owner{UID: int(st.Uid), GID: int(st.Gid), Mode: st.Mode & 0o7777})
}

func own(dir string, o anchor.Owner) error {
	if err := os.Lchown(dir, o.UID, o.GID); err != nil {
		return err
	}
	return unix.Chmod(dir, o.Mode) // made by us, below our own directory: no link
}

// point makes a mount point that the image lacks.
func (s skeleton) point(p Point) error {
	st, err := s.base.look(p.Path[1:])
	if err != nil {
		return err
	}
	if st != nil {
		if !p.fits(*st) {
			return fmt.Errorf("%w: %q in the image is of another type (%#o)", ErrObstructed, p.Path, st.Mode&unix.S_IFMT)
		}
		return nil
	}
	if err := s.parents(p.Path); err != nil {
		return err
	}
	at := s.dir + p.Path
	if p.File {
		f, err := os.OpenFile(at, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
		if err != nil {
			return err
		}
		return f.Close()
	}
	if err := os.Mkdir(at, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	if p.Owner != nil {
		return own(at, *p.Owner)
	}
	return own(at, anchor.Owner{Mode: 0o755})
}

// parents makes the directories above p: as the image has them, or root's.
func (s skeleton) parents(p string) error {
	for i := 1; i < len(p); i++ {
		if p[i] != '/' {
			continue
		}
		at := s.dir + p[:i]
		if err := os.Mkdir(at, 0o755); os.IsExist(err) {
			continue
		} else if err != nil {
			return err
		}
		o := anchor.Owner{Mode: 0o755}
		st, err := s.base.look(p[1:i])
		if err != nil {
			return err
		}
		if st != nil {
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				return fmt.Errorf("%w: %q in the image is not a directory", ErrObstructed, p[:i])
			}
			o = anchor.Owner{UID: int(st.Uid), GID: int(st.Gid), Mode: st.Mode & 0o7777}
		}
		if err := own(at, o); err != nil {
			return err
		}
	}
	return nil
}

const maxAccounts = 1 << 20 // bytes

// account adds the agent to passwd and group when the image has nobody of its uid.
func (s skeleton) account(a Agent, r *Result) error {
	passwd, err := s.read("etc/passwd")
	if err != nil {
		return s.noAccount(r, err)
	}
	group, err := s.read("etc/group")
	if err != nil {
		return s.noAccount(r, err)
	}
	name, have := accountName(passwd, a)
	if have {
		return nil
	}
	shell := a.Shell
	if shell == "" {
		shell = "/bin/sh"
	}
	passwd = appendLine(passwd, fmt.Sprintf("%s:x:%d:%d:%s:%s:%s", name, a.UID, a.GID, name, a.Home, shell))
	if !hasID(group, a.GID) {
		group = appendLine(group, fmt.Sprintf("%s:x:%d:", name, a.GID))
	}
	for file, data := range map[string][]byte{"/etc/passwd": passwd, "/etc/group": group} {
		if err := s.parents(file); err != nil {
			return s.noAccount(r, err)
		}
		if err := os.WriteFile(s.dir+file, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (s skeleton) noAccount(r *Result, err error) error {
	r.find("no-agent", "programs that look up the agent's name will not find it", "the agent's account could not be added to the image: %v", err)
	return nil
}

// read reads an account file of the image, which must not be reached through a link: the copy
// in the skeleton would not be the file that programs open. A missing file is empty.
func (s skeleton) read(rel string) ([]byte, error) {
	st, err := s.base.look(rel)
	if err != nil || st == nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("/%s is not a regular file", rel)
	}
	return image.ReadInRoot(s.base.root, rel, maxAccounts)
}

// accountName chooses a free name for the agent; have tells that its uid has an account.
func accountName(passwd []byte, a Agent) (name string, have bool) {
	name = a.Name
	names := map[string]bool{}
	for line := range strings.Lines(string(passwd)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) >= 7 && f[2] == fmt.Sprint(a.UID) {
			return f[0], true
		}
		names[f[0]] = true
	}
	for n := a.UID; names[name]; n++ {
		name = fmt.Sprint(a.Name, n)
	}
	return name, false
}

func hasID(group []byte, gid int) bool {
	for line := range strings.Lines(string(group)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) >= 3 && f[2] == fmt.Sprint(gid) {
			return true
		}
	}
	return false
}

func appendLine(file []byte, line string) []byte {
	if len(file) > 0 && !bytes.HasSuffix(file, []byte("\n")) {
		file = append(file, '\n')
	}
	return append(file, line+"\n"...)
}

// pointsWithin makes sure that the mount points below an anchor are there in its merged view. The
// agent may have removed or replaced them in an earlier run.
func pointsWithin(target, anchorPath string, points []Point) error {
	root, err := os.OpenFile(target, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, p := range points {
		rel, ok := strings.CutPrefix(p.Path, anchorPath+"/")
		if !ok {
			continue
		}
		if err := pointWithin(root, rel, p); err != nil {
			return fmt.Errorf("mount points in State Anchor %q: %w", anchorPath, err)
		}
	}
	return nil
}

func pointWithin(root *os.File, rel string, p Point) error {
	for i := 0; i <= len(rel); i++ {
		if i < len(rel) && rel[i] != '/' {
			continue
		}
		last := i == len(rel)
		st, err := look(root, rel[:i])
		if err != nil {
			return err
		}
		want := Point{File: last && p.File}
		if st != nil {
			if !want.fits(*st) {
				return fmt.Errorf("%w: the agent has put something else at %q", ErrObstructed, rel[:i])
			}
			continue
		}
		if err := makeAt(root, rel[:i], want.File); err != nil {
			return err
		}
	}
	return nil
}

// makeAt makes one entry whose parents look has just accepted.
func makeAt(root *os.File, rel string, file bool) error {
	dir := path.Dir(rel)
	fd, err := unix.Openat2(int(root.Fd()), dir, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	if !file {
		if err := unix.Mkdirat(fd, path.Base(rel), 0o755); err != nil {
			return &os.PathError{Op: "mkdir", Path: rel, Err: err}
		}
		return nil
	}
	f, err := unix.Openat(fd, path.Base(rel), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return &os.PathError{Op: "create", Path: rel, Err: err}
	}
	return unix.Close(f)
}

// checkOwner tells when the agent cannot write what is meant to persist for it.
func checkOwner(in Input, spec Anchor, target string, r *Result) {
	var st unix.Stat_t
	if unix.Lstat(target, &st) != nil {
		return
	}
	writable := st.Mode&0o002 != 0 || int(st.Uid) == in.Agent.UID && st.Mode&0o200 != 0 || int(st.Gid) == in.Agent.GID && st.Mode&0o020 != 0
	if !writable {
		r.find("owner", "set an owner for the path, or run what writes it as root in the sandbox",
			"persistent path %q belongs to %d:%d with mode %#o: the agent (uid %d) cannot write it", spec.Path, st.Uid, st.Gid, st.Mode&0o7777, in.Agent.UID)
	}
}
