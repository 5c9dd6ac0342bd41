package gofer

import (
	"strconv"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

const (
	maxSeedEntries = 4096     // of a copied directory
	maxSeedBytes   = 64 << 20 // of one copied file
	maxSeedDepth   = 16
)

// ensureTwin returns the private directory of d, and makes it as a skeleton if it is not there.
func (d *dir) ensureTwin() (int, error) {
	if p := d.twin(); p >= 0 {
		return p, nil
	}
	up, err := d.parent.ensureTwin()
	if err != nil {
		return -1, err
	}
	t := d.t
	// Made aside and moved into place with its mark: without it, the host's content would vanish behind it.
	tmp := t.tmpName()
	if err := unix.Mkdirat(t.meta, tmp, 0o755); err != nil {
		return -1, err
	}
	fd, err := openPath(t.meta, tmp, unix.O_DIRECTORY)
	if err == nil {
		if err = t.own(fd, ""); err == nil {
			err = t.mark(fd, sentry.MarkSkeleton)
		}
	}
	if err == nil {
		err = unix.Renameat2(t.meta, tmp, up, d.name, unix.RENAME_NOREPLACE)
		if err == unix.EEXIST && d.parent.whiteout(d.name) {
			if err = unix.Unlinkat(up, d.name, 0); err == nil {
				err = unix.Renameat2(t.meta, tmp, up, d.name, unix.RENAME_NOREPLACE)
			}
		}
	}
	if err != nil {
		if fd >= 0 {
			unix.Unlinkat(fd, sentry.MarkSkeleton, 0)
			unix.Close(fd)
		}
		unix.Unlinkat(t.meta, tmp, unix.AT_REMOVEDIR)
		if err != unix.EEXIST {
			return -1, err
		}
		if fd, err = openPath(up, d.name, unix.O_DIRECTORY); err != nil {
			return -1, err
		}
	}
	if !d.priv.CompareAndSwap(-1, int32(fd)) {
		unix.Close(fd) // another creation was faster
	}
	return d.twin(), nil
}

// mark leaves a FIFO called name; it may be there.
func (t *tree) mark(dirfd int, name string) error {
	if err := unix.Mknodat(dirfd, name, unix.S_IFIFO|0o600, 0); err != nil && err != unix.EEXIST {
		return err
	}
	return t.own(dirfd, name)
}

// hideRemoved leaves a whiteout where the twin's entry was removed and the host's would show through again.
func (d *dir) hideRemoved(name string) error {
	p, err := d.ensureTwin()
	if err != nil {
		return err
	}
	return d.t.mark(p, name)
}

// clearWhiteout makes room for a creation in the twin.
func (d *dir) clearWhiteout(p int, name string) error {
	if !d.whiteout(name) {
		return nil
	}
	return unix.Unlinkat(p, name, 0)
}

// purge removes what the sandbox cannot see in the private directory name of p (marks and whiteouts, and skeletons of
// nothing else), and then the directory. ENOTEMPTY means that something visible is left. A dry run only looks.
func (t *tree) purge(p int, name string, depth int, dry bool) error {
	if depth > maxSeedDepth {
		return unix.ENOTEMPTY
	}
	fd, err := openPath(p, name, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	names, types, err := readNames(fd, maxSeedEntries)
	if err != nil {
		return unix.ENOTEMPTY
	}
	for i, n := range names {
		switch {
		case types[i] == unix.DT_FIFO:
		case types[i] == unix.DT_DIR && marked(fd, n, sentry.MarkSkeleton):
			if err := t.purge(fd, n, depth+1, dry); err != nil {
				return err
			}
		default:
			return unix.ENOTEMPTY
		}
	}
	if dry {
		return nil
	}
	// The mark goes last: without it the directory would count as a private one.
	for _, last := range []bool{false, true} {
		for i, n := range names {
			if types[i] == unix.DT_FIFO && (n == sentry.MarkSkeleton) == last {
				unix.Unlinkat(fd, n, 0)
			}
		}
	}
	return unix.Unlinkat(p, name, unix.AT_REMOVEDIR)
}

// dropTwin removes the skeleton of name in d's twin after its host directory has been removed.
func (d *dir) dropTwin(name string) error {
	p := d.twin()
	if p < 0 {
		return nil
	}
	if err := d.t.purge(p, name, 0, false); err != nil && err != unix.ENOENT && err != unix.ENOTDIR {
		return err
	}
	d.t.forget(d, name)
	return nil
}

// seed gives the private name its first content from the host's, unless the twin has it or has it removed.
func (d *dir) seed(name string, how route.Seed, host *unix.Statx_t) error {
	p, err := d.ensureTwin()
	if err != nil {
		return err
	}
	var st unix.Statx_t
	switch err := statAt(p, name, &st); {
	case err == nil:
		if how == route.SeedConfig && isRegular(&st) && isRegular(host) {
			return d.reseed(p, name, host, &st)
		}
		return nil
	case err != unix.ENOENT:
		return err
	}
	tmp := d.t.tmpName()
	if how == route.SeedConfig {
		if !isRegular(host) {
			return nil
		}
		err = d.copyConfig(name, tmp)
	} else {
		left := maxSeedEntries
		err = d.t.copyTree(d.host, name, d.t.meta, tmp, &left, 0)
	}
	if err == nil {
		err = unix.Renameat2(d.t.meta, tmp, p, name, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		d.t.removeTree(d.t.meta, tmp, 0)
	}
	if err == unix.EEXIST {
		return nil
	}
	return err
}

// copyConfig writes the sanitised copy of a configuration file, with the host file's time as its own, which reseed
// compares: as long as nobody inside has written it, a change on the host is taken over.
func (d *dir) copyConfig(name, tmp string) error {
	b, st, err := readFile(d.host, name, maxRuleFile)
	if err != nil {
		return err
	}
	b, err = sanitise(b, d.t.ws)
	if err != nil {
		b = nil // what cannot be parsed cannot be cleaned
	}
	if err := d.t.writeFile(d.t.meta, tmp, b, st.Mode&0o777|0o600); err != nil {
		return err
	}
	if err := d.t.setMtime(d.t.meta, tmp, st.Mtime); err != nil {
		return err
	}
	fd, err := openAt(d.t.meta, tmp, unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// A file system without attributes keeps the first copy.
	if err := unix.Fsetxattr(fd, seedAttr, []byte(seedTag(st.Mtime)), 0); err != nil && err != unix.EOPNOTSUPP {
		return err
	}
	return nil
}

// setMtime marks a private copy as untouched since the host's file had that time.
func (t *tree) setMtime(dirfd int, name string, mtime unix.StatxTimestamp) error {
	ts := []unix.Timespec{{Sec: mtime.Sec, Nsec: int64(mtime.Nsec)}, {Sec: mtime.Sec, Nsec: int64(mtime.Nsec)}}
	return unix.UtimesNanoAt(dirfd, name, ts, unix.AT_SYMLINK_NOFOLLOW)
}

// seedAttr records on a private copy which state of the host's file it was made from. Git replaces a configuration file
// when it writes it, and the attribute with it; the sandbox cannot set it.
const seedAttr = "user.lazaret.seed"

func seedTag(mtime unix.StatxTimestamp) string {
	return strconv.FormatInt(mtime.Sec, 10) + "." + strconv.FormatUint(uint64(mtime.Nsec), 10)
}

// reseed takes over a change of the host's configuration into a copy that nobody inside has written.
func (d *dir) reseed(p int, name string, host, have *unix.Statx_t) error {
	if host.Mtime == have.Mtime {
		return nil
	}
	fd, err := openAt(p, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var tag [64]byte
	n, err := unix.Fgetxattr(fd, seedAttr, tag[:])
	if err != nil || string(tag[:n]) != seedTag(have.Mtime) {
		return nil
	}
	tmp := d.t.tmpName()
	if err := d.copyConfig(name, tmp); err != nil {
		unix.Unlinkat(d.t.meta, tmp, 0)
		return err
	}
	return unix.Renameat2(d.t.meta, tmp, p, name, 0)
}

// copyTree copies a file, a directory or a symbolic link. Anything else is left out.
func (t *tree) copyTree(from int, name string, to int, as string, left *int, depth int) error {
	if *left--; *left < 0 || depth > maxSeedDepth {
		return unix.EFBIG
	}
	var st unix.Statx_t
	if err := statAt(from, name, &st); err != nil {
		return err
	}
	switch route.HostOf(uint32(st.Mode)) {
	case route.File:
		return t.copyFile(from, name, to, as)
	case route.Link:
		buf := make([]byte, 4096)
		n, err := unix.Readlinkat(from, name, buf)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(string(buf[:n]), to, as); err != nil {
			return err
		}
		return t.own(to, as)
	case route.Dir:
		src, err := openPath(from, name, unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer unix.Close(src)
		if err := unix.Mkdirat(to, as, uint32(st.Mode)&0o777|0o700); err != nil {
			return err
		}
		dst, err := openPath(to, as, unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer unix.Close(dst)
		if err := t.own(dst, ""); err != nil {
			return err
		}
		names, _, err := readNames(src, *left)
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := t.copyTree(src, n, dst, n, left, depth+1); err != nil && err != unix.ENOENT {
				return err
			}
		}
	}
	return nil
}

func (t *tree) copyFile(from int, name string, to int, as string) error {
	src, err := openAt(from, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	return t.copyOpen(src, to, as)
}

// copyOpen copies the open regular file src, with its permissions and times.
func (t *tree) copyOpen(src, to int, as string) error {
	var st unix.Statx_t
	if err := statAt(src, "", &st); err != nil {
		return err
	}
	if !isRegular(&st) {
		return unix.EINVAL
	}
	if st.Size > maxSeedBytes {
		return unix.EFBIG
	}
	dst, err := openAt(to, as, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, uint32(st.Mode)&0o777|0o600)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	if err := t.own(dst, ""); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for total := 0; total <= maxSeedBytes; {
		n, err := unix.Read(src, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return t.setMtime(to, as, st.Mtime)
		}
		if err := writeAll(dst, buf[:n]); err != nil {
			return err
		}
		total += n
	}
	return unix.EFBIG
}

func (t *tree) writeFile(dirfd int, name string, b []byte, mode uint16) error {
	fd, err := openAt(dirfd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, uint32(mode))
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := t.own(fd, ""); err != nil {
		return err
	}
	return writeAll(fd, b)
}

// removeTree removes a temporary copy.
func (t *tree) removeTree(dirfd int, name string, depth int) {
	if unix.Unlinkat(dirfd, name, 0) == nil || depth > maxSeedDepth+1 {
		return
	}
	fd, err := openPath(dirfd, name, unix.O_DIRECTORY)
	if err != nil {
		return
	}
	names, _, _ := readNames(fd, maxSeedEntries)
	for _, n := range names {
		t.removeTree(fd, n, depth+1)
	}
	unix.Close(fd)
	unix.Unlinkat(dirfd, name, unix.AT_REMOVEDIR)
}

// keepForAgent copies a file that the sandbox could see until a rule inside the workspace hid it, so that the agent does
// not lose what it has written.
func (d *dir) keepForAgent(name string, r *rules, st *unix.Statx_t) bool {
	if !isRegular(st) || !r.showed(name, st.Ctime) {
		return false
	}
	p, err := d.ensureTwin()
	if err != nil {
		return false
	}
	tmp := d.t.tmpName()
	if d.t.copyFile(d.host, name, d.t.meta, tmp) == nil &&
		unix.Renameat2(d.t.meta, tmp, p, name, unix.RENAME_NOREPLACE) == nil {
		return true
	}
	unix.Unlinkat(d.t.meta, tmp, 0)
	return false
}
