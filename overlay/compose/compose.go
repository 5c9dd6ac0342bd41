// Package compose builds the file system of one Domain: a read-only base with the mount points
// that the base lacks, one overlay per State Anchor, and the list of binds for the bundle.
//
// What is kept true, for nsenter and the developer:
//   - The base is never written: the root is a read-only overlay of a skeleton and the image's
//     layers, or the caller's host base. What the agent writes outside its anchors goes to runsc's own overlay
//     ([Result.Overlay2]) and ends with the Domain.
//   - Nothing is mounted before everything was checked that can be; a State Anchor of another
//     base stops the start with [*ChangedError] until the developer chose.
//   - No name in a base or an anchor leads a mount elsewhere: a symbolic link on the way to a
//     mount point is an error ([ErrObstructed]), never followed.
//   - A failed or killed Compose leaves mounts that go with the mount namespace, and files below
//     the work directory only; [Result.Close] undoes both.
//
// It runs as uid 0 in the Domain's user and mount namespaces, with /proc mounted. Steps to wire it:
//
//  1. image.Open, Store.Share, Store.Resolve, Store.Image, Store.Pin, Guard.Release
//     (host base: [Points], then overlay.HostBase with these as Dirs and Files).
//  2. [Compose]. On *ChangedError: Result is nil and everything is undone; ask the developer, set
//     Anchor.OnChange, call again.
//  3. OCI root.path = Result.Root, readonly false; append Result.Mounts to the bundle's own,
//     sorted by destination; runsc --overlay2=Result.Overlay2.
//  4. At the end of the Domain: runsc delete, Result.Close, Pin.Release.
package compose

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/mount"
	"lazaret.dev/lazaret/overlay/tree"
	"lazaret.dev/lazaret/overlay/volume"
)

// Input is what Compose needs; plain data, validated as a whole.
type Input struct {
	Base     anchor.Base // what State Anchors are keyed to
	Layers   []string    // of an image, topmost first; empty for the host base
	HostRoot string      // composed root of the host base, which has all Points; empty for an image

	Agent  Agent
	Points []Point         // further mount points the bundle needs: workspace, client program, resolv.conf
	Anchor []Anchor        // State Anchors; none may lie within another
	Volume []volume.Volume // checked by volume.CheckAll

	DomainRoot string // holds the anchors; on a file system that can carry an overlay's upper directory
	Work       string // existing empty directory, transient, no ':' in its path
	Scratch    int64  // bytes for what the agent writes outside anchors; 0: no limit
	ScratchDir string // existing directory on a disk for it; empty: memory
	Now        time.Time

	hook func(step string) // tests kill here
}

// Agent is the account that the agent runs as.
type Agent struct {
	UID, GID int    // 1000, 1000 with the usual id map
	Name     string // used when the base has no account of that uid
	Home     string
	Shell    string // in the added passwd line; empty: /bin/sh
}

// Point is a mount point that must exist in the root.
type Point struct {
	Path  string
	File  bool          // a regular file; else a directory
	Owner *anchor.Owner // of a directory made for it; nil: root's, 0755
}

// Anchor is one persistent path.
type Anchor struct {
	Path     string
	Owner    *anchor.Owner // forced on the anchor's own directory when it begins; nil: as in the base
	OnChange Choice
}

// Choice says what happens to an anchor that was written over another base.
type Choice int

// The choices.
const (
	Ask      Choice = iota // refuse with *ChangedError
	Keep                   // the anchor's files stay and shadow the new base
	Snapshot               // as Keep, after a snapshot named "before-…" was made
	Reset                  // begin empty
)

// ChangedError says that an anchor belongs over another base and what it would shadow here.
type ChangedError struct {
	Path     string
	Old, New anchor.Base
	Report   anchor.Report // differences from the new base; the list is bounded
}

func (e *ChangedError) Error() string {
	n := 0
	for _, c := range e.Report.Changes {
		if c.Kind != anchor.Added {
			n++
		}
	}
	more := ""
	if e.Report.Truncated {
		more = " or more"
	}
	return fmt.Sprintf("State Anchor %q was written over another base image and shadows %d%s of this one's files", e.Path, n, more)
}

// Is makes it an anchor.ErrBaseChanged.
func (e *ChangedError) Is(target error) bool { return target == anchor.ErrBaseChanged }

// reportLimit bounds the differences that a start collects.
const reportLimit = 1000

// ErrObstructed means that a name in the base or an anchor stands where a mount point must be.
var ErrObstructed = errors.New("mount point is obstructed")

// Mount is one bind mount of the bundle.
type Mount struct {
	Source, Destination string
	Options             []string
}

