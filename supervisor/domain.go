package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay/compose"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/sentry"
)

const (
	agentName = "agent"
	agentHome = "/home/agent"
)

// domain is the state of the domain process: pid 1, uid 0 and alone in the Domain's namespaces.
type domain struct {
	plan    Plan
	control *nsenter.Conn
	reaper  *nsenter.Reaper
	usr     *os.File // see overlay.HostBase.Usr; nil for an ordinary user
	dir     string   // staging directory: a tmpfs that only these namespaces have
	runtime nsenter.Runtime
	vital   [2]unix.PollFd    // pidfds of sandbox and gofer; set by the last step of the start
	network *routes.Topology  // set by the step "network"
	setup   chan networkSetup // one value, from beginNetwork
	base    *base             // set by the step "base"
	files   *compose.Result   // set by the step "files"

	mu       sync.Mutex
	sessions map[string]*nsenter.Running // by Session ID
}

// DomainMain is the role "domain". It ends when the coordinator does, and with it all processes, mounts and namespaces
// of the Domain.
func DomainMain(self nsenter.Self) int {
	d := &domain{control: self.Control, sessions: map[string]*nsenter.Running{}}
	files, err := self.Control.Recv(&d.plan)
	if err != nil {
		_ = self.Control.Send(domainEvent{Failed: asFailure(fmt.Errorf("read the plan: %w", err))})
		return 1
	}
	if len(files) > 0 {
		d.usr = files[0]
	}
	d.reaper = nsenter.NewReaper()
	if err := d.start(); err != nil {
		d.base.release()
		_ = self.Control.Send(domainEvent{Failed: asFailure(err), Changed: changedIn(err)})
		return 1
	}
	if err := self.Control.Send(domainEvent{Ready: true, Base: d.base.report(d.files)}); err != nil {
		return 1
	}
	go d.watchUsage()
	d.serve()
	return 0
}

// steps are taken in this order; each relies on those before it.
func (d *domain) steps() []step {
	return []step{
		{"private mounts", d.privateMounts},
		{"staging directory", d.stage},
		{"proc", d.mountProc},
		{"network namespaces", d.beginNetwork},
		{"volumes", d.pinVolumes},
		{"base", d.openBase},
		{"escalation", d.composeInside},
		{"workspace", d.mountServed},
		{"network", d.makeNetwork},
		{"files", d.composeFiles},
		{"bundle", d.writeBundle},
		{"create", func() error { return d.runtime.Create(d.path("bundle")) }},
		{"start", d.startSandbox},
	}
}

type step struct {
	name string
	do   func() error
}

func (d *domain) start() error {
	// When memory runs out, the kernel takes a sandbox before the developer's own programs (proc(5)).
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	for _, s := range d.steps() {
		err := s.do()
		if err == nil && d.plan.FailAt == s.name {
			err = errors.New("failed on request")
		}
		if err != nil {
			return hint(fmt.Errorf("start sandbox: %s: %w", s.name, err), "lazaret doctor checks what a start needs")
		}
	}
	return nil
}

func (d *domain) path(name ...string) string {
	return filepath.Join(append([]string{d.dir}, name...)...)
}

// privateMounts cuts the propagation to and from the host.
func (d *domain) privateMounts() error {
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
}

