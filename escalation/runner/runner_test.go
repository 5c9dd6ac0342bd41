package runner

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Args[0] == RoleArg {
		os.Exit(Main())
	}
	if len(os.Args) > 1 && os.Args[1] == "coordinator" {
		coordinator(os.Args[2])
	}
	os.Exit(m.Run())
}

// fixture is a workspace and a host.
type fixture struct {
	work string
	ws   Workspace
	host *Host
}

func setup(t testing.TB) fixture {
	t.Helper()
	work, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ws, err := OpenWorkspace(work)
	if err != nil {
		t.Fatal(err)
	}
	h := NewHost(Config{})
	t.Cleanup(func() {
		h.Close()
		ws.Root.Close()
	})
	return fixture{work, ws, h}
}

func (f fixture) file(t testing.TB, name, text string) string {
	t.Helper()
	p := filepath.Join(f.work, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// plan pins argv in dir; a program below the workspace is the sandbox's.
func (f fixture) plan(t testing.TB, dir string, code bool, argv ...string) *Plan {
	t.Helper()
	d, err := f.ws.PinDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		t.Fatal(err)
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		t.Fatal(err)
	}
	prog, err := PinProgram(path, strings.HasPrefix(path, f.work))
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(argv, []string{"PATH=/usr/bin:/bin", "A=b"}, d, prog, code)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// run starts a plan; between runs after it was prepared and before it starts.
func (f fixture) run(t testing.TB, p *Plan, between func()) (out string, e Exit, err error) {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	w2, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	run, err := f.host.Prepare(p, Stdio{null, w, w2})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-run.Ready(); err == nil {
		if between != nil {
			between()
		}
		run.Start()
	}
	b, err := io.ReadAll(r)
	r.Close()
	if err != nil {
		t.Fatal(err)
	}
	<-run.Done()
	e, err = run.Exit()
	return string(b), e, err
}

func TestRunOutputAndStatus(t *testing.T) {
	f := setup(t)
	out, e, err := f.run(t, f.plan(t, f.work, false, "sh", "-c", "pwd; echo err >&2; exit 7"), nil)
	if err != nil || e != (Exit{Status: 7}) || out != f.work+"\nerr\n" {
		t.Errorf("%q %+v %v", out, e, err)
	}
	_, e, err = f.run(t, f.plan(t, f.work, false, "sh", "-c", "kill -USR1 $$"), nil)
	if err != nil || e != (Exit{Status: -1, Signal: int(syscall.SIGUSR1)}) {
		t.Errorf("%+v %v", e, err)
	}
	out, _, _ = f.run(t, f.plan(t, f.work, false, "printf", "%s", "\xff\xfe\x01"), nil)
	if out != "\xff\xfe\x01" {
		t.Errorf("bytes became %q", out)
	}
}

// The command has nothing but what the plan names.
func TestSR3NothingInherited(t *testing.T) {
	t.Setenv("SECRET", "x")
	f := setup(t)
	out, _, err := f.run(t, f.plan(t, f.work, false, "env"), nil)
	if err != nil || out != "PATH=/usr/bin:/bin\nA=b\n" {
		t.Errorf("environment %q, %v", out, err)
	}
	out, _, err = f.run(t, f.plan(t, f.work, false, "ls", "/proc/self/fd"), nil)
	if err != nil || out != "0\n1\n2\n3\n" { // 3 is ls reading the directory
		t.Errorf("descriptors %q, %v", out, err)
	}
	out, _, err = f.run(t, f.plan(t, f.work, false, "sh", "-c", "(: </dev/tty) 2>&1; cut -d' ' -f6,7 /proc/$$/stat; echo $$"), nil)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if err != nil || len(lines) != 3 || !strings.Contains(lines[0], "/dev/tty") || lines[1] != lines[2]+" 0" {
		t.Errorf("session and terminal %q, %v", out, err)
	}
	out, _, err = f.run(t, f.plan(t, f.work, false, "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"), nil)
	if err != nil || strings.Count(out, "0000000000000000") != 2 {
		t.Errorf("signals %q, %v", out, err)
	}
}

func TestSR8DirectoryOfTheSandbox(t *testing.T) {
	f := setup(t)
	f.file(t, "sub/x", "")
	out := t.TempDir()
	for name, to := range map[string]string{"link": out, "inner": "sub", "dangling": "/absent"} {
		if err := os.Symlink(to, filepath.Join(f.work, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []string{out, "/", f.work + "x", f.work + "/..", f.work + "/sub/../..", f.work + "/link", f.work + "/inner",
		f.work + "/dangling", f.work + "/absent", f.work + "/sub/x", f.work + "//sub", "sub", "", f.work + "/", "/proc/self/cwd",
		f.work + "/" + strings.Repeat("a/", 3000)} {
		if d, err := f.ws.PinDir(bad); !errors.Is(err, ErrOutside) {
			t.Errorf("%.40q became %+v, %v", bad, d, err)
		}
	}
	if _, err := f.ws.PinDir(f.work + "/sub"); err != nil {
		t.Error(err)
	}
}

// What was shown is swapped between approval and execution.
func TestSR8SwapsAreRefused(t *testing.T) {
	f := setup(t)
	move := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	evil := t.TempDir()
	for name, tc := range map[string]struct {
		argv   []string
		code   bool
		byPath bool
		swap   func(dir string)
	}{
		"directory by symlink":      {argv: []string{"pwd"}, swap: func(d string) { move(d, d+".old"); _ = os.Symlink(evil, d) }},
		"directory by directory":    {argv: []string{"pwd"}, swap: func(d string) { move(d, d+".old"); _ = os.Mkdir(d, 0o755) }},
		"directory removed":         {argv: []string{"pwd"}, swap: func(d string) { _ = os.RemoveAll(d) }},
		"script replaced":           {argv: []string{"DIR/s.sh"}, swap: func(d string) { write(d+"/n", "#!/bin/sh\necho evil\n"); move(d+"/n", d+"/s.sh") }},
		"script rewritten":          {argv: []string{"DIR/s.sh"}, swap: func(d string) { write(d+"/s.sh", "#!/bin/sh\necho evil\n") }},
		"script linked":             {argv: []string{"DIR/s.sh"}, swap: func(d string) { _ = os.Remove(d + "/s.sh"); _ = os.Symlink("/bin/true", d+"/s.sh") }},
		"script by path rewritten":  {argv: []string{"DIR/s.sh"}, byPath: true, swap: func(d string) { write(d+"/s.sh", "#!/bin/sh\necho evil\n") }},
		"script of an interpreter":  {argv: []string{"sh", "s.sh"}, code: true, swap: func(d string) { write(d+"/s.sh", "echo evil\n") }},
		"script argument by rename": {argv: []string{"sh", "s.sh"}, code: true, swap: func(d string) { write(d+"/n", "echo evil\n"); move(d+"/n", d+"/s.sh") }},
		"program touched":           {argv: []string{"DIR/s.sh"}, swap: func(d string) { _ = os.Chtimes(d+"/s.sh", time.Unix(1, 0), time.Unix(1, 0)) }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(f.work, strings.ReplaceAll(name, " ", "-"))
			f.file(t, filepath.Base(dir)+"/s.sh", "#!/bin/sh\necho good\n")
			argv := append([]string{}, tc.argv...)
			argv[0] = strings.ReplaceAll(argv[0], "DIR", dir)
			p := f.plan(t, dir, tc.code, argv...)
			p.ByPath = tc.byPath
			out, _, err := f.run(t, p, func() { tc.swap(dir) })
			if !errors.Is(err, ErrChanged) || out != "" {
				t.Errorf("it ran: %q, %v", out, err)
			}
		})
	}
}

func TestSR8ScriptRunsFromItsCopy(t *testing.T) {
	f := setup(t)
	s := f.file(t, "s.sh", "#!/bin/sh\necho \"good $1\"; ls /proc/$$/fd >/dev/null\n")
	if out, e, err := f.run(t, f.plan(t, f.work, false, s, "x"), nil); err != nil || out != "good x\n" || e.Status != 0 {
		t.Errorf("%q %+v %v", out, e, err)
	}
	b, err := os.ReadFile("/bin/echo")
	if err != nil {
		t.Fatal(err)
	}
	s = f.file(t, "echo", string(b))
	if out, e, err := f.run(t, f.plan(t, f.work, false, s, "x"), nil); err != nil || out != "x\n" || e.Status != 0 {
		t.Errorf("%q %+v %v", out, e, err)
	}
	s = f.file(t, "notexec", "no format\n")
	if out, _, err := f.run(t, f.plan(t, f.work, false, s), nil); err == nil || errors.Is(err, ErrChanged) {
		t.Errorf("%q %v", out, err)
	}
}

// The script flips all the time; whatever runs is what was shown.
func TestSR8ScriptRace(t *testing.T) {
	f := setup(t)
	good, evil := "#!/bin/sh\necho good\n", "#!/bin/sh\necho evil\n"
	s := f.file(t, "s.sh", good)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		h, err := os.OpenFile(s, os.O_WRONLY, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer h.Close()
		for {
			for _, text := range []string{evil, good} {
				_, _ = h.WriteAt([]byte(text), 0)
				select {
				case <-stop:
					return
				case <-time.After(300 * time.Microsecond):
				}
			}
		}
	}()
	ran, refused := 0, 0
	for range 60 {
		p := f.plan(t, f.work, false, s)
		sum := p.Program.Sum
		out, _, err := f.run(t, p, nil)
		switch {
		case err != nil:
			refused++
		case out == "good\n" || out == "evil\n":
			ran++
			if (out == "good\n") != (sum == sumOf(t, good)) {
				t.Fatalf("%q ran, which is not what was shown", out)
			}
		default:
			t.Fatalf("unexpected output %q", out)
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d ran, %d refused", ran, refused)
}

func sumOf(t *testing.T, text string) [32]byte {
	t.Helper()
	p := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := sum(f, 1000, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// alive reports whether a process runs (and is no zombie).
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

func pidIn(t *testing.T, path string) int {
	t.Helper()
	for range 500 {
		if b, err := os.ReadFile(path); err == nil && strings.HasSuffix(string(b), "\n") {
			pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s was never written", path)
	return 0
}

func waitDead(t *testing.T, pid int) {
	t.Helper()
	for range 300 {
		if !alive(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	t.Errorf("process %d is still alive", pid)
}

const daemonise = `setsid sh -c 'setsid sleep 300 & echo $! >%[1]s/daemon' & sleep 0.2; %[2]s`

func TestOR3NothingIsLeft(t *testing.T) {
	f := setup(t)
	t.Run("the command ends", func(t *testing.T) {
		d := t.TempDir()
		_, e, err := f.run(t, f.plan(t, f.work, false, "sh", "-c", fmt.Sprintf(daemonise, d, "exit 3")), nil)
		if err != nil || e != (Exit{Status: 3}) {
			t.Errorf("%+v, %v", e, err)
		}
		waitDead(t, pidIn(t, d+"/daemon"))
	})
	kill := func(t *testing.T, script string, grace time.Duration) (Exit, time.Duration) {
		d := t.TempDir()
		null, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		null2, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		null3, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		run, err := f.host.Prepare(f.plan(t, f.work, false, "sh", "-c", script+fmt.Sprintf(daemonise, d, "echo $$ >"+d+"/self; sleep 300; sleep 300")), Stdio{null, null2, null3})
		if err != nil {
			t.Fatal(err)
		}
		if err := <-run.Ready(); err != nil {
			t.Fatal(err)
		}
		run.Start()
		daemon, self := pidIn(t, d+"/daemon"), pidIn(t, d+"/self")
		start := time.Now()
		run.Kill(grace)
		<-run.Done()
		took := time.Since(start)
		waitDead(t, daemon)
		waitDead(t, self)
		e, err := run.Exit()
		if err != nil {
			t.Fatal(err)
		}
		return e, took
	}
	t.Run("kill", func(t *testing.T) {
		if e, took := kill(t, "", 0); e.Signal != 9 || took > time.Second {
			t.Errorf("%+v after %v", e, took)
		}
	})
	t.Run("kill with grace", func(t *testing.T) {
		if e, took := kill(t, "", 5*time.Second); e.Signal != 15 || took > time.Second {
			t.Errorf("%+v after %v", e, took)
		}
	})
	t.Run("kill of a stubborn command", func(t *testing.T) {
		if e, took := kill(t, "trap '' TERM; ", 300*time.Millisecond); e.Signal != 9 || took < 250*time.Millisecond {
			t.Errorf("%+v after %v", e, took)
		}
	})
	t.Run("called off before the start", func(t *testing.T) {
		d := t.TempDir()
		null, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		null2, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		null3, _ := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		run, err := f.host.Prepare(f.plan(t, f.work, false, "touch", d+"/x"), Stdio{null, null2, null3})
		if err != nil {
			t.Fatal(err)
		}
		<-run.Ready()
		run.Kill(time.Second)
		run.Start()
		<-run.Done()
		if _, err := run.Exit(); err == nil {
			t.Error("no error")
		}
		if _, err := os.Stat(d + "/x"); err == nil {
			t.Error("it ran")
		}
	})
}

// coordinator is a process that runs one command and dies in the way that the parent chooses.
func coordinator(dir string) {
	ws, err := OpenWorkspace(dir)
	if err != nil {
		panic(err)
	}
	h := NewHost(Config{})
	d, err := ws.PinDir(dir)
	if err != nil {
		panic(err)
	}
	sh, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		panic(err)
	}
	prog, err := PinProgram(sh, false)
	if err != nil {
		panic(err)
	}
	p, err := New([]string{"sh", "-c", fmt.Sprintf(daemonise, dir, "echo $$ >"+dir+"/self; sleep 300; sleep 300")}, []string{"PATH=/usr/bin:/bin"}, d, prog, false)
	if err != nil {
		panic(err)
	}
	var n [3]*os.File
	for i := range n {
		n[i], _ = os.OpenFile(os.DevNull, os.O_RDWR, 0)
	}
	run, err := h.Prepare(p, Stdio{n[0], n[1], n[2]})
	if err != nil {
		panic(err)
	}
	<-run.Ready()
	run.Start()
	<-run.Done()
	os.Exit(0)
}

func TestOR3CoordinatorDies(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "coordinator", dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	daemon, self := pidIn(t, dir+"/daemon"), pidIn(t, dir+"/self")
	runner := parent(t, self)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	waitDead(t, daemon)
	waitDead(t, self)
	waitDead(t, runner)
}

func parent(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	p, err := strconv.Atoi(strings.Fields(string(b[strings.LastIndex(string(b), ")")+1:]))[1])
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A FIFO or device with the name of a program or script must not block or be opened.
func TestSR8SpecialFiles(t *testing.T) {
	f := setup(t)
	fifo := filepath.Join(f.work, "fifo")
	if err := syscall.Mkfifo(fifo, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := PinProgram(fifo, true); err == nil {
		t.Error("a FIFO was pinned")
	}
	if _, err := PinProgram("/dev/null", false); err == nil {
		t.Error("a device was pinned")
	}
	if p := f.plan(t, f.work, true, "sh", "fifo", "/dev/tty"); len(p.Files) != 0 {
		t.Errorf("pinned %+v", p.Files)
	}
}

func TestSR8DigestCoversThePlan(t *testing.T) {
	f := setup(t)
	f.file(t, "s.sh", "echo a\n")
	base := func() *Plan { return f.plan(t, f.work, true, "sh", "s.sh", "x") }
	want := base().Digest()
	if again := base().Digest(); again != want {
		t.Fatal("the digest is not stable")
	}
	for name, change := range map[string]func(*Plan){
		"argument": func(p *Plan) { p.Argv[2] = "y" },
		"split":    func(p *Plan) { p.Argv = []string{"sh", "s.shx"} },
		"env":      func(p *Plan) { p.Env = p.Env[:1] },
		"dir":      func(p *Plan) { p.Dir.ID.Ino++ },
		"program":  func(p *Plan) { p.Program.ID.Ino++ },
		"file":     func(p *Plan) { p.Files[0].Sum[0]++ },
		"by path":  func(p *Plan) { p.ByPath = true },
		"time":     func(p *Plan) { p.Time++ },
		"output":   func(p *Plan) { p.Output++ },
	} {
		p := base()
		change(p)
		if p.Digest() == want {
			t.Errorf("%s is not covered", name)
		}
	}
}

func TestEnv(t *testing.T) {
	got := Env([]string{"AB=1", "A=2", "A=3", "C"}, []string{"A", "C", "AB", "Z"})
	if strings.Join(got, " ") != "A=2 AB=1" {
		t.Errorf("%q", got)
	}
}

func BenchmarkRunTrue(b *testing.B) {
	f := setup(b)
	b.Run("runner", func(b *testing.B) {
		for b.Loop() {
			if _, e, err := f.run(b, f.plan(b, f.work, false, "true"), nil); err != nil || e.Status != 0 {
				b.Fatal(e, err)
			}
		}
	})
	b.Run("direct", func(b *testing.B) {
		for b.Loop() {
			if err := exec.Command("true").Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
