package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/compose"
	"lazaret.dev/lazaret/overlay/gc"
	"lazaret.dev/lazaret/overlay/image"
)

// storageNamespaces are those of the role "storage": images and State Anchors hold files of all the Domain's ids.
const storageNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID

// storageRequest is what a command asks of the role "storage".
type storageRequest struct {
	Op      string
	Plan    Plan     // Dirs and ids at least
	Environ []string // of a pull
	Image   string   // a reference
	Own     bool     // import without Podman
	Path    string   // of an anchor; empty: all
	Name    string   // of a snapshot
	Keep    bool     // after a snapshot: it stays over the present base
	Limit   int      // of a list of differences
	GC      GCOptions
	Stage   string // an empty directory
}

// storageEvent is what the role tells; its result goes through a pipe, as it may be large.
type storageEvent struct {
	Line   string // progress
	Done   bool
	Failed *Failure
}

// storage is the state of the role.
type storage struct {
	req     storageRequest
	control *nsenter.Conn
	usr     *os.File // see domain.usr
}

// StorageMain is the role "storage": one command on images, State Anchors or leftovers, as uid 0 of a namespace with the
// Domains' id map. It ends with the command that started it.
func StorageMain(self nsenter.Self) int {
	s := &storage{control: self.Control}
	files, err := self.Control.Recv(&s.req)
	if err != nil || len(self.Files) != 1 {
		return 1
	}
	if len(files) > 0 {
		s.usr = files[0]
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		_, _ = self.Control.Recv(new(storageEvent)) // a message or the end: stop
		cancel(errStopped)
	}()
	result, err := s.run(ctx)
	if err == nil {
		err = json.NewEncoder(self.Files[0]).Encode(result)
	}
	self.Files[0].Close()
	_ = self.Control.Send(storageEvent{Done: true, Failed: asFailure(explainStorage(err))})
	if err != nil {
		return 1
	}
	return 0
}

var errStopped = errors.New("stopped on request")

func (s *storage) run(ctx context.Context) (any, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return nil, fmt.Errorf("mount proc: %w", err)
	}
	// Podman keeps its locks there under the developer's uid; ours would be a subordinate id's, and lock out their own Podman.
	if err := unix.Mount("lazaret", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=16m"); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("mount a private /dev/shm: %w", err)
	}
	switch s.req.Op {
	case "image pull", "image ls", "image rm":
		return s.onImages(ctx)
	case "anchor ls":
		return s.listAnchors()
	case "gc":
		return s.collect(ctx)
	}
	return s.onAnchor()
}

// Write passes progress on, a line at a time; see image.PullOptions.
func (s *storage) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimRight(line, "\r\n"); line != "" {
			_ = s.control.Send(storageEvent{Line: line}) // nobody is there: the pull goes on until it is stopped
		}
	}
	return len(b), nil
}

// PulledImage is the result of a pull.
type PulledImage struct {
	image.Record
	Changed bool `json:"changed"` // the reference meant another image before, or none
}

func (s *storage) onImages(ctx context.Context) (any, error) {
	store, err := image.Open(imageConfig(s.req.Plan))
	if err != nil {
		return nil, err
	}
	defer store.Close()
	switch s.req.Op {
	case "image pull":
		rec, changed, err := store.Pull(ctx, s.req.Image, image.PullOptions{Progress: s, Environ: s.req.Environ, Own: s.req.Own, Now: time.Now()})
		return PulledImage{rec, changed}, err
	case "image rm":
		ctx, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		return nil, store.Remove(ctx, s.req.Image)
	}
	return store.List()
}

// AnchorInfo describes a State Anchor.
type AnchorInfo struct {
	anchor.Info
	Bytes   int64 `json:"bytes"`        // on disk, snapshots included
	Another bool  `json:"base_changed"` // it was written over another base than the profile's present one
}

func (s *storage) listAnchors() ([]AnchorInfo, error) {
	infos, err := anchor.List(domainRoot(s.req.Plan))
	if err != nil {
		return nil, err
	}
	now, err := s.presentBase()
	out := []AnchorInfo{}
	for _, i := range infos {
		u, uerr := i.Usage()
		if uerr != nil {
			return nil, uerr
		}
		out = append(out, AnchorInfo{i, u.Bytes, err == nil && i.Meta != nil && i.Meta.Base.Key != now.Key})
	}
	return out, nil // an image that was removed hides no anchor
}

// presentBase names the base that the profile has now, without composing it.
func (s *storage) presentBase() (anchor.Base, error) {
	p := s.req.Plan
	if p.Profile.Image == hostImage {
		return hostBaseID(), nil
	}
	store, err := image.Open(imageConfig(p))
	if err != nil {
		return anchor.Base{}, err
	}
	defer store.Close()
	rec, err := store.Resolve(p.Profile.Image)
	return imageBaseID(rec), err
}

