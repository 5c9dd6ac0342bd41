// Package sentry guards an Agent Workspace: it holds the Git Sentry (SR-4) and Ignored Workspace State (SR-13) together.
//
// The workspace that the sandbox sees is served by package gofer, out of two trees: H, the developer's work tree, and P,
// its private twin in the Domain Root. Package route decides, name by name, which of them serves and what may be done.
// The decision is taken in the gofer process of lazaret-runsc, outside the gVisor Sentry, chrooted and seccomp-filtered.
//
// What is kept true, for the developer:
//   - nothing that host Git executes or obeys is changed from inside, by any path (package route has the table);
//   - a path that Git ignores, by the rules now or by the rules last consented to, is neither read nor written on the host;
//   - integration files that host programs act on without being asked change in P only, until the developer applies them;
//   - what lands on the host is a regular file, directory or relative symbolic link, owned by the developer, without
//     set-id bits.
//
// # How to wire it
//
// The supervisor builds one [Plan] per Domain, writes it to a file that the sandbox cannot reach, names that file in the
// environment variable [PlanEnv] of every `lazaret-runsc` invocation that starts a gofer (create, run), and gives the OCI
// bundle, per [Workspace], a bind mount at Workspace.Mount with Workspace.Annotations, and the annotation
// [RequiredAnnotation]. lazaret-runsc refuses to start a gofer that has the annotation and no plan, or a plan and no
// annotation that switches directfs off for the mount.
package sentry

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strconv"
)

const (
	// PlanEnv names the plan file to the gofer process. The sandbox process gets an empty environment.
	PlanEnv = "LAZARET_WORKSPACE_PLAN"
	// RequiredAnnotation holds the number of workspaces that the plan must have; a gofer without such a plan fails.
	RequiredAnnotation = "dev.lazaret.workspaces"
	// PlanVersion is the version of the plan that this build reads.
	PlanVersion = 1
)

// Plan is what the supervisor tells the workspace server. It is trusted.
type Plan struct {
	Version    int
	Workspaces []Workspace
}

// Workspace is one served tree.
type Workspace struct {
	Mount   string // where it appears in the sandbox, which is its path on the host; absolute and clean
	Host    string // where runsc binds H from: that path, or where the supervisor has staged it
	Private string // directory of the private twin, 0700, owned by the developer; created by the supervisor

	AgentUID, AgentGID uint32 // reported as owner of what the developer owns

	// GitDir is true when H is itself a repository directory (the common directory of a linked worktree).
	GitDir bool

	// Repository and Common are the directory of the repository whose work tree's root H is, and its common directory, where
	// they lie outside H; "" otherwise. The server reads the index and rules of a linked worktree there.
	Repository, Common string

	// Excludes is the content of the developer's core.excludesFile now, and Info that of the root repository's info/exclude
	// where that is a symbolic link, which the server cannot follow. The snapshot has those last consented to.
	Excludes, Info []byte

	// ShowIgnored is true when trusted configuration has set isolate_ignored = false (FR-9). Git Sentry stays.
	ShowIgnored bool

	Held      []string // patterns of held names, see route.DefaultHeld
	HeldPaths []string // exact paths below Host that host Git configuration or hooks name

	// ExcludesInside is where the sandbox finds a copy of the developer's core.excludesFile; "" if there is none.
	ExcludesInside string

	// AllowConfigKeys are keys of repository configuration that keep their value in the private copy.
	AllowConfigKeys []string
}

// Name is the workspace's name in mount annotations.
func (w *Workspace) Name(i int) string { return "lazaret" + strconv.Itoa(i) }

// Annotations are the OCI annotations that the mount of workspace i needs. All of them are needed: runsc drops an
// incomplete set with a warning, and the gofer then refuses to serve the mount.
func (w *Workspace) Annotations(i int) map[string]string {
	prefix := "dev.gvisor.spec.mount." + w.Name(i) + "."
	return map[string]string{
		prefix + "source":   w.Host,
		prefix + "type":     "bind",
		prefix + "share":    "shared", // revalidates every lookup, so that host edits show at once
		prefix + "directfs": "off",
	}
}

// ParsePlan reads a plan.
func ParsePlan(b []byte) (*Plan, error) {
	var p Plan
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("read workspace plan: %w", err)
	}
	if p.Version != PlanVersion {
		return nil, fmt.Errorf("read workspace plan: version %d, want %d", p.Version, PlanVersion)
	}
	for i := range p.Workspaces {
		if err := p.Workspaces[i].validate(); err != nil {
			return nil, fmt.Errorf("read workspace plan: workspace %d: %w", i, err)
		}
	}
	return &p, nil
}

func (w *Workspace) validate() error {
	for _, dir := range []string{w.Mount, w.Host, w.Private} {
		if !path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" {
			return fmt.Errorf("path %q is not absolute and clean", dir)
		}
	}
	for _, dir := range []string{w.Repository, w.Common} {
		if dir != "" && (!path.IsAbs(dir) || path.Clean(dir) != dir) {
			return fmt.Errorf("path %q is not absolute and clean", dir)
		}
	}
	if Within(w.Private, w.Host) || Within(w.Host, w.Private) {
		return errors.New("the private twin and the workspace lie in one another")
	}
	return nil
}

// Within reports whether the clean path p is dir or lies below it.
func Within(p, dir string) bool {
	return p == dir || len(p) > len(dir) && p[:len(dir)] == dir && p[len(dir)] == '/'
}
