package tests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
)

// patience bounds every command; a loaded machine needs some seconds for a cold start.
const patience = 60 * time.Second

// binDir holds the programs under test.
var binDir string

func TestMain(m *testing.M) {
	nsenter.Main(map[string]func(nsenter.Self) int{"remove": removeRole}, nil)
	if filepath.Base(os.Args[0]) == probeName { // in the sandbox
		os.Exit(netProbe(os.Args[1:]))
	}
	binDir = os.Getenv("LAZARET_BIN")
	if binDir == "" {
		binDir = "../bin"
	}
	var err error
	if binDir, err = filepath.Abs(binDir); err == nil {
		for _, p := range []string{"lazaret", "lazaret-runsc", "lazaret-init", "lazaret-escalate"} {
			if _, serr := os.Stat(filepath.Join(binDir, p)); serr != nil {
				err = fmt.Errorf("%w; build the programs with: make", serr)
			}
		}
	}
	if err == nil {
		err = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// needs ends a test that lacks something: it fails where all is required.
func needs(t testing.TB, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("%s is required here: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}

func needsProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	needs(t, name, err)
	return path
}

// box is one developer: a home, XDG directories and a workspace, removed at the end of the test.
type box struct {
	t       testing.TB
	dir     string // short, and searchable by everybody
	home    string
	ws      string
	runtime string // XDG_RUNTIME_DIR
	bin     string
	extra   []string // environment of every command
	wrap    []string // put before every command line
}

// newBox makes a developer, and checks at the end of the test that nothing of him is left on the host.
func newBox(t testing.TB) *box {
	t.Helper()
	return newBoxIn(t, "/var/tmp")
}

func newBoxIn(t testing.TB, parent string) *box {
	t.Helper()
	dir, err := os.MkdirTemp(parent, "lz")
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, dir: dir, home: filepath.Join(dir, "home"), ws: filepath.Join(dir, "ws"), runtime: filepath.Join(dir, "run"), bin: binDir}
	for _, d := range []string{b.home, b.ws, b.runtime} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.wantNothingLeft()
		if t.Failed() {
			b.showLogs()
		}
		if err := removeTree(dir); err != nil {
			t.Errorf("remove the box: %v", err)
		}
	})
	return b
}

// removeTree removes also what is not writable, as a module cache, and what belongs to subordinate ids.
func removeTree(dir string) error {
	if os.RemoveAll(dir) == nil {
		return nil
	}
	_ = filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if e != nil && e.IsDir() {
			_ = os.Chmod(p, 0o700)
		}
		return nil
	})
	if os.RemoveAll(dir) == nil {
		return nil
	}
	me, err := user.Current()
	if err != nil {
		return err
	}
	ids := nsenter.PlanIDs(uint32(os.Getuid()), uint32(os.Getgid()), me.Username, nsenter.ReadSubordinate())
	p, err := nsenter.Child{Role: "remove", Namespaces: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, IDs: &ids, Stderr: os.Stderr}.Start()
	if err != nil {
		return err
	}
	defer p.End()
	if err := p.Control.Send(dir); err != nil {
		return err
	}
	var answer string
	if _, err := p.Control.Recv(&answer); err != nil || answer != "" {
		return errors.Join(err, errors.New(answer))
	}
	return nil
}

// removeRole is root of a namespace of ours.
func removeRole(self nsenter.Self) int {
	var dir, answer string
	if _, err := self.Control.Recv(&dir); err != nil {
		return 1
	}
	if err := os.RemoveAll(dir); err != nil {
		answer = err.Error()
	}
	_ = self.Control.Send(answer)
	return 0
}

func (b *box) config() string  { return filepath.Join(b.home, ".config/lazaret") }
func (b *box) storage() string { return filepath.Join(b.home, ".local/share/lazaret") }

// profile writes an Agent Profile.
func (b *box) profile(name, text string) {
	b.t.Helper()
	dir := filepath.Join(b.config(), "profiles")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		b.t.Fatal(err)
	}
	b.write(filepath.Join(dir, name+".toml"), text)
}

func (b *box) write(path, text string) {
	b.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) environ() []string {
	return append([]string{"HOME=" + b.home, "XDG_RUNTIME_DIR=" + b.runtime, "PATH=" + os.Getenv("PATH"), "TERM=xterm-256color", "LANG=C.UTF-8"}, b.extra...)
}

