package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is one below the test process, as /proc shows it.
type process struct {
	pid, parent int
	state       string
	title       string // command line, or the name of one that has none
}

func (p process) String() string { return fmt.Sprintf("%d (%s) %s", p.pid, p.state, p.title) }

// descendants lists the processes below pid, zombies included.
func descendants(pid int) (out []process) {
	entries, _ := os.ReadDir("/proc")
	children := map[int][]process{}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n))
		if err != nil {
			continue
		}
		open, end := strings.IndexByte(string(stat), '('), strings.LastIndexByte(string(stat), ')')
		f := strings.Fields(string(stat[end+1:]))
		p := process{pid: n, state: f[0], title: string(stat[open : end+1])}
		p.parent, _ = strconv.Atoi(f[1])
		if cl, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", n)); len(cl) > 0 {
			p.title = strings.TrimSpace(strings.ReplaceAll(string(cl), "\x00", " "))
		}
		children[p.parent] = append(children[p.parent], p)
	}
	queue := []int{pid}
	for len(queue) > 0 {
		for _, c := range children[queue[0]] {
			out = append(out, c)
			queue = append(queue, c.pid)
		}
		queue = queue[1:]
	}
	return out
}

// leftovers lists what runs below the test and is no command that it still waits for. Orphans that have ended are reaped.
func leftovers() (out []process) {
	for _, p := range descendants(os.Getpid()) {
		ownedMu.Lock()
		ours := owned[p.pid]
		if !ours && p.state == "Z" && p.parent == os.Getpid() {
			_, _ = syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
			ours = true
		}
		ownedMu.Unlock()
		if !ours {
			out = append(out, p)
		}
	}
	return out
}

// find returns the processes whose title contains text.
func find(text string) (out []process) {
	for _, p := range descendants(os.Getpid()) {
		if strings.Contains(p.title, text) && p.state != "Z" {
			out = append(out, p)
		}
	}
	return out
}

// titles of Lazaret's processes.
const (
	coordinator = "lazaret [coordinator]"
	domain      = "lazaret [domain]"
	uplink      = "lazaret [uplink]"
	runner      = "lazaret [runner]"
	sandbox     = "runsc-sandbox"
	gofer       = "runsc-gofer"
)

// theOne returns the only process of that title.
func (b *box) theOne(title string) process {
	b.t.Helper()
	found := find(title)
	if len(found) != 1 {
		b.t.Fatalf("want one %q, found %v among %v", title, found, descendants(os.Getpid()))
	}
	return found[0]
}

// wantNoProcess checks that everything that was started is gone within limit, and returns how long it took.
func (b *box) wantNoProcess(limit time.Duration) time.Duration {
	b.t.Helper()
	begin := time.Now()
	for {
		left := leftovers()
		switch {
		case len(left) == 0:
			return time.Since(begin)
		case time.Since(begin) > limit:
			b.t.Errorf("processes left after %v: %v", limit, left)
			for _, p := range left {
				_ = syscall.Kill(p.pid, syscall.SIGKILL)
			}
			return limit
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// wantNoMount checks that the host sees no mount in the box.
func (b *box) wantNoMount() {
	b.t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, b.dir) {
			b.t.Errorf("mount left: %s", line)
		}
	}
}

// transients lists the files that must go with a Domain: all of the runtime directory but the image store's own, and the
// throw-away layer.
func (b *box) transients() (out []string) {
	_ = filepath.WalkDir(filepath.Join(b.runtime, "lazaret"), func(p string, e os.DirEntry, err error) error {
		if e != nil && e.Name() == ".img" {
			return filepath.SkipDir
		}
		if p != filepath.Join(b.runtime, "lazaret") {
			out = append(out, p)
		}
		return nil
	})
	found, _ := filepath.Glob(filepath.Join(b.storage(), "transient/*"))
	slices.Sort(out)
	return append(out, found...)
}

// wantNoFile checks that no transient file is left within limit.
func (b *box) wantNoFile(limit time.Duration) {
	b.t.Helper()
	begin := time.Now()
	for left := b.transients(); len(left) > 0; left = b.transients() {
		if time.Since(begin) > limit {
			b.t.Errorf("files left after %v: %q", limit, left)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// wantNothingLeft checks all of it, after the last session has ended (OR-1).
func (b *box) wantNothingLeft() {
	b.t.Helper()
	b.wantNoProcess(10 * time.Second)
	b.wantNoMount()
	b.wantNoFile(0)
}

func (b *box) showLogs() {
	logs, _ := filepath.Glob(filepath.Join(b.storage(), "domains/*/domain.log"))
	journals, _ := filepath.Glob(filepath.Join(b.storage(), "domains/*/journal.jsonl"))
	for _, l := range append(logs, journals...) {
		if text, _ := os.ReadFile(l); len(text) > 0 {
			b.t.Logf("%s:\n%s", l, clip(string(text)))
		}
	}
}
