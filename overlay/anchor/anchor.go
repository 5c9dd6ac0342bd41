// Package anchor keeps State Anchors: the Domain-private writable layer over one path of the base.
//
// What is kept true, for the developer and for compose:
//   - An anchor is used by one Domain at a time ([Anchor] holds a lock until Close); the kernel
//     itself would accept a second mount of the same upper directory and corrupt it (SR-11).
//   - An upper directory is never mounted over another base than the one recorded for it, except
//     after [Anchor.Keep], [Anchor.Snapshot] or [Anchor.Reset] was chosen ([ErrBaseChanged]).
//   - Every step is a rename or leaves the old state in force: killed at any point, an anchor holds
//     the state before or after the step. What a killed step leaves is named ".tmp-…" and is
//     removed by the next [Lock] of the anchor or by gc.
//   - No symbolic link is followed, neither in the base nor in an anchor.
//
// On disk, below the Domain Root (all owned by uid 0 of the Domain's user namespace):
//
//	anchors/<escaped path>/lock
//	anchors/<escaped path>/current/{meta.json,upper/,work/}      one generation; absent: the anchor is empty
//	anchors/<escaped path>/snapshots/<name>/{meta.json,upper/}
//
// Everything here runs in the Domain's user namespace as uid 0, as upper directories hold files
// of all ids.
package anchor

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/tree"
)

var (
	// ErrBusy means that a running Domain, or another command, uses the anchor.
	ErrBusy = errors.New("the State Anchor is in use")
	// ErrBaseChanged means that the anchor was written over another base and no choice was made.
	ErrBaseChanged = errors.New("the State Anchor was written over another base image")
	// ErrNoSnapshot means that no snapshot has that name.
	ErrNoSnapshot = errors.New("no such snapshot")
	// ErrDamaged means that a generation lacks its record or its data; reset or restore mends it.
	ErrDamaged = errors.New("the State Anchor is damaged")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("the State Anchor is closed")
)

// Base identifies what an anchor was written over. Equal Keys mean equal content.
type Base struct {
	Key     string   `json:"key"`                // digest over the diff ids, or the host base's digest
	Image   string   `json:"image,omitempty"`    // reference, for people
	ImageID string   `json:"image_id,omitempty"` // config digest
	DiffIDs []string `json:"diff_ids,omitempty"`
}

// Meta is the record of one generation.
type Meta struct {
	Version int       `json:"version"`
	Path    string    `json:"path"`
	Base    Base      `json:"base"`
	Created time.Time `json:"created"`
	Bases   []Base    `json:"earlier_bases,omitempty"` // newest last, at most maxEarlier
	Seeded  string    `json:"seeded,omitempty"`        // key of the base whose directories were seeded last
}

const (
	metaVersion = 1
	maxEarlier  = 16
	maxMeta     = 1 << 20 // bytes
	dirName     = "anchors"
	tmpPrefix   = ".tmp-"
)

// Info describes an anchor without locking it.
type Info struct {
	Path      string     `json:"path"`
	Dir       string     `json:"dir"`
	Meta      *Meta      `json:"meta,omitempty"` // nil: empty or damaged
	InUse     bool       `json:"in_use"`
	Damaged   bool       `json:"damaged,omitempty"`
	Leftover  bool       `json:"leftover,omitempty"` // a killed step left something; Lock removes it
	Snapshots []Snapshot `json:"snapshots,omitempty"`
}

// Snapshot describes one snapshot.
type Snapshot struct {
	Name string `json:"name"`
	Meta Meta   `json:"meta"`
}

// Escape is the directory name of an anchor's path; distinct paths have distinct names.
func Escape(path string) (string, error) {
	if path == "/" || !strings.HasPrefix(path, "/") || filepath.Clean(path) != path || strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("persistent path %q: not an absolute, clean path below /", path)
	}
	name := strings.ReplaceAll(url.QueryEscape(path[1:]), ".", "%2E")
	if len(name) > 200 {
		return "", fmt.Errorf("persistent path %q: name is too long", path)
	}
	return name, nil
}

