package review

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/route"
)

// ErrChanged says that something is no longer what was reviewed; nothing was written.
var ErrChanged = errors.New("it has changed since it was reviewed")

// ErrStays says that an item is not one that can be applied.
var ErrStays = errors.New("it stays inside")

// tempName is the half-made file beside the one that it is to become. The workspace server refuses this name in every
// directory, so that no process inside can see it, open it, or hold it open when it gets its real name.
const tempName = sentry.MarkTree

// CanApply returns nil, or an error that wraps ErrStays with the reason.
func (i *Item) CanApply() error {
	stays := func(why string) error { return fmt.Errorf("%w: %s", ErrStays, why) }
	switch {
	case i.Kind == Config && len(i.adoptable()) == 0:
		return stays("only the tracking of branches (branch.*.remote, merge, rebase) can be taken over; change the host's file yourself for the rest")
	case i.Kind == Config:
		return nil
	case i.Kind == RepoFile:
		return stays("the host's Git would run or obey it; copy it by hand if you trust it")
	case i.Kind != Held && i.Kind != Kept:
		return stays("push or fetch its commits instead")
	case i.Kind == Kept && gitName(i.Path):
		return stays("Git could take its directory for a repository")
	case i.Dir:
		return stays("it is a directory; copy what you need by hand")
	case i.Removed != (i.Seen.Private == ""):
		return stays("it has changed; review it again")
	case !i.Removed && len(i.Seen.Private) != 2*sha256.Size:
		return stays("it is no regular file that can be read, or too large")
	case i.Seen.Host != "" && len(i.Seen.Host) != 2*sha256.Size:
		return stays("the host has no regular file of usual size there")
	}
	return nil
}

// gitName reports whether a component of rel means something to Git wherever it stands.
func gitName(rel string) bool {
	for _, name := range components(rel) {
		if c := route.Classify(name); c == route.DotGit || c == route.Variant {
			return true
		}
	}
	base := path.Base(rel)
	return base == "HEAD" || base == "commondir"
}

// Apply brings the host to what the item shows: the private content of a file, its removal, or the adoptable settings of
// a configuration. It fails with ErrChanged when either side is no longer as in i.Seen. The private copy goes when it is
// still what was applied, so that the sandbox sees the host's again.
func (t *Tree) Apply(i *Item) error {
	if err := i.CanApply(); err != nil {
		return fmt.Errorf("apply %s: %w", i.Name(), err)
	}
	var err error
	switch {
	case i.Kind == Config:
		err = t.applyConfig(i)
	case i.Removed:
		err = t.applyRemoval(i)
	default:
		err = t.applyFile(i)
	}
	if err != nil {
		return fmt.Errorf("apply %s: %w", i.Name(), err)
	}
	return nil
}

// applyFile copies the private file over the host's.
func (t *Tree) applyFile(i *Item) error {
	src, st, err := openRegular(t.twin, i.Path)
	if err != nil {
		return errors.Join(ErrChanged, err)
	}
	defer src.Close()
	dir, err := t.hostParent(i.Path)
	if err != nil {
		return err
	}
	defer dir.Close()
	write := func(tmp *os.File) error {
		h := sha256.New()
		if _, err := io.Copy(io.MultiWriter(tmp, h), io.LimitReader(src, maxCompare+1)); err != nil {
			return err
		}
		if hex.EncodeToString(h.Sum(nil)) != i.Seen.Private {
			return ErrChanged
		}
		return nil
	}
	if err := t.replace(dir, i.Path, tempName, i.Seen.Host, st.Mode&0o100 != 0, write); err != nil {
		return err
	}
	if err := t.merge(path.Dir(i.Path)); err != nil {
		return err
	}
	return t.forget(i.Path, st)
}

// merge lets the host's content show through the private directory rel and its parents, without any other change: what
// only the host has there is removed inside from now on by a mark of its own.
func (t *Tree) merge(rel string) error {
	for at := 0; at <= len(rel) && rel != "."; at++ {
		if at < len(rel) && rel[at] != '/' {
			continue
		}
		if err := t.mergeOne(rel[:at]); err != nil {
			return fmt.Errorf("merge private directory %s: %w", Show(rel[:at]), err)
		}
	}
	return nil
}

