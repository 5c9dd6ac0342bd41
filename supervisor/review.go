package supervisor

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/review"
)

// Names in the Domain Root.
const (
	baselineFile = "baseline.json" // savedBaseline
	reviewedFile = "reviewed.json" // what the developer has been shown: review.Seen by reviewKey
)

// WorkspaceOptions are those of the lazaret workspace commands.
type WorkspaceOptions struct {
	Profile   string
	Workspace string   // as in EnterOptions
	Paths     []string // relative to the current directory, or absolute; a directory stands for all below it
	Yes       bool     // do not ask
	Force     bool     // apply what was not reviewed
	JSON      bool

	Out io.Writer
	Ask func(question string) (bool, error) // nil if nobody can be asked
}

// remembered is the workspace as a Domain found it.
type remembered struct {
	started  time.Time
	baseline *review.Baseline // as the Domain found it

	mu     sync.Mutex
	status *review.Status   // as the developer knows it
	told   *review.Baseline // likewise
}

// savedBaseline outlives the Domain, for lazaret workspace status.
type savedBaseline struct {
	Started  time.Time
	Baseline *review.Baseline
	Ended    time.Time `json:",omitzero"` // of the last session, with what had changed by then
	Changes  []savedChange
}

// savedChange is a review.Change whose path keeps its bytes in JSON.
type savedChange struct {
	Path []byte
	What string
}

// reviewed is an open view of a Domain's workspace.
type reviewed struct {
	plan   Plan
	setup  *workspaceSetup
	trees  []*review.Tree // of the workspace first
	gitdir *os.File       // see review.Tree.Repos
}

func openReview(p Plan, setup *workspaceSetup) (*reviewed, error) {
	r := &reviewed{plan: p, setup: setup}
	for i, s := range p.Served {
		host, err := s.Open()
		if err != nil {
			r.Close()
			return nil, err
		}
		t, err := review.OpenTree(s.Path, host, &setup.plan.Workspaces[i])
		if err != nil {
			r.Close()
			return nil, err
		}
		r.trees = append(r.trees, t)
	}
	if setup.gitdir != "" && !within(setup.gitdir, p.Workspace.Path) {
		f, _, err := openExact(setup.gitdir)
		if err != nil {
			r.Close()
			return nil, err
		}
		r.gitdir = f
	}
	return r, nil
}

// Close releases the descriptors.
func (r *reviewed) Close() {
	for _, t := range r.trees {
		t.Close()
	}
	if r.gitdir != nil {
		r.gitdir.Close()
	}
}

func (r *reviewed) status() *review.Status { return review.Take(r.trees, r.gitdir) }

// remember looks at the workspace before the agent does, and saves the baseline. Without it there is only less to report,
// so a failure is said in the status alone.
func remember(p Plan, setup *workspaceSetup) *remembered {
	r, err := openReview(p, setup)
	if err != nil {
		return nil
	}
	defer r.Close()
	m := &remembered{started: time.Now(), status: r.status(), baseline: r.trees[0].Baseline()}
	m.told = m.baseline
	_ = saveBaseline(p, &savedBaseline{Started: m.started, Baseline: m.baseline})
	return m
}

func saveBaseline(p Plan, s *savedBaseline) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return writeAtomic(filepath.Join(domainRoot(p), baselineFile), b)
}

func loadBaseline(p Plan) (*savedBaseline, error) {
	b, err := os.ReadFile(filepath.Join(domainRoot(p), baselineFile))
	if err != nil {
		return nil, err
	}
	var s savedBaseline
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read %s: %w", baselineFile, err)
	}
	return &s, nil
}

// reportPatience is how long the report may keep a session from ending; the sandbox decides how much there is to look at.
const reportPatience = 3 * time.Second

// report is what the developer is told when the last session ends: what is new since the Domain started, or since he was
// told before. Only one call runs at a time.
func (c *coordinator) report(now time.Time) []string {
	if c.before == nil {
		return nil
	}
	done := make(chan []string, 1)
	go func() { done <- c.before.news(c.plan, now) }()
	select {
	case lines := <-done:
		return lines
	case <-time.After(reportPatience):
		return []string{"the workspace has too much to look at for a short report; see: lazaret workspace status"}
	}
}

