package gofer

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitindex"
	"lazaret.dev/lazaret/sentry/ignore"
	"lazaret.dev/lazaret/sentry/route"
)

const (
	// ruleTTL is how long a lookup may use rules without asking whether their files have changed. Creations always ask.
	ruleTTL = 500 * time.Millisecond

	maxRuleFile  = 1 << 20  // bytes; a larger file hides everything below it (package ignore fails closed)
	maxRuleBytes = 64 << 20 // of all rule files in use; beyond, a directory's own file hides everything
	maxPastBytes = 16 << 10 // of a rule file whose earlier states are remembered
)

var started = time.Now()

func now() int64 { return int64(time.Since(started)) }

// hide says how the rules hide one name: the snapshot's and the live rules' bits together, and more.
type hide uint16

const (
	hideFile = hide(sentry.HideFile)
	hideDir  = hide(sentry.HideDir)
	mergeDir = hide(sentry.MergeDir) // tracked files in it are shared, the rest is private

	liveOnly     hide = 1 << (iota + 5) // a file hidden by the live rules alone
	newlyTracked                        // hidden by the snapshot alone, and the live index tracks it
	holdFile                            // a held name
	holdDir                             // a held name if it is a directory
)

// rules is what hides names in one directory, as of one state of its rule files. Immutable.
type rules struct {
	t        *tree
	id       uint64 // for the cache of verdicts
	path     string // of the directory, from the workspace root
	epoch    int64  // of the tree
	live     *ignore.Dir
	ice      *sentry.ViewDir // the consented snapshot's view
	repo     *liveRepo
	parent   *rules
	own      stamp // of the directory's .gitignore; zero without one
	ownRules *ignore.Patterns
	index    *indexState
	config   repoStamps          // of a repository root
	changed  unix.StatxTimestamp // ctime of the youngest rule file on the way
	past     []past              // the states before, youngest first, for keepForAgent; immutable
}

type repoStamps struct {
	dotGit, exclude, config stamp
	kind                    route.Host
}

// liveRepo is a repository whose work tree is (part of) the workspace.
type liveRepo struct {
	mu    sync.Mutex
	state atomic.Pointer[indexState]
}

// indexState is the tracked paths of one state of the index file; a damaged one keeps those before.
type indexState struct {
	stamp, shared stamp // of the index and of its shared part
	set           *gitindex.Set
}

// current returns the directory's rules. fresh asks every rule file on the way now.
func (d *dir) current(fresh bool) *rules {
	r := d.rules.Load()
	if r != nil && !fresh && r.epoch == d.t.epoch.Load() && now()-d.checked.Load() < int64(ruleTTL) {
		return r
	}
	return d.refresh(fresh)
}

func (d *dir) refresh(fresh bool) *rules {
	var up *rules
	if d.parent != nil {
		up = d.parent.current(fresh)
	}
	d.rulesMu.Lock()
	defer d.rulesMu.Unlock()
	d.checked.Store(now())
	old := d.rules.Load()
	epoch, path := d.t.epoch.Load(), ""
	if up != nil {
		path = joinRel(up.path, d.name)
	}

	var st unix.Statx_t
	var own stamp
	if statAt(d.host, ".gitignore", &st) == nil && isRegular(&st) {
		own = stampOf(&st)
	}
	git, stamps := d.look()
	defer git.close()
	var ice *sentry.ViewDir
	switch {
	case d.parent == nil:
		ice = d.t.snapshot.Root()
	case old != nil && old.parent == up && old.epoch == epoch:
		ice = old.ice
	default:
		ice = up.ice.Child(d.name)
	}
	isRoot := d.parent == nil || stamps.kind != route.None
	var index *indexState
	repo := (*liveRepo)(nil)
	switch {
	case !isRoot:
		repo = up.repo
	case old != nil && old.repo != nil && (d.parent == nil || old.config.kind != route.None):
		repo = old.repo
	default:
		repo = &liveRepo{}
	}
	inside := "" // path from the repository's root
	if isRoot {
		index = repo.load(git, ice)
	} else {
		index = repo.state.Load()
		inside = joinRel(up.live.Path(), d.name)
	}
	if old != nil && old.epoch == epoch && old.parent == up && old.own == own && old.index == index && old.config == stamps {
		return old
	}
	r := &rules{t: d.t, path: path, epoch: epoch, parent: up, own: own, index: index, config: stamps, repo: repo, id: d.t.lastRules.Add(1)}
	if old != nil && own.size <= maxPastBytes && old.own.size <= maxPastBytes {
		r.past = append([]past{{old.live, old.ice, old.index, old.changed}}, old.past[:min(len(old.past), maxPast-1)]...)
	}
	if up != nil {
		r.changed = up.changed
	}
	if own != (stamp{}) {
		if old != nil && old.own == own {
			r.ownRules = old.ownRules
		} else {
			r.ownRules = d.parseOwn(&st)
		}
		r.changed = later(r.changed, own.ctime)
	} else if index != nil && index.set.RulesElsewhere(inside) {
		r.ownRules = ignore.Unknown()
	}
	if isRoot {
		info, fold := git.info(d, ice)
		r.live = ignore.Root(ignore.Config{FoldCase: fold, Excludes: d.t.excludes, Info: info, Own: r.ownRules})
	} else {
		r.live = up.live.Child(d.name, r.ownRules)
	}
	r.ice = ice
	d.rules.Store(r)
	return r
}