func (t *Tree) mergeOne(rel string) error {
	host, err := openDir(t.host, rel)
	if err != nil {
		return nil // nothing to show through
	}
	defer host.Close()
	twin, err := openDir(t.twin, rel)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer twin.Close()
	if kindAt(twin, sentry.MarkSkeleton) == fifo {
		return nil
	}
	names, all, err := listNames(host)
	if err != nil || !all {
		return cmp.Or(err, errors.New("the host's directory has too many names"))
	}
	for _, name := range append(names, sentry.MarkSkeleton) { // the mark last: it makes the others count
		if name != tempName && kindAt(twin, name) == 0 {
			if err := unix.Mknodat(int(twin.Fd()), name, unix.S_IFIFO|0o600, 0); err != nil && err != unix.EEXIST {
				return err
			}
		}
	}
	return nil
}

// hostParent opens the directory of rel on the host, and makes the ones that are missing. A symbolic link on the way is
// an error.
func (t *Tree) hostParent(rel string) (*os.File, error) {
	dir, err := openDir(t.host, ".")
	for _, name := range components(path.Dir(rel)) {
		if err != nil {
			return nil, err
		}
		next, oerr := openDir(dir, name)
		if errors.Is(oerr, os.ErrNotExist) {
			if merr := unix.Mkdirat(int(dir.Fd()), name, 0o777); merr != nil && merr != unix.EEXIST {
				oerr = &os.PathError{Op: "mkdir", Path: Show(name), Err: merr}
			} else {
				next, oerr = openDir(dir, name)
			}
		}
		dir.Close()
		dir, err = next, oerr
	}
	if err != nil {
		return nil, err
	}
	return dir, nil
}

func components(dir string) (parts []string) {
	for dir != "." && dir != "" {
		parts = append([]string{path.Base(dir)}, parts...)
		dir = path.Dir(dir)
	}
	return parts
}

