// Command bench measures what Lazaret costs next to its peers, as ratios, in one run: go run ./tests/bench [-o FILE].
//
// Each round runs every case once, in turn, so that a change of the machine's load meets all alike; the table has medians.
// A peer that is not there, or that does not work on this machine, has a line that says so.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"lazaret.dev/lazaret/nsenter"
)

func main() {
	nsenter.Main(map[string]func(nsenter.Self) int{"bare": bareMain}, nil)
	rounds := flag.Int("n", 9, "number of `rounds`")
	out := flag.String("o", "", "write the table to `FILE` too")
	bin := flag.String("bin", "bin", "`directory` of the programs")
	flag.Parse()
	if err := run(*rounds, *bin, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// measurement is one line of the table.
type measurement struct {
	name    string
	once    func() (time.Duration, error)
	times   []time.Duration
	problem error // why there are no times
}

const (
	cold     = "lazaret enter -- true (cold)"
	join     = "lazaret enter -- true (join)"
	bareRun  = "lazaret-runsc run, same base (bare)"
	bareExec = "lazaret-runsc exec (bare)"
	crun     = "podman run, crun"
)

func run(rounds int, bin, out string) error {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/var/tmp", "lzbench")
	if err != nil {
		return err
	}
	defer removeAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	lz := developer{dir: dir, program: filepath.Join(bin, "lazaret")}
	if err := lz.prepare(); err != nil {
		return err
	}
	bare, bareErr := startBare(dir, filepath.Join(bin, "lazaret-runsc"), filepath.Join(bin, "lazaret-init"))
	if bareErr == nil {
		defer bare.close()
	}
	rootfs, rootErr := makeRootfs(filepath.Join(dir, "rootfs"))
	podman := func(args ...string) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			if rootErr != nil {
				return 0, rootErr
			}
			return lz.time(slices.Concat([]string{"podman"}, args, []string{"run", "--rm", "--network", "none", "--log-driver", "none"})...)(rootfs)
		}
	}
	held, idle, err := lz.hold()
	if err != nil {
		return err
	}
	defer held()
	ms := []*measurement{
		{name: cold, once: lz.enter("cold")},
		{name: bareRun, once: bare.time("run", bareErr)},
		{name: join, once: lz.enter("held")},
		{name: bareExec, once: bare.time("exec", bareErr)},
		{name: "bwrap --unshare-all", once: func() (time.Duration, error) {
			return lz.timed("bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
				"--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "true")
		}},
		{name: crun, once: podman("--runtime", "crun")},
		{name: "podman run, lazaret-runsc", once: podman("--runtime", filepath.Join(bin, "lazaret-runsc"), "--runtime-flag", "ignore-cgroups", "--runtime-flag", "network=none")},
	}
	for range rounds {
		for _, m := range ms {
			if m.problem != nil {
				continue
			}
			took, err := m.once()
			if err != nil {
				m.problem = err
				continue
			}
			m.times = append(m.times, took)
		}
	}
	var b bytes.Buffer
	table(&b, ms, rounds)
	memory(&b, idle)
	if err := escalation(&b, lz, rounds); err != nil {
		fmt.Fprintf(&b, "\nEscalation was not measured: %v\n", err)
	}
	if out != "" {
		if err := os.WriteFile(out, b.Bytes(), 0o644); err != nil {
			return err
		}
	}
	_, err = os.Stdout.Write(b.Bytes())
	return err
}

func removeAll(dir string) {
	if os.RemoveAll(dir) != nil { // podman leaves files of its user namespace
		_ = exec.Command("podman", "unshare", "rm", "-rf", dir).Run()
		_ = os.RemoveAll(dir)
	}
}

func table(w io.Writer, ms []*measurement, rounds int) {
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Fprintf(w, "%d interleaved rounds on %d processors, load %s.\n\n", rounds, runtime.NumCPU(), strings.Join(strings.Fields(string(load))[:3], " "))
	fmt.Fprintf(w, "| case | median ms | fastest to slowest ms | of bare run | of bare exec |\n|---|---|---|---|---|\n")
	median := map[string]float64{}
	for _, m := range ms {
		if m.problem == nil {
			slices.Sort(m.times)
			median[m.name] = millis(m.times[len(m.times)/2])
		}
	}
	for _, m := range ms {
		if m.problem != nil {
			fmt.Fprintf(w, "| %s | not measured: %s | | | |\n", m.name, strings.ReplaceAll(m.problem.Error(), "\n", " "))
			continue
		}
		fmt.Fprintf(w, "| %s | %.0f | %.0f to %.0f | %s | %s |\n", m.name, median[m.name], millis(m.times[0]), millis(m.times[len(m.times)-1]),
			ratio(median[m.name], median[bareRun]), ratio(median[m.name], median[bareExec]))
	}
	fmt.Fprintf(w, "\nAims: cold at most 1.5 of bare run: %s; below podman with crun: %s; join at most 2 of bare exec: %s.\n",
		ratio(median[cold], median[bareRun]), ratio(median[cold], median[crun]), ratio(median[join], median[bareExec]))
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func ratio(a, b float64) string {
	if a == 0 || b == 0 {
		return "not known"
	}
	return fmt.Sprintf("%.2f", a/b)
}

// developer is a user of Lazaret with directories of his own.
type developer struct{ dir, program string }

func (d developer) environ() []string {
	return []string{"HOME=" + filepath.Join(d.dir, "home"), "XDG_RUNTIME_DIR=" + filepath.Join(d.dir, "run"), "PATH=" + os.Getenv("PATH"), "LANG=C.UTF-8"}
}

func (d developer) prepare() error {
	for _, name := range []string{"home", "run", "cold", "held"} {
		if err := os.Mkdir(filepath.Join(d.dir, name), 0o700); err != nil {
			return err
		}
	}
	return nil
}

func (d developer) enter(workspace string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		return d.timed(d.program, "enter", "--workspace", filepath.Join(d.dir, workspace), "--", "true")
	}
}

// time returns a measurement of a command whose arguments end with a root file system and true.
func (d developer) time(args ...string) func(rootfs string) (time.Duration, error) {
	return func(rootfs string) (time.Duration, error) {
		return d.timed(append(args, "--rootfs", rootfs, "true")...)
	}
}

const limit = 2 * time.Minute

func (d developer) timed(args ...string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if _, err := exec.LookPath(args[0]); err != nil {
		return 0, fmt.Errorf("%s is not installed", args[0])
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env, cmd.Dir = d.environ(), filepath.Join(d.dir, "cold")
	begin := time.Now()
	if said, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, bytes.TrimSpace(said))
	}
	return time.Since(begin), nil
}

