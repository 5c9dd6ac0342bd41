package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitconfig"
	"lazaret.dev/lazaret/sentry/route"
)

// Names in the Domain's runtime directory of what the domain process reads besides the Plan: it may be large.
const (
	workspacePlanFile = "workspace.json" // sentry.Plan
	gitConfigFile     = "gitconfig"      // system configuration of the sandbox's Git
	excludesFile      = "excludes"       // copy of the developer's core.excludesFile
)

// excludesInside is where the sandbox finds that copy.
const excludesInside = "/etc/git/excludes"

// served is a host directory that the workspace server shows at its own path: the workspace, and the repository directory
// of a linked worktree, which lies elsewhere.
type served struct {
	Workspace
	GitDir bool
}

// findServed returns what must be served for a workspace, the workspace first.
func findServed(ws Workspace) ([]served, error) {
	out := []served{{Workspace: ws}}
	gitdir, common, err := repositoryOf(ws.Path)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{common, gitdir} {
		if dir == "" || slices.ContainsFunc(out, func(s served) bool { return within(dir, s.Path) }) {
			continue
		}
		f, st, err := openExact(dir)
		if err != nil {
			return nil, hint(fmt.Errorf("workspace %s: its repository directory: %w", ws.Path, err), "git worktree repair")
		}
		f.Close()
		out = append(out, served{Workspace: Workspace{Path: dir, Dev: st.Dev, Ino: st.Ino}, GitDir: true})
	}
	return out, nil
}

// repositoryOf returns the repository directory of the work tree at dir, and its common directory, both canonical; "" if
// there is none (gitrepository-layout(5)).
func repositoryOf(dir string) (gitdir, common string, err error) {
	dotgit := filepath.Join(dir, ".git")
	st, err := os.Lstat(dotgit)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", "", nil
	case err != nil:
		return "", "", err
	case st.IsDir():
		return dotgit, dotgit, nil
	case !st.Mode().IsRegular():
		return "", "", refusal(fmt.Sprintf("workspace %s: its .git is neither a directory nor a file", dir), "replace the link by what it points to")
	}
	b, err := readSmall(dotgit)
	if err != nil {
		return "", "", err
	}
	target, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), "gitdir: ")
	if !ok {
		return "", "", refusal(fmt.Sprintf("workspace %s: its .git is not a gitfile", dir), "git worktree repair")
	}
	if gitdir, err = filepath.EvalSymlinks(absolute(dir, target)); err != nil {
		return "", "", hint(fmt.Errorf("workspace %s: follow its .git file: %w", dir, err), "git worktree repair")
	}
	common = gitdir
	if b, err := readSmall(filepath.Join(gitdir, "commondir")); err == nil {
		if common, err = filepath.EvalSymlinks(absolute(gitdir, strings.TrimRight(string(b), "\r\n"))); err != nil {
			return "", "", fmt.Errorf("workspace %s: follow its common directory: %w", dir, err)
		}
	}
	return gitdir, common, nil
}

func absolute(dir, p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(dir, p)
}

// readSmall reads a one-line file, without following a link at its end.
func readSmall(name string) ([]byte, error) { return readHost(name, 4096) }

