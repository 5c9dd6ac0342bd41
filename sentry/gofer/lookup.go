package gofer

import (
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// entry is what a name leads to.
type entry struct {
	st      unix.Statx_t
	kind    route.Kind
	zone    route.Zone // of the directory of this name
	seed    route.Seed
	private bool // served from the twin
}

// lookup routes name in d, and finds what is there. ENOENT leaves e.kind, e.zone and e.private telling where the name
// would be created. It does not allocate once the rules are cached.
func (d *dir) lookup(name string, e *entry) error {
	if name == sentry.MarkSkeleton || name == sentry.MarkTree {
		*e = entry{kind: route.No}
		return unix.ENOENT
	}
	e.seed = route.NoSeed
	switch z := d.Zone(); z {
	case route.Private:
		return d.inTwin(name, route.P, route.Private, e)
	case route.Work:
		return d.inWork(name, e)
	case route.HeldTree:
		return d.inHeld(name, e)
	default:
		return d.inRepo(z, name, e)
	}
}

// inTwin looks in the private directory alone.
func (d *dir) inTwin(name string, kind route.Kind, zone route.Zone, e *entry) error {
	e.kind, e.zone, e.private = kind, zone, true
	p := d.twin()
	if p < 0 {
		return unix.ENOENT
	}
	if err := statAt(p, name, &e.st); err != nil {
		return err
	}
	if isFIFO(&e.st) {
		return unix.ENOENT
	}
	return nil
}

// onHost looks in the host directory alone.
func (d *dir) onHost(name string, kind route.Kind, zone route.Zone, e *entry) error {
	e.kind, e.zone, e.private = kind, zone, false
	if d.host < 0 {
		return unix.ENOENT
	}
	return statAt(d.host, name, &e.st)
}

// hostHas asks the live question.
func (d *dir) hostHas(name string) route.Host {
	var st unix.Statx_t
	if d.host < 0 || statAt(d.host, name, &st) != nil {
		return route.None
	}
	return route.HostOf(uint32(st.Mode))
}

// isRepository reports whether the host has a repository directory (bare or .git) at d now.
func (d *dir) isRepository() bool {
	if d.hostHas("HEAD") == route.None {
		return false
	}
	return d.hostHas("objects") != route.None && d.hostHas("refs") != route.None || d.hostHas("commondir") != route.None
}

func (d *dir) inRepo(z route.Zone, name string, e *entry) error {
	herr := unix.ENOENT
	if d.host >= 0 {
		if err := statAt(d.host, name, &e.st); err == nil {
			herr = 0
		} else if err != unix.ENOENT {
			return err
		}
	}
	host := route.None
	if herr == 0 {
		host = route.HostOf(uint32(e.st.Mode))
	}
	v := route.Git(z, name, host)
	if v.Kind == route.Pin && z == route.Modules && v.Child == route.Modules && d.leadsToRepository(name) {
		v.Child = route.Gitdir
	}
	e.kind, e.zone, e.seed, e.private = v.Kind, v.Child, v.Seed, false
	if v.Kind != route.P {
		if host == route.None {
			return unix.ENOENT
		}
		return nil
	}
	e.private = true
	if v.Seed != route.NoSeed && host != route.None {
		if err := d.seed(name, v.Seed, &e.st); err != nil {
			return err
		}
	}
	return d.inTwin(name, route.P, route.Private, e)
}

// leadsToRepository reports whether the host's directory name of d is itself a repository directory.
func (d *dir) leadsToRepository(name string) bool {
	fd, err := openPath(d.host, name, unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	return statAt(fd, "HEAD", &st) == nil
}

func (d *dir) inWork(name string, e *entry) error {
	switch route.Classify(name) {
	case route.DotGit:
		switch d.hostHas(name) {
		case route.None:
			return d.inTwin(name, route.P, route.Private, e)
		case route.Dir:
			return d.onHost(name, route.Pin, route.Gitdir, e)
		}
		return d.onHost(name, route.RO, route.ReadOnly, e)
	case route.Variant:
		if d.hostHas(name) == route.None {
			*e = entry{kind: route.No}
			return unix.ENOENT
		}
		return d.onHost(name, route.RO, route.ReadOnly, e)
	case route.Layout:
		if d.isRepository() {
			return d.inRepo(route.Gitdir, name, e)
		}
	}
	r := d.current(false)
	h := r.hidden(name)
	if h&(holdFile|holdDir) != 0 {
		err := d.inHeld(name, e)
		if h&holdFile != 0 || err != nil && err != unix.ENOENT || err == nil && isDir(&e.st) {
			return err
		}
		// The pattern holds directories only and this is none.
	}
	skeleton := false
	if p := d.twin(); p >= 0 {
		switch err := statAt(p, name, &e.st); {
		case err == unix.ENOENT:
		case err != nil:
			return err
		case isFIFO(&e.st): // removed inside
			e.kind, e.zone, e.private = route.P, route.Private, true
			return unix.ENOENT
		case isDir(&e.st) && marked(p, name, sentry.MarkSkeleton):
			skeleton = true
		default: // private wins while it exists
			e.kind, e.zone, e.private = route.P, route.Private, true
			return nil
		}
	}
	err := d.onHost(name, route.W, route.Work, e)
	if err != nil && err != unix.ENOENT {
		return err
	}
	if err == nil && h != 0 {
		directory := isDir(&e.st)
		if directory && h&hideDir != 0 || !directory && h&hideFile != 0 {
			if !directory && h&liveOnly != 0 && d.keepForAgent(name, r, &e.st) {
				return d.inTwin(name, route.P, route.Private, e)
			}
			e.kind, e.zone, e.private = route.P, route.Private, true
			if d.t.admitted(d, name, &e.st) {
				e.kind, e.zone, e.private = route.W, route.Work, false
				return nil
			}
			return d.skeletonOr(skeleton, name, e)
		}
	}
	if err != nil && h&(hideFile|hideDir) != 0 {
		e.kind, e.private = route.P, true // the caller of a creation asks again with its type
	}
	return d.finishWork(name, skeleton, err, e)
}

// skeletonOr shows the private part of a directory whose host part is hidden.
func (d *dir) skeletonOr(skeleton bool, name string, e *entry) error {
	if skeleton {
		return d.inTwin(name, route.P, route.Private, e)
	}
	return unix.ENOENT
}

func (d *dir) finishWork(name string, skeleton bool, err error, e *entry) error {
	if err != nil {
		if skeleton { // the host's directory is gone, what was private in it is still the agent's
			return d.inTwin(name, route.P, route.Private, e)
		}
		return err
	}
	if skeleton && isDir(&e.st) && d.privateTree(name) {
		e.zone = route.Private
	}
	return nil
}

// privateTree reports whether all content of the work tree directory name is private: the agent made a repository there
// while it was empty, and the host has made none since.
func (d *dir) privateTree(name string) bool {
	fd, err := openPath(d.twin(), name, unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if statAt(fd, sentry.MarkTree, &st) != nil {
		return false
	}
	h, err := openPath(d.host, name, unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer unix.Close(h)
	return statAt(h, ".git", &st) == unix.ENOENT
}

func marked(dirfd int, name, mark string) bool {
	fd, err := openPath(dirfd, name, unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	return statAt(fd, mark, &st) == nil
}

// inHeld shows the twin's entry, or else the host's until it is written.
func (d *dir) inHeld(name string, e *entry) error {
	err := d.inTwin(name, route.Hold, route.Private, e)
	if d.twin() >= 0 && err == nil {
		if isDir(&e.st) && marked(d.twin(), name, sentry.MarkSkeleton) {
			if d.hostHas(name) == route.Dir {
				return d.onHost(name, route.Hold, route.HeldTree, e)
			}
		}
		return nil
	}
	if err == unix.ENOENT && d.whiteout(name) {
		return unix.ENOENT
	}
	if err := d.onHost(name, route.Hold, route.HeldTree, e); err != nil {
		if err == unix.ENOENT {
			e.private = true // a creation lands in the twin
		}
		return err
	}
	return nil
}

// whiteout reports whether the twin says that name is removed.
func (d *dir) whiteout(name string) bool {
	var st unix.Statx_t
	p := d.twin()
	return p >= 0 && statAt(p, name, &st) == nil && isFIFO(&st)
}

// enter opens the directory that e describes, which lookup has just found as name of d.
func (d *dir) enter(name string, e *entry) (*dir, error) {
	id := identOf(&e.st)
	if k := d.t.kid(d, name, id); k != nil {
		k.zone.Store(uint32(e.zone)) // the host may have made a repository of it
		return k, nil
	}
	n := &dir{t: d.t, id: id, host: -1}
	n.priv.Store(-1)
	n.zone.Store(uint32(e.zone))
	if e.private {
		fd, err := openPath(d.twin(), name, unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		n.priv.Store(int32(fd))
	} else {
		fd, err := openPath(d.host, name, unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		n.host = fd
		if p := d.twin(); p >= 0 {
			if fd, err := openPath(p, name, unix.O_DIRECTORY); err == nil {
				n.priv.Store(int32(fd))
			}
		}
	}
	var st unix.Statx_t
	fd := n.host
	if fd < 0 {
		fd = n.twin()
	}
	if err := statAt(fd, "", &st); err != nil || identOf(&st) != id {
		n.closeFDs()
		return nil, unix.ENOENT // replaced meanwhile by the host
	}
	return d.t.adopt(d, name, n), nil
}
