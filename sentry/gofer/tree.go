package gofer

import (
	"container/list"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/ignore"
	"lazaret.dev/lazaret/sentry/route"
)

// maxCachedDirs bounds the directories that stay open though no control FD names them. Each holds at most two
// descriptors.
const maxCachedDirs = 512

// tree is one served workspace. Lock order: lisafs's locks, then dir.rulesMu from the root downwards, then tree.mu.
type tree struct {
	ws        *sentry.Workspace
	held      *route.Held
	self      int    // descriptor of /proc/self/fd, to reopen an O_PATH descriptor
	meta      int    // directory of P that the sandbox never sees: temporary files, snapshot
	owner     uint32 // uid of the developer as this process sees it
	group     uint32
	chown     bool // files made by this process are not the developer's by themselves
	snapshot  *sentry.View
	excludes  *ignore.Patterns // the developer's own, as of the start
	gitdir    int              // of the root's repository where it lies outside, or -1
	common    int              // its common directory, likewise
	tmp       atomic.Uint64
	verdicts  *verdictCache
	lastRules atomic.Uint64
	ruleBytes atomic.Int64 // of all rule files in use
	denials   *denials
	guard     sync.Mutex   // held from asking whether a repository's name may be made until it is
	epoch     atomic.Int64 // counts renames of directories: paths below have changed

	mu   sync.Mutex // guards refs, kids, parent, name and cache of every dir
	root *dir
	lru  *list.List // of *dir, most recently used first; each element holds a reference

	guests     map[string]identity // see admit; guarded by mu
	guestCount atomic.Int64

	moved struct { // the rename in progress, for Renamed; guarded by lisafs's global lock
		from, to         *dir
		oldName, newName string
	}
}

// dir is a directory as the sandbox sees it: a host directory, one of the private twin, or both merged. All control FDs
// of one place share one dir, so a change of its rules reaches them all.
type dir struct {
	t    *tree
	id   identity // of the directory that the sandbox sees
	host int      // O_PATH descriptor of the host directory, -1 if none; immutable
	priv atomic.Int32
	zone atomic.Uint32

	refs   int
	parent *dir // nil for the root; this dir holds a reference on it
	name   string
	kids   map[string]*dir // no reference is held on them
	cached *list.Element

	rulesMu   sync.Mutex // held while the rules are computed
	rules     atomic.Pointer[rules]
	ruleBytes int64        // of its own rule file; guarded by rulesMu
	checked   atomic.Int64 // when the rule files were last asked about
}

func (d *dir) Zone() route.Zone { return route.Zone(d.zone.Load()) }

// twin returns the private descriptor, or -1.
func (d *dir) twin() int { return int(d.priv.Load()) }

func (t *tree) newRoot(host, priv int, id identity, zone route.Zone) {
	t.lru = list.New()
	t.root = &dir{t: t, id: id, host: host, refs: 1}
	t.root.priv.Store(int32(priv))
	t.root.zone.Store(uint32(zone))
}

// kid returns the cached directory name of p with a new reference, if it is still the directory id.
func (t *tree) kid(p *dir, name string, id identity) *dir {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := p.kids[name]
	if d == nil {
		return nil
	}
	if d.id != id {
		delete(p.kids, name) // it lives on for those who hold it
		return nil
	}
	d.refs++
	return d
}

// adopt enters d as name of p, and returns it with a reference; if another call was faster, it returns the other's and
// closes d.
func (t *tree) adopt(p *dir, name string, d *dir) *dir {
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := p.kids[name]; other != nil && other.id == d.id {
		other.refs++
		d.closeFDs()
		return other
	}
	d.t, d.parent, d.name, d.refs = t, p, name, 2 // the caller's and the cache's
	p.refs++
	if p.kids == nil {
		p.kids = make(map[string]*dir)
	}
	p.kids[name] = d
	d.cached = t.lru.PushFront(d)
	for t.lru.Len() > maxCachedDirs {
		t.uncache(t.lru.Back())
	}
	return d
}

func (t *tree) uncache(e *list.Element) {
	t.lru.Remove(e)
	d := e.Value.(*dir)
	d.cached = nil
	t.dropLocked(d)
}

func (t *tree) ref(d *dir) *dir {
	t.mu.Lock()
	d.refs++
	t.mu.Unlock()
	return d
}

func (t *tree) drop(d *dir) {
	t.mu.Lock()
	t.dropLocked(d)
	t.mu.Unlock()
}

func (t *tree) dropLocked(d *dir) {
	for d != nil {
		d.refs--
		if d.refs > 0 {
			return
		}
		p := d.parent
		if p != nil && p.kids[d.name] == d {
			delete(p.kids, d.name)
		}
		d.closeFDs()
		d = p
	}
}

func (d *dir) closeFDs() {
	if d.host >= 0 {
		unix.Close(d.host)
		d.host = -1
	}
	if fd := d.priv.Swap(-1); fd >= 0 {
		unix.Close(int(fd))
	}
	if d.t != nil {
		d.t.ruleBytes.Add(-d.ruleBytes)
	}
}

// forget makes the next lookup of name in p build a new dir: its sides have changed.
func (t *tree) forget(p *dir, name string) {
	t.mu.Lock()
	if d := p.kids[name]; d != nil {
		delete(p.kids, name)
		if d.cached != nil {
			t.uncache(d.cached)
		}
	}
	t.mu.Unlock()
}

// rel is d's path from the workspace root, "" for the root.
func (d *dir) rel() string {
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	return d.relLocked()
}

func (d *dir) relLocked() string {
	if d.parent == nil {
		return ""
	}
	if d.parent.parent == nil {
		return d.name
	}
	return d.parent.relLocked() + "/" + d.name
}

func joinRel(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// reopen opens the file behind an O_PATH descriptor.
func (t *tree) reopen(fd, flags int) (int, error) {
	return openAt(t.self, strconv.Itoa(fd), flags&^unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// own gives what this process has made to the developer.
func (t *tree) own(dir int, name string) error {
	if !t.chown {
		return nil
	}
	return unix.Fchownat(dir, name, int(t.owner), int(t.group), unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
}

// tmpName is a fresh name for the meta directory.
func (t *tree) tmpName() string { return "tmp." + strconv.FormatUint(t.tmp.Add(1), 36) }