func later(a, b unix.StatxTimestamp) unix.StatxTimestamp {
	if b.Sec > a.Sec || b.Sec == a.Sec && b.Nsec > a.Nsec {
		return b
	}
	return a
}

// parseRules reads a rule file. One that cannot be read hides everything: it may hold rules.
func parseRules(dirfd int, name string) *ignore.Patterns {
	b, _, err := readFile(dirfd, name, maxRuleFile)
	switch err {
	case nil:
		return ignore.Parse(b)
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EINVAL:
		return nil // Git does not read these either
	}
	return ignore.Unknown()
}

// info returns the rules of the repository's info/exclude and whether it compares without regard to case. ice is what
// the snapshot knows of the repository, for one that cannot be read from here.
func (r repository) info(d *dir, ice *sentry.ViewDir) (info *ignore.Patterns, fold bool) {
	if r.common < 0 {
		info, fold, _, _ = ice.Repository()
		return info, fold
	}
	fold = r.foldsCase()
	dir, err := openPath(r.common, "info", unix.O_DIRECTORY)
	switch err {
	case nil:
	case unix.ENOENT:
		return nil, fold
	default: // perhaps a link, which Git follows
		return r.linkedInfo(d), fold
	}
	defer unix.Close(dir)
	var st unix.Statx_t
	if statAt(dir, "exclude", &st) == nil && isLink(&st) {
		return r.linkedInfo(d), fold
	}
	return parseRules(dir, "exclude"), fold
}

// linkedInfo stands for an info/exclude behind a symbolic link, which leads out of what this process sees. The
// supervisor has read the root repository's.
func (r repository) linkedInfo(d *dir) *ignore.Patterns {
	if d.parent == nil && d.t.ws.Info != nil {
		return ignore.Parse(d.t.ws.Info)
	}
	return ignore.Unknown()
}

// parseOwn reads the directory's own rule file within the budget that all of them share.
func (d *dir) parseOwn(st *unix.Statx_t) *ignore.Patterns {
	cost := int64(st.Size)
	used := d.t.ruleBytes.Add(cost - d.ruleBytes)
	d.ruleBytes = cost
	if used > maxRuleBytes {
		return ignore.Unknown()
	}
	return parseRules(d.host, ".gitignore")
}

// look opens the repository whose work tree's root is d, if there is one, and asks for the state of its files.
func (d *dir) look() (r repository, s repoStamps) {
	r = repository{-1, -1}
	var st unix.Statx_t
	if statAt(d.host, ".git", &st) != nil {
		return r, s
	}
	s.kind = route.HostOf(uint32(st.Mode))
	s.dotGit.id = identOf(&st)
	if r = d.openRepository(s.kind); r.common < 0 {
		return r, s
	}
	if statAt(r.common, "config", &st) == nil {
		s.config = stampOf(&st)
	}
	if f, err := openPath(r.common, "info", unix.O_DIRECTORY); err == nil {
		if statAt(f, "exclude", &st) == nil {
			s.exclude = stampOf(&st)
		}
		unix.Close(f)
	}
	return r, s
}