func unescape(name string) (string, bool) {
	p, err := url.QueryUnescape(name)
	if err != nil {
		return "", false
	}
	path := "/" + p
	back, err := Escape(path)
	return path, err == nil && back == name
}

// List describes the anchors of a Domain Root, sorted by path. A missing Domain Root has none.
func List(domainRoot string) ([]Info, error) {
	entries, err := os.ReadDir(filepath.Join(domainRoot, dirName))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Info
	for _, e := range entries {
		path, ok := unescape(e.Name())
		if !ok || !e.IsDir() {
			continue
		}
		out = append(out, inspect(filepath.Join(domainRoot, dirName, e.Name()), path))
	}
	slices.SortFunc(out, func(a, b Info) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

func inspect(dir, path string) Info {
	info := Info{Path: path, Dir: dir}
	if f, err := lockFile(dir); err == nil {
		f.Close()
	} else {
		info.InUse = errors.Is(err, ErrBusy)
	}
	meta, err := readGeneration(filepath.Join(dir, "current"), path)
	switch {
	case err == nil:
		info.Meta = meta
	case !os.IsNotExist(err):
		info.Damaged = true
	}
	entries, _ := os.ReadDir(dir)
	info.Leftover = slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), tmpPrefix) })
	names, _ := os.ReadDir(filepath.Join(dir, "snapshots"))
	for _, n := range names {
		if m, err := readGeneration(filepath.Join(dir, "snapshots", n.Name()), path); err == nil {
			info.Snapshots = append(info.Snapshots, Snapshot{n.Name(), *m})
		}
	}
	return info
}

// Anchor is one locked State Anchor. Its methods are for one goroutine at a time.
type Anchor struct {
	path string
	dir  string
	lock *os.File // holds the flock; nil after Close
	hook func(step string)
}

// Lock takes the anchor of path in the Domain Root, creating its directory when missing. It
// returns ErrBusy when another holder lives. The lock ends with Close or with the process;
// keep it as long as the anchor is mounted.
func Lock(domainRoot, path string) (*Anchor, error) {
	name, err := Escape(path)
	if err != nil {
		return nil, err
	}
	parent := filepath.Join(domainRoot, dirName)
	dir := filepath.Join(parent, name)
	for _, d := range []string{parent, dir} {
		if err := os.Mkdir(d, 0o700); err != nil && !os.IsExist(err) {
			return nil, fmt.Errorf("lock State Anchor %q: %w", path, err)
		}
	}
	f, err := lockFile(dir)
	if err != nil {
		return nil, fmt.Errorf("lock State Anchor %q: %w", path, err)
	}
	a := &Anchor{path: path, dir: dir, lock: f, hook: func(string) {}}
	if err := a.recover(); err != nil {
		f.Close()
		return nil, fmt.Errorf("recover State Anchor %q: %w", path, err)
	}
	return a, nil
}

func lockFile(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, ErrBusy
		}
		return nil, fmt.Errorf("flock: %w", err)
	}
	// A gc that removed the directory before we had the lock left us a lock on nothing.
	var held, named unix.Stat_t
	if unix.Fstat(int(f.Fd()), &held) != nil || unix.Lstat(f.Name(), &named) != nil || held.Ino != named.Ino {
		f.Close()
		return nil, ErrBusy
	}
	return f, nil
}