// Finding is something about the base that the developer should hear; the start goes on.
type Finding struct {
	Code string `json:"code"` // "no-shell", "no-agent", "no-home", "owner", "kept", "snapshot", "reset"
	Text string `json:"text"`
	Hint string `json:"hint,omitempty"`
}

// Result is a composed file system. Its Mounts are sorted by destination.
type Result struct {
	Root     string
	Mounts   []Mount
	Overlay2 string // for runsc --overlay2
	Findings []Finding

	undo []func() error
}

// Close unmounts everything, releases the anchors and empties the work directory. It is
// idempotent and does all it can.
func (r *Result) Close() error {
	var errs []error
	for _, step := range slices.Backward(r.undo) {
		errs = append(errs, step())
	}
	r.undo = nil
	return errors.Join(errs...)
}

func (r *Result) push(step func() error) { r.undo = append(r.undo, step) }

func (r *Result) find(code, hint, format string, args ...any) {
	r.Findings = append(r.Findings, Finding{code, fmt.Sprintf(format, args...), hint})
}

func (in *Input) step(name string) {
	if in.hook != nil {
		in.hook(name)
	}
}

func (in *Input) validate() error {
	var errs []error
	path := func(what, p string) {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.ContainsRune(p, 0) {
			errs = append(errs, fmt.Errorf("%s %q is not an absolute, clean path", what, p))
		}
	}
	if (len(in.Layers) == 0) == (in.HostRoot == "") {
		errs = append(errs, errors.New("either Layers or HostRoot must be set"))
	}
	if in.Base.Key == "" {
		errs = append(errs, errors.New("Base.Key is empty"))
	}
	path("Work", in.Work)
	path("DomainRoot", in.DomainRoot)
	if strings.ContainsAny(in.ScratchDir, ",:") {
		errs = append(errs, fmt.Errorf("ScratchDir %q: runsc cannot take ',' and ':'", in.ScratchDir))
	}
	for _, p := range in.Points {
		path("mount point", p.Path)
	}
	for i, a := range in.Anchor {
		path("persistent path", a.Path)
		for _, b := range in.Anchor[:i] {
			if volume.Within(a.Path, b.Path) || volume.Within(b.Path, a.Path) {
				errs = append(errs, fmt.Errorf("persistent paths %q and %q overlap", b.Path, a.Path))
			}
		}
		for _, p := range append(in.pointPaths(), "/proc", "/sys", "/dev", "/tmp") {
			if volume.Within(a.Path, p) {
				errs = append(errs, fmt.Errorf("persistent path %q lies within %q", a.Path, p))
			}
		}
	}
	return errors.Join(errs...)
}

func (in *Input) pointPaths() []string {
	var out []string
	for _, p := range in.Points {
		out = append(out, p.Path)
	}
	for _, v := range in.Volume {
		out = append(out, v.Target)
	}
	return out
}

// Points lists all mount points of in, parents first: the host base must have them.
func Points(in Input) ([]Point, error) {
	all := slices.Clone(in.Points)
	for _, a := range in.Anchor {
		all = append(all, Point{Path: a.Path, Owner: a.Owner})
	}
	for _, v := range in.Volume {
		st, err := os.Stat(v.Host)
		if err != nil {
			return nil, fmt.Errorf("volume %q: %w", v.Host, err)
		}
		all = append(all, Point{Path: v.Target, File: !st.IsDir()})
	}
	slices.SortFunc(all, func(a, b Point) int { return strings.Compare(a.Path, b.Path) })
	return slices.CompactFunc(all, func(a, b Point) bool { return a.Path == b.Path }), nil
}

// Compose builds the file system. On error everything is undone.
func Compose(in Input) (*Result, error) {
	r, err := compose(in)
	if err != nil {
		return nil, fmt.Errorf("compose file system: %w", err)
	}
	return r, nil
}