func (m *remembered) news(p Plan, now time.Time) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	setup, err := setupWorkspace(p)
	if err != nil {
		return []string{fmt.Sprintf("the workspace could not be looked at: %v", err)}
	}
	r, err := openReview(p, setup)
	if err != nil {
		return []string{fmt.Sprintf("the workspace could not be looked at: %v", err)}
	}
	defer r.Close()
	status, baseline := r.status(), r.trees[0].Baseline()
	fresh := status.Since(m.status)
	fresh.Reported = m.told.Changes(baseline)
	m.status, m.told = status, baseline
	saved := &savedBaseline{Started: m.started, Baseline: m.baseline, Ended: now}
	for _, c := range m.baseline.Changes(baseline) {
		saved.Changes = append(saved.Changes, savedChange{[]byte(c.Path), c.What})
	}
	_ = saveBaseline(p, saved) // status then compares with the baseline itself
	return fresh.Brief(now)
}

// openWorkspace opens the workspace of the options for a review.
func openWorkspace(opt WorkspaceOptions) (*reviewed, error) {
	p, err := MakePlan(EnterOptions{Profile: opt.Profile, Workspace: opt.Workspace})
	if err != nil {
		return nil, err
	}
	setup, err := setupWorkspace(p)
	if err != nil {
		return nil, err
	}
	return openReview(p, setup)
}

// running reports whether a Domain of the workspace runs.
func (r *reviewed) running() bool {
	dir, err := os.Open(filepath.Join(r.plan.Dirs.Runtime, r.plan.DomainID))
	if err != nil {
		return false
	}
	defer dir.Close()
	return !lockIsFree(dir)
}

// stopping is how long a sandbox may take to end after its last session.
const stopping = 3 * time.Second

// staysRunning reports whether a Domain runs that is not just ending.
func (r *reviewed) staysRunning() bool {
	for end := time.Now().Add(stopping); r.running(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return true
		}
	}
	return false
}

// WorkspaceStatus prints what is held, reported, private or remarkable.
func WorkspaceStatus(opt WorkspaceOptions) error {
	r, err := openWorkspace(opt)
	if err != nil {
		return err
	}
	defer r.Close()
	s := r.status()
	running := r.running()
	switch b, err := loadBaseline(r.plan); {
	case errors.Is(err, fs.ErrNotExist): // no Domain has run yet
	case err != nil:
		s.Partial = append(s.Partial, err.Error())
	case !running && !b.Ended.IsZero():
		for _, c := range b.Changes {
			s.Reported = append(s.Reported, review.Change{Path: string(c.Path), What: c.What})
		}
	case b.Baseline != nil:
		now := r.trees[0].Baseline()
		s.Reported = b.Baseline.Changes(now)
		s.Partial = append(s.Partial, now.Partial...)
	}
	s.Partial = append(s.Partial, "commits: objects are not read; before you merge or check out the agent's branches, look at: git diff HEAD...BRANCH")
	if opt.JSON {
		b, err := s.JSON(time.Now())
		if err != nil {
			return err
		}
		_, err = opt.Out.Write(b)
		return err
	}
	state := "no sandbox runs"
	if running {
		state = "its sandbox runs"
	}
	fmt.Fprintf(opt.Out, "Workspace %s, profile %s: %s.\n", review.Show(r.plan.Workspace.Path), r.plan.Profile.Name, state)
	s.Write(opt.Out, time.Now())
	return nil
}

// selectItems returns the items that opt.Paths name.
func (r *reviewed) selectItems(opt WorkspaceOptions) ([]*review.Item, error) {
	items := r.status().Items
	if len(opt.Paths) == 0 {
		return items, nil
	}
	cwd, err := canonicalDir(".")
	if err != nil {
		return nil, err
	}
	var out []*review.Item
	for _, arg := range opt.Paths {
		dir := absolute(cwd, arg)
		dir, found := filepath.Clean(dir), false
		for _, i := range items {
			if within(i.Tree.Abs(i.Path), dir) {
				if found = true; !slices.Contains(out, i) {
					out = append(out, i)
				}
			}
		}
		if !found {
			return nil, refusal(fmt.Sprintf("%s: nothing is held or private there", review.Show(arg)), "lazaret workspace status lists what is")
		}
	}
	return out, nil
}

// reviewKey names an item in the record of what was shown.
func reviewKey(i *review.Item) string {
	sum := sha256.Sum256([]byte(string(i.Kind) + "\x00" + i.Tree.Path + "\x00" + i.Path))
	return hex.EncodeToString(sum[:])
}

