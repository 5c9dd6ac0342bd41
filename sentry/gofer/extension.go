// Package gofer serves an Agent Workspace to gVisor: it is a lisafs server that routes each name to the developer's work
// tree (H) or to its private twin (P), as package route decides.
//
// It runs inside the gofer process of lazaret-runsc, registered through gVisor's extension hook by [Register], chrooted
// and behind gVisor's seccomp filter. What it keeps true whatever the sandbox sends:
//
//   - It works below descriptors, one component at a time, and follows no symbolic link; there are no string paths to
//     race against. A control FD stands for a file by an O_PATH descriptor, never by a path that is looked up again.
//   - It gives away descriptors of regular files alone. It refuses the whole mount if gVisor would serve it with directfs,
//     where the Sentry opens files by itself.
//   - Asking whether a name may be made and making it are one step: lisafs holds the directory exclusively for creations
//     and the whole tree for renames, and every lookup in a directory is made under its lock.
//   - Descriptors and memory are bounded by what the client holds, which RLIMIT_NOFILE and gVisor's dentry cache bound,
//     plus [maxCachedDirs] directories, a fixed number of verdicts and a budget for rule files.
//
// # Where its orders come from
//
// The plan ([sentry.Plan]) is a file named by [sentry.PlanEnv]. [Register] reads it, and opens each workspace's private
// twin, in the first moments of the gofer process, when the host's paths are still there; the sandbox process never runs
// that code and gets an empty environment. Should gVisor re-execute the gofer, the descriptors travel in a flag.
package gofer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/lisafs"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/fsgofer/extension"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/ignore"
	"lazaret.dev/lazaret/sentry/route"
)

const maxPlan = 64 << 20 // bytes of a plan or snapshot

// workspaceExtension implements extension.Extension.
type workspaceExtension struct {
	plan   *sentry.Plan
	opened []opened // parallel to plan.Workspaces
	state  string   // flag for a re-executed gofer: JSON of carried
	self   int      // /proc/self/fd, -1 until prepared
	euid   int      // asked before the filter
}

// opened is what Register found by the host's paths.
type opened struct {
	Private  int // descriptor of Workspace.Private
	Gitdir   int // descriptors of Workspace.Repository and Workspace.Common, -1 without
	Common   int
	Dev, Ino uint64
	Snapshot int // descriptor of the snapshot file
	Denials  int // descriptor of the list of refusals, for appending; -1 if it cannot be had
}

// carried travels through the re-execution.
type carried struct {
	Plan   *sentry.Plan
	Opened []opened
}

// Register registers the workspace server if this process is a gofer; args is os.Args. It must be called before gVisor's
// own main. An unreadable plan is reported when the gofer prepares, which fails the container.
func Register(args []string) {
	gofer := false
	for _, a := range args {
		gofer = gofer || a == "gofer"
	}
	if !gofer {
		return
	}
	e := &workspaceExtension{self: -1}
	if err := e.open(os.Getenv(sentry.PlanEnv)); err != nil {
		fmt.Fprintf(os.Stderr, "lazaret-runsc: error: %v\n", err)
		os.Exit(128)
	}
	os.Unsetenv(sentry.PlanEnv) // a re-executed gofer has the flag instead
	extension.Register(e)
}

func (e *workspaceExtension) open(name string) error {
	if name == "" {
		return nil
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("open workspace plan: %w", err)
	}
	if e.plan, err = sentry.ParsePlan(b); err != nil {
		return err
	}
	for i := range e.plan.Workspaces {
		ws := &e.plan.Workspaces[i]
		var st unix.Stat_t
		if err := unix.Lstat(ws.Host, &st); err != nil {
			return fmt.Errorf("look at workspace %q: %w", ws.Host, err)
		}
		p, err := unix.Open(ws.Private, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open private twin %q: %w", ws.Private, err)
		}
		o := opened{Private: p, Gitdir: -1, Common: -1, Dev: st.Dev, Ino: st.Ino, Snapshot: -1, Denials: openDenials(p)}
		for dir, fd := range map[string]*int{ws.Repository: &o.Gitdir, ws.Common: &o.Common} {
			if dir == "" {
				continue
			}
			if *fd, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
				return fmt.Errorf("open repository directory %q: %w", dir, err)
			}
		}
		if !ws.ShowIgnored {
			if o.Snapshot, err = unix.Openat(p, sentry.SnapshotFile, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
				return fmt.Errorf("open snapshot of workspace %q: %w", ws.Host, err)
			}
		}
		e.opened = append(e.opened, o)
	}
	return nil
}

