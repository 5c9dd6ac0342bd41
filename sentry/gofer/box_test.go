package gofer

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// A box is a real sandbox for tests: lazaret-runsc in user, mount, pid and network namespaces of an ordinary user, with
// the host's /usr as its root and one workspace. The test stays outside, where it is the developer.
//
//	test                 domain (uid 0 in the namespaces)
//	  --- {script} --->    runsc exec as uid 1000
//	  <-- {rc, output} -
type box struct {
	t    testing.TB
	dir  string // of everything
	ws   string // the workspace
	plan sentry.Plan
	in   io.WriteCloser
	out  *bufio.Reader
	cmd  *exec.Cmd

	alter   func(*specs.Spec) // a last change of the bundle
	flags   []string          // of runsc
	refused string            // why it did not start; only with mayRefuse
	may     bool
}

type request struct {
	Script string
	Root   bool // as uid 0 inside
}

type reply struct {
	RC  int
	Out string
}

// order is what the domain process needs to know.
type order struct {
	Runsc, State, Bundle, Log, Workspace string
	Flags                                []string
}

func runscPath() (string, error) {
	p := os.Getenv("LAZARET_TEST_RUNSC")
	if p == "" {
		p, _ = filepath.Abs("../../bin/lazaret-runsc")
	}
	_, err := os.Stat(p)
	return p, err
}

type boxOption func(*box)

// newBox starts a sandbox on the workspace ws, below dir.
func newBox(t testing.TB, dir, ws string, options ...boxOption) *box {
	t.Helper()
	runsc, err := runscPath()
	needs(t, "bin/lazaret-runsc", err)
	_, err = exec.LookPath("newuidmap")
	needs(t, "newuidmap", err)
	if os.Getuid() == 0 {
		needs(t, "an ordinary user", errors.New("running as root"))
	}
	private := filepath.Join(dir, "private")
	b := &box{t: t, dir: dir, ws: ws}
	b.plan = sentry.Plan{Version: sentry.PlanVersion, Workspaces: []sentry.Workspace{{
		Mount: ws, Host: ws, Private: private, AgentUID: 1000, AgentGID: 1000, Held: route.DefaultHeld,
	}}}
	for _, o := range options {
		o(b)
	}
	must(t, os.MkdirAll(private, 0o700))
	if _, err := os.Stat(filepath.Join(private, sentry.SnapshotFile)); err != nil {
		s, err := sentry.TakeSnapshot(ws, nil)
		must(t, err)
		writeJSON(t, filepath.Join(private, sentry.SnapshotFile), s)
	}
	bundle := filepath.Join(dir, "bundle")
	must(t, os.MkdirAll(bundle, 0o700))
	writeJSON(t, filepath.Join(dir, "plan.json"), &b.plan)
	s := b.spec(filepath.Join(dir, "root"))
	if b.alter != nil {
		b.alter(s)
	}
	writeJSON(t, filepath.Join(bundle, "config.json"), s)
	b.start(order{Runsc: runsc, State: filepath.Join(dir, "state"), Bundle: bundle, Log: filepath.Join(dir, "log"), Workspace: ws, Flags: b.flags})
	t.Cleanup(b.stop)
	return b
}