func (r *reviewed) shown() map[string]review.Seen {
	m := map[string]review.Seen{}
	if b, err := os.ReadFile(filepath.Join(domainRoot(r.plan), reviewedFile)); err == nil {
		_ = json.Unmarshal(b, &m) // what cannot be read was not shown
	}
	return m
}

// show prints the items, and records what was shown.
func (r *reviewed) show(w io.Writer, items []*review.Item) error {
	m := map[string]review.Seen{} // older reviews of other paths are forgotten with what is gone
	old := r.shown()
	for _, i := range r.status().Items {
		if seen, ok := old[reviewKey(i)]; ok {
			m[reviewKey(i)] = seen
		}
	}
	for _, i := range items {
		i.Tree.Review(w, i)
		m[reviewKey(i)] = i.Seen
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return writeAtomic(filepath.Join(domainRoot(r.plan), reviewedFile), b)
}

// WorkspaceReview prints the differences between the host's files and the private copies.
func WorkspaceReview(opt WorkspaceOptions) error {
	r, err := openWorkspace(opt)
	if err != nil {
		return err
	}
	defer r.Close()
	items, err := r.selectItems(opt)
	if err != nil {
		return err
	}
	if len(items) == 0 {
		fmt.Fprintln(opt.Out, "Nothing is held or private.")
		return nil
	}
	return r.show(opt.Out, items)
}

// WorkspaceApply brings private copies to the host: what the developer is shown now, or, unasked, what he was shown before.
func WorkspaceApply(opt WorkspaceOptions) error {
	r, err := openWorkspace(opt)
	if err != nil {
		return err
	}
	defer r.Close()
	items, err := r.selectItems(opt)
	if err != nil {
		return err
	}
	var fit []*review.Item
	for _, i := range items {
		if err := i.CanApply(); err != nil {
			fmt.Fprintf(opt.Out, "%s: %v\n", i.Name(), err)
			continue
		}
		fit = append(fit, i)
	}
	if len(fit) == 0 {
		return refusal("apply: none of it can be applied", "lazaret workspace drop PATH discards what is not wanted")
	}
	shown := r.shown()
	switch {
	case opt.Yes && opt.Force:
	case opt.Yes:
		for _, i := range fit {
			if seen, ok := shown[reviewKey(i)]; !ok || seen != i.Seen {
				what := "it has not been reviewed"
				if ok {
					what = "it has changed since it was reviewed"
				}
				return refusal(fmt.Sprintf("apply %s: %s", i.Name(), what), "lazaret workspace review PATH, then apply again; with --force too, what is there now is applied")
			}
		}
	default:
		if opt.Ask == nil {
			return refusal("apply: nobody can be asked: this is no terminal", "review first, then: lazaret workspace apply --yes PATH…")
		}
		if err := r.show(opt.Out, fit); err != nil {
			return err
		}
		if ok, err := opt.Ask(fmt.Sprintf("Write %s to the host?", count(len(fit), "change"))); err != nil || !ok {
			return err
		}
	}
	for _, i := range fit {
		if err := i.Tree.Apply(i); err != nil {
			switch {
			case errors.Is(err, review.ErrChanged):
				return hint(err, "lazaret workspace review PATH, then apply again")
			default:
				return hint(err, "nothing else was changed; lazaret workspace status shows what is left")
			}
		}
		fmt.Fprintf(opt.Out, "applied %s\n", i.Name())
	}
	return nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// WorkspaceDrop discards private copies; the sandbox sees the host's again.
func WorkspaceDrop(opt WorkspaceOptions) error {
	r, err := openWorkspace(opt)
	if err != nil {
		return err
	}
	defer r.Close()
	items, err := r.selectItems(opt)
	if err != nil {
		return err
	}
	for _, i := range items {
		if i.Dir && !i.Removed {
			if r.staysRunning() {
				return refusal(fmt.Sprintf("drop %s: it is a directory, and the sandbox runs", i.Name()), "leave the sandbox's sessions first")
			}
			break
		}
	}
	for _, i := range items {
		fmt.Fprintf(opt.Out, "%s: %s\n", i.Name(), i.What)
	}
	if !opt.Yes {
		if opt.Ask == nil {
			return refusal("drop: nobody can be asked: this is no terminal", "lazaret workspace drop --yes PATH…")
		}
		if ok, err := opt.Ask(fmt.Sprintf("Discard %s for good?", count(len(items), "private change"))); err != nil || !ok {
			return err
		}
	}
	for _, i := range items {
		if err := i.Tree.Drop(i); err != nil {
			return hint(err, "lazaret workspace status shows what is left")
		}
		fmt.Fprintf(opt.Out, "dropped %s\n", i.Name())
	}
	return nil
}

const maxRescan = 200 // paths of each list

// WorkspaceRescan replaces the consented snapshot of rules and tracked paths, after showing what that exposes.
func WorkspaceRescan(opt WorkspaceOptions) error {
	r, err := openWorkspace(opt)
	if err != nil {
		return err
	}
	defer r.Close()
	ws := &r.setup.plan.Workspaces[0]
	runs := refusal("rescan: the sandbox of this workspace runs", "leave its sessions first; what is hidden is decided when it starts")
	switch {
	case ws.ShowIgnored:
		return refusal("rescan: this profile shows ignored paths (isolate_ignored = false), so no rule hides anything", "set isolate_ignored = true in the profile")
	case r.staysRunning():
		return runs
	}
	file := filepath.Join(ws.Private, sentry.SnapshotFile)
	have, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintln(opt.Out, "There is no snapshot yet: the first lazaret enter takes it.")
		return nil
	}
	if err != nil {
		return err
	}
	old, err := sentry.ParseSnapshot(have)
	if err != nil {
		return err
	}
	next, err := sentry.TakeSnapshot(ws.Mount, r.setup.excludes)
	if err != nil {
		return hint(err, "repair the repository (git status must work), then try again")
	}
	b, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if string(b) == string(have) {
		fmt.Fprintln(opt.Out, "Rules and tracked paths are those that you consented to.")
		return nil
	}
	change, err := compareSnapshots(old, next, ws)
	if err != nil {
		return err
	}
	printRescan(opt.Out, change)
	if !opt.Yes {
		if opt.Ask == nil {
			return refusal("rescan: nobody can be asked: this is no terminal", "lazaret workspace rescan --yes")
		}
		if ok, err := opt.Ask("Let the sandbox follow the rules and tracked paths as they are now?"); err != nil || !ok {
			return err
		}
	}
	release, err := r.claim()
	if errors.Is(err, errBusy) {
		return runs
	}
	if err != nil {
		return err
	}
	defer release()
	if err := writeAtomic(file, b); err != nil {
		return fmt.Errorf("replace the snapshot: %w", err)
	}
	fmt.Fprintln(opt.Out, "The next lazaret enter follows them.")
	return nil
}

// claim holds the Domain's lock, so that none can start.
func (r *reviewed) claim() (release func(), err error) {
	parent, err := PrivateDir(r.plan.Dirs.Runtime)
	if err != nil {
		return nil, err
	}
	parent.Close()
	dir, err := PrivateDir(filepath.Join(r.plan.Dirs.Runtime, r.plan.DomainID))
	if err != nil {
		return nil, err
	}
	lock, err := takeLock(dir)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return func() {
		_ = os.Remove(filepath.Join(dir.Name(), "lock"))
		_ = os.Remove(dir.Name())
		lock.Close()
		dir.Close()
	}, nil
}

func compareSnapshots(old, next *sentry.Snapshot, ws *sentry.Workspace) (*sentry.Rescan, error) {
	host, err := os.OpenRoot(ws.Mount)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	tree := filepath.Join(ws.Private, sentry.TreeDir)
	if err := os.Mkdir(tree, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	twin, err := os.OpenRoot(tree)
	if err != nil {
		return nil, err
	}
	defer twin.Close()
	return sentry.CompareSnapshots(old, next, host, twin, maxRescan)
}

func printRescan(w io.Writer, c *sentry.Rescan) {
	list := func(title string, paths []string) {
		if len(paths) == 0 {
			return
		}
		fmt.Fprintf(w, "%s:\n", title)
		for _, p := range paths {
			dir := ""
			if strings.HasSuffix(p, "/") {
				p, dir = strings.TrimSuffix(p, "/"), "/"
			}
			fmt.Fprintf(w, "    %s%s\n", review.Show(p), dir)
		}
	}
	list("The sandbox would see these paths of the host", c.Appear)
	list("These private paths are no longer ignored. They stay private while they exist; what is made there later lands on the host", c.Land)
	if c.More {
		fmt.Fprintf(w, "    … and more: only the first %d of each are listed\n", maxRescan)
	}
	if len(c.Appear)+len(c.Land) == 0 {
		fmt.Fprintln(w, "No path of the host would become visible; new files follow the rules as they are now.")
	}
}
