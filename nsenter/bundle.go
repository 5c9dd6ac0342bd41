package nsenter

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Mount is one mount of the sandbox, in the order of the OCI bundle's list.
type Mount struct {
	Source, Target string
	Type           string // "bind", "tmpfs", "proc", "sysfs"
	Options        []string
	// Annotations are those of the bundle that this mount needs, such as runsc's hints.
	Annotations map[string]string
}

// Sandbox is the plan of an Agent Sandbox: plain data, from which [Sandbox.WriteBundle] makes the OCI bundle.
type Sandbox struct {
	Root     string // directory that becomes "/"
	NetNS    string // path of the network namespace whose interfaces the sandbox takes
	Hostname string
	Init     []string // argument vector of the sandbox's pid 1
	Mounts   []Mount
	NoFile   uint64 // RLIMIT_NOFILE of every process
	NProc    uint64 // RLIMIT_NPROC of every user
	// Annotations of the bundle, besides those of the mounts; may be nil.
	Annotations map[string]string
}

// AgentProcess describes one process of the agent: no capabilities and no way to gain any (SR-7). Its resource limits
// are the sandbox's.
func AgentProcess(id uint32, argv, env []string, cwd string, tty bool) specs.Process {
	return specs.Process{
		Terminal:        tty,
		User:            specs.User{UID: id, GID: id},
		Args:            argv,
		Env:             env,
		Cwd:             cwd,
		Capabilities:    &specs.LinuxCapabilities{},
		NoNewPrivileges: true,
	}
}

// WriteBundle writes config.json into dir, which must exist. Mounts are sorted by target, so that a mount never hides
// one that lies below it.
func (s Sandbox) WriteBundle(dir string) error {
	spec := specs.Spec{
		Version:  specs.Version,
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: s.Root},
		Process: &specs.Process{Args: s.Init, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{},
			NoNewPrivileges: true,
			// runsc gives the limits of pid 1 to every process that is started by exec.
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Soft: s.NoFile, Hard: s.NoFile},
				{Type: "RLIMIT_NPROC", Soft: s.NProc, Hard: s.NProc},
				{Type: "RLIMIT_CORE", Soft: 0, Hard: 0},
			}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
			{Type: specs.NetworkNamespace, Path: s.NetNS},
		}},
		Annotations: map[string]string{},
	}
	mounts := slices.Clone(s.Mounts)
	slices.SortStableFunc(mounts, func(a, b Mount) int { return strings.Compare(a.Target, b.Target) })
	maps.Copy(spec.Annotations, s.Annotations)
	for _, m := range mounts {
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: m.Target, Type: m.Type, Source: m.Source, Options: m.Options})
		maps.Copy(spec.Annotations, m.Annotations)
	}
	b, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}