// stage mounts a tmpfs over an empty directory of the runtime directory. What is in it is never on the host's disk and
// goes with the namespace, however that ends.
func (d *domain) stage() error {
	d.dir = filepath.Join(d.plan.Dirs.Runtime, d.plan.DomainID, "stage")
	if err := unix.Mount("lazaret", d.dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size=64m"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", d.dir, err)
	}
	for _, name := range []string{"base", "compose", "bundle", "runsc", "logs", "sessions", "served", "volumes"} {
		if err := os.Mkdir(d.path(name), 0o700); err != nil {
			return err
		}
	}
	if err := os.Chmod(d.path("base"), 0o755); err != nil {
		return err
	}
	// runsc logs what the sandbox does wrong; on a file system of its own that cannot use up the rest.
	return unix.Mount("lazaret", d.path("logs"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=8m")
}

// mountProc shows this pid namespace; the host's processes are in nobody's view from here on.
func (d *domain) mountProc() error {
	return unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// sandboxTmpfs are the memory file systems of the sandbox itself.
var sandboxTmpfs = []string{"/tmp", "/dev/shm"}

func inTmpfs(path string) bool {
	for _, t := range sandboxTmpfs {
		if within(path, t) {
			return true
		}
	}
	return false
}

// copyInto copies a small file of the coordinator into the base, where everybody may read it.
func copyInto(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}

// mountServed pins the served trees by descriptor, so that a name swapped later changes nothing.
func (d *domain) mountServed() error {
	for i, s := range d.plan.Served {
		dir, err := s.Open()
		if err != nil {
			return err
		}
		to := stagedTree(d.plan, i)
		err = os.Mkdir(to, 0o700)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), to, "", unix.MS_BIND|unix.MS_REC, "")
		}
		dir.Close()
		if err != nil {
			return fmt.Errorf("bind %s: %w", s.Path, err)
		}
	}
	return nil
}