func writeJSON(t testing.TB, name string, v any) {
	t.Helper()
	j, err := json.MarshalIndent(v, "", " ")
	must(t, err)
	must(t, os.WriteFile(name, j, 0o600))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// spec writes the bundle's root and returns its configuration.
func (b *box) spec(root string) *specs.Spec {
	for _, d := range []string{"usr", "etc", "proc", "dev", "tmp", "home/agent", b.ws} {
		must(b.t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	for _, l := range []string{"bin", "sbin", "lib", "lib64"} {
		_ = os.Symlink("usr/"+l, filepath.Join(root, l))
	}
	for name, text := range map[string]string{
		"passwd":    "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/bash\n",
		"group":     "root:x:0:\nagent:x:1000:\n",
		"gitconfig": "[core]\n\tcheckStat = minimal\n[gc]\n\tauto = 0\n[user]\n\tname = Agent\n\temail = agent@example.com\n[protocol \"file\"]\n\tallow = always\n[init]\n\tdefaultBranch = main\n[advice]\n\tdetachedHead = false\n",
	} {
		must(b.t, os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644))
	}
	s := &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: root},
		Process: &specs.Process{
			Cwd: "/", Args: []string{"/bin/sleep", "1000000"}, User: specs.User{UID: 1000, GID: 1000},
			Env: []string{"PATH=/usr/bin:/bin", "HOME=/home/agent"},
		},
		Hostname: "box",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777"}},
			{Destination: "/home/agent", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=0777"}},
			{Destination: "/usr", Type: "bind", Source: "/usr", Options: []string{"rbind", "ro"}},
		},
		Annotations: map[string]string{sentry.RequiredAnnotation: strconv.Itoa(len(b.plan.Workspaces))},
		Linux:       &specs.Linux{},
	}
	for i := range b.plan.Workspaces {
		w := &b.plan.Workspaces[i]
		s.Mounts = append(s.Mounts, specs.Mount{Destination: w.Mount, Type: "bind", Source: w.Host, Options: []string{"bind", "rw"}})
		for k, v := range w.Annotations(i) {
			s.Annotations[k] = v
		}
	}
	return s
}

// firstSubID returns the first of the ids that subuid(5) or subgid(5) grants us.
func firstSubID(file string) (int, error) {
	me, err := user.Current()
	if err != nil {
		return 0, err
	}
	grants, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(grants)) {
		if f := strings.Split(line, ":"); len(f) == 3 && (f[0] == me.Username || f[0] == me.Uid) {
			return strconv.Atoi(f[1])
		}
	}
	return 0, fmt.Errorf("%s is not in it", me.Username)
}

func (b *box) start(o order) {
	t := b.t
	j, err := json.Marshal(o)
	must(t, err)
	ready, tell, err := os.Pipe()
	must(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{
		"LAZARET_TEST_ROLE=map", "LAZARET_TEST_ORDER=" + string(j), "PATH=" + os.Getenv("PATH"),
		sentry.PlanEnv + "=" + filepath.Join(b.dir, "plan.json"),
	}
	cmd.ExtraFiles = []*os.File{ready}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		AmbientCaps: []uintptr{unix.CAP_SETUID, unix.CAP_SETGID},
		Pdeathsig:   unix.SIGKILL,
	}
	b.in, err = cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	b.out = bufio.NewReader(out)
	err = cmd.Start()
	ready.Close()
	needs(t, "user namespaces", err)
	b.cmd = cmd
	for _, tool := range []string{"newuidmap", "newgidmap"} {
		id, file := os.Getuid(), "/etc/subuid"
		if tool == "newgidmap" {
			id, file = os.Getgid(), "/etc/subgid"
		}
		sub, err := firstSubID(file)
		needs(t, file, err)
		m, err := exec.Command(tool, strconv.Itoa(cmd.Process.Pid), "0", strconv.Itoa(sub), "1000", "1000", strconv.Itoa(id), "1",
			"1001", strconv.Itoa(sub+1000), "64535").CombinedOutput()
		if err != nil {
			cmd.Process.Kill()
			cmd.Wait()
			needs(t, tool, fmt.Errorf("%w: %s", err, m))
		}
	}
	tell.Write([]byte{1})
	tell.Close()
	var r reply
	b.receive(&r)
	if b.refused = r.Out; r.RC != 0 && !b.may {
		t.Fatalf("the sandbox did not start: %s\n%s", r.Out, b.logs())
	}
}

func (b *box) logs() string {
	var s strings.Builder
	for _, name := range []string{"gofer", "boot", "run"} {
		m, _ := filepath.Glob(filepath.Join(b.dir, "log", "*"+name+"*"))
		for _, f := range m {
			text, _ := os.ReadFile(f)
			lines := strings.Split(string(text), "\n")
			fmt.Fprintf(&s, "== %s\n%s\n", f, strings.Join(lines[max(0, len(lines)-25):], "\n"))
		}
	}
	return s.String()
}

