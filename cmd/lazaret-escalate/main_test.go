package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/escalation/client"
	"lazaret.dev/lazaret/escalation/wire"
)

func TestMain(m *testing.M) {
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
