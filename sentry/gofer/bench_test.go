package gofer

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// job is something to measure; its script is timed inside, so that starting a shell there costs nothing.
type job struct{ name, before, script string }

var jobs = []job{
	{"git status, warm", `git status >/dev/null`, `git status >/dev/null`},
	{"find", `find . >/dev/null`, `find . >/dev/null`},
	{"untar", `rm -rf x; mkdir x; test -e /tmp/t.tar || tar cf /tmp/t.tar files`, `tar xf /tmp/t.tar -C x`},
	{"cp -r", `rm -rf y`, `cp -r x y`},
	{"rm -r", ``, `rm -r y`},
	{"write 256 MiB", `rm -f big`, `dd if=/dev/zero of=big bs=1M count=256 conv=fsync 2>/dev/null`},
	{"read 256 MiB", `cat big >/dev/null`, `cat big >/dev/null`},
}

// benchFiles is how many files the work tree has; LAZARET_BENCH_FILES changes it.
func benchFiles(b *testing.B) int {
	s := os.Getenv("LAZARET_BENCH_FILES")
	if s == "" {
		return 5000
	}
	n, err := strconv.Atoi(s)
	must(b, err)
	return n
}

// BenchmarkWorkspace compares this server with the host, with gVisor's own gofer and with a plain bind mount of it, in one
// run: the ratios mean something on a busy machine, the times do not.
func BenchmarkWorkspace(b *testing.B) {
	dir := shortTemp(b)
	tpl := dir + "/tpl"
	project(b, tpl)
	for i := range benchFiles(b) {
		write(b, fmt.Sprintf("%s/files/d%02d/f%03d", tpl, i/100, i%100), strings.Repeat("x", 900)+strconv.Itoa(i))
	}
	hostGit(b, tpl, "config", "gc.auto", "0")
	hostGit(b, tpl, "add", "-A")
	hostGit(b, tpl, "commit", "-qm", "files")
	plain := func(flags ...string) boxOption {
		return func(x *box) {
			x.flags = flags
			x.plan.Workspaces = nil
			x.alter = func(s *specs.Spec) {
				s.Mounts = append(s.Mounts, specs.Mount{Destination: x.ws, Type: "bind", Source: x.ws, Options: []string{"bind", "rw"}})
			}
		}
	}
	kinds := []string{"native", "bind", "directfs off", "ours", "ours, dcache 4000"}
	options := map[string][]boxOption{
		"bind":              {plain()},
		"directfs off":      {plain("--directfs=false")},
		"ours":              nil,
		"ours, dcache 4000": {func(x *box) { x.flags = []string{"--dcache=4000"} }},
	}
	run := map[string]func(string) string{}
	for i, kind := range kinds {
		at := fmt.Sprintf("%s/%d", dir, i)
		must(b, os.MkdirAll(at, 0o755))
		if out, err := exec.Command("cp", "-a", tpl, at+"/ws").CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		if kind == "native" {
			run[kind] = func(script string) string {
				c := exec.Command("bash", "-c", strings.ReplaceAll(script, "/tmp/t.tar", dir+"/t.tar"))
				c.Dir = at + "/ws"
				out, err := c.CombinedOutput()
				if err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				return string(out)
			}
			continue
		}
		x := newBox(b, at, at+"/ws", options[kind]...)
		run[kind] = x.do
	}
	took := map[string]map[string][]int{}
	for b.Loop() {
		for _, j := range jobs {
			for _, kind := range kinds {
				out := run[kind](fmt.Sprintf("set -e; export GIT_OPTIONAL_LOCKS=0; %s\na=${EPOCHREALTIME/./}; %s; echo TOOK $((${EPOCHREALTIME/./} - a))", j.before, j.script))
				_, us, _ := strings.Cut(strings.TrimSpace(out), "TOOK ")
				n, err := strconv.Atoi(us)
				if err != nil {
					b.Fatalf("%s, %s: %q", kind, j.name, out)
				}
				if took[j.name] == nil {
					took[j.name] = map[string][]int{}
				}
				took[j.name][kind] = append(took[j.name][kind], n)
			}
		}
	}
	fmt.Printf("%-20s", "ms (ratio to stock)")
	for _, kind := range kinds {
		fmt.Printf("%20s", kind)
	}
	fmt.Println()
	for _, j := range jobs {
		stock := slices.Min(took[j.name]["directfs off"])
		fmt.Printf("%-20s", j.name)
		for _, kind := range kinds {
			n := slices.Min(took[j.name][kind])
			fmt.Printf("%13d (%.2f)", n/1000, float64(n)/float64(stock))
		}
		fmt.Println()
	}
}