func (b *box) receive(r *reply) {
	line, err := b.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, r)
	}
	if err != nil {
		b.t.Fatalf("the domain process is gone: %v\n%s", err, b.logs())
	}
}

// run runs a bash script inside, in the workspace.
func (b *box) run(script string) (int, string) {
	b.t.Helper()
	j, _ := json.Marshal(request{Script: script})
	if _, err := b.in.Write(append(j, '\n')); err != nil {
		b.t.Fatal(err)
	}
	var r reply
	b.receive(&r)
	return r.RC, r.Out
}

// do runs a script inside that must succeed.
func (b *box) do(script string) string {
	b.t.Helper()
	rc, out := b.run(script)
	if rc != 0 {
		b.t.Errorf("inside: %s\nrc %d: %s", script, rc, out)
	}
	return out
}

func (b *box) stop() {
	b.in.Close()
	if err := b.cmd.Wait(); err != nil {
		b.t.Errorf("domain process: %v", err)
	}
}

// roleMap is the first process of the namespaces: it waits for its id map, becomes uid 0 and executes itself to get the
// capabilities of that.
func roleMap() int {
	var one [1]byte
	if n, err := unix.Read(3, one[:]); n != 1 {
		fmt.Fprintln(os.Stderr, "no map:", err)
		return 1
	}
	unix.Close(3)
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(0, 0, 0), syscall.Setresuid(0, 0, 0)); err != nil {
		fmt.Fprintln(os.Stderr, "become uid 0:", err)
		return 1
	}
	os.Setenv("LAZARET_TEST_ROLE", "domain")
	fmt.Fprintln(os.Stderr, syscall.Exec("/proc/self/exe", os.Args[:1], os.Environ()))
	return 1
}

// roleDomain is pid 1: it runs the sandbox and passes scripts into it until its input ends.
func roleDomain() int {
	var o order
	enc := json.NewEncoder(os.Stdout)
	fail := func(err error) int {
		enc.Encode(reply{RC: 1, Out: err.Error()})
		return 0
	}
	if err := json.Unmarshal([]byte(os.Getenv("LAZARET_TEST_ORDER")), &o); err != nil {
		return fail(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fail(err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fail(err)
	}
	os.Setenv("TMPDIR", "/tmp")
	os.MkdirAll(o.Log, 0o777)
	runsc := func(args ...string) *exec.Cmd {
		global := []string{"--root=" + o.State, "--ignore-cgroups", "--network=none", "--host-uds=none", "--platform=systrap",
			"--overlay2=root:memory", "--debug-log=" + o.Log + "/%COMMAND%.log"}
		if os.Getenv("LAZARET_TEST_DEBUG") != "" {
			global = append(global, "--debug")
		}
		c := exec.Command(o.Runsc, slices.Concat(global, o.Flags, args)...)
		return c
	}
	create := runsc("run", "--detach", "--bundle="+o.Bundle, "box")
	text := filepath.Join(o.Log, "run.out")
	f, err := os.Create(text)
	if err != nil {
		return fail(err)
	}
	create.Stdout, create.Stderr = f, f
	if err := create.Run(); err != nil {
		out, _ := os.ReadFile(text)
		return fail(fmt.Errorf("%w: %s", err, out))
	}
	defer runsc("delete", "--force", "box").Run()
	enc.Encode(reply{})
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		var q request
		if err := json.Unmarshal(line, &q); err != nil {
			return fail(err)
		}
		c := runsc("exec", "--user=1000:1000", "--cwd="+o.Workspace, "box", "/bin/bash", "-c", q.Script)
		c.Stdin = nil
		out, err := c.CombinedOutput()
		r := reply{Out: string(out)}
		if err != nil {
			r.RC = -1
			var e *exec.ExitError
			if errors.As(err, &e) {
				r.RC = e.ExitCode()
			} else {
				r.Out += err.Error()
			}
		}
		enc.Encode(r)
	}
}