// openDenials opens the list of refusals. A long one starts afresh: it is for looking at, not for keeping.
func openDenials(private int) int {
	fd, err := unix.Openat(private, sentry.DenialsFile, unix.O_WRONLY|unix.O_CREAT|unix.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1
	}
	var st unix.Stat_t
	var dir unix.Stat_t
	if unix.Fstat(fd, &st) == nil && st.Size > sentry.MaxDenials {
		_ = unix.Ftruncate(fd, 0)
	}
	if unix.Fstatat(private, "", &dir, unix.AT_EMPTY_PATH) == nil && dir.Uid != st.Uid {
		_ = unix.Fchown(fd, int(dir.Uid), int(dir.Gid)) // the developer removes it with the Domain
	}
	return fd
}

// Name implements extension.Extension.Name.
func (e *workspaceExtension) Name() string { return "lazaret-workspace" }

// SeccompRules implements extension.Extension.SeccompRules: hard links are made from descriptors, through /proc/self/fd.
func (e *workspaceExtension) SeccompRules() seccomp.SyscallRules {
	return seccomp.MakeSyscallRules(map[uintptr]seccomp.SyscallRule{
		unix.SYS_LINKAT: seccomp.PerArg{
			seccomp.NonNegativeFD{},
			seccomp.AnyValue{},
			seccomp.NonNegativeFD{},
			seccomp.AnyValue{},
			seccomp.EqualTo(unix.AT_SYMLINK_FOLLOW),
		},
	})
}

// SetFlags adds the flag that carries descriptors through a re-execution.
func (e *workspaceExtension) SetFlags(f *flag.FlagSet) {
	f.StringVar(&e.state, "lazaret-workspaces", "", "state of the workspace server, from the process before its re-execution")
}

// PrepareGofer runs before the gofer gives up its privileges and its view of /proc.
func (e *workspaceExtension) PrepareGofer(ctx extension.GoferPrepareContext) (extension.GoferPrepareResult, error) {
	var none extension.GoferPrepareResult
	if e.state != "" {
		var c carried
		if err := json.Unmarshal([]byte(e.state), &c); err != nil {
			return none, fmt.Errorf("read carried workspace state: %w", err)
		}
		e.plan, e.opened = c.Plan, c.Opened
	}
	want, err := strconv.Atoi(ctx.Spec.Annotations[sentry.RequiredAnnotation])
	if err != nil && ctx.Spec.Annotations[sentry.RequiredAnnotation] != "" {
		return none, fmt.Errorf("annotation %s: %w", sentry.RequiredAnnotation, err)
	}
	have := 0
	if e.plan != nil {
		have = len(e.plan.Workspaces)
	}
	if want != have {
		return none, fmt.Errorf("the bundle asks for %d workspaces and the plan has %d", want, have)
	}
	if e.plan == nil {
		return none, nil
	}
	if e.self, err = unix.Open(procSelfFD(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return none, fmt.Errorf("open /proc/self/fd: %w", err)
	}
	e.euid = unix.Geteuid()
	b, err := json.Marshal(carried{e.plan, e.opened})
	if err != nil {
		return none, err
	}
	for _, o := range e.opened {
		for _, fd := range []int{o.Private, o.Snapshot, o.Gitdir, o.Common, o.Denials} {
			if fd < 0 {
				continue
			}
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
				return none, fmt.Errorf("keep descriptor: %w", err)
			}
		}
	}
	return extension.GoferPrepareResult{FlagOverrides: map[string]string{"lazaret-workspaces": string(b)}}, nil
}