// hold keeps a Domain running and returns the pid of its coordinator.
func (d developer) hold() (release func(), client int, err error) {
	cmd := exec.Command(d.program, "enter", "--workspace", filepath.Join(d.dir, "held"), "--", "sh", "-c", "echo; exec cat")
	cmd.Env, cmd.Dir = d.environ(), filepath.Join(d.dir, "held")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, 0, err
	}
	if err := cmd.Start(); err != nil {
		return nil, 0, err
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		return nil, 0, errors.Join(fmt.Errorf("hold a Domain: %w", err), cmd.Wait())
	}
	return func() { in.Close(); _ = cmd.Wait() }, cmd.Process.Pid, nil
}

// makeRootfs makes the least root file system in which true runs.
func makeRootfs(dir string) (string, error) {
	path, err := exec.LookPath("true")
	if err != nil {
		return "", err
	}
	files := []string{path}
	if libs, err := exec.Command("ldd", path).Output(); err == nil {
		for _, f := range strings.Fields(string(libs)) {
			if strings.HasPrefix(f, "/") {
				files = append(files, f)
			}
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		if f == path {
			f = "/bin/true"
		}
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, f), b, 0o755); err != nil {
			return "", err
		}
	}
	for _, d := range []string{"proc", "sys", "dev", "tmp", "etc", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return "", err
		}
	}
	return dir, nil
}
