package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const outputBytes = 100 << 20

const escalationProfile = `
[[escalation.rule]]
argv = ["true"]
auto = true

[[escalation.rule]]
argv = ["head", "-c", "104857600", "/dev/zero"]
auto = true
`

// insideScript prints the name and the nanoseconds of each case, once in turn; the first round warms up.
const insideScript = `
once() { name=$1; shift; s=$(date +%s%N); "$@" >/dev/null; e=$(date +%s%N); echo "$name $((e-s))"; }
i=0
while [ $i -le ROUNDS ]; do
	once true true
	once help lazaret-escalate --help
	once ask lazaret-escalate -- true
	once output lazaret-escalate -- head -c 104857600 /dev/zero
	i=$((i+1))
done
`

// escalation measures rules that approve, through the real product, next to the same command run directly on the host.
func escalation(w io.Writer, d developer, rounds int) error {
	ws, profiles := filepath.Join(d.dir, "escalate"), filepath.Join(d.dir, "home/.config/lazaret/profiles")
	if err := os.MkdirAll(profiles, 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(ws, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(profiles, "escalate.toml"), []byte(escalationProfile), 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit*3)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.program, "enter", "escalate", "--workspace", ws, "--", "sh", "-c", strings.ReplaceAll(insideScript, "ROUNDS", strconv.Itoa(rounds)))
	cmd.Env, cmd.Dir = d.environ(), ws
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	times := map[string][]float64{}
	running := true
	for running { // the host's, meanwhile: both meet the same load
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("escalation: %w: %s", err, errs.Bytes())
			}
			running = false
		case <-time.After(100 * time.Millisecond):
			for name, args := range map[string][]string{"host true": {"true"}, "host output": {"head", "-c", strconv.Itoa(outputBytes), "/dev/zero"}} {
				took, err := piped(args)
				if err != nil {
					return err
				}
				times[name] = append(times[name], millis(took))
			}
		}
	}
	seen := map[string]bool{}
	for line := range strings.Lines(out.String()) {
		name, ns, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseFloat(ns, 64)
		if err != nil {
			return fmt.Errorf("escalation: %q: %w", line, err)
		}
		if seen[name] {
			times[name] = append(times[name], n/1e6)
		}
		seen[name] = true
	}
	fmt.Fprintf(w, "\n| escalation, approved by a rule | median ms | fastest ms |\n|---|---|---|\n")
	median, least := map[string]float64{}, map[string]float64{}
	for _, c := range [][2]string{{"host true", "`true` on the host"}, {"true", "`true` in the sandbox"}, {"help", "`lazaret-escalate --help`"},
		{"ask", "`lazaret-escalate -- true`"}, {"host output", "100 MB through a pipe on the host"}, {"output", "100 MB from the host into the sandbox"}} {
		ts := times[c[0]]
		if len(ts) == 0 {
			return fmt.Errorf("escalation: no times of %q", c[0])
		}
		slices.Sort(ts)
		median[c[0]], least[c[0]] = ts[len(ts)/2], ts[0]
		fmt.Fprintf(w, "| %s | %.1f | %.1f |\n", c[1], median[c[0]], least[c[0]])
	}
	fmt.Fprintf(w, "\nAims: asking adds at most 15 ms to the host's `true`: %.1f (median), %.1f (fastest), of which starting the client takes %.1f and %.1f; at least half of a pipe's throughput: %s and %s.\n",
		median["ask"]-median["host true"], least["ask"]-least["host true"], median["help"], least["help"],
		ratio(median["host output"], median["output"]), ratio(least["host output"], least["output"]))
	return nil
}

// piped runs a command whose output is read through a pipe.
func piped(args []string) (time.Duration, error) {
	begin := time.Now()
	cmd := exec.Command(args[0], args[1:]...)
	r, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	_, _ = io.Copy(struct{ io.Writer }{io.Discard}, r)
	err = cmd.Wait()
	return time.Since(begin), err
}