func compose(in Input) (_ *Result, err error) {
	if err := in.validate(); err != nil {
		return nil, err
	}
	points, err := Points(in)
	if err != nil {
		return nil, err
	}
	r := &Result{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	// Another Domain's mounts must not meet our undo step.
	if entries, err := os.ReadDir(in.Work); err != nil || len(entries) > 0 {
		return nil, errors.Join(fmt.Errorf("work directory %q is not empty", in.Work), err)
	}
	r.push(func() error { return clear(in.Work) })
	for _, d := range []string{"skeleton", "empty", "root", "anchors", "scratch"} {
		if err := os.Mkdir(filepath.Join(in.Work, d), 0o755); err != nil {
			return nil, err
		}
	}
	in.step("made directories")
	held, err := lockAnchors(in, r)
	if err != nil {
		return nil, err
	}
	in.step("locked anchors")
	b, err := openBase(in)
	if err != nil {
		return nil, err
	}
	defer b.close()
	if err := b.prepare(in, points, r); err != nil {
		return nil, err
	}
	in.step("built skeleton")
	if in.HostRoot != "" {
		r.Root = in.HostRoot
	} else {
		r.Root = filepath.Join(in.Work, "root")
		r.push(func() error { return mount.Detach(filepath.Join(in.Work, "root")) })
		lowers := append([]string{filepath.Join(in.Work, "skeleton")}, in.Layers...)
		if err := (mount.Overlay{Lower: lowers}).Attach(r.Root); err != nil {
			return nil, err
		}
	}
	in.step("mounted root")
	for i, a := range held {
		if err := mountAnchor(in, in.Anchor[i], a, points, b, r); err != nil {
			return nil, err
		}
	}
	for _, v := range in.Volume {
		mode := "ro"
		if v.Writable {
			mode = "rw"
		}
		r.Mounts = append(r.Mounts, Mount{v.Host, v.Target, []string{"rbind", mode, "nosuid", "nodev"}})
	}
	slices.SortFunc(r.Mounts, func(a, b Mount) int { return strings.Compare(a.Destination, b.Destination) })
	r.Overlay2 = overlay2(in)
	in.step("done")
	return r, nil
}

func overlay2(in Input) string {
	s := "root:memory"
	if in.ScratchDir != "" {
		s = "root:dir=" + in.ScratchDir
	}
	if in.Scratch > 0 {
		s += ",size=" + strconv.FormatInt(in.Scratch, 10)
	}
	return s
}

// clear empties the work directory; gc does the same for a Domain that was killed.
func clear(work string) error {
	entries, err := os.ReadDir(work)
	for _, e := range entries {
		err = errors.Join(err, tree.RemovePath(work, e.Name()))
	}
	return err
}

func lockAnchors(in Input, r *Result) ([]*anchor.Anchor, error) {
	var held []*anchor.Anchor
	for _, spec := range in.Anchor {
		a, err := anchor.Lock(in.DomainRoot, spec.Path)
		if err != nil {
			return nil, err
		}
		r.push(a.Close)
		held = append(held, a)
	}
	return held, nil
}

func mountAnchor(in Input, spec Anchor, a *anchor.Anchor, points []Point, b *base, r *Result) error {
	lowers, err := b.lowers(in, spec)
	if err != nil {
		return err
	}
	if err := settle(in, spec, a, lowers, r); err != nil {
		return err
	}
	name, err := anchor.Escape(spec.Path)
	if err != nil {
		return err
	}
	target := filepath.Join(in.Work, "anchors", name)
	if err := os.Mkdir(target, 0o700); err != nil {
		return err
	}
	r.push(func() error { return mount.Detach(target) })
	if err := a.Mount(in.Base, lowers, spec.Owner, target, in.Now); err != nil {
		return err
	}
	in.step("mounted anchor " + spec.Path)
	if err := pointsWithin(target, spec.Path, points); err != nil {
		return err
	}
	checkOwner(in, spec, target, r)
	r.Mounts = append(r.Mounts, Mount{target, spec.Path, []string{"rbind", "rw", "nodev"}})
	return nil
}

// settle brings the anchor over the present base as the developer chose.
func settle(in Input, spec Anchor, a *anchor.Anchor, lowers []string, r *Result) error {
	m, err := a.Meta()
	if err != nil || m == nil || m.Base.Key == in.Base.Key {
		return err
	}
	if spec.OnChange == Reset {
		if err := a.Reset(); err != nil {
			return err
		}
		r.find("reset", "", "State Anchor %q began empty on the new base image", spec.Path)
		return nil
	}
	rep, err := anchor.Diff(a.Dir(), lowers, reportLimit, filepath.Join(in.Work, "scratch"))
	if err != nil {
		return err
	}
	changed := &ChangedError{Path: spec.Path, Old: m.Base, New: in.Base, Report: rep}
	switch spec.OnChange {
	case Keep:
	case Snapshot:
		name := "before-" + in.Now.UTC().Format("20060102-150405")
		if err := a.Snapshot(name); err != nil {
			return err
		}
		r.find("snapshot", "lazaret anchor restore brings it back", "State Anchor %q was kept as snapshot %q", spec.Path, name)
	default:
		return changed
	}
	if err := a.Keep(in.Base); err != nil {
		return err
	}
	if rep.Shadows() {
		r.find("kept", "lazaret anchor diff lists them, lazaret anchor reset starts afresh", "%v", changed)
	}
	return nil
}
