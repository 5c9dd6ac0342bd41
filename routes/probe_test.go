package routes

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
)

func mustAddr(s string) netip.Addr { return netip.MustParseAddr(s) }

func openFDs(t testing.TB) int {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// children are the process IDs of this process's children.
func children(t testing.TB) (pids []string) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}

func openFDsOf(t testing.TB, pid int) int {
	t.Helper()
	// The process is not dumpable, so its own directory is closed to us; its limit is not.
	es, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Skipf("descriptors of the uplink: %v", err)
	}
	return len(es)
}