// replace gives name in dir, the host's directory of rel, what write writes, if the host's content is still expected.
// The new file has the mode of the old one, or what the umask leaves; only its executable bits follow exec.
func (t *Tree) replace(dir *os.File, rel, temp, expected string, exec bool, write func(*os.File) error) (err error) {
	d, name := int(dir.Fd()), path.Base(rel)
	if now, err := contentOf(dir, name); err != nil || now != expected {
		return errors.Join(ErrChanged, err)
	}
	var old unix.Stat_t
	switch err := statAt(dir, name, &old); {
	case err == nil && old.Mode&unix.S_IFMT != regular, (err == nil) != (expected != ""):
		return ErrChanged
	case err != nil && err != unix.ENOENT:
		return err
	}
	fd, err := unix.Openat(d, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o666)
	if err == unix.EEXIST && temp == tempName { // of a run that was killed
		if err = unix.Unlinkat(d, temp, 0); err == nil {
			fd, err = unix.Openat(d, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o666)
		}
	}
	if err != nil {
		return &os.PathError{Op: "create", Path: Show(path.Join(path.Dir(rel), temp)), Err: err}
	}
	tmp := os.NewFile(uintptr(fd), temp)
	defer func() {
		tmp.Close()
		if err != nil {
			_ = unix.Unlinkat(d, temp, 0)
		}
	}()
	if err := write(tmp); err != nil {
		return err
	}
	var made unix.Stat_t
	if err := unix.Fstat(fd, &made); err != nil {
		return err
	}
	mode := made.Mode & 0o666
	if expected != "" {
		mode = old.Mode & 0o666
	}
	if exec {
		mode |= mode & 0o444 >> 2
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil {
		return err
	}
	if err := t.stillAt(dir, rel); err != nil {
		return err
	}
	if expected == "" {
		if err := unix.Renameat2(d, temp, d, name, unix.RENAME_NOREPLACE); err != nil {
			return errors.Join(ErrChanged, err)
		}
		if err := t.stillAt(dir, rel); err != nil {
			_ = unix.Unlinkat(d, name, 0)
			return err
		}
		return nil
	}
	// An exchange can be looked at and taken back; a plain rename would lose what the host has written meanwhile.
	if err := unix.Renameat2(d, temp, d, name, unix.RENAME_EXCHANGE); err != nil {
		return err
	}
	err = t.stillAt(dir, rel)
	var now unix.Stat_t
	if err == nil {
		if serr := statAt(dir, temp, &now); serr != nil || !sameObject(now, old) || now.Size != old.Size || now.Mtim != old.Mtim {
			err = ErrChanged
		}
	}
	if err != nil {
		return errors.Join(err, unix.Renameat2(d, temp, d, name, unix.RENAME_EXCHANGE))
	}
	return unix.Unlinkat(d, temp, 0)
}

// stillAt fails if the host's directory of rel is no longer dir.
func (t *Tree) stillAt(dir *os.File, rel string) error {
	var have, want unix.Stat_t
	d, err := openDir(t.host, path.Dir(rel))
	if err != nil {
		return errors.Join(ErrChanged, err)
	}
	defer d.Close()
	if err := errors.Join(unix.Fstat(int(d.Fd()), &have), unix.Fstat(int(dir.Fd()), &want)); err != nil {
		return err
	}
	if !sameObject(have, want) {
		return ErrChanged
	}
	return nil
}

// forget removes the private copy that st describes; a newer one stays.
func (t *Tree) forget(rel string, st unix.Stat_t) error {
	dir, err := openDir(t.twin, path.Dir(rel))
	if err != nil {
		return nil // it is gone with its directory
	}
	defer dir.Close()
	var now unix.Stat_t
	if statAt(dir, path.Base(rel), &now) != nil || !sameObject(now, st) || now.Ctim != st.Ctim {
		return nil
	}
	return unix.Unlinkat(int(dir.Fd()), path.Base(rel), 0)
}

// applyRemoval removes the host's file that was removed inside.
func (t *Tree) applyRemoval(i *Item) error {
	dir, err := openDir(t.host, path.Dir(i.Path))
	if err != nil {
		return err
	}
	defer dir.Close()
	name := path.Base(i.Path)
	// Moved aside first: what is then looked at is what is removed.
	if err := unix.Renameat2(int(dir.Fd()), name, int(dir.Fd()), tempName, unix.RENAME_NOREPLACE); err != nil {
		return &os.PathError{Op: "remove", Path: i.Name(), Err: err}
	}
	now, err := contentOf(dir, tempName)
	if err != nil || now != i.Seen.Host {
		return errors.Join(ErrChanged, err, unix.Renameat2(int(dir.Fd()), tempName, int(dir.Fd()), name, unix.RENAME_NOREPLACE))
	}
	if err := unix.Unlinkat(int(dir.Fd()), tempName, 0); err != nil {
		return err
	}
	var st unix.Stat_t
	if p, err := openDir(t.twin, path.Dir(i.Path)); err == nil {
		defer p.Close()
		if statAt(p, name, &st) == nil && st.Mode&unix.S_IFMT == fifo {
			return unix.Unlinkat(int(p.Fd()), name, 0)
		}
	}
	return nil
}

// at opens both directories of an item.
func (t *Tree) at(rel string) (p place, done func(), err error) {
	p.rel = path.Dir(rel)
	if p.twin, err = openDir(t.twin, p.rel); err != nil {
		return p, nil, err
	}
	if p.host, err = openDir(t.host, p.rel); err != nil {
		p.twin.Close()
		return p, nil, err
	}
	return p, func() { p.twin.Close(); p.host.Close() }, nil
}

// adoptable are the settings of a configuration item that the host may take over.
func (i *Item) adoptable() (list []gitconfig.Entry) {
	if i.Removed || i.Tree == nil {
		return nil
	}
	p, done, err := i.Tree.at(i.Path)
	if err != nil {
		return nil
	}
	defer done()
	c, err := i.Tree.readConfig(p, path.Base(i.Path))
	if err != nil || c.seen != i.Seen {
		return nil
	}
	return c.adoptable()
}

func (c *configs) adoptable() (list []gitconfig.Entry) {
	for _, d := range c.diffs {
		if e, err := gitconfig.Adoptable(d, c.host); err == nil {
			list = append(list, e)
		}
	}
	return list
}

// applyConfig changes the adoptable settings of the host's file, under Git's own lock. The private copy stays: the rest
// of its differences is still there.
func (t *Tree) applyConfig(i *Item) error {
	p, done, err := t.at(i.Path)
	if err != nil {
		return err
	}
	defer done()
	name := path.Base(i.Path)
	c, err := t.readConfig(p, name)
	if err != nil {
		return err
	}
	if c.seen != i.Seen {
		return ErrChanged
	}
	b, err := gitconfig.Edit(c.hostBytes, c.adoptable())
	if err != nil {
		return err
	}
	expected, err := contentOf(p.host, name)
	if err != nil || expected != i.Seen.Host {
		return errors.Join(ErrChanged, err)
	}
	err = t.replace(p.host, i.Path, name+".lock", expected, false, func(tmp *os.File) error {
		_, err := tmp.Write(b)
		return err
	})
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("the host's Git is writing it just now: %w", err)
	}
	return err
}

