package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
	"lazaret.dev/lazaret/escalation/trust"
	"lazaret.dev/lazaret/escalation/wire"
)

func TestMain(m *testing.M) {
	if os.Args[0] == runner.RoleArg {
		os.Exit(escalation.RunnerMain())
	}
	if os.Getenv("TEST_AS_CLIENT") != "" {
		main()
	}
	os.Exit(m.Run())
}

func TestParse(t *testing.T) {
	o, err := parse([]string{"--reason", "because", "--timeout=90s", "--stdin", "--", "git", "push", "--help"})
	if err != nil || o.reason != "because" || o.timeout != 90*time.Second || !o.stdin || !slices.Equal(o.argv, []string{"git", "push", "--help"}) {
		t.Errorf("%+v, %v", o, err)
	}
	for _, bad := range [][]string{{}, {"git", "push"}, {"--"}, {"--", ""}, {"--reason"}, {"--reason", "--", "x"}, {"--timeout", "x", "--", "a"},
		{"--timeout=-1s", "--", "a"}, {"--frob", "--", "a"}} {
		if o, err := parse(bad); err == nil {
			t.Errorf("%q became %+v", bad, o)
		}
	}
	if o, err := parse([]string{"mcp"}); err != nil || !o.mcp {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestExitStatuses(t *testing.T) {
	for _, tc := range []struct {
		r    wire.Result
		want int
		line string
	}{
		{wire.Result{Outcome: wire.Completed}, 0, ""},
		{wire.Result{Outcome: wire.Completed, Status: 7}, 7, ""},
		{wire.Result{Outcome: wire.Completed, Status: -1, Signal: 9}, 137, ""},
		{wire.Result{Outcome: wire.Denied, Detail: "by a rule"}, 201, "denied: by a rule"},
		{wire.Result{Outcome: wire.TimedOut}, 202, "timed out"},
		{wire.Result{Outcome: wire.Cancelled}, 203, "cancelled"},
		{wire.Result{Outcome: wire.Failed}, 204, "failed"},
	} {
		if got, line := verdict(tc.r); got != tc.want || line != tc.line {
			t.Errorf("%+v: %d %q", tc.r, got, line)
		}
	}
	for _, doc := range []string{usage, escalation.EscalateMD} {
		for _, s := range []string{"201  denied", "202  nobody", "203  cancelled", "204  failed", "205  no conn", "206  usage"} {
			if !strings.Contains(doc, s) {
				t.Errorf("%q is not documented in\n%s", s, doc)
			}
		}
	}
}

func runClient(t *testing.T, env []string, args ...string) (int, string, string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cmd := exec.Command(exe, args...)
	cmd.Env = append(append(os.Environ(), "TEST_AS_CLIENT=1"), env...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestCommandLine(t *testing.T) {
	if code, out, _ := runClient(t, nil, "--help"); code != 0 || out != usage {
		t.Errorf("%d %q", code, out)
	}
	if code, _, errs := runClient(t, nil, "ls"); code != exitUsage || !strings.Contains(errs, "after --") {
		t.Errorf("%d %q", code, errs)
	}
	none := filepath.Join(t.TempDir(), "absent")
	if code, _, errs := runClient(t, []string{client.SessionEnv + "=" + none}, "--", "ls"); code != exitNoConnection || !strings.Contains(errs, "no connection") {
		t.Errorf("%d %q", code, errs)
	}
}

func TestMCPTool(t *testing.T) {
	s := mcp.NewServer(&mcp.Implementation{Name: "x", Version: "1"}, nil)
	addTool(s, func(_ context.Context, q client.Request) (wire.Result, error) {
		if q.Reason != "why" || !slices.Equal(q.Argv, []string{"git", "push"}) || q.Wait != 60*time.Second {
			t.Errorf("%+v", q)
		}
		_, _ = q.Stdout.Write(bytes.Repeat([]byte("o"), maxReply+1))
		return wire.Result{Outcome: wire.Denied, Detail: "by the developer"}, nil
	})
	here, there := mcp.NewInMemoryTransports()
	ctx := t.Context()
	ss, err := s.Connect(ctx, there, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ss.Close()
	cs, err := mcp.NewClient(&mcp.Implementation{Name: "c", Version: "1"}, nil).Connect(ctx, here, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer cs.Close()
	res, err := cs.CallTool(ctx, &mcp.CallToolParams{Name: "run_on_host",
		Arguments: map[string]any{"command": []string{"git", "push"}, "reason": "why", "timeout_seconds": 60}})
	if err != nil {
		t.Fatal(err)
	}
	m, ok := res.StructuredContent.(map[string]any)
	if !ok || !res.IsError || m["outcome"] != "denied" || m["exit_status"] != float64(201) || m["truncated"] != true {
		t.Errorf("%+v %.200v", res.IsError, res.StructuredContent)
	}
}

// person denies every prompt for "printenv" and leaves all others open.
type person struct{}

func (person) Prompt(ctx context.Context, _ string, q prompt.Request, _ func([]string) (prompt.Request, error)) (prompt.Answer, error) {
	if q.Argv[0] == "printenv" {
		return prompt.Answer{Kind: prompt.Denied}, nil
	}
	<-ctx.Done()
	return prompt.Answer{}, nil
}

// domain serves a workspace and returns it with the environment of a client in session s1.
func domain(t *testing.T) (work string, env []string, s *escalation.Server) {
	t.Helper()
	work, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	res := rules.Resolver{Path: []string{"/usr/bin", "/bin"}, Writable: []string{work}}
	auto := func(argv ...string) rules.Rule { return rules.Rule{Argv: argv, Action: rules.Auto, Stdin: true} }
	set, _, err := rules.Compile([]rules.Rule{auto("pwd"), auto("false"), auto("cat"), auto("sleep", "77"), auto("seq", "100000")}, rules.Options{Resolver: res})
	must(err)
	ws, err := runner.OpenWorkspace(work)
	must(err)
	a, err := trust.New("d", 0, time.Now)
	must(err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	host := runner.NewHost(runner.Config{})
	s, err = escalation.New(escalation.Config{Domain: "d", Profile: "p", Listener: ln, Anchor: a, Rules: set, Resolver: res, Workspace: ws,
		Host: host, Prompter: person{}, Grace: time.Second})
	must(err)
	go func() { _ = s.Serve() }()
	t.Cleanup(func() {
		_ = s.Close()
		host.Close()
		ws.Root.Close()
	})
	cert, key, err := s.Join("s1", true)
	must(err)
	dir := t.TempDir()
	for name, text := range map[string][]byte{"endpoint": []byte(ln.Addr().String() + "\n"), "ca.pem": a.CA(), "cert.pem": cert, "key.pem": key} {
		must(os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	return work, []string{client.DirEnv + "=" + dir, client.SessionEnv + "=" + dir}, s
}

func TestFR5EndToEnd(t *testing.T) {
	work, env, s := domain(t)
	t.Chdir(work)
	for _, tc := range []struct {
		args      []string
		code      int
		out, errs string
	}{
		{[]string{"--", "pwd"}, 0, work + "\n", ""},
		{[]string{"--", "false"}, 1, "", ""},
		{[]string{"--reason", "x", "--", "printenv"}, exitDenied, "", "lazaret-escalate: denied: denied by the developer\n"},
		{[]string{"--timeout", "300ms", "--", "id"}, exitTimedOut, "", "lazaret-escalate: timed out: nobody answered in time\n"},
		{[]string{"--", "absent"}, exitFailed, "", "lazaret-escalate: failed: there is no such program on the host\n"},
		{[]string{"--reason", strings.Repeat("x", 5000), "--", "pwd"}, exitUsage, "", "lazaret-escalate: error: the request cannot be sent: "},
	} {
		if code, out, errs := runClient(t, env, tc.args...); code != tc.code || out != tc.out || !strings.HasPrefix(errs, tc.errs) || tc.errs == "" && errs != "" {
			t.Errorf("%.60q: %d %q %q", tc.args, code, out, errs)
		}
	}
	s.Leave("s1")
	if code, _, errs := runClient(t, env, "--", "pwd"); code != exitNoConnection {
		t.Errorf("%d %q", code, errs)
	}
}

// Control-C in the sandbox cancels the command on the host; so does a reader that goes away.
func TestOR3InterruptedClient(t *testing.T) {
	work, env, s := domain(t)
	t.Chdir(work)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	start := func(args ...string) *exec.Cmd {
		cmd := exec.Command(exe, args...)
		cmd.Env = append(append(os.Environ(), "TEST_AS_CLIENT=1"), env...)
		cmd.Stderr = os.Stderr
		return cmd
	}
	running := func() bool {
		p := s.Pending()
		return len(p) == 1 && p[0].Phase == "running"
	}
	await := func(what string, f func() bool) {
		t.Helper()
		for range 500 {
			if f() {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatal(what)
	}
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		cmd := start("--", "sleep", "77")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		await("not running", running)
		_ = cmd.Process.Signal(sig)
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); sig != syscall.SIGKILL && code != exitCancelled {
			t.Errorf("%v: exit status %d", sig, code)
		}
		await("the request is left", func() bool { return len(s.Pending()) == 0 })
	}
	cmd := start("--", "seq", "100000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = out.Read(make([]byte, 10))
	out.Close()
	_ = cmd.Wait()
	await("the request is left", func() bool { return len(s.Pending()) == 0 })
	cmd = start("--stdin", "--", "cat")
	cmd.Stdin = strings.NewReader(strings.Repeat("x", 200000))
	if b, err := cmd.Output(); err != nil || len(b) != 200000 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}