// command is a command line of the developer, in the workspace. It dies with the test.
func (b *box) command(args ...string) *exec.Cmd {
	args = append(append([]string{}, b.wrap...), args...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir, cmd.Env = b.ws, b.environ()
	return cmd
}

// lazaret is a command line that starts with lazaret.
func (b *box) lazaret(args ...string) *exec.Cmd {
	return b.command(append([]string{filepath.Join(b.bin, "lazaret")}, args...)...)
}

// enter runs argv in the sandbox of the default profile.
func (b *box) enter(argv ...string) *exec.Cmd {
	return b.lazaret(append([]string{"enter", "--"}, argv...)...)
}

// shell runs a script in the sandbox.
func (b *box) shell(script string) *exec.Cmd { return b.enter("sh", "-c", script) }

// result is how a command ended.
type result struct {
	status   int // as a shell gives it
	out, err string
	took     time.Duration
}

func (r result) String() string {
	return fmt.Sprintf("status %d after %v\nstdout: %s\nstderr: %s", r.status, r.took.Round(time.Millisecond), clip(r.out), clip(r.err))
}

func clip(s string) string {
	if len(s) > 4000 {
		return s[:2000] + " … " + s[len(s)-2000:]
	}
	return s
}

// run runs cmd to its end.
func (b *box) run(cmd *exec.Cmd) result {
	b.t.Helper()
	var out, errs bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errs
	}
	p := b.start(cmd)
	r := p.wait(patience)
	r.out, r.err = out.String(), errs.String()
	return r
}

// ok runs cmd, which must succeed, and returns its output.
func (b *box) ok(cmd *exec.Cmd) string {
	b.t.Helper()
	r := b.run(cmd)
	if r.status != 0 {
		b.t.Fatalf("%q: %v", cmd.Args, r)
	}
	return r.out
}

// refused runs cmd, which Lazaret must refuse with each of the texts on standard error.
func (b *box) refused(cmd *exec.Cmd, texts ...string) {
	b.t.Helper()
	r := b.run(cmd)
	if r.status != 125 {
		b.t.Errorf("%q: want status 125: %v", cmd.Args, r)
	}
	for _, text := range texts {
		if !strings.Contains(r.err, text) {
			b.t.Errorf("%q: want %q: %v", cmd.Args, text, r)
		}
	}
}

// proc is a running command.
type proc struct {
	*exec.Cmd
	b     *box
	since time.Time
	done  chan struct{}
	err   error // after done
}

var (
	ownedMu sync.Mutex
	owned   = map[int]bool{} // children that os/exec waits for
)

// start starts cmd; the test must wait for it.
func (b *box) start(cmd *exec.Cmd) *proc {
	b.t.Helper()
	cmd.WaitDelay = 5 * time.Second // a reader of ours does not wait for a process that was left behind
	ownedMu.Lock()
	err := cmd.Start()
	if err == nil {
		owned[cmd.Process.Pid] = true
	}
	ownedMu.Unlock()
	if err != nil {
		b.t.Fatalf("start %q: %v", cmd.Args, err)
	}
	p := &proc{Cmd: cmd, b: b, since: time.Now(), done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		ownedMu.Lock()
		delete(owned, cmd.Process.Pid)
		ownedMu.Unlock()
		close(p.done)
	}()
	b.t.Cleanup(func() { _ = cmd.Process.Kill(); <-p.done })
	return p
}

// wait returns how the command ended. One that has not after limit is shown and killed.
func (p *proc) wait(limit time.Duration) result {
	p.b.t.Helper()
	select {
	case <-p.done:
	case <-time.After(limit):
		var who strings.Builder
		for _, d := range descendants(os.Getpid()) {
			fmt.Fprintf(&who, "\n  %v", d)
		}
		_ = p.Process.Kill()
		<-p.done
		p.b.t.Fatalf("%q hangs after %v; running:%s", p.Args, limit, who.String())
	}
	r := result{took: time.Since(p.since)}
	ws := p.ProcessState.Sys().(syscall.WaitStatus)
	if r.status = ws.ExitStatus(); ws.Signaled() {
		r.status = 128 + int(ws.Signal())
	}
	if p.err != nil && !errors.As(p.err, new(*exec.ExitError)) && !errors.Is(p.err, exec.ErrWaitDelay) {
		p.b.t.Logf("%q: %v", p.Args, p.err)
	}
	return r
}

// eventually waits until cond holds.
func eventually(t testing.TB, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

// waitFile waits until a file of the workspace is there.
func (b *box) waitFile(name string) {
	b.t.Helper()
	eventually(b.t, patience, name+" in the workspace", func() bool {
		_, err := os.Stat(filepath.Join(b.ws, name))
		return err == nil
	})
}

func (b *box) readFile(name string) string {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.ws, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

// hold starts a session that lasts until the returned function is called.
func (b *box) hold() (client *proc, release func()) {
	b.t.Helper()
	cmd := b.shell("echo ready; exec cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	p := b.start(cmd)
	ready := make(chan struct{})
	go func() {
		_, _ = out.Read(make([]byte, 16))
		close(ready)
	}()
	select {
	case <-ready:
	case <-time.After(patience):
		b.t.Fatal("the session does not start")
	}
	return p, func() {
		b.t.Helper()
		in.Close()
		if r := p.wait(patience); r.status != 0 {
			b.t.Errorf("end of the held session: %v", r)
		}
	}
}

// timeout is a context for helper programs of the host.
func timeout(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// host runs a program on the host, which must succeed.
func (b *box) host(args ...string) string {
	b.t.Helper()
	cmd := exec.CommandContext(timeout(b.t), args[0], args[1:]...)
	cmd.Dir = b.ws
	cmd.Env = append(b.environ(), "GIT_CONFIG_NOSYSTEM=1")
	return b.ok(cmd)
}