// procSelfFD is a mount of /proc/self/fd alone where gVisor has made one: from there, ".." leads nowhere.
func procSelfFD() string {
	var st unix.Statfs_t
	if unix.Statfs("/proc/fs", &st) == nil && st.Type == unix.PROC_SUPER_MAGIC {
		var self unix.Stat_t
		if unix.Stat("/proc/fs/0", &self) == nil {
			return "/proc/fs"
		}
	}
	return "/proc/self/fd"
}

// TryHandleMount implements extension.Extension.TryHandleMount. It runs behind the filter, in the final root.
func (e *workspaceExtension) TryHandleMount(spec *specs.Spec, mount *specs.Mount, mountPath string, readonly bool) (lisafs.ConnectionImpl, lisafs.ConnectionOpts, error) {
	var none lisafs.ConnectionOpts
	if mount == nil || e.plan == nil {
		return nil, none, nil
	}
	for i := range e.plan.Workspaces {
		ws := &e.plan.Workspaces[i]
		at, from := path.Clean(mount.Destination) == ws.Mount, path.Clean(mount.Source) == ws.Host
		if !at && !from {
			continue
		}
		if !at || !from {
			return nil, none, fmt.Errorf("mount of %q at %q: the plan has %q at %q", mount.Source, mount.Destination, ws.Host, ws.Mount)
		}
		if err := lisafsAlone(spec, mount); err != nil {
			return nil, none, err
		}
		t, err := e.newTree(ws, e.opened[i], mountPath)
		if err != nil {
			return nil, none, fmt.Errorf("serve workspace %q: %w", ws.Host, err)
		}
		return &connection{t: t}, t.options(readonly), nil
	}
	return nil, none, nil
}

// lisafsAlone fails unless the Sentry, reading the same annotations with the same code, serves the mount without
// directfs and revalidates what it caches.
func lisafsAlone(spec *specs.Spec, mount *specs.Mount) error {
	hints, err := boot.NewPodMountHints(spec)
	if err != nil {
		return fmt.Errorf("read mount annotations: %w", err)
	}
	hint := hints.FindMount(mount.Source)
	switch {
	case hint == nil:
		return errors.New("the workspace mount has no valid annotation: directfs would be on")
	case !hint.SuppressDirectFS:
		return errors.New("directfs is on for the workspace mount")
	case hint.Share.String() != "shared":
		return fmt.Errorf("the workspace mount is %s, not shared: the sandbox would not see the host's changes", hint.Share)
	}
	return nil
}

func (e *workspaceExtension) newTree(ws *sentry.Workspace, o opened, mountPath string) (*tree, error) {
	host, err := unix.Openat2(unix.AT_FDCWD, mountPath, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", mountPath, err)
	}
	var st unix.Statx_t
	if err := statAt(host, "", &st); err != nil {
		return nil, err
	}
	if st.Ino != o.Ino || unix.Mkdev(st.Dev_major, st.Dev_minor) != o.Dev {
		return nil, errors.New("what is mounted is not the directory that the plan names")
	}
	snapshot := &sentry.Snapshot{Version: sentry.SnapshotVersion}
	if o.Snapshot >= 0 {
		b, err := readAll(o.Snapshot, maxPlan)
		if err != nil {
			return nil, fmt.Errorf("read snapshot: %w", err)
		}
		if snapshot, err = sentry.ParseSnapshot(b); err != nil {
			return nil, err
		}
	}
	t, err := newTree(ws, host, o.Private, e.self, e.euid, snapshot)
	if err == nil {
		t.gitdir, t.common, t.denials = o.Gitdir, o.Common, newDenials(o.Denials)
	}
	return t, err
}