// load reads the repository's index when it has changed. A broken or unreadable index keeps the last good set, and so
// does one that cannot be reached from here, whose first good set is the snapshot's.
func (l *liveRepo) load(r repository, ice *sentry.ViewDir) *indexState {
	l.mu.Lock()
	defer l.mu.Unlock()
	have := l.state.Load()
	if have == nil && r.gitdir < 0 {
		if _, _, tracked, ok := ice.Repository(); ok {
			have = &indexState{set: tracked}
			l.state.Store(have)
		}
	}
	var st unix.Statx_t
	if r.gitdir < 0 || statAt(r.gitdir, "index", &st) != nil || !isRegular(&st) {
		return have
	}
	if have != nil && have.stamp == stampOf(&st) && have.shared == sharedStamp(r.gitdir, have.set) {
		return have
	}
	next := &indexState{stamp: stampOf(&st), set: nothing}
	if have != nil {
		next.set = have.set
	}
	if b, st, err := readFile(r.gitdir, "index", gitindex.MaxIndex); err == nil {
		next.stamp = stampOf(&st)
		if set, err := parseIndex(b, r.gitdir); err == nil {
			next.set = set
		}
	}
	next.shared = sharedStamp(r.gitdir, next.set) // a damaged state is remembered too: it is not parsed at every look
	l.state.Store(next)
	return next
}

// sharedStamp is the state of the shared part of a split index; zero without one.
func sharedStamp(gitdir int, set *gitindex.Set) stamp {
	var st unix.Statx_t
	if name := set.SharedName(); name == "" || statAt(gitdir, name, &st) != nil {
		return stamp{}
	}
	return stampOf(&st)
}

// hidden says how name is hidden.
func (r *rules) hidden(name string) hide {
	if h, ok := r.t.verdicts.get(r.id, name); ok {
		return h
	}
	h := r.decide(name)
	r.t.verdicts.put(r.id, strings.Clone(name), h)
	return h
}

func (r *rules) decide(name string) hide {
	var h hide
	if file, directory := r.t.held.Match(r.path, name); file || directory {
		if file {
			h |= holdFile
		}
		if directory {
			h |= holdDir
		}
	}
	if r.t.ws.ShowIgnored {
		return h
	}
	set := r.index.tracked()
	live := hide(sentry.Decide(r.live, set, name))
	if name == ".gitignore" {
		live &^= hideFile // tools hide their own cache, rule file included; it must stay in force inside too
	}
	frozen := hide(r.ice.Hidden(name))
	h |= (live | frozen) & (hideFile | hideDir | mergeDir)
	if h&hideDir != 0 {
		h &^= mergeDir
	}
	if live&hideFile != 0 && frozen&hideFile == 0 {
		h |= liveOnly
	}
	if frozen&(hideFile|hideDir) != 0 && live&(hideFile|hideDir) == 0 {
		if p := joinRel(r.live.Path(), name); set.Tracked(p) || set.HasTrackedBelow(p) {
			h |= newlyTracked
		}
	}
	return h
}

var nothing = &gitindex.Set{}

// tracked is what the repository tracks now; nothing if that is not known, which hides what a rule ignores.
func (i *indexState) tracked() sentry.Tracked {
	if i == nil {
		return nothing
	}
	return i.set
}

// maxPast is how many changes of the rules a file may lie back and still be kept for the agent.
const maxPast = 8

// past is an earlier state of a directory's rules.
type past struct {
	live    *ignore.Dir
	ice     *sentry.ViewDir
	index   *indexState
	changed unix.StatxTimestamp
}

// hid reports whether the state hid the file name.
func (p *past) hid(name string) bool {
	return (sentry.Decide(p.live, p.index.tracked(), name)|p.ice.Hidden(name))&sentry.HideFile != 0
}

// showed reports whether a file called name, last changed at ctime, was visible under an earlier state: one that was
// replaced after that time. A secret that comes with or after its rule was never visible.
func (r *rules) showed(name string, ctime unix.StatxTimestamp) bool {
	replaced := r.changed
	for i := range r.past {
		if later(ctime, replaced) != ctime && !r.past[i].hid(name) {
			return true
		}
		replaced = r.past[i].changed
	}
	return false
}