// recover ends what a killed predecessor began.
func (a *Anchor) recover() error {
	if _, err := os.Lstat(a.file("current")); os.IsNotExist(err) {
		// A restore on a file system without exchange was killed between its two renames.
		if err := os.Rename(a.file(tmpPrefix+"replaced"), a.file("current")); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	entries, err := os.ReadDir(a.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := tree.RemovePath(a.dir, e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close releases the lock. Unmount first.
func (a *Anchor) Close() error {
	if a.lock == nil {
		return nil
	}
	err := a.lock.Close()
	a.lock = nil
	return err
}

// Dir is the anchor's directory in the Domain Root.
func (a *Anchor) Dir() string { return a.dir }

// Path is the anchored path in the sandbox.
func (a *Anchor) Path() string { return a.path }

func (a *Anchor) file(parts ...string) string {
	return filepath.Join(append([]string{a.dir}, parts...)...)
}

// Meta returns the record of the current generation; nil when the anchor is empty.
// ErrDamaged: there is data without a valid record, or the reverse.
func (a *Anchor) Meta() (*Meta, error) {
	if a.lock == nil {
		return nil, ErrClosed
	}
	m, err := readGeneration(a.file("current"), a.path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	return m, err
}

func readGeneration(dir, path string) (*Meta, error) {
	if _, err := os.Lstat(dir); err != nil {
		return nil, err
	}
	damaged := func(err error) error {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, filepath.Base(dir), errors.New(err.Error())) // hides ENOENT
	}
	f, err := os.OpenFile(filepath.Join(dir, "meta.json"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, damaged(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxMeta))
	if err != nil {
		return nil, damaged(err)
	}
	var m Meta
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, damaged(err)
	}
	if m.Version != metaVersion || m.Path != path || m.Base.Key == "" {
		return nil, damaged(fmt.Errorf("record of version %d for %q", m.Version, m.Path))
	}
	if st, err := os.Lstat(filepath.Join(dir, "upper")); err != nil || !st.IsDir() {
		return nil, damaged(errors.New("no upper directory"))
	}
	return &m, nil
}

// Owner is the owner and mode of an anchor's own directory.
type Owner struct {
	UID, GID int
	Mode     uint32 // permission bits, set-id and sticky included
}

// Mount mounts the anchor over lowers, topmost first, on target. An empty anchor starts a
// generation for base, its directory owned and moded as want, or as lowers[0] when want is nil.
// With want, directories below that belong to the base's root become want's too: a persistent path
// in which only root can write would keep nothing of the agent's.
// An anchor of another base is refused with ErrBaseChanged.
func (a *Anchor) Mount(base Base, lowers []string, want *Owner, target string, now time.Time) error {
	m, err := a.Meta()
	if err != nil {
		return a.errorf("mount", err)
	}
	if m != nil && m.Base.Key != base.Key {
		return a.errorf("mount", fmt.Errorf("%w (%s, now %s)", ErrBaseChanged, m.Base.title(), base.title()))
	}
	if m == nil {
		if err := a.begin(base, lowers, want, now); err != nil {
			return a.errorf("begin", err)
		}
	}
	if err := a.seedFor(base, lowers, want); err != nil {
		return a.errorf("seed", err)
	}
	work := a.file("current", "work")
	if err := tree.RemovePath(a.file("current"), "work"); err != nil {
		return a.errorf("clear work directory of", err)
	}
	if err := os.Mkdir(work, 0o700); err != nil {
		return a.errorf("mount", err)
	}
	err = mount.Overlay{Lower: lowers, Upper: a.file("current", "upper"), Work: work}.Attach(target)
	if err != nil {
		return a.errorf("mount", err)
	}
	return nil
}

func (b Base) title() string {
	if b.Image != "" {
		return b.Image
	}
	return b.Key
}

// begin builds the first generation beside and renames it into place.
func (a *Anchor) begin(base Base, lowers []string, want *Owner, now time.Time) error {
	if want == nil {
		var st unix.Stat_t
		if err := unix.Lstat(lowers[0], &st); err != nil {
			return &os.PathError{Op: "stat", Path: lowers[0], Err: err}
		}
		want = &Owner{int(st.Uid), int(st.Gid), st.Mode & 0o7777}
		if unmapped(st) {
			want.UID, want.GID = 0, 0
		}
	}
	tmp, err := a.newTmp()
	if err != nil {
		return err
	}
	a.hook("begin: made")
	upper := filepath.Join(tmp, "upper")
	if err := os.Mkdir(upper, 0o700); err != nil {
		return err
	}
	if err := own(upper, *want); err != nil {
		return err
	}
	m := Meta{Version: metaVersion, Path: a.path, Base: base, Created: now.UTC()}
	if err := writeMeta(tmp, m); err != nil {
		return err
	}
	a.hook("begin: built")
	if err := os.Rename(tmp, a.file("current")); err != nil {
		return err
	}
	a.hook("begin: renamed")
	return tree.SyncDir(a.dir)
}

// seedFor seeds once per base. Seeded directories get the owner of the anchor's own.
func (a *Anchor) seedFor(base Base, lowers []string, want *Owner) error {
	foreign := unmapped
	if want != nil && want.UID != 0 {
		foreign = func(st unix.Stat_t) bool { return unmapped(st) || st.Uid == 0 }
	}
	var low, top unix.Stat_t
	upper := a.file("current", "upper")
	if err := unix.Lstat(lowers[0], &low); err != nil {
		return &os.PathError{Op: "stat", Path: lowers[0], Err: err}
	}
	if !foreign(low) {
		return nil
	}
	m, err := a.Meta()
	if err != nil || m.Seeded == base.Key {
		return err
	}
	if err := unix.Lstat(upper, &top); err != nil {
		return &os.PathError{Op: "stat", Path: upper, Err: err}
	}
	from, err := a.merged(lowers)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := seed(upper, from, Owner{UID: int(top.Uid), GID: int(top.Gid)}, foreign); err != nil {
		return err
	}
	m.Seeded = base.Key
	return writeMeta(a.file("current"), *m)
}

// merged opens what the lowers are together.
func (a *Anchor) merged(lowers []string) (*os.File, error) {
	if len(lowers) == 1 {
		return tree.OpenDir(lowers[0])
	}
	scratch, err := a.newTmp()
	if err != nil {
		return nil, err
	}
	defer os.Remove(scratch)
	return mount.Overlay{Lower: lowers}.Open(scratch)
}

// Keep records base as the one that the present content belongs over; the content stays.
func (a *Anchor) Keep(base Base) error {
	m, err := a.Meta()
	if err != nil || m == nil {
		return a.errorf("keep", err)
	}
	if m.Base.Key == base.Key {
		return nil
	}
	m.Bases = append(m.Bases, m.Base)
	m.Bases = m.Bases[max(0, len(m.Bases)-maxEarlier):]
	m.Base = base
	a.hook("keep: write")
	return a.errorf("keep", writeMeta(a.file("current"), *m))
}

// Reset empties the anchor; snapshots stay. It also mends a damaged anchor.
func (a *Anchor) Reset() error {
	if a.lock == nil {
		return a.errorf("reset", ErrClosed)
	}
	trash := tmpPrefix + rand.Text()
	if err := os.Rename(a.file("current"), a.file(trash)); err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return a.errorf("reset", err)
	}
	a.hook("reset: renamed")
	if err := tree.SyncDir(a.dir); err != nil {
		return a.errorf("reset", err)
	}
	a.hook("reset: synced")
	return a.errorf("reset", tree.RemovePath(a.dir, trash))
}

var snapshotName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`) })

func checkName(name string) error {
	if !snapshotName().MatchString(name) {
		return fmt.Errorf("snapshot name %q: use up to 64 letters, digits, '.', '_' and '-'", name)
	}
	return nil
}

// Snapshot copies the current content under a new name; an empty anchor has nothing to copy and
// is an error. The anchor must not be mounted.
func (a *Anchor) Snapshot(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	m, err := a.Meta()
	if err == nil && m == nil {
		err = errors.New("the anchor is empty")
	}
	if err != nil {
		return a.errorf("snapshot", err)
	}
	if err := os.Mkdir(a.file("snapshots"), 0o700); err != nil && !os.IsExist(err) {
		return a.errorf("snapshot", err)
	}
	tmp, err := a.copyGeneration(a.file("current"), *m)
	if err != nil {
		return a.errorf("snapshot", err)
	}
	a.hook("snapshot: copied")
	err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, a.file("snapshots", name), unix.RENAME_NOREPLACE)
	if err != nil {
		_ = tree.RemovePath(a.dir, filepath.Base(tmp))
		return a.errorf("snapshot", fmt.Errorf("name %q: %w", name, err))
	}
	a.hook("snapshot: renamed")
	return a.errorf("snapshot", tree.SyncDir(a.file("snapshots")))
}

// Restore replaces the current content by a copy of the snapshot. The replaced content is gone.
func (a *Anchor) Restore(name string) error {
	if a.lock == nil {
		return a.errorf("restore", ErrClosed)
	}
	if err := checkName(name); err != nil {
		return err
	}
	src := a.file("snapshots", name)
	m, err := readGeneration(src, a.path)
	if os.IsNotExist(err) {
		err = fmt.Errorf("%w: %q", ErrNoSnapshot, name)
	}
	if err != nil {
		return a.errorf("restore", err)
	}
	tmp, err := a.copyGeneration(src, *m)
	if err != nil {
		return a.errorf("restore", err)
	}
	a.hook("restore: copied")
	if err := a.swapIn(tmp); err != nil {
		return a.errorf("restore", err)
	}
	a.hook("restore: swapped")
	if err := tree.SyncDir(a.dir); err != nil {
		return a.errorf("restore", err)
	}
	return a.errorf("restore", a.recover()) // removes what was replaced
}

// swapIn makes the generation tmp the current one.
func (a *Anchor) swapIn(tmp string) error {
	current := a.file("current")
	err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, current, unix.RENAME_EXCHANGE)
	switch err {
	case nil:
		return nil
	case unix.ENOENT:
		return os.Rename(tmp, current)
	case unix.EINVAL, unix.ENOSYS:
		return a.swapInTwoSteps(tmp)
	}
	return err
}

// swapInTwoSteps is for file systems without exchange; recover knows the name it leaves.
func (a *Anchor) swapInTwoSteps(tmp string) error {
	if err := os.Rename(a.file("current"), a.file(tmpPrefix+"replaced")); err != nil {
		return err
	}
	a.hook("restore: between")
	return os.Rename(tmp, a.file("current"))
}

// DropSnapshot removes a snapshot; a missing one is not an error.
func (a *Anchor) DropSnapshot(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	trash := a.file(tmpPrefix + rand.Text())
	if err := os.Rename(a.file("snapshots", name), trash); err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return a.errorf("drop snapshot of", err)
	}
	return a.errorf("drop snapshot of", tree.RemovePath(a.dir, filepath.Base(trash)))
}

// copyGeneration copies src's upper directory to a new temporary generation and makes it durable.
func (a *Anchor) copyGeneration(src string, m Meta) (tmp string, err error) {
	tmp, err = a.newTmp()
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = tree.RemovePath(a.dir, filepath.Base(tmp))
		}
	}()
	upper, err := tree.OpenDir(filepath.Join(src, "upper"))
	if err != nil {
		return "", err
	}
	defer upper.Close()
	parent, err := tree.OpenDir(tmp)
	if err != nil {
		return "", err
	}
	defer parent.Close()
	a.hook("copy: begin")
	if err := tree.Copy(upper, parent, "upper"); err != nil {
		return "", err
	}
	if err := writeMeta(tmp, m); err != nil {
		return "", err
	}
	if err := unix.Syncfs(int(parent.Fd())); err != nil {
		return "", fmt.Errorf("sync: %w", err)
	}
	return tmp, nil
}

func (a *Anchor) newTmp() (string, error) {
	tmp := a.file(tmpPrefix + rand.Text())
	return tmp, os.Mkdir(tmp, 0o700)
}

func writeMeta(dir string, m Meta) error {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "meta-*") // 0600
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, "meta.json"))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	return tree.SyncDir(dir)
}

// Usage measures the anchor with its snapshots.
func (i Info) Usage() (tree.Usage, error) { return tree.MeasurePath(i.Dir) }

func (a *Anchor) errorf(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s State Anchor %q: %w", op, a.path, err)
}
