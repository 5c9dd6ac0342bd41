package review

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/route"
)

// Kind sorts what the private twin holds.
type Kind string

const (
	Held       Kind = "held"       // an integration file; the developer may apply it
	Kept       Kind = "kept"       // private, though the consented rules do not ignore it
	Config     Kind = "config"     // a repository's configuration
	RepoFile   Kind = "repository" // a hook or a file below info/
	Private    Kind = "private"    // a repository, worktree or submodule that exists inside only
	Unfinished Kind = "unfinished" // a rebase, or a sequence of picks, that was not finished inside
)

// Item is one difference between the private twin and the host.
type Item struct {
	Kind Kind
	Path string // from the tree's root; bytes of the sandbox
	What string // "added", "changed", "removed", or a remark
	Tree *Tree

	// Lines are details: configuration differences, lines of a todo list. They are fit for a terminal.
	Lines []string

	// Seen identifies both sides' content, as far as it was read.
	Seen Seen

	Dir     bool // a directory as a whole
	Removed bool // removed inside
}

// Seen is the content that a decision is about: hexadecimal SHA-256 of a file, "link:" and a target, or "" for nothing.
type Seen struct{ Private, Host string }

// Name is the item's path for the developer, fit for a terminal: from the workspace root, or absolute in another tree.
func (i *Item) Name() string {
	if i.Tree != nil && i.Tree.ws.GitDir {
		return Show(i.Tree.Abs(i.Path))
	}
	return Show(i.Path)
}

// unreadable is what Seen holds of content that could not be read.
const unreadable = "unreadable"

const (
	maxItems   = 5000
	maxCompare = 16 << 20 // bytes of one file that are compared
	maxRead    = 64 << 20 // bytes of all files of one walk; beyond, files are known by size and time
	maxLines   = 1000     // details of one item
	maxConfig  = 1 << 20
	maxTodo    = 1 << 20
)

// Items lists the differences, and what was not looked at.
func (t *Tree) Items() (items []*Item, partial []string) {
	if t.twin == nil {
		return nil, nil
	}
	w := &twinWalk{t: t}
	var view *sentry.ViewDir
	if t.view != nil {
		view = t.view.Root()
	}
	zone := route.Work
	if t.ws.GitDir {
		zone = route.Gitdir
	}
	w.dir(place{host: t.host, twin: t.twin, zone: zone, view: view}, 0)
	return w.items, w.partial
}

// place is a directory on both sides; host is nil where the host has none.
type place struct {
	host, twin *os.File
	rel        string
	zone       route.Zone
	view       *sentry.ViewDir
}

type twinWalk struct {
	t       *Tree
	items   []*Item
	partial []string
	looked  int
	read    int64 // bytes of files
}

func (w *twinWalk) skip(rel string, why any) {
	if len(w.partial) < 100 {
		w.partial = append(w.partial, fmt.Sprintf("%s: %v", Show(rel), why))
	}
}

// more counts what is looked at, and ends a walk that grows without bound.
func (w *twinWalk) more() bool {
	if w.looked++; w.looked == 10*maxItems {
		w.skip(w.t.Path, "more than the limit of private entries; the rest was not looked at")
	}
	return w.looked < 10*maxItems && len(w.items) < maxItems
}

func (w *twinWalk) add(i *Item) {
	i.Tree = w.t
	w.items = append(w.items, i)
}

func (w *twinWalk) dir(p place, depth int) {
	if depth > maxDepth {
		w.skip(p.rel, "too deep")
		return
	}
	names, all, err := listNames(p.twin)
	if err != nil {
		w.skip(p.rel, err)
		return
	}
	if !all {
		w.skip(p.rel, "too many entries")
	}
	bare := p.zone == route.Work && p.host != nil && isRepository(p.host)
	for _, name := range names {
		if name == sentry.MarkSkeleton || name == sentry.MarkTree {
			continue
		}
		if !w.more() {
			return
		}
		switch {
		case p.zone != route.Work:
			w.inRepo(p, name, depth)
		case bare && route.Classify(name) == route.Layout:
			q := p
			q.zone = route.Gitdir
			w.inRepo(q, name, depth)
		default:
			w.inWork(p, name, depth)
		}
	}
}

