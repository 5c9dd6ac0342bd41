package gc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/tree"
)

// Config says where to look. Directories may be missing.
type Config struct {
	Run     string       // holds <Domain ID>/lock and transient state
	Scratch []string     // further parents of transient <Domain ID> directories
	Domains string       // holds the Domain Roots
	Store   *image.Store // may be nil
	// Workspace reads the workspace's path from a Domain Root's record; "" when it cannot tell.
	Workspace func(domainRoot string) string
	// Hook, for tests, is told each named step before it happens.
	Hook func(step string)
}

func (c Config) step(name string) {
	if c.Hook != nil {
		c.Hook(name)
	}
}

// ErrLive means that the Domain runs.
var ErrLive = errors.New("the Domain is running")

const (
	lockName       = "lock"
	removingPrefix = ".removing-"
)

// idPattern keeps names out that are not Domain IDs: gc removes only what Lazaret named.
var idPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`) })

// DomainLock is the lock of one Domain ID.
type DomainLock struct{ f *os.File }

// Release ends the lock.
func (l *DomainLock) Release() { l.f.Close() }

// LockDomain takes the lock of a Domain ID below run, making its directory (0700) when missing.
// ErrLive: someone holds it.
func LockDomain(run, id string) (*DomainLock, error) {
	if !idPattern().MatchString(id) {
		return nil, fmt.Errorf("Domain ID %q is not valid", id)
	}
	for range 100 {
		l, err := tryLock(run, id)
		if l != nil || err != nil {
			return l, err
		}
	}
	return nil, fmt.Errorf("lock Domain %s: %w", id, ErrLive)
}

// tryLock returns nothing when gc removed the lock file meanwhile.
func tryLock(run, id string) (*DomainLock, error) {
	var owner unix.Stat_t
	if err := unix.Lstat(run, &owner); err != nil {
		return nil, &os.PathError{Op: "stat", Path: run, Err: err}
	}
	dir := filepath.Join(run, id)
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		// The coordinator is the developer, and we are uid 0 of a namespace: what we make must be the coordinator's.
		if err := os.Lchown(dir, int(owner.Uid), int(owner.Gid)); err != nil {
			return nil, err
		}
	case !os.IsExist(err):
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := f.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
		f.Close()
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("lock Domain %s: %w", id, ErrLive)
		}
		return nil, fmt.Errorf("lock Domain %s: %w", id, err)
	}
	var held, named unix.Stat_t
	if unix.Fstat(int(f.Fd()), &held) != nil || unix.Lstat(f.Name(), &named) != nil || held.Ino != named.Ino {
		f.Close()
		return nil, nil
	}
	return &DomainLock{f}, nil
}

// live tells whether the Domain's lock is held, without making it. In doubt it is.
func live(run, id string) bool {
	f, err := os.OpenFile(filepath.Join(run, id, lockName), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return !os.IsNotExist(err)
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

func ids(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// Gather looks at everything once.
func Gather(c Config) (Facts, error) {
	found := map[string]*Domain{}
	at := func(id string) *Domain {
		if found[id] == nil {
			found[id] = &Domain{ID: id, Live: live(c.Run, id)}
		}
		return found[id]
	}
	for _, parent := range append([]string{c.Run}, c.Scratch...) {
		names, err := ids(parent)
		if err != nil {
			return Facts{}, err
		}
		for _, id := range names {
			if !idPattern().MatchString(id) {
				continue
			}
			u, err := tree.MeasurePath(filepath.Join(parent, id))
			if err != nil {
				return Facts{}, err
			}
			d := at(id)
			d.HasRun, d.Transient = true, d.Transient+u.Bytes
		}
	}
	roots, err := ids(c.Domains)
	if err != nil {
		return Facts{}, err
	}
	for _, name := range roots {
		if id, ok := strings.CutPrefix(name, removingPrefix); ok && idPattern().MatchString(id) {
			at(id).Leftover = true
			continue
		}
		if !idPattern().MatchString(name) {
			continue
		}
		if err := c.gatherRoot(at(name)); err != nil {
			return Facts{}, err
		}
	}
	var f Facts
	for _, d := range found {
		f.Domains = append(f.Domains, *d)
	}
	slices.SortFunc(f.Domains, func(a, b Domain) int { return strings.Compare(a.ID, b.ID) })
	if c.Store == nil {
		return f, nil
	}
	return f, c.gatherStore(&f)
}

func (c Config) gatherRoot(d *Domain) error {
	root := filepath.Join(c.Domains, d.ID)
	d.HasRoot = true
	u, err := tree.MeasurePath(root)
	if err != nil {
		return err
	}
	d.State = u.Bytes
	if c.Workspace != nil {
		d.Workspace = c.Workspace(root)
	}
	if d.Workspace != "" {
		_, err := os.Lstat(d.Workspace)
		d.Gone = os.IsNotExist(err)
	}
	anchors, err := anchor.List(root)
	if err != nil {
		return err
	}
	for _, a := range anchors {
		u, err := a.Usage()
		if err != nil {
			return err
		}
		d.Anchors = append(d.Anchors, AnchorU{a.Path, u.Bytes})
		d.Leftover = d.Leftover || a.Leftover
	}
	return nil
}

func (c Config) gatherStore(f *Facts) (err error) {
	if err := c.gatherRecords(f); err != nil {
		return err
	}
	f.Sizes = map[string]int64{}
	for _, id := range f.Images {
		if img, err := c.Store.Image(id); err == nil {
			f.Sizes[id] = img.Size
		}
	}
	// A pull beside us would have its layers taken for orphans.
	g, err := c.Store.Exclude()
	if errors.Is(err, image.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer g.Release()
	f.Layers, err = c.Store.Orphans()
	return err
}

// Outcome of an action: Err nil is done or already gone; ErrLive, image.ErrInUse, image.ErrBusy
// and anchor.ErrBusy mean that something came to life meanwhile and it was left.
type Outcome struct {
	Action
	Err error
}

// Left tells that the action was rightly not done.
func (o Outcome) Left() bool {
	for _, e := range []error{ErrLive, image.ErrInUse, image.ErrBusy, anchor.ErrBusy} {
		if errors.Is(o.Err, e) {
			return true
		}
	}
	return false
}

// Run does the actions that need no question, in order; one that fails does not stop the others.
// Ending ctx stops between two actions.
func Run(ctx context.Context, c Config, o Options, plan []Action) []Outcome {
	var out []Outcome
	for _, a := range plan {
		if a.Ask {
			continue
		}
		err := ctx.Err()
		if err == nil {
			err = c.do(ctx, o, a)
		}
		if err != nil {
			err = fmt.Errorf("remove %s %q: %w", a.Kind, a.ID, err)
		}
		out = append(out, Outcome{a, err})
	}
	return out
}

func (c Config) do(ctx context.Context, o Options, a Action) error {
	c.step(string(a.Kind) + ": begin")
	switch a.Kind {
	case Transient:
		return c.underLock(a.ID, func() error { return nil }) // underLock removes it
	case Leftover:
		return c.underLock(a.ID, func() error { return c.finish(a.ID) })
	case State:
		return c.underLock(a.ID, func() error { return c.removeState(a.ID, o) })
	case DeadPin, PinLock, Unused, Layer:
		g, err := c.Store.Exclude()
		if err != nil {
			return err
		}
		defer g.Release()
		return c.storeAction(o, a)
	case Reference:
		ctx, cancel := context.WithCancel(ctx)
		cancel() // do not wait for a pull
		if err := c.Store.Remove(ctx, a.ID); !errors.Is(err, image.ErrNotPulled) {
			return err
		}
		return nil
	}
	return fmt.Errorf("unknown kind %q", a.Kind)
}

// underLock runs f with the Domain's lock held, then removes the Domain's transient directories,
// the lock's own last.
func (c Config) underLock(id string, f func() error) error {
	if err := os.MkdirAll(c.Run, 0o700); err != nil {
		return err
	}
	l, err := LockDomain(c.Run, id)
	if err != nil {
		return err
	}
	defer l.Release()
	c.step("locked")
	if err := f(); err != nil {
		return err
	}
	for _, parent := range c.Scratch {
		c.step("remove scratch")
		if err := tree.RemovePath(parent, id); err != nil {
			return err
		}
	}
	dir := filepath.Join(c.Run, id)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == lockName {
			continue
		}
		c.step("remove runtime entry")
		if err := tree.RemovePath(dir, e.Name()); err != nil {
			return err
		}
	}
	c.step("remove lock")
	if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
		return err
	}
	c.step("remove runtime directory")
	// A coordinator that starts now may have made a new lock in it: then it is in use, and stays.
	if err := os.Remove(dir); err != nil && !os.IsNotExist(err) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// finish completes removals, and lets each anchor clear what was interrupted.
func (c Config) finish(id string) error {
	if err := tree.RemovePath(c.Domains, removingPrefix+id); err != nil {
		return err
	}
	root := filepath.Join(c.Domains, id)
	anchors, err := anchor.List(root)
	if err != nil {
		return err
	}
	for _, info := range anchors {
		if !info.Leftover {
			continue
		}
		c.step("recover anchor")
		a, err := anchor.Lock(root, info.Path) // locking recovers
		if err != nil {
			return err
		}
		if err := a.Close(); err != nil {
			return err
		}
	}
	return nil
}

// removeState renames a Domain Root away and removes it. Precondition: the Domain's lock is held.
func (c Config) removeState(id string, o Options) error {
	root := filepath.Join(c.Domains, id)
	if !o.Force && c.Workspace != nil {
		if w := c.Workspace(root); w != "" {
			if _, err := os.Lstat(w); !os.IsNotExist(err) {
				return fmt.Errorf("workspace %q exists again", w)
			}
		}
	}
	anchors, err := anchor.List(root)
	if err != nil {
		return err
	}
	for _, info := range anchors {
		if info.InUse { // an anchor command, which does not take the Domain's lock
			return fmt.Errorf("%q: %w", info.Path, anchor.ErrBusy)
		}
	}
	away := removingPrefix + id
	if err := tree.RemovePath(c.Domains, away); err != nil {
		return err
	}
	c.step("rename state")
	if err := os.Rename(root, filepath.Join(c.Domains, away)); err != nil && !os.IsNotExist(err) {
		return err
	}
	c.step("remove state")
	return tree.RemovePath(c.Domains, away)
}

// storeAction decides again and acts. Precondition: the store is locked exclusively.
func (c Config) storeAction(o Options, a Action) error {
	var f Facts
	if err := c.factsLocked(&f); err != nil {
		return err
	}
	if !slices.ContainsFunc(Plan(f, o), func(b Action) bool { return b.Kind == a.Kind && b.ID == a.ID && !b.Ask }) {
		return c.whyNot(f, a)
	}
	c.step(string(a.Kind) + ": remove")
	switch a.Kind {
	case DeadPin, PinLock:
		return c.Store.DropDeadPin(a.ID)
	case Unused:
		return c.Store.DeleteImage(a.ID)
	}
	return c.Store.DeleteLayer(a.ID)
}

func (c Config) factsLocked(f *Facts) (err error) {
	if err := c.gatherRecords(f); err != nil {
		return err
	}
	f.Layers, err = c.Store.Orphans()
	return err
}

func (c Config) gatherRecords(f *Facts) (err error) {
	if f.Pins, err = c.Store.Pins(); err != nil {
		return err
	}
	if f.Strays, err = c.Store.StrayLocks(); err != nil {
		return err
	}
	if f.Images, err = c.Store.IDs(); err != nil {
		return err
	}
	f.Records, err = c.Store.Records()
	return err
}

// whyNot: gone already is fine, in use again is not.
func (c Config) whyNot(f Facts, a Action) error {
	there := slices.Contains(f.Images, a.ID) || slices.Contains(f.Layers, a.ID) ||
		slices.ContainsFunc(f.Pins, func(p image.PinInfo) bool { return p.ID == a.ID })
	if there {
		return image.ErrInUse
	}
	return nil
}