// Drop discards the private side of an item. A directory goes as a whole.
func (t *Tree) Drop(i *Item) error {
	err := t.drop(i)
	if err != nil {
		return fmt.Errorf("drop %s: %w", i.Name(), err)
	}
	return nil
}

func (t *Tree) drop(i *Item) error {
	if i.Removed && i.Kind != RepoFile {
		if err := t.merge(path.Dir(i.Path)); err != nil {
			return err
		}
	}
	dir, err := openDir(t.twin, path.Dir(i.Path))
	if err != nil {
		return err
	}
	defer dir.Close()
	private, err := os.Open(t.Private)
	if err != nil {
		return err
	}
	defer private.Close()
	store, err := openDir(private, sentry.TempDir) // emptied by the next start, should this be interrupted
	if err != nil {
		return err
	}
	defer store.Close()
	name := path.Base(i.Path)
	aside := fmt.Sprintf("drop-%d", os.Getpid())
	if i.Kind == RepoFile && i.Seen.Host != "" {
		// Its directory is a whole copy of the host's, so the host's file does not show through.
		if err := t.copyHost(i.Path, store, aside); err != nil {
			return err
		}
		if err := unix.Renameat2(int(store.Fd()), aside, int(dir.Fd()), name, unix.RENAME_EXCHANGE); err == unix.ENOENT {
			return unix.Renameat2(int(store.Fd()), aside, int(dir.Fd()), name, unix.RENAME_NOREPLACE)
		} else if err != nil {
			return err
		}
		return removeAll(store, aside, 0)
	}
	if err := unix.Renameat2(int(dir.Fd()), name, int(store.Fd()), aside, unix.RENAME_NOREPLACE); err != nil {
		return err
	}
	return removeAll(store, aside, 0)
}

// copyHost copies the host's file rel, or its link, to name in the private directory to.
func (t *Tree) copyHost(rel string, to *os.File, name string) error {
	dir, err := openDir(t.host, path.Dir(rel))
	if err != nil {
		return err
	}
	defer dir.Close()
	if kindAt(dir, path.Base(rel)) == symlink {
		target, err := readLink(dir, path.Base(rel))
		if err != nil {
			return err
		}
		return unix.Symlinkat(target, int(to.Fd()), name)
	}
	b, st, err := readFile(dir, path.Base(rel), maxCompare)
	if err != nil {
		return err
	}
	fd, err := unix.Openat(int(to.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, st.Mode&0o777)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// removeAll removes name, which processes inside may still hold open and change.
func removeAll(dir *os.File, name string, depth int) error {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if depth > 900 {
		return errors.New("it is too deep; what is left is in the private store")
	}
	d, oerr := openDir(dir, name)
	if errors.Is(oerr, os.ErrPermission) {
		if d, oerr = openAt(dir, name, unix.O_PATH|unix.O_DIRECTORY); oerr == nil {
			oerr = os.Chmod(fmt.Sprintf("/proc/self/fd/%d", d.Fd()), 0o700)
			d.Close()
		}
		if oerr == nil {
			d, oerr = openDir(dir, name)
		}
	}
	if oerr != nil {
		return oerr
	}
	defer d.Close()
	_ = unix.Fchmod(int(d.Fd()), 0o700) // it must be writable to be emptied
	for range 100 {
		names, _, err := listNames(d)
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := removeAll(d, n, depth+1); err != nil {
				return err
			}
		}
		if err = unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err != unix.ENOTEMPTY {
			return err
		}
	}
	return errors.New("something inside keeps filling it")
}
