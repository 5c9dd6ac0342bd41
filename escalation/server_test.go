package escalation

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
	"lazaret.dev/lazaret/escalation/trust"
	"lazaret.dev/lazaret/escalation/wire"
)

func TestMain(m *testing.M) {
	if os.Args[0] == runner.RoleArg {
		os.Exit(RunnerMain())
	}
	os.Exit(m.Run())
}

// developer answers prompts as a test says.
type developer struct {
	mu    sync.Mutex
	asked []prompt.Request
	seen  chan prompt.Request
	do    func(ctx context.Context, session string, q prompt.Request, edit func([]string) (prompt.Request, error)) (prompt.Answer, error)
}

func (d *developer) Prompt(ctx context.Context, session string, q prompt.Request, edit func([]string) (prompt.Request, error)) (prompt.Answer, error) {
	if session != q.Session {
		panic("a prompt of another session")
	}
	d.mu.Lock()
	d.asked = append(d.asked, q)
	do := d.do
	d.mu.Unlock()
	select {
	case d.seen <- q:
	default:
	}
	return do(ctx, session, q, edit)
}

func approve(_ context.Context, _ string, q prompt.Request, _ func([]string) (prompt.Request, error)) (prompt.Answer, error) {
	return prompt.Answer{Kind: prompt.Approved, Digest: q.Digest}, nil
}

func ignore(ctx context.Context, _ string, _ prompt.Request, _ func([]string) (prompt.Request, error)) (prompt.Answer, error) {
	<-ctx.Done()
	return prompt.Answer{}, nil
}

type rig struct {
	t    testing.TB
	work string
	dev  *developer
	s    *Server
	a    *trust.Anchor
	addr string

	mu  sync.Mutex
	log []Entry
}

// newRig starts a real server over loopback, with real processes.
func newRig(t testing.TB, rs []rules.Rule, change func(*Config)) *rig {
	t.Helper()
	work, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, work: work, dev: &developer{do: approve, seen: make(chan prompt.Request, 100)}}
	res := rules.Resolver{Path: []string{"/usr/bin", "/bin"}, Writable: []string{work}}
	set, _, err := rules.Compile(rs, rules.Options{Resolver: res})
	if err != nil {
		t.Fatal(err)
	}
	ws, err := runner.OpenWorkspace(work)
	if err != nil {
		t.Fatal(err)
	}
	if r.a, err = trust.New("d1", 0, time.Now); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	host := runner.NewHost(runner.Config{})
	cfg := Config{Domain: "d1", Profile: "p1", Listener: ln, Anchor: r.a, Rules: set, Resolver: res, Workspace: ws, Host: host,
		Environ: []string{"PATH=/usr/bin:/bin", "HOME=/h", "SECRET=x"}, Prompter: r.dev, Grace: time.Second,
		Journal: func(e Entry) { r.mu.Lock(); r.log = append(r.log, e); r.mu.Unlock() }}
	if change != nil {
		change(&cfg)
	}
	if r.s, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.s.Serve() }()
	t.Cleanup(func() {
		if err := r.s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		host.Close()
		ws.Root.Close()
	})
	return r
}

func (r *rig) join(session string, terminal bool) client.Endpoint {
	r.t.Helper()
	cert, key, err := r.s.Join(session, terminal)
	if err != nil {
		r.t.Fatal(err)
	}
	c, err := trust.ClientConfig(r.a.CA(), cert, key)
	if err != nil {
		r.t.Fatal(err)
	}
	return client.Endpoint{Addr: r.addr, TLS: c}
}

type outcome struct {
	res      wire.Result
	err      error
	out, eut string
}

func (r *rig) run(e client.Endpoint, argv ...string) outcome {
	return r.runCtx(context.Background(), e, client.Request{Argv: argv})
}

func (r *rig) runCtx(ctx context.Context, e client.Endpoint, q client.Request) outcome {
	var out, eut bytes.Buffer
	if q.Dir == "" {
		q.Dir = r.work
	}
	q.Stdout, q.Stderr = &out, &eut
	res, err := e.Run(ctx, q)
	return outcome{res, err, out.String(), eut.String()}
}

