package review

import (
	"bytes"
	"fmt"
	"strings"
)

const (
	maxDiffBytes = 1 << 20 // of one side; larger files are summarised
	maxDiffLines = 20000
	maxEdits     = 1000 // lines that differ; beyond, the differing middle is shown as replaced as a whole
	diffContext  = 3
)

// edit is one step from a to b: ' ' keeps a line of both, '-' drops one of a, '+' takes one of b.
type edit struct {
	op   byte
	a, b int // line numbers from 0
}

// isText reports whether b can be shown line by line.
func isText(b []byte) bool {
	return len(b) <= maxDiffBytes && bytes.IndexByte(b, 0) < 0 && bytes.Count(b, []byte("\n")) < maxDiffLines
}

// splitLines cuts text into lines; each keeps its newline, so that a missing last one is a difference.
func splitLines(b []byte) []string {
	if len(b) == 0 {
		return nil
	}
	lines := strings.SplitAfter(string(b), "\n")
	if last := len(lines) - 1; lines[last] == "" {
		lines = lines[:last]
	}
	return lines
}

// compareLines finds a short edit script (E. W. Myers, An O(ND) Difference Algorithm and Its Variations, 1986).
func compareLines(a, b []string) []edit {
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	var out []edit
	for i := range head {
		out = append(out, edit{' ', i, i})
	}
	out = append(out, middle(a[head:len(a)-tail], b[head:len(b)-tail], head)...)
	for i := range tail {
		out = append(out, edit{' ', len(a) - tail + i, len(b) - tail + i})
	}
	return out
}

func middle(a, b []string, shift int) []edit {
	v := map[int]int{1: 0} // furthest x on each diagonal x-y
	var trace []map[int]int
	found := false
search:
	for d := 0; d <= min(len(a)+len(b), maxEdits); d++ {
		next := make(map[int]int, d+1)
		for k := -d; k <= d; k += 2 {
			x := v[k-1] + 1
			if k == -d || k != d && v[k-1] < v[k+1] {
				x = v[k+1]
			}
			y := x - k
			for x < len(a) && y < len(b) && a[x] == b[y] {
				x, y = x+1, y+1
			}
			next[k] = x
			if x >= len(a) && y >= len(b) {
				trace = append(trace, next)
				found = true
				break search
			}
		}
		trace = append(trace, next)
		v = next
	}
	if !found {
		var out []edit
		for i := range a {
			out = append(out, edit{'-', shift + i, shift})
		}
		for i := range b {
			out = append(out, edit{'+', shift + len(a), shift + i})
		}
		return out
	}
	var back []edit
	x, y := len(a), len(b)
	for d := len(trace) - 1; d > 0; d-- {
		v, k := trace[d-1], x-y
		prev := k - 1
		if k == -d || k != d && v[k-1] < v[k+1] {
			prev = k + 1
		}
		start := v[prev] + 1 // of the kept lines after this step's edit
		if prev == k+1 {
			start--
		}
		for x > start {
			x, y = x-1, y-1
			back = append(back, edit{' ', shift + x, shift + y})
		}
		if prev == k+1 {
			y--
			back = append(back, edit{'+', shift + x, shift + y})
		} else {
			x--
			back = append(back, edit{'-', shift + x, shift + y})
		}
	}
	for x > 0 && y > 0 {
		x, y = x-1, y-1
		back = append(back, edit{' ', shift + x, shift + y})
	}
	out := make([]edit, 0, len(back))
	for i := range back {
		out = append(out, back[len(back)-1-i])
	}
	return out
}

// unified returns the lines of a unified difference, safe for a terminal and without headers.
func unified(from, to []byte) []string {
	a, b := splitLines(from), splitLines(to)
	script := compareLines(a, b)
	var out []string
	for i := 0; i < len(script); i++ {
		if script[i].op == ' ' {
			continue
		}
		last := i
		for j := i; j < len(script) && j-last <= 2*diffContext; j++ {
			if script[j].op != ' ' {
				last = j
			}
		}
		end := min(last+diffContext+1, len(script))
		out = append(out, hunk(script[max(0, i-diffContext):end], a, b)...)
		i = end - 1
	}
	return out
}

func hunk(script []edit, a, b []string) []string {
	na, nb := 0, 0
	var lines []string
	for _, e := range script {
		text := ""
		if e.op == '+' {
			text = b[e.b]
		} else {
			text = a[e.a]
		}
		if e.op != '+' {
			na++
		}
		if e.op != '-' {
			nb++
		}
		line, ended := strings.CutSuffix(text, "\n")
		lines = append(lines, string(e.op)+ShowLine(line))
		if !ended {
			lines = append(lines, `\ No newline at end of file`)
		}
	}
	at := func(first, n int) string {
		if n == 0 {
			return fmt.Sprintf("%d,0", first)
		}
		return fmt.Sprintf("%d,%d", first+1, n)
	}
	return append([]string{fmt.Sprintf("@@ -%s +%s @@", at(script[0].a, na), at(script[0].b, nb))}, lines...)
}