// enter opens both sides of a directory and walks it.
func (w *twinWalk) enter(p place, name string, zone route.Zone, view *sentry.ViewDir, depth int) {
	w.both(p, name, func(q place) {
		q.zone, q.view = zone, view
		w.dir(q, depth+1)
	})
}

func (w *twinWalk) both(p place, name string, f func(place)) {
	q := place{rel: path.Join(p.rel, name)}
	var err error
	if q.twin, err = openDir(p.twin, name); err != nil {
		w.skip(q.rel, err)
		return
	}
	defer q.twin.Close()
	if p.host != nil {
		if q.host, err = openDir(p.host, name); err == nil {
			defer q.host.Close()
		} else {
			q.host = nil
		}
	}
	f(q)
}

func marked(dir *os.File, name, mark string) bool {
	d, err := openAt(dir, name, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer d.Close()
	return kindAt(d, mark) == fifo
}

func (w *twinWalk) inWork(p place, name string, depth int) {
	rel := path.Join(p.rel, name)
	kind, host := kindAt(p.twin, name), kindAt(p.host, name)
	if name == ".git" {
		switch {
		case kind == folder && host == folder:
			w.enter(p, name, route.Gitdir, nil, depth)
		case kind != fifo && kind != 0:
			w.add(&Item{Kind: Private, Path: rel, What: "a repository that exists inside only", Dir: kind == folder})
		}
		return
	}
	file, dir := w.t.held.Match(p.rel, name)
	skeleton := kind == folder && marked(p.twin, name, sentry.MarkSkeleton)
	if file || dir && (kind == folder || kind == fifo && host == folder) {
		w.compare(p, name, Held, depth)
		return
	}
	switch {
	case kind == 0, kind == fifo && host == 0:
	case kind == fifo:
		if !hides(p.view, name, host == folder) {
			w.removed(p, name, Kept)
		}
	case skeleton && marked(p.twin, name, sentry.MarkTree):
		w.add(&Item{Kind: Private, Path: rel, What: "a repository that exists inside only, with its work tree", Dir: true})
	case skeleton:
		var view *sentry.ViewDir
		if p.view != nil {
			view = p.view.Child(name)
		}
		w.enter(p, name, route.Work, view, depth)
	case hides(p.view, name, kind == folder): // Ignored Workspace State
	case kind == folder:
		w.add(&Item{Kind: Kept, Path: rel, What: "directory", Dir: true})
	default:
		w.leaf(p, name, Kept)
	}
}

func hides(view *sentry.ViewDir, name string, dir bool) bool {
	if view == nil {
		return false
	}
	h := view.Hidden(name)
	return dir && h&sentry.HideDir != 0 || !dir && h&sentry.HideFile != 0
}

func (w *twinWalk) inRepo(p place, name string, depth int) {
	rel := path.Join(p.rel, name)
	kind, host := kindAt(p.twin, name), kindAt(p.host, name)
	v := route.Git(p.zone, name, hostOf(host))
	if v.Kind != route.P {
		if kind != folder || host != folder {
			return
		}
		zone := v.Child
		if p.zone == route.Modules {
			if d, err := openDir(p.host, name); err == nil {
				if kindAt(d, "HEAD") != 0 {
					zone = route.Gitdir
				}
				d.Close()
			}
		}
		w.enter(p, name, zone, nil, depth)
		return
	}
	switch {
	case kind == 0 || strings.HasSuffix(name, ".lock"):
	case p.zone == route.Modules, name == "modules" && kind == folder:
		w.add(&Item{Kind: Private, Path: rel, What: "a submodule's repository that exists inside only", Dir: kind == folder})
	case p.zone == route.Worktrees, name == "worktrees" && kind == folder:
		w.add(&Item{Kind: Private, Path: rel, What: "a worktree that exists inside only", Dir: kind == folder})
	case v.Seed == route.SeedConfig:
		w.config(p, name)
	case name == "hooks" || name == "info":
		w.compare(p, name, RepoFile, depth)
	case v.Seed == route.SeedCopy && kind == folder:
		w.unfinished(p, name, host != 0)
	}
}

// compare lists what differs at name, on both sides.
func (w *twinWalk) compare(p place, name string, as Kind, depth int) {
	if !w.more() {
		return
	}
	kind, host := kindAt(p.twin, name), kindAt(p.host, name)
	rel := path.Join(p.rel, name)
	switch {
	case kind == 0:
	case depth > maxDepth:
		w.skip(rel, "too deep")
	case kind == folder:
		skeleton := marked(p.twin, name, sentry.MarkSkeleton)
		if host != 0 && host != folder {
			w.add(&Item{Kind: as, Path: rel, What: "changed from a file into a directory", Dir: true})
			return
		}
		w.both(p, name, func(q place) {
			names, all, err := listNames(q.twin)
			if err != nil || !all {
				w.skip(rel, errors.Join(err, errors.New("not all of it was looked at")))
			}
			has := make(map[string]bool, len(names))
			for _, n := range names {
				if has[n] = true; n != sentry.MarkSkeleton && n != sentry.MarkTree {
					w.compare(q, n, as, depth+1)
				}
			}
			if skeleton || q.host == nil || !all {
				return
			}
			names, _, err = listNames(q.host)
			if err != nil {
				w.skip(rel, err)
			}
			for _, n := range names {
				if !has[n] && w.more() {
					w.removed(q, n, as)
				}
			}
		})
	case kind == fifo:
		w.removed(p, name, as)
	default:
		w.leaf(p, name, as)
	}
}

func (w *twinWalk) removed(p place, name string, as Kind) {
	kind := kindAt(p.host, name)
	if kind == 0 {
		return
	}
	i := &Item{Kind: as, Path: path.Join(p.rel, name), What: "removed", Dir: kind == folder, Removed: true}
	i.Seen.Host, _ = w.content(p.host, name)
	w.add(i)
}

// content is contentOf within the limit on what is read in all.
func (w *twinWalk) content(dir *os.File, name string) (string, error) {
	var st unix.Stat_t
	if dir != nil && statAt(dir, name, &st) == nil && st.Mode&unix.S_IFMT == regular {
		if w.read += min(st.Size, maxCompare); w.read > maxRead {
			return large(st.Size, st), nil
		}
	}
	return contentOf(dir, name)
}

// leaf compares what is no directory in the twin.
func (w *twinWalk) leaf(p place, name string, as Kind) {
	i := &Item{Kind: as, Path: path.Join(p.rel, name), What: "changed"}
	var private, host unix.Stat_t
	if statAt(p.twin, name, &private) != nil {
		return
	}
	hostErr := statAt(p.host, name, &host)
	var err error
	if i.Seen.Private, err = w.content(p.twin, name); err != nil {
		w.skip(i.Path, err)
		i.Seen.Private = unreadable
	}
	if hostErr == nil {
		if i.Seen.Host, err = w.content(p.host, name); err != nil {
			i.Seen.Host = unreadable
		}
	}
	switch {
	case hostErr != nil:
		i.What = "added"
	case host.Mode&unix.S_IFMT != private.Mode&unix.S_IFMT:
		i.What = "changed in type"
	case i.Seen.Private == i.Seen.Host && i.Seen.Host != unreadable && (private.Mode^host.Mode)&0o100 == 0:
		return
	}
	if private.Mode&unix.S_IFMT == regular {
		switch {
		case private.Mode&0o100 != 0 && (hostErr != nil || host.Mode&0o100 == 0):
			i.What += ", executable"
		case private.Mode&0o100 == 0 && hostErr == nil && host.Mode&0o100 != 0 && host.Mode&unix.S_IFMT == regular:
			i.What += ", no longer executable"
		}
	}
	w.add(i)
}

// contentOf is one side of Seen. Files over the limit are known by size and times only.
func contentOf(dir *os.File, name string) (string, error) {
	if dir == nil {
		return "", nil
	}
	var st unix.Stat_t
	if err := statAt(dir, name, &st); err != nil {
		if err == unix.ENOENT {
			return "", nil
		}
		return "", err
	}
	switch st.Mode & unix.S_IFMT {
	case symlink:
		target, err := readLink(dir, name)
		return "link:" + target, err
	case regular:
		f, st, err := openRegular(dir, name)
		if err != nil {
			return "", err
		}
		defer f.Close()
		return digest(f, st)
	}
	return fmt.Sprintf("type:%o", st.Mode&unix.S_IFMT), nil
}

// digest reads an open file to its end. One that grows over the limit while it is read is known by its size only.
func digest(f *os.File, st unix.Stat_t) (string, error) {
	if st.Size > maxCompare {
		return large(st.Size, st), nil
	}
	h := sha256.New()
	n, err := io.Copy(h, io.LimitReader(f, maxCompare+1))
	if err != nil {
		return "", err
	}
	if n > maxCompare {
		return large(n, st), nil
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// large stands for content that is not read.
func large(size int64, st unix.Stat_t) string {
	return fmt.Sprintf("large:%d:%d.%09d:%d", size, st.Ctim.Sec, st.Ctim.Nsec, st.Ino)
}

// config compares a private configuration with what it started from.
func (w *twinWalk) config(p place, name string) {
	i := &Item{Kind: Config, Path: path.Join(p.rel, name), What: "changed"}
	if kindAt(p.twin, name) == fifo {
		if kindAt(p.host, name) != 0 {
			i.What, i.Removed = "removed", true
			w.add(i)
		}
		return
	}
	c, err := w.t.readConfig(p, name)
	if err != nil {
		i.What = fmt.Sprintf("cannot be read: %v", err)
		w.add(i)
		return
	}
	if len(c.diffs) == 0 {
		return
	}
	i.Seen = c.seen
	for _, d := range c.diffs {
		i.Lines = append(i.Lines, strings.Split(strings.TrimSuffix(d.String(), "\n"), "\n")...)
	}
	if n := len(i.Lines); n > maxLines {
		i.Lines = append(i.Lines[:maxLines], fmt.Sprintf("(%d more lines)", n-maxLines))
	}
	w.add(i)
}

// configs is a private configuration file beside the host's.
type configs struct {
	hostBytes []byte
	host      *gitconfig.File
	diffs     []gitconfig.Difference
	seen      Seen
}

func (t *Tree) readConfig(p place, name string) (*configs, error) {
	b, _, err := readFile(p.twin, name, maxConfig)
	if err != nil {
		return nil, err
	}
	private, err := gitconfig.Parse(b)
	if err != nil {
		return nil, err
	}
	c := &configs{host: &gitconfig.File{}}
	seed := &gitconfig.File{}
	if p.host != nil {
		c.hostBytes, _, err = readFile(p.host, name, maxConfig)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, fmt.Errorf("the host's file: %w", err)
		default:
			if c.host, err = gitconfig.Parse(c.hostBytes); err != nil {
				return nil, fmt.Errorf("the host's file: %w", err)
			}
			if seed, err = t.seedOf(c.hostBytes); err != nil {
				return nil, err
			}
		}
	}
	c.diffs = gitconfig.Compare(seed, private)
	c.seen = Seen{Private: sum(b), Host: sum(c.hostBytes)}
	return c, nil
}

// unfinished reports a rebase or sequence that exists inside, unless it is the host's own.
func (w *twinWalk) unfinished(p place, name string, onHost bool) {
	i := &Item{Kind: Unfinished, Path: path.Join(p.rel, name), What: "not finished inside", Dir: true}
	w.both(p, name, func(q place) {
		for _, todo := range []string{"git-rebase-todo", "todo"} {
			b, _, err := readFile(q.twin, todo, maxTodo)
			if err != nil {
				continue
			}
			if onHost && q.host != nil {
				if h, _, err := readFile(q.host, todo, maxTodo); err == nil && bytes.Equal(h, b) {
					i.What = "copied from the host"
				}
			}
			for line := range strings.Lines(string(b)) {
				line = strings.TrimRight(line, "\n")
				word, _, _ := strings.Cut(strings.TrimLeft(line, " \t"), " ")
				mark := "  "
				if word == "exec" || word == "x" {
					mark = "! " // runs a command
				}
				if line == "" || line[0] == '#' {
					continue
				}
				if len(i.Lines) == maxLines {
					i.Lines = append(i.Lines, "  (more lines)")
					break
				}
				i.Lines = append(i.Lines, mark+ShowLine(line))
			}
			break
		}
	})
	if i.What != "copied from the host" {
		w.add(i)
	}
}