func (s *storage) onAnchor() (any, error) {
	p, req := s.req.Plan, s.req
	infos, err := anchor.List(domainRoot(p))
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(infos, func(i anchor.Info) bool { return i.Path == req.Path }) {
		return nil, refusal(fmt.Sprintf("State Anchor %q: there is none in this Domain", req.Path), "lazaret anchor ls lists them; --profile and --workspace name another Domain")
	}
	if req.Op == "anchor diff" {
		return s.diff()
	}
	a, err := anchor.Lock(domainRoot(p), req.Path)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	switch req.Op {
	case "anchor reset":
		return nil, a.Reset()
	case "anchor snapshot":
		if err := a.Snapshot(req.Name); err != nil || !req.Keep {
			return nil, err
		}
		fallthrough
	case "anchor keep":
		b, err := s.presentBase()
		if err != nil {
			return nil, err
		}
		return nil, a.Keep(b)
	case "anchor restore":
		return nil, a.Restore(req.Name)
	case "anchor drop":
		return nil, a.DropSnapshot(req.Name)
	}
	return nil, fmt.Errorf("the role \"storage\" has no operation %q", req.Op)
}

// diff compares an anchor with the profile's present base.
func (s *storage) diff() (anchor.Report, error) {
	p := s.req.Plan
	if err := unix.Mount("lazaret", s.req.Stage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size=64m"); err != nil {
		return anchor.Report{}, fmt.Errorf("mount tmpfs on %s: %w", s.req.Stage, err)
	}
	dir, scratch := filepath.Join(s.req.Stage, "base"), filepath.Join(s.req.Stage, "scratch")
	for _, d := range []string{dir, scratch} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return anchor.Report{}, err
		}
	}
	b, err := openBase(p, dir, s.usr, []compose.Point{{Path: s.req.Path}})
	if err != nil {
		return anchor.Report{}, err
	}
	lowers := []string{filepath.Join(b.root, s.req.Path)}
	if b.root == "" {
		if lowers, err = anchor.SubLowers(b.layers, s.req.Path); err != nil {
			return anchor.Report{}, err
		}
	}
	name, err := anchor.Escape(s.req.Path)
	if err != nil {
		return anchor.Report{}, err
	}
	return anchor.Diff(filepath.Join(domainRoot(p), "anchors", name), lowers, s.req.Limit, scratch)
}

// GCOptions are those of lazaret gc.
type GCOptions struct {
	DryRun bool
	State  []string // Domain IDs or workspaces whose persistent state goes
	Force  bool     // also while the workspace exists
	Images bool     // also recorded images that no profile names
	InUse  []string // references that profiles name
	FailAt string   // tests: the step before which it kills itself
}

// GCReport is what gc found and did.
type GCReport struct {
	DryRun  bool     `json:"dry_run"`
	Actions []GCItem `json:"actions"`
}

// GCItem is one thing that can go.
type GCItem struct {
	gc.Action
	Workspace string `json:"workspace,omitempty"` // of a Domain's
	Done      bool   `json:"done"`
	Left      bool   `json:"left,omitempty"` // it came to life meanwhile
	Error     string `json:"error,omitempty"`
}

func (s *storage) collect(ctx context.Context) (*GCReport, error) {
	p, opt := s.req.Plan, s.req.GC
	c := gc.Config{Run: p.Dirs.Runtime, Scratch: []string{p.Dirs.transients()}, Domains: p.Dirs.domains(),
		Workspace: func(root string) string { return readDomainRecord(root).Workspace }}
	if opt.FailAt != "" {
		c.Hook = func(step string) {
			if step == opt.FailAt {
				os.Exit(1) // pid 1 of its namespace: nothing of it runs on
			}
		}
	}
	if _, err := os.Stat(imageConfig(p).Root); err == nil {
		if c.Store, err = image.Open(imageConfig(p)); err != nil {
			return nil, err
		}
		defer c.Store.Close()
	}
	f, err := gc.Gather(c)
	if err != nil {
		return nil, err
	}
	o := gc.Options{Force: opt.Force, References: opt.Images, InUse: opt.InUse}
	if o.State, err = stateNamed(f, opt); err != nil {
		return nil, err
	}
	report := &GCReport{DryRun: opt.DryRun, Actions: []GCItem{}}
	index := map[string]int{}
	plan := gc.Plan(f, o)
	for _, a := range plan {
		item := GCItem{Action: a}
		for _, d := range f.Domains {
			if d.ID == a.ID {
				item.Workspace = d.Workspace
			}
		}
		index[string(a.Kind)+a.ID] = len(report.Actions)
		report.Actions = append(report.Actions, item)
	}
	if opt.DryRun {
		return report, nil
	}
	for _, out := range gc.Run(ctx, c, o, plan) {
		item := &report.Actions[index[string(out.Kind)+out.ID]]
		switch {
		case out.Err == nil:
			item.Done = true
		case out.Left():
			item.Left = true
		default:
			item.Error = out.Err.Error()
		}
	}
	return report, nil
}

