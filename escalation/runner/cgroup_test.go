package runner

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
)

func needs(t *testing.T, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("%s is required here: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}

// Even if the runner itself is killed, a command in a cgroup of its own leaves nothing behind. LAZARET_TEST_CGROUP names a
// delegated cgroup v2 directory, in a child of which the tests run.
func TestOR3RunnerIsKilled(t *testing.T) {
	parentGroup := os.Getenv("LAZARET_TEST_CGROUP")
	var err error
	if parentGroup == "" {
		err = errors.New("LAZARET_TEST_CGROUP is not set")
	}
	needs(t, "a delegated cgroup", err)
	f := setup(t)
	f.host.Close()
	f.host = NewHost(Config{Cgroup: parentGroup})
	defer f.host.Close()
	d := t.TempDir()
	var n [3]*os.File
	for i := range n {
		if n[i], err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
			t.Fatal(err)
		}
	}
	p := f.plan(t, f.work, false, "sh", "-c", fmt.Sprintf(daemonise, d, "echo $$ >"+d+"/self; sleep 300; sleep 300"))
	run, err := f.host.Prepare(p, Stdio{n[0], n[1], n[2]})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-run.Ready(); err != nil {
		t.Fatal(err)
	}
	run.Start()
	daemon, self := pidIn(t, d+"/daemon"), pidIn(t, d+"/self")
	if err := syscall.Kill(parent(t, self), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-run.Done()
	waitDead(t, daemon)
	waitDead(t, self)
	if _, err := run.Exit(); err == nil {
		t.Error("no error")
	}
	if _, err := os.Stat(run.cgroup); err == nil {
		t.Errorf("%s is left", run.cgroup)
	}
	// And an ordinary run.
	if out, _, err := f.run(t, f.plan(t, f.work, false, "cat", "/proc/self/cgroup"), nil); err != nil {
		t.Errorf("%q %v", out, err)
	}
}
