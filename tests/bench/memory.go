package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// memory lists what the processes of an idle Domain take; Lazaret's own are those that are not gVisor's.
func memory(w io.Writer, client int) {
	fmt.Fprintf(w, "\n| process of an idle Domain with one session | PSS MB | whose |\n|---|---|---|\n")
	var own float64
	bound := ""
	for _, pid := range family(client) {
		title := title(pid)
		kb, exact := pss(pid)
		whose := "gVisor's"
		if strings.HasPrefix(title, "lazaret [") || strings.HasPrefix(title, "lazaret enter") {
			whose = "Lazaret's"
			own += float64(kb) / 1024
			if !exact {
				bound = "at most "
			}
		}
		size := fmt.Sprintf("%.1f", float64(kb)/1024)
		if !exact {
			size = "at most " + size + " (RSS; it hides its PSS)"
		}
		fmt.Fprintf(w, "| %s | %s | %s |\n", title, size, whose)
	}
	fmt.Fprintf(w, "\nLazaret's own: %s%.1f MB. Aim: at most 40 MB.\n", bound, own)
}

// family lists the client and the processes of its Domain; the coordinator is the client's child.
func family(client int) (out []int) {
	children := map[int][]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		parent, _ := strconv.Atoi(f[1])
		children[parent] = append(children[parent], pid)
	}
	queue := []int{client}
	for len(queue) > 0 {
		out = append(out, queue[0])
		queue = append(queue[1:], children[queue[0]]...)
	}
	return out
}

// title is the first words of a command line.
func title(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	argv := strings.Split(string(b), "\x00")
	switch {
	case strings.HasPrefix(argv[0], "lazaret ["), strings.HasPrefix(argv[0], "runsc-"):
		return argv[0]
	case strings.HasSuffix(argv[0], "/lazaret"):
		return "lazaret enter"
	case strings.HasPrefix(argv[0], "lazaret-runsc"):
		return "lazaret-runsc exec"
	}
	return "system call stub"
}

// pss returns the proportional set size in KiB; where it is hidden, the resident set size, which is not smaller.
func pss(pid int) (kb int, exact bool) {
	for _, try := range []struct{ file, key string }{{"smaps_rollup", "Pss:"}, {"status", "VmRSS:"}} {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, try.file))
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, try.key); ok {
				_, _ = fmt.Sscan(v, &kb)
				return kb, try.key == "Pss:"
			}
		}
	}
	return 0, false
}