func (d *domain) writeBundle() error {
	p := d.plan.Profile
	tmp := fmt.Sprintf("size=%d", p.TmpSize)
	s := nsenter.Sandbox{
		Root:     d.files.Root,
		NetNS:    d.path(agentNetNS),
		Hostname: p.Name,
		Init:     []string{initPath},
		NoFile:   p.OpenFiles,
		NProc:    p.Processes,
		Mounts: []nsenter.Mount{
			{Target: "/proc", Type: "proc", Source: "proc"},
			{Target: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro", "nosuid", "nodev", "noexec"}},
			{Target: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777", tmp, "nosuid", "nodev"}},
			{Target: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777", tmp, "nosuid", "nodev"}},
		},
	}
	for _, m := range d.files.Mounts {
		s.Mounts = append(s.Mounts, nsenter.Mount{Target: m.Destination, Type: "bind", Source: m.Source, Options: m.Options})
	}
	s.Mounts = append(s.Mounts, nsenter.Mount{Target: insideDir, Type: "bind", Source: d.path("shown"), Options: []string{"rbind", "ro", "nosuid", "nodev"}})
	s.Mounts = append(s.Mounts, servedMounts(d.plan)...)
	s.Annotations = map[string]string{sentry.RequiredAnnotation: strconv.Itoa(len(d.plan.Served))}
	d.runtime = nsenter.Runtime{
		Path: d.plan.Runsc, State: d.path("runsc"), Logs: d.path("logs"), Reaper: d.reaper,
		// For the gofer: its orders about the workspace. The sandbox process gets an empty environment.
		Env: []string{sentry.PlanEnv + "=" + filepath.Join(d.plan.Dirs.Runtime, d.plan.DomainID, workspacePlanFile)},
		Flags: []string{
			"--ignore-cgroups", "--platform=systrap", "--network=sandbox", "--host-uds=none", "--host-fifo=none",
			// A work tree of a few thousand files stays in the Sentry's cache: warm metadata work is what agents do most.
			"--dcache=4000",
			"--overlay2=" + d.files.Overlay2,
		},
	}
	return s.WriteBundle(d.path("bundle"))
}

// transientDir is where runsc keeps the throw-away layer: on the Storage Root's disk, since it may be large.
func transientDir(p Plan) string { return filepath.Join(p.Dirs.transients(), p.DomainID) }

func domainRoot(p Plan) string { return filepath.Join(p.Dirs.domains(), p.DomainID) }

func (d *domain) startSandbox() error {
	if err := d.runtime.StartInit(); err != nil {
		return err
	}
	for i, ask := range []func() (int, error){d.runtime.SandboxPID, d.runtime.GoferPID} {
		pid, err := ask()
		if err != nil {
			return err
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return fmt.Errorf("watch the sandbox: %w", err)
		}
		d.vital[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN} // open as long as we live
	}
	go d.watchSandbox()
	return nil
}

// watchSandbox tells the coordinator when the sandbox ends by itself; the coordinator then ends the Domain.
func (d *domain) watchSandbox() {
	d.sandboxEnds(-1)
	_ = d.control.Send(domainEvent{Gone: d.runtime.Cause("the sandbox process was killed")})
}

// sandboxEnds reports whether the sandbox or its gofer ends within a number of milliseconds; -1 waits for it.
func (d *domain) sandboxEnds(within int) bool {
	vital := d.vital // poll writes into it
	for {
		n, err := unix.Poll(vital[:], within)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

// serve answers the coordinator until it is gone.
func (d *domain) serve() {
	for {
		var req domainRequest
		files, err := d.control.Recv(&req)
		if err != nil {
			return
		}
		switch {
		case req.Exec != nil:
			go d.exec(*req.Exec, files)
		case req.Signal != nil:
			nsenter.CloseAll(files)
			d.signal(*req.Signal)
		case req.Network != nil:
			nsenter.CloseAll(files)
			go d.replaceNetwork(*req.Network)
		case req.Release:
			nsenter.CloseAll(files)
			d.base.release()
			_ = d.control.Send(domainEvent{Released: true})
		default:
			nsenter.CloseAll(files)
		}
	}
}

// exec runs one session's process to its end. It owns files.
func (d *domain) exec(req execRequest, files []*os.File) {
	status, err := d.runSession(req, files)
	// A process whose gofer is gone is killed; and sockets close some moments before their process counts as ended.
	patience := 0
	if errors.Is(err, nsenter.ErrLost) {
		patience = 5000
	} else if status == 128+int(unix.SIGKILL) {
		patience = 100
	}
	if d.sandboxEnds(patience) {
		return // what the status says is not the command's end; all sessions are told that the sandbox has ended
	}
	_ = d.control.Send(domainEvent{Exit: &execExit{Session: req.Session, Status: status, Failed: asFailure(err)}})
}

func (d *domain) runSession(req execRequest, files []*os.File) (int, error) {
	run, err := d.startSession(req, files)
	nsenter.CloseAll(files) // a copy kept here would hide the end of output
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	d.sessions[req.Session] = run
	d.mu.Unlock()
	status, err := run.Wait()
	d.mu.Lock()
	delete(d.sessions, req.Session)
	d.mu.Unlock()
	os.RemoveAll(d.path("sessions", req.Session))
	d.takeKeys(req.Session)
	return status, explainExec(d.plan.Profile.Image, req.Argv, err)
}

func (d *domain) startSession(req execRequest, files []*os.File) (*nsenter.Running, error) {
	if len(files) != 3 {
		return nil, fmt.Errorf("start session: %d descriptors in place of 3", len(files))
	}
	dir := d.path("sessions", req.Session)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	if err := d.giveKeys(req.Session, req.Keys); err != nil {
		return nil, fmt.Errorf("start session: %w", err)
	}
	return d.runtime.Exec(nsenter.Exec{
		Process: nsenter.AgentProcess(d.plan.IDs.Agent, req.Argv, req.Env, req.Cwd, req.TTY),
		Stdio:   [3]*os.File(files), TTY: req.TTY, Dir: dir,
	})
}

// explainExec says what a shell would say when a command cannot be started.
func explainExec(image string, argv []string, err error) error {
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "no such file or directory"), strings.Contains(err.Error(), "not found"):
		if image != hostImage {
			return refusal(fmt.Sprintf("command %q: not found in the sandbox", argv[0]),
				fmt.Sprintf("the sandbox has the programs of the image %s, the workspace and its own /home/agent", image))
		}
		return refusal(fmt.Sprintf("command %q: not found in the sandbox", argv[0]),
			"the sandbox has the host's /usr, the workspace and its own /home/agent; programs elsewhere on the host are not there")
	case strings.Contains(err.Error(), "permission denied"):
		return refusal(fmt.Sprintf("command %q: the agent may not execute it", argv[0]), "chmod +x it, or name its interpreter")
	}
	return fmt.Errorf("command %q: %w", argv[0], err)
}

func (d *domain) signal(s execSignal) {
	d.mu.Lock()
	run := d.sessions[s.Session]
	d.mu.Unlock()
	if run != nil {
		go func() { _ = run.Signal(unix.Signal(s.Signal)) }() // it ended meanwhile: nothing to signal
	}
}