// newTree makes the tree of a workspace from descriptors, which it owns from here on: the host directory, the directory
// of the private twin, and /proc/self/fd.
func newTree(ws *sentry.Workspace, host, private, self, euid int, snapshot *sentry.Snapshot) (*tree, error) {
	held, err := route.NewHeld(ws.Held, ws.HeldPaths)
	if err != nil {
		return nil, err
	}
	view, err := snapshot.View()
	if err != nil {
		return nil, err
	}
	var st unix.Statx_t
	if err := statAt(host, "", &st); err != nil {
		return nil, err
	}
	t := &tree{ws: ws, held: held, self: self, owner: st.Uid, group: st.Gid, snapshot: view, verdicts: newVerdictCache(),
		gitdir: -1, common: -1, excludes: ignore.Parse(ws.Excludes)}
	t.chown = euid != int(st.Uid)
	twin, err := t.ownDir(private, sentry.TreeDir)
	if err != nil {
		return nil, fmt.Errorf("open private tree: %w", err)
	}
	if t.meta, err = t.ownDir(private, sentry.TempDir); err != nil {
		return nil, fmt.Errorf("open private store: %w", err)
	}
	names, _, err := readNames(t.meta, maxSeedEntries)
	if err != nil && err != unix.EFBIG {
		return nil, err
	}
	for _, name := range names {
		t.removeTree(t.meta, name, 0) // half-made copies of a gofer that died
	}
	zone := route.Work
	if ws.GitDir {
		zone = route.Gitdir
	}
	t.newRoot(host, twin, identOf(&st), zone)
	return t, nil
}

// ownDir opens the directory name in dir, and makes it if it is not there.
func (t *tree) ownDir(dir int, name string) (int, error) {
	if err := unix.Mkdirat(dir, name, 0o700); err == nil {
		if err := t.own(dir, name); err != nil {
			return -1, err
		}
	} else if err != unix.EEXIST {
		return -1, err
	}
	return openPath(dir, name, unix.O_DIRECTORY)
}

func (t *tree) options(readonly bool) lisafs.ConnectionOpts {
	return lisafs.ConnectionOpts{
		Readonly:          readonly,
		WalkStatSupported: true, // WalkStat works below descriptors and keeps its own locks
		SetAttrOnDeleted:  true, // and a control FD is a descriptor, not a path
		AllocateOnDeleted: true,
		OpenOnDeleted:     true,
	}
}

// connection implements lisafs.ConnectionImpl for one workspace.
type connection struct{ t *tree }

// Mount implements lisafs.ConnectionImpl.Mount. It never gives a descriptor away: a Sentry that expects one for directfs
// fails there.
func (c *connection) Mount(conn *lisafs.Connection, at *lisafs.Node) (*lisafs.ControlFD, lisafs.Statx, int, error) {
	t := c.t
	var st unix.Statx_t
	if err := t.root.stat(&st); err != nil {
		return nil, lisafs.Statx{}, -1, err
	}
	n := &node{t: t, self: t.ref(t.root)}
	n.fd.Store(packed(-1, false))
	at.IncRef()
	n.ControlFD.Init(conn, at, unix.S_IFDIR, n)
	return n.FD(), t.shown(&st), -1, nil
}

// MaxMessageSize implements lisafs.ConnectionImpl.MaxMessageSize.
func (c *connection) MaxMessageSize() uint32 { return lisafs.MaxMessageSize() }

// SupportedMessages implements lisafs.ConnectionImpl.SupportedMessages. Without the socket messages the client would
// fall back to the stock answers; they are listed and refused.
func (c *connection) SupportedMessages() []lisafs.MID {
	return []lisafs.MID{
		lisafs.Mount, lisafs.Channel, lisafs.FStat, lisafs.SetStat, lisafs.Walk, lisafs.WalkStat, lisafs.OpenAt,
		lisafs.OpenCreateAt, lisafs.Close, lisafs.FSync, lisafs.PWrite, lisafs.PRead, lisafs.MkdirAt, lisafs.MknodAt,
		lisafs.SymlinkAt, lisafs.LinkAt, lisafs.FStatFS, lisafs.FAllocate, lisafs.ReadLinkAt, lisafs.Connect,
		lisafs.UnlinkAt, lisafs.RenameAt, lisafs.Getdents64, lisafs.FGetXattr, lisafs.FSetXattr, lisafs.FListXattr,
		lisafs.FRemoveXattr, lisafs.BindAt, lisafs.Listen, lisafs.Accept, lisafs.ConnectWithCreds, lisafs.RenameAt2,
	}
}