// stateNamed finds the Domains that --state means, by their ID or their workspace.
func stateNamed(f gc.Facts, o GCOptions) (ids []string, err error) {
	for _, name := range o.State {
		found := false
		for _, d := range f.Domains {
			if !d.HasRoot || d.ID != name && d.Workspace != name {
				continue
			}
			found = true
			switch {
			case d.Live:
				return nil, refusal(fmt.Sprintf("remove the state of %s: its Domain runs", name), "leave its sessions first")
			case !d.Gone && !o.Force:
				return nil, refusal(fmt.Sprintf("remove the state of %s: its workspace %q exists, or is not known", name, d.Workspace), "add --force if all that persists there shall go")
			}
			ids = append(ids, d.ID)
		}
		if !found {
			return nil, refusal(fmt.Sprintf("remove the state of %q: no Domain has that ID or workspace", name), "lazaret gc --dry-run lists what could go")
		}
	}
	return ids, nil
}

// pullEnviron are the variables of the caller that a pull may need; nothing else crosses into the role.
var pullEnviron = []string{"PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "CONTAINERS_CONF", "CONTAINERS_REGISTRIES_CONF",
	"REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR",
	"http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"}

// callStorage runs one command in the role and decodes its result. Ending ctx stops it; a second time is not waited for.
func callStorage(ctx context.Context, req storageRequest, result any, progress func(string)) error {
	for _, dir := range []string{req.Plan.Dirs.Runtime, req.Plan.Dirs.Storage} {
		f, err := PrivateDir(dir)
		if err != nil {
			return err
		}
		f.Close()
	}
	if req.Op == "anchor diff" {
		stage, err := os.MkdirTemp(req.Plan.Dirs.Runtime, stagePrefix)
		if err != nil {
			return err
		}
		defer os.Remove(stage)
		req.Stage = stage
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	p, err := nsenter.Child{Role: "storage", Namespaces: storageNamespaces, IDs: &req.Plan.IDs, Files: []*os.File{w}, Stderr: os.Stderr}.Start()
	w.Close()
	if err != nil {
		if errors.Is(err, nsenter.ErrUserNS) {
			err = hint(err, "%s", nsenter.UserNSHint(nsenter.Sysctl))
		}
		return err
	}
	defer p.End()
	var files []*os.File
	if req.Plan.IDs.Kind == nsenter.MapRoot && req.Op == "anchor diff" {
		if files, err = usrOfRoot(); err != nil {
			return err
		}
		defer nsenter.CloseAll(files)
	}
	if err := p.Control.Send(req, files...); err != nil {
		return fmt.Errorf("start storage process: %w", err)
	}
	data := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(r)
		data <- b
	}()
	stop := context.AfterFunc(ctx, func() {
		_ = p.Control.Send(storageEvent{Done: true})
		time.AfterFunc(stopPatience, func() { _ = p.Kill() })
	})
	defer stop()
	for {
		var ev storageEvent
		files, err := p.Control.Recv(&ev)
		nsenter.CloseAll(files)
		switch {
		case err != nil:
			if ctx.Err() != nil {
				err = errStopped
			}
			return fmt.Errorf("%s: %w", req.Op, err)
		case ev.Failed != nil:
			return ev.Failed
		case ev.Done:
			if b := <-data; result != nil {
				return json.Unmarshal(b, result)
			}
			return nil
		case progress != nil:
			progress(ev.Line)
		}
	}
}

const stagePrefix = ".stage-"

// removeStages removes the empty directories of killed commands. One that is in use is a mount point, which would go too
// (rmdir(2)): only old ones are taken.
func removeStages(d Dirs) {
	old, _ := filepath.Glob(filepath.Join(d.Runtime, stagePrefix+"*"))
	for _, dir := range old {
		if st, err := os.Lstat(dir); err == nil && time.Since(st.ModTime()) > time.Hour {
			_ = os.Remove(dir)
		}
	}
}

// stopPatience is how long a stopped command may take to put its things in order.
const stopPatience = 15 * time.Second