func TestFR5ApprovedAndRan(t *testing.T) {
	r := newRig(t, nil, nil)
	e := r.join("s1", true)
	o := r.run(e, "sh", "-c", "echo out; echo err >&2; env; pwd; exit 5")
	if o.err != nil || o.res.Outcome != wire.Completed || o.res.Status != 5 || !o.res.Started || o.eut != "err\n" ||
		o.out != "out\nPATH=/usr/bin:/bin\nHOME=/h\nPWD="+r.work+"\n"+r.work+"\n" && !strings.HasPrefix(o.out, "out\n") {
		t.Errorf("%+v", o)
	}
	if strings.Contains(o.out, "SECRET") {
		t.Error("a name that no rule lists was passed")
	}
	o = r.run(e, "sh", "-c", "kill -9 $$")
	if o.res.Signal != 9 || o.res.Status != -1 {
		t.Errorf("%+v", o)
	}
	q := r.dev.asked[0]
	if q.Profile != "p1" || q.Session != "s1" || q.Dir != r.work || q.Argv[0] != "sh" || q.Expires.IsZero() || len(q.Notes) == 0 {
		t.Errorf("%+v", q)
	}
}

func TestDX4AutoDenyAndAsk(t *testing.T) {
	r := newRig(t, []rules.Rule{
		{Argv: []string{"echo", "a"}, Action: rules.Auto},
		{Argv: []string{"rm"}, Trailing: rules.TrailingAny, Action: rules.Deny},
		{Argv: []string{"cat"}, Stdin: true, Action: rules.Auto},
		{Argv: []string{"ls"}, Dir: "/usr", Action: rules.Auto},
		{Argv: []string{"sleep", "60"}, Time: 300 * time.Millisecond, Action: rules.Auto},
		{Argv: []string{"seq", "1000000"}, Output: 1000, Action: rules.Auto},
	}, nil)
	e := r.join("s1", true)
	r.dev.do = func(context.Context, string, prompt.Request, func([]string) (prompt.Request, error)) (prompt.Answer, error) {
		return prompt.Answer{Kind: prompt.Denied}, nil
	}
	if o := r.run(e, "echo", "a"); o.out != "a\n" || o.res.Outcome != wire.Completed {
		t.Errorf("auto: %+v", o)
	}
	if o := r.run(e, "rm", "-rf", "/"); o.res.Outcome != wire.Denied || o.res.Detail != detailRule || o.res.Started {
		t.Errorf("deny rule: %+v", o)
	}
	if len(r.dev.asked) != 0 {
		t.Error("the developer was asked")
	}
	if o := r.run(e, "echo", "b"); o.res.Outcome != wire.Denied || o.res.Detail != detailPerson {
		t.Errorf("denied: %+v", o)
	}
	if o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"cat"}, Stdin: strings.NewReader(strings.Repeat("x", 300000))}); len(o.out) != 300000 {
		t.Errorf("stdin: %d bytes, %+v %v", len(o.out), o.res, o.err)
	}
	if o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"echo", "a"}, Stdin: strings.NewReader("")}); o.res.Outcome != wire.Failed || o.res.Detail != detailStdin {
		t.Errorf("stdin that no rule allows: %+v", o)
	}
	if o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"ls"}, Dir: "/outside"}); !strings.Contains(o.out, "bin") {
		t.Errorf("fixed directory: %+v", o)
	}
	if o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"echo", "a"}, Dir: "/"}); o.res.Outcome != wire.Failed || o.res.Detail != detailDir {
		t.Errorf("directory outside: %+v", o)
	}
	if o := r.run(e, "no-such-program"); o.res.Outcome != wire.Failed || o.res.Detail != detailProgram {
		t.Errorf("no program: %+v", o)
	}
	if o := r.run(e, "sleep", "60"); o.res.Outcome != wire.TimedOut || !o.res.Started {
		t.Errorf("time limit: %+v", o)
	}
	if o := r.run(e, "seq", "1000000"); o.res.Outcome != wire.Failed || o.res.Detail != detailOutput || len(o.out) != 1000 {
		t.Errorf("output limit: %+v, %d bytes", o.res, len(o.out))
	}
}

