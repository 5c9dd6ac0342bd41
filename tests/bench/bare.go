package main

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay"
)

// bare runs lazaret-runsc by itself, in namespaces that were made before and on a base that was composed before: the part
// of a start that is not Lazaret's.
type bare struct{ p *nsenter.Process }

// barePlan is what the role is started with.
type barePlan struct {
	Dir         string
	Runsc, Init string
}

// bareResult is the time of one run, or why there is none.
type bareResult struct {
	Took   time.Duration
	Failed string
}

func startBare(dir, runsc, init string) (*bare, error) {
	name := ""
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	ids := nsenter.PlanIDs(uint32(os.Getuid()), uint32(os.Getgid()), name, nsenter.ReadSubordinate())
	stage := filepath.Join(dir, "bare")
	if err := os.Mkdir(stage, 0o755); err != nil {
		return nil, err
	}
	p, err := nsenter.Child{Role: "bare", Namespaces: nsenter.DomainNamespaces, IDs: &ids, Stderr: os.Stderr}.Start()
	if err != nil {
		return nil, err
	}
	b := &bare{p}
	if err := p.Control.Send(barePlan{Dir: stage, Runsc: runsc, Init: init}); err != nil {
		b.close()
		return nil, err
	}
	if _, err := b.answer(); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

func (b *bare) close() { b.p.End() }

func (b *bare) answer() (time.Duration, error) {
	var r bareResult
	if _, err := b.p.Control.Recv(&r); err != nil {
		return 0, fmt.Errorf("bare runsc: %w", err)
	}
	if r.Failed != "" {
		return 0, errors.New(r.Failed)
	}
	return r.Took, nil
}

// time returns a measurement of "run" or "exec".
func (b *bare) time(what string, broken error) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		if broken != nil {
			return 0, broken
		}
		if err := b.p.Control.Send(what); err != nil {
			return 0, err
		}
		return b.answer()
	}
}

// bareMain is the role "bare".
func bareMain(self nsenter.Self) int {
	var plan barePlan
	if _, err := self.Control.Recv(&plan); err != nil {
		return 1
	}
	r := runner{plan: plan, reaper: nsenter.NewReaper()}
	result := bareResult{}
	if err := r.prepare(); err != nil {
		result.Failed = "prepare: " + err.Error()
	}
	for {
		if err := self.Control.Send(result); err != nil {
			return 1
		}
		var what string
		if _, err := self.Control.Recv(&what); err != nil {
			return 0
		}
		result = r.one(what)
	}
}

type runner struct {
	plan   barePlan
	reaper *nsenter.Reaper
	runs   int
}

func (r *runner) path(name ...string) string {
	return filepath.Join(append([]string{r.plan.Dir}, name...)...)
}

// prepare composes a base like a Domain's, without a workspace, and starts the container in which exec is measured.
func (r *runner) prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("bench", r.plan.Dir, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	for _, name := range []string{"base", "run", "exec", "upper"} {
		if err := os.Mkdir(r.path(name), 0o755); err != nil {
			return err
		}
	}
	base := overlay.HostBase{Dir: r.path("base"), Hostname: "bench", Files: []string{"/run/init"},
		Agent: overlay.Identity{UID: nsenter.AgentID, GID: nsenter.AgentID, Name: "agent", Home: "/home/agent", Shell: "/bin/sh"}}
	if err := base.Compose(); err != nil {
		return err
	}
	if err := overlay.BindReadOnly(r.plan.Init, r.path("base/run/init")); err != nil {
		return err
	}
	for dir, argv := range map[string][]string{"run": {"/bin/true"}, "exec": {"/run/init"}} {
		s := nsenter.Sandbox{Root: r.path("base"), Hostname: "bench", Init: argv, NoFile: 65536, NProc: 4096, Mounts: []nsenter.Mount{
			{Target: "/proc", Type: "proc", Source: "proc"},
			{Target: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Target: "/dev/shm", Type: "tmpfs", Source: "tmpfs"},
			{Target: "/tmp", Type: "tmpfs", Source: "tmpfs"},
		}}
		if err := s.WriteBundle(r.path(dir)); err != nil {
			return err
		}
	}
	if err := r.runsc("held", "run", "--detach", "--bundle", r.path("exec"), "held"); err != nil {
		return err
	}
	return nil
}

func (r *runner) one(what string) (res bareResult) {
	r.runs++
	begin := time.Now()
	var err error
	if what == "exec" {
		err = r.runsc("held", "exec", "held", "/bin/true")
	} else {
		err = r.runsc(fmt.Sprintf("state%d", r.runs), "run", "--bundle", r.path("run"), "bare")
	}
	res.Took = time.Since(begin)
	if err != nil {
		res.Failed = err.Error()
	}
	return res
}

// runsc runs one command with a state directory of its own, and the flags of a Domain.
func (r *runner) runsc(state string, args ...string) error {
	if err := os.MkdirAll(r.path(state), 0o700); err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	said, err := os.CreateTemp(r.plan.Dir, "said")
	if err != nil {
		return err
	}
	defer os.Remove(said.Name())
	defer said.Close()
	argv := append([]string{"lazaret-runsc", "--root", r.path(state), "--ignore-cgroups", "--platform=systrap", "--network=sandbox", "--host-uds=none",
		"--overlay2=root:dir=" + r.path("upper") + ",size=1g"}, args...)
	p, err := r.reaper.Start(nsenter.Command{Path: r.plan.Runsc, Args: argv, Env: []string{"PATH=/usr/bin:/bin"}, Files: []*os.File{null, null, said}})
	if err != nil {
		return err
	}
	if status := nsenter.ExitStatus(p.Wait()); status != 0 {
		text, _ := os.ReadFile(said.Name())
		return fmt.Errorf("lazaret-runsc %s: status %d: %s", args[0], status, strings.TrimSpace(string(text)))
	}
	return nil
}