// readHost reads a regular file of the developer, of at most limit bytes; it never blocks on a FIFO.
func readHost(name string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > limit {
		return nil, fmt.Errorf("read %s: it is not a file of at most %d bytes", name, limit)
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// workspaceSetup is what the workspace server and the sandbox's Git start from.
type workspaceSetup struct {
	plan      sentry.Plan
	gitConfig []byte // system configuration of the sandbox's Git
	excludes  []byte // content of the developer's core.excludesFile
	gitdir    string // repository directory of the workspace, "" if it has none
	notes     []string
}

// setupWorkspace reads the developer's Git configuration; it runs no Git and writes nothing. The notes are for the
// developer.
func setupWorkspace(p Plan) (*workspaceSetup, error) {
	gitdir, common, err := repositoryOf(p.Workspace.Path)
	if err != nil {
		return nil, err
	}
	s := &workspaceSetup{plan: sentry.Plan{Version: sentry.PlanVersion}, gitdir: gitdir}
	env := gitconfig.Env{Home: p.Dirs.Home, XDGConfigHome: filepath.Dir(p.Dirs.Config), System: "/etc/gitconfig", GitDir: gitdir, CommonDir: common,
		Branch: branchOf(gitdir), ReadFile: func(name string) ([]byte, error) { return readHost(name, gitconfig.MaxSource) }}
	effective := gitconfig.Resolve(env)
	for _, problem := range effective.Problems {
		s.notes = append(s.notes, fmt.Sprintf("Git configuration: %v", problem))
	}
	excludes, inside, err := readExcludes(p.Workspace, env, effective)
	if err != nil {
		return nil, err
	}
	s.excludes, s.gitConfig = excludes, gitconfig.Inside(effective, inside).Bytes()
	for i, served := range p.Served {
		w := sentry.Workspace{
			Mount: served.Path, Host: stagedTree(p, i), Private: privateTwin(p, i), AgentUID: p.IDs.Agent, AgentGID: p.IDs.Agent, GitDir: served.GitDir,
			ShowIgnored: !p.Profile.IsolateIgnored || served.GitDir, Held: p.Profile.held(), AllowConfigKeys: p.Profile.AllowGitConfig, ExcludesInside: inside,
		}
		if !served.GitDir {
			w.HeldPaths = heldPaths(p, effective)
			w.Repository, w.Common = stagedPath(p, gitdir), stagedPath(p, common)
			w.Excludes, w.Info = excludes, linkedExclude(common)
		}
		s.plan.Workspaces = append(s.plan.Workspaces, w)
	}
	return s, nil
}

// prepareWorkspace writes what the workspace server and the sandbox's Git start from.
func prepareWorkspace(p Plan) (*workspaceSetup, error) {
	s, err := setupWorkspace(p)
	if err != nil {
		return nil, err
	}
	runtime := filepath.Join(p.Dirs.Runtime, p.DomainID)
	for i := range s.plan.Workspaces {
		w := &s.plan.Workspaces[i]
		if err := os.MkdirAll(w.Private, 0o700); err != nil {
			return nil, err
		}
		if !w.ShowIgnored {
			if err := keepSnapshot(w.Private, w.Mount, s.excludes); err != nil {
				return nil, err
			}
		}
	}
	b, err := json.Marshal(s.plan)
	if err != nil {
		return nil, err
	}
	for name, content := range map[string][]byte{workspacePlanFile: b, gitConfigFile: s.gitConfig, excludesFile: s.excludes} {
		if err := os.WriteFile(filepath.Join(runtime, name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// readExcludes returns the developer's global excludes and where they appear inside. A file that exists and cannot be
// read is an error: what it hides would be shown.
func readExcludes(ws Workspace, env gitconfig.Env, e *gitconfig.Effective) (content []byte, inside string, err error) {
	name, err := env.Excludes(e)
	if err != nil {
		return nil, "", hint(fmt.Errorf("find core.excludesFile: %w", err), "set it to an absolute path or one below ~/")
	}
	if name == "" {
		return nil, "", nil
	}
	content, err = readHost(absolute(ws.Path, name), 1<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	return content, excludesInside, hint(err, "make core.excludesFile readable, or unset it")
}

// linkedExclude returns the content of info/exclude if that is behind a symbolic link, which Git follows and the workspace
// server cannot; nil if it is not, or cannot be read: the server then hides what is not tracked.
func linkedExclude(common string) []byte {
	if common == "" {
		return nil
	}
	name := filepath.Join(common, "info", "exclude")
	if at, err := filepath.EvalSymlinks(name); err == nil && at == name {
		return nil
	}
	b, err := readHost(name, 1<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return []byte{}
	}
	return b
}

// stagedPath is where the domain process finds a repository directory that lies outside the workspace; "" for others.
func stagedPath(p Plan, dir string) string {
	if dir == "" || within(dir, p.Workspace.Path) {
		return ""
	}
	for i, s := range p.Served {
		if rel, err := filepath.Rel(s.Path, dir); err == nil && within(dir, s.Path) {
			return filepath.Join(stagedTree(p, i), rel)
		}
	}
	return ""
}

// keepSnapshot takes the snapshot of rules and tracked paths that the developer has consented to, unless there is one:
// only lazaret workspace rescan replaces it.
func keepSnapshot(private, host string, excludes []byte) error {
	file := filepath.Join(private, sentry.SnapshotFile)
	if _, err := os.Lstat(file); err == nil {
		return nil
	}
	s, err := sentry.TakeSnapshot(host, excludes)
	if err != nil {
		return hint(err, "repair the repository (git status must work), then enter again")
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return writeAtomic(file, b)
}

// writeAtomic replaces a private file as a whole, so that an interrupted run leaves the old one.
func writeAtomic(name string, b []byte) error {
	tmp := name + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(tmp, name)
	}
	return err
}

// heldPaths are single files of the workspace that the developer's Git, or the developer, runs: targets of configuration,
// and Lazaret's own programs where they are built in the workspace.
func heldPaths(p Plan, e *gitconfig.Effective) (out []string) {
	files := e.FilesBelow(p.Workspace.Path)
	if o, ok := e.Last("core.hookspath"); ok {
		files = append(files, absolute(p.Workspace.Path, o.Value))
	}
	self, err := os.Executable()
	if err == nil {
		files = append(files, self)
	}
	files = append(files, p.Runsc, p.Init, p.Escalate)
	for _, f := range files {
		if f, err := canonicalPrefix(f); err == nil && f != p.Workspace.Path && within(f, p.Workspace.Path) {
			rel, _ := filepath.Rel(p.Workspace.Path, f)
			if rel != ".git" && !strings.HasPrefix(rel, ".git/") {
				out = append(out, path.Clean(rel))
			}
		}
	}
	return out
}

// branchOf returns the short name of the branch that is checked out, for conditional configuration; "" if none is.
func branchOf(gitdir string) string {
	if gitdir == "" {
		return ""
	}
	b, err := readSmall(filepath.Join(gitdir, "HEAD"))
	if err != nil {
		return ""
	}
	branch, _ := strings.CutPrefix(strings.TrimSpace(string(b)), "ref: refs/heads/")
	return branch
}

// held returns the profile's list of held names.
func (p Profile) held() []string {
	list := slices.Clone(route.DefaultHeld)
	list = slices.DeleteFunc(list, func(s string) bool { return slices.Contains(p.Unhold, s) })
	return append(list, p.Hold...)
}

// privateTwin is the Ignored Workspace State, and everything else private, of one served tree.
func privateTwin(p Plan, i int) string {
	return filepath.Join(domainRoot(p), "ignored", fmt.Sprintf("%d", i))
}

// stagedTree is where the domain process binds one served tree.
func stagedTree(p Plan, i int) string {
	return filepath.Join(p.Dirs.Runtime, p.DomainID, "stage", "served", fmt.Sprintf("%d", i))
}

// servedMounts are the sandbox's mounts of the served trees.
func servedMounts(p Plan) (mounts []nsenter.Mount) {
	for i, s := range p.Served {
		w := sentry.Workspace{Host: stagedTree(p, i)}
		mounts = append(mounts, nsenter.Mount{Target: s.Path, Type: "bind", Source: w.Host, Options: []string{"rbind", "rw", "nosuid", "nodev"},
			Annotations: w.Annotations(i)})
	}
	return mounts
}