func TestDX4Edit(t *testing.T) {
	r := newRig(t, []rules.Rule{{Argv: []string{"rm"}, Trailing: rules.TrailingAny, Action: rules.Deny}}, nil)
	e := r.join("s1", true)
	r.dev.do = func(_ context.Context, _ string, q prompt.Request, edit func([]string) (prompt.Request, error)) (prompt.Answer, error) {
		if _, err := edit([]string{"rm", "x"}); err == nil {
			t.Error("an edit to a denied command was taken")
		}
		if _, err := edit([]string{"absent-program"}); err == nil {
			t.Error("an edit to no program was taken")
		}
		n, err := edit([]string{"echo", "edited"})
		if err != nil || !n.Edited || n.Digest == q.Digest || n.Program == q.Program {
			t.Errorf("%+v, %v", n, err)
		}
		return prompt.Answer{Kind: prompt.Approved, Digest: n.Digest}, nil
	}
	if o := r.run(e, "printf", "original"); o.out != "edited\n" {
		t.Errorf("%+v", o)
	}
	// Consent to the form before the edit is none.
	r.dev.do = func(_ context.Context, _ string, q prompt.Request, edit func([]string) (prompt.Request, error)) (prompt.Answer, error) {
		_, _ = edit([]string{"echo", "edited"})
		return prompt.Answer{Kind: prompt.Approved, Digest: q.Digest}, nil
	}
	if o := r.run(e, "printf", "original"); o.out != "" || o.res.Outcome != wire.Denied {
		t.Errorf("%+v", o)
	}
}

// Between the prompt and the run, the sandbox swaps its working directory.
func TestSR8SwapAfterApproval(t *testing.T) {
	r := newRig(t, nil, nil)
	e := r.join("s1", true)
	d := filepath.Join(r.work, "d")
	if err := os.Mkdir(d, 0o755); err != nil {
		t.Fatal(err)
	}
	r.dev.do = func(_ context.Context, _ string, q prompt.Request, _ func([]string) (prompt.Request, error)) (prompt.Answer, error) {
		if err := os.Remove(d); err != nil {
			t.Error(err)
		}
		if err := os.Symlink("/", d); err != nil {
			t.Error(err)
		}
		return prompt.Answer{Kind: prompt.Approved, Digest: q.Digest}, nil
	}
	o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"pwd"}, Dir: d})
	if o.res.Outcome != wire.Failed || o.res.Detail != detailChanged || o.out != "" {
		t.Errorf("%+v", o)
	}
}

func TestOR2TimeOutAndCancel(t *testing.T) {
	r := newRig(t, []rules.Rule{{Argv: []string{"sleep", "61"}, Action: rules.Auto}}, nil)
	r.dev.do = ignore
	e := r.join("s1", true)
	if o := r.runCtx(context.Background(), e, client.Request{Argv: []string{"true"}, Wait: 200 * time.Millisecond}); o.res.Outcome != wire.TimedOut || o.res.Detail != detailWait {
		t.Errorf("%+v", o)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if o := r.runCtx(ctx, e, client.Request{Argv: []string{"true"}}); o.res.Outcome != wire.Cancelled || o.res.Started {
		t.Errorf("waiting: %+v", o)
	}
	ctx, cancel2 := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel2()
	if o := r.runCtx(ctx, e, client.Request{Argv: []string{"sleep", "61"}}); o.res.Outcome != wire.Cancelled || !o.res.Started {
		t.Errorf("running: %+v", o)
	}
	r.quiet()
}

// quiet waits until no request is open.
func (r *rig) quiet() {
	r.t.Helper()
	for range 500 {
		if len(r.s.Pending()) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.t.Fatalf("still open: %+v", r.s.Pending())
}

func (r *rig) phase(want string) string {
	r.t.Helper()
	for range 500 {
		if p := r.s.Pending(); len(p) == 1 && p[0].Phase == want {
			return p[0].Request.ID
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.t.Fatalf("no request is %s: %+v", want, r.s.Pending())
	return ""
}

// The client, the session and the coordinator go away in every phase; no command is left, and others go on.
func TestOR3GoneInEveryPhase(t *testing.T) {
	ways := map[string]func(r *rig, kill context.CancelFunc){
		"client":      func(r *rig, kill context.CancelFunc) { kill() },
		"session":     func(r *rig, _ context.CancelFunc) { r.s.Leave("s1") },
		"coordinator": func(r *rig, _ context.CancelFunc) { _ = r.s.Close() },
	}
	for way, gone := range ways {
		for _, phase := range []string{"queued", "prompted", "running"} {
			t.Run(way+" while "+phase, func(t *testing.T) {
				r := newRig(t, []rules.Rule{{Argv: []string{"echo", "fine"}, Action: rules.Auto}}, nil)
				e := r.join("s1", phase != "queued")
				other := r.join("s2", true)
				if phase == "prompted" {
					r.dev.do = ignore
				}
				pidFile := filepath.Join(r.t.TempDir(), "pid")
				raw := r.raw(e)
				r.submit(raw, "sh", "-c", "setsid sleep 300 & echo $! >"+pidFile+"; exec sleep 300")
				r.phase(phase)
				pid := 0
				if phase == "running" {
					pid = waitPid(t, pidFile)
				}
				gone(r, func() { raw.Close() })
				r.quiet()
				if pid != 0 {
					for range 300 {
						if syscall.Kill(pid, 0) != nil {
							break
						}
						time.Sleep(10 * time.Millisecond)
					}
					if syscall.Kill(pid, 0) == nil {
						t.Errorf("process %d is left", pid)
					}
				}
				if way != "coordinator" {
					if o := r.run(other, "echo", "fine"); o.out != "fine\n" {
						t.Errorf("the other session: %+v", o)
					}
				}
				if way == "session" {
					if o := r.run(e, "echo", "fine"); !errors.Is(o.err, client.ErrNoConnection) {
						t.Errorf("a session that left: %+v", o)
					}
				}
			})
		}
	}
}

func waitPid(t *testing.T, path string) int {
	t.Helper()
	pid := 0
	for range 500 {
		b, _ := os.ReadFile(path)
		if n, _ := fmt.Sscanf(string(b), "%d\n", &pid); n == 1 {
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the command did not start")
	return 0
}

// raw is an authenticated connection that speaks as it likes.
func (r *rig) raw(e client.Endpoint) net.Conn {
	r.t.Helper()
	c, err := tls.Dial("tcp", e.Addr, e.TLS)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

func (r *rig) submit(c net.Conn, argv ...string) [16]byte {
	r.t.Helper()
	sub := wire.Submit{Argv: argv, Dir: r.work}
	copy(sub.ID[:], fmt.Sprint(time.Now().UnixNano()))
	if _, err := c.Write(wire.AppendFrame(nil, wire.KindSubmit, sub.Append(nil))); err != nil {
		r.t.Fatal(err)
	}
	return sub.ID
}

func read(t testing.TB, c net.Conn) (wire.Kind, []byte) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	k, b, err := (&wire.Reader{R: c}).Next()
	if err != nil {
		return 0, nil
	}
	return k, b
}

func TestSR9DuplicatesAndReplay(t *testing.T) {
	r := newRig(t, nil, nil)
	r.dev.do = ignore
	e, e2 := r.join("s1", true), r.join("s2", true)
	frame := wire.AppendFrame(nil, wire.KindSubmit, wire.Submit{ID: [16]byte{7}, Argv: []string{"true"}, Dir: r.work}.Append(nil))
	first := r.raw(e)
	_, _ = first.Write(frame)
	if k, _ := read(t, first); k != wire.KindAccepted {
		t.Fatal(k)
	}
	for _, x := range []client.Endpoint{e, e2} { // at the same time, also from another session
		c := r.raw(x)
		_, _ = c.Write(frame)
		if k, b := read(t, c); k != wire.KindRefused || b[0] != byte(broker.RefusedDuplicate) {
			t.Errorf("duplicate: %d %v", k, b)
		}
	}
	_, _ = first.Write(frame) // a second one on the same connection ends it
	r.quiet()
	c := r.raw(e) // replayed after its end
	_, _ = c.Write(frame)
	if k, b := read(t, c); k != wire.KindRefused || b[0] != byte(broker.RefusedDuplicate) {
		t.Errorf("replay: %d %v", k, b)
	}
}

// Peers that are silent, half open, slow, malformed or huge are cut off, and a good one is served meanwhile.
func TestSR8BadPeers(t *testing.T) {
	r := newRig(t, []rules.Rule{{Argv: []string{"echo", "fine"}, Action: rules.Auto}}, func(c *Config) {
		c.Handshake, c.Silence, c.Delivery = time.Second, 1200*time.Millisecond, time.Second
	})
	e := r.join("s1", false)
	cut := func(name string, c net.Conn) {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s was not cut off", name)
		}
	}
	var half []net.Conn
	for range 3 * maxStrangers { // more than there is room for
		c, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		half = append(half, c)
	}
	if o := r.run(e, "echo", "fine"); o.out != "fine\n" {
		t.Errorf("behind half-open peers: %+v", o)
	}
	for _, c := range half[len(half)-3:] {
		cut("half open", c)
	}
	plain, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	_, _ = plain.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	cut("no TLS", plain)
	cut("authenticated and silent", r.raw(e))
	silent := r.raw(e)
	r.submit(silent, "true")
	cut("silent after a request", silent)
	for name, b := range map[string][]byte{
		"unknown kind":     {0, 0, 0, 0, 0},
		"64 MB claimed":    binary.BigEndian.AppendUint32([]byte{byte(wire.KindSubmit)}, 64<<20),
		"not a request":    wire.AppendFrame(nil, wire.KindCancel, nil),
		"garbage":          wire.AppendFrame(nil, wire.KindSubmit, bytes.Repeat([]byte{0xff}, 100)),
		"server's message": wire.AppendFrame(nil, wire.KindResult, nil),
	} {
		c := r.raw(e)
		_, _ = c.Write(b)
		cut(name, c)
	}
	big := r.raw(e)
	arg := wire.Submit{Argv: []string{"true", strings.Repeat("a", 64<<20)}, Dir: r.work}
	go func() { _, _ = big.Write(wire.AppendFrame(nil, wire.KindSubmit, arg.Append(nil))) }()
	cut("64 MB of arguments", big)
	deaf := r.raw(e) // takes its result, never confirms it, but pings
	r.submit(deaf, "echo", "fine")
	go func() {
		for range 40 {
			time.Sleep(100 * time.Millisecond)
			_, _ = deaf.Write(wire.AppendFrame(nil, wire.KindPing, nil))
		}
	}()
	cut("result not confirmed", deaf)
	in := r.raw(e)
	r.submit(in, "true")
	_, _ = in.Write(wire.AppendFrame(nil, wire.KindStdin, []byte("x")))
	cut("standard input that was not announced", in)
	if o := r.run(e, "echo", "fine"); o.out != "fine\n" {
		t.Errorf("at the end: %+v", o)
	}
	r.quiet()
}

func TestSR8Flood(t *testing.T) {
	r := newRig(t, []rules.Rule{{Argv: []string{"echo", "fine"}, Action: rules.Auto}}, nil)
	r.dev.do = ignore
	bad, good := r.join("s1", true), r.join("s2", true)
	n := 10000
	if testing.Short() {
		n = 500
	}
	var wg sync.WaitGroup
	work := make(chan struct{})
	var mu sync.Mutex
	count := map[string]int{}
	for range 100 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var held []net.Conn
			defer func() {
				for _, c := range held {
					c.Close()
				}
			}()
			for range work {
				c, err := tls.Dial("tcp", bad.Addr, bad.TLS)
				if err != nil {
					continue
				}
				sub := wire.Submit{Argv: []string{"true"}, Dir: r.work}
				mu.Lock()
				count["sent"]++
				binary.BigEndian.PutUint64(sub.ID[:], uint64(count["sent"]))
				mu.Unlock()
				_, _ = c.Write(wire.AppendFrame(nil, wire.KindSubmit, sub.Append(nil)))
				_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
				if k, _, _ := (&wire.Reader{R: c}).Next(); k == wire.KindRefused {
					c.Close()
				} else if k == wire.KindAccepted {
					mu.Lock()
					count["accepted"]++
					mu.Unlock()
					held = append(held, c)
				}
			}
		}()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	slowest := time.Duration(0)
	for i := range n {
		work <- struct{}{}
		if i%(n/10) == 0 {
			at := time.Now()
			if o := r.run(good, "echo", "fine"); o.out != "fine\n" {
				t.Errorf("the other session, after %d: %+v", i, o)
			}
			slowest = max(slowest, time.Since(at))
		}
		if open := len(r.s.Pending()); i%500 == 0 && open > 70 {
			t.Errorf("%d open requests", open)
		}
	}
	close(work)
	wg.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	t.Logf("%d requests in %v: %v; the other session waited %v at most; heap %d -> %d KiB", n, time.Since(start).Round(time.Millisecond),
		count, slowest.Round(time.Millisecond), before.HeapAlloc>>10, after.HeapAlloc>>10)
	r.quiet()
}

func TestFR5AnswerFromAnotherTerminal(t *testing.T) {
	r := newRig(t, nil, nil)
	r.dev.do = ignore
	for _, session := range []string{"s1", "s2"} { // without and with a terminal
		e := r.join(session, session == "s2")
		done := make(chan outcome)
		go func() { done <- r.run(e, "echo", "x") }()
		id := r.phase(map[string]string{"s1": "queued", "s2": "prompted"}[session])
		if err := r.s.Answer(id, prompt.Answer{Kind: prompt.Approved}); !errors.Is(err, ErrNotPending) {
			t.Errorf("approved without a digest: %v", err)
		}
		if err := r.s.Answer(id, prompt.Answer{Kind: prompt.Approved, Digest: r.s.Pending()[0].Request.Digest}); err != nil {
			t.Error(err)
		}
		if o := <-done; o.out != "x\n" {
			t.Errorf("%+v", o)
		}
		go func() { done <- r.run(e, "sleep", "300") }()
		id = r.phase(map[string]string{"s1": "queued", "s2": "prompted"}[session])
		if err := r.s.Cancel(id); err != nil {
			t.Error(err)
		}
		if o := <-done; o.res.Outcome != wire.Cancelled {
			t.Errorf("%+v", o)
		}
		if err := r.s.Answer(id, prompt.Answer{Kind: prompt.Denied}); !errors.Is(err, ErrNotPending) {
			t.Errorf("answered after its end: %v", err)
		}
	}
}

func TestDX4Remember(t *testing.T) {
	got := make(chan rules.Rule, 1)
	r := newRig(t, nil, func(c *Config) { c.Remember = func(_ string, n rules.Rule) error { got <- n; return nil } })
	e := r.join("s1", true)
	r.dev.do = func(_ context.Context, _ string, q prompt.Request, _ func([]string) (prompt.Request, error)) (prompt.Answer, error) {
		if !strings.Contains(q.Remember, `"x y"`) {
			t.Errorf("%q", q.Remember)
		}
		return prompt.Answer{Kind: prompt.Approved, Digest: q.Digest, Remember: true}, nil
	}
	r.run(e, "echo", "x y")
	if n := <-got; n.Action != rules.Auto || len(n.Argv) != 2 || n.Trailing != rules.TrailingNone {
		t.Errorf("%+v", n)
	}
}

// Nothing is left of a server: no goroutine, no descriptor.
func TestOR3NothingLeaks(t *testing.T) {
	once := func() {
		t.Run("", func(t *testing.T) {
			r := newRig(t, nil, nil)
			e := r.join("s1", true)
			r.run(e, "echo", "x")
			r.dev.do = ignore
			c := r.raw(e)
			r.submit(c, "true")
			r.phase("prompted")
		})
	}
	count := func() (int, int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(fds)
	}
	once()
	g, f := count()
	for range 3 {
		once()
	}
	var g2, f2 int
	for range 100 {
		if g2, f2 = count(); g2 <= g && f2 <= f {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	buf := make([]byte, 1<<20)
	t.Errorf("goroutines %d -> %d, descriptors %d -> %d\n%s", g, g2, f, f2, buf[:runtime.Stack(buf, true)])
}

func BenchmarkTrue(b *testing.B) {
	r := newRig(b, []rules.Rule{{Argv: []string{"true"}, Action: rules.Auto}}, nil)
	e := r.join("s1", true)
	b.Run("escalated", func(b *testing.B) {
		for b.Loop() {
			if o := r.run(e, "true"); o.res.Outcome != wire.Completed {
				b.Fatal(o)
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

func BenchmarkOutput(b *testing.B) {
	const size = 100 << 20
	argv := []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}
	r := newRig(b, []rules.Rule{{Argv: argv, Action: rules.Auto}}, nil)
	e := r.join("s1", true)
	b.Run("escalated", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			var n counter
			res, err := e.Run(context.Background(), client.Request{Argv: argv, Dir: r.work, Stdout: &n, Stderr: &n})
			if err != nil || res.Outcome != wire.Completed || n != size {
				b.Fatal(res, err, n)
			}
		}
	})
	b.Run("pipe", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			cmd := exec.Command(argv[0], argv[1:]...)
			p, err := cmd.StdoutPipe()
			if err != nil {
				b.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
			var n counter
			if _, err := io.CopyBuffer(struct{ io.Writer }{&n}, struct{ io.Reader }{p}, make([]byte, 64<<10)); err != nil || n != size {
				b.Fatal(err, n)
			}
			if err := cmd.Wait(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}

// A thousand requests that wait cost a bounded and small amount of memory each.
func TestSR8ThousandQueued(t *testing.T) {
	r := newRig(t, nil, func(c *Config) { c.Limits = broker.Limits{PerSession: 1000, Total: 1000} })
	e := r.join("s1", false)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := heap()
	const n = 1000
	conns := make([]net.Conn, n)
	for i := range conns {
		conns[i] = r.raw(e)
		sub := wire.Submit{Argv: []string{"true"}, Dir: r.work}
		binary.BigEndian.PutUint64(sub.ID[:], uint64(i))
		if _, err := conns[i].Write(wire.AppendFrame(nil, wire.KindSubmit, sub.Append(nil))); err != nil {
			t.Fatal(err)
		}
	}
	queued := func() (k int) {
		for _, p := range r.s.Pending() {
			if p.Phase == "queued" {
				k++
			}
		}
		return k
	}
	for start := time.Now(); queued() < n; time.Sleep(50 * time.Millisecond) {
		if time.Since(start) > time.Minute {
			t.Fatalf("%d queued", queued())
		}
	}
	full := heap()
	t.Logf("%d queued requests, both ends in this process: %d KiB each", n, (full-before)/n>>10)
	if each := (full - before) / n; each > 256<<10 {
		t.Errorf("%d bytes for each queued request", each)
	}
	extra := r.raw(e)
	r.submit(extra, "true")
	if k, b := read(t, extra); k != wire.KindRefused || b[0] != byte(broker.RefusedBusy) {
		t.Errorf("one more: %d %v", k, b)
	}
	r.s.Leave("s1")
	r.quiet()
}
