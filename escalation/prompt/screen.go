package prompt

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Smallest size, in cells, that a request is shown on. On a smaller one it can only be denied.
const (
	MinColumns = 40
	MinRows    = 10
)

type mode uint8

const (
	asking mode = iota
	remembering
	editing
)

// Screen is a prompt as a value: what is on the screen, and what a key does to it. It does no I/O and knows no time but
// the one it is told.
type Screen struct {
	Req        Request
	Cols, Rows int
	Now        time.Time

	mode    mode
	top     int    // first line of the body that is shown
	seen    bool   // the body's end has been on the screen
	message string // ours, of the last key
	editor  editor
}

// Decision is what a key led to.
type Decision uint8

const (
	Nothing Decision = iota
	Approve
	ApproveAndRemember
	Deny
	Recheck // the edited vector is to be checked: Screen.Edited, then Screen.Replace or Screen.Reject
)

const label = 9 // width of the first column

// Lines returns the screen, at most Rows lines of at most Cols-1 cells (a terminal may wrap at the last one), and the line
// and the byte in it that the cursor is on; row is -1 if it is hidden.
func (s *Screen) Lines() (lines []string, row, at int) {
	if s.Cols < MinColumns || s.Rows < MinRows {
		return fit([]string{"Lazaret asks for permission.", "Window too small:", fmt.Sprintf("%dx%d is needed.", MinColumns, MinRows), "[d] deny"}, s.Cols, s.Rows), -1, 0
	}
	body := s.body()
	foot := s.foot(len(body))
	room := s.Rows - len(foot)
	row = -1
	if s.mode == editing {
		row, at = s.editor.cursor(s.Cols - 1 - label)
		row += len(body) - len(s.editor.lines(s.Cols-1-label))
		s.top = max(min(s.top, row), row-room+1)
		row, at = row-s.top, at+label
	}
	s.top = max(0, min(s.top, len(body)-room))
	end := min(len(body), s.top+room)
	if s.mode == asking && end == len(body) {
		s.seen = true
	}
	lines = slices.Clone(body[s.top:end])
	for len(lines) < room {
		lines = append(lines, "")
	}
	return append(lines, foot...), row, at
}

// fit cuts lines of ours to a size.
func fit(lines []string, cols, rows int) []string {
	lines = lines[:min(len(lines), max(rows, 0))]
	for i, l := range lines {
		lines[i] = l[:min(len(l), max(cols-1, 0))]
	}
	return lines
}

func (s *Screen) body() []string {
	switch s.mode {
	case remembering:
		lines := s.para("Lazaret would add this rule to the profile, and run the command now. From then on it runs without being asked about:")
		return append(append(lines, ""), s.text("", s.Req.Remember, true)...)
	case editing:
		lines := s.para("Edit the command. Enter checks it and shows it again; it does not run yet. Escape goes back.")
		lines = append(lines, "")
		for i, l := range s.editor.lines(s.Cols - 1 - label) {
			lines = append(lines, name(i == 0, "command")+l)
		}
		return lines
	}
	q := s.Req
	title := "Lazaret: run this on the host?"
	if q.Edited {
		title = "Lazaret: run this, as you edited it?"
	}
	lines := []string{title, ""}
	lines = append(lines, s.text("profile", q.Profile, false)...)
	lines = append(lines, s.text("session", q.Session, false)...)
	lines = append(lines, s.text("program", q.Program, false)...)
	lines = append(lines, s.command()...)
	lines = append(lines, s.text("in", q.Dir, false)...)
	env := "none"
	if len(q.Env) > 0 {
		env = strings.Join(q.Env, " ")
	}
	lines = append(lines, s.text("env", env, false)...)
	if q.Time > 0 {
		lines = append(lines, s.text("at most", q.Time.String(), false)...)
	}
	for _, n := range append(slices.Clone(q.Notes), s.unusual()...) {
		lines = append(lines, s.text("note", n, false)...)
	}
	lines = append(lines, "")
	if q.Reason == "" {
		return append(lines, "The agent gives no reason.")
	}
	lines = append(lines, s.para("The agent says, in its own words:")...)
	return append(lines, s.text("", q.Reason, true)...)
}

// command shows the argument vector: on one line if it fits, else each argument on its own.
func (s *Screen) command() []string {
	if one := Join(s.Req.Argv); width(one) <= s.Cols-1-label {
		return []string{name(true, "command") + one}
	}
	lines := []string{name(true, "command") + fmt.Sprintf("%d words, one on each line:", len(s.Req.Argv))}
	for i, a := range s.Req.Argv {
		for j, part := range wrap(Quote(a), s.Cols-1-label) {
			n := ""
			if j == 0 {
				n = fmt.Sprintf("%d", i)
			}
			lines = append(lines, fmt.Sprintf("%*s ", label-1, n)+part)
		}
	}
	return lines
}

// unusual points out what is easily overlooked.
func (s *Screen) unusual() (notes []string) {
	count := map[rune]bool{}
	for i, a := range append([]string{s.Req.Dir}, s.Req.Argv...) {
		for _, r := range a {
			if r >= 0x80 && r != utf8.RuneError && !count[r] && len(count) < 6 {
				count[r] = true
				where := fmt.Sprintf("word %d", i-1)
				if i == 0 {
					where = "the directory"
				}
				notes = append(notes, fmt.Sprintf("U+%04X in %s is not plain ASCII.", r, where))
			}
		}
	}
	if base := path.Base(s.Req.Program); len(s.Req.Argv) > 0 && path.Base(s.Req.Argv[0]) != base {
		notes = append(notes, "The program's file has another name than word 0.")
	}
	return notes
}

func name(first bool, n string) string {
	if !first {
		n = ""
	}
	return fmt.Sprintf("%-*s", label, n)
}

// text shows a value behind its label, escaped and wrapped. With margin it is somebody's words: line breaks are kept, and
// each line is marked.
func (s *Screen) text(n, value string, margin bool) (lines []string) {
	if !margin {
		for i, part := range wrap(escape(value, ""), s.Cols-1-label) {
			lines = append(lines, name(i == 0, n)+part)
		}
		return lines
	}
	for _, l := range strings.Split(strings.TrimRight(value, "\n"), "\n") {
		for _, part := range wrap(escape(l, ""), s.Cols-1-4) {
			lines = append(lines, "  | "+part)
		}
	}
	return lines
}

// para wraps words of ours.
func (s *Screen) para(text string) (lines []string) {
	line := ""
	for _, w := range strings.Fields(text) {
		if line != "" && len(line)+1+len(w) > s.Cols-1 {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += w
	}
	return append(lines, line)
}

// row puts choices side by side, as many as fit on a line.
func (s *Screen) row(choices ...string) []string {
	lines := []string{choices[0]}
	for _, c := range choices[1:] {
		if last := lines[len(lines)-1]; len(last)+3+len(c) <= s.Cols-1 {
			lines[len(lines)-1] = last + "   " + c
		} else {
			lines = append(lines, c)
		}
	}
	return lines
}

// wrap cuts showable text into pieces of at most n cells; there is at least one.
func wrap(text string, n int) (parts []string) {
	start, used := 0, 0
	for i, r := range text {
		if c := cells(r); used+c > n {
			parts = append(parts, text[start:i])
			start, used = i, 0
		}
		used += cells(r)
	}
	return append(parts, text[start:])
}

// foot is the part that never scrolls.
func (s *Screen) foot(body int) []string {
	rule := strings.Repeat("-", s.Cols-1)
	switch s.mode {
	case remembering:
		return append([]string{rule}, s.row("[y] run and remember", "[n] go back")...)
	case editing:
		lines := []string{rule}
		if s.message != "" {
			lines = append(lines, s.para(s.message)...)
		}
		return append(lines, s.row("[Enter] check", "[Escape] go back")...)
	}
	choices := []string{"[a] approve", "[d] deny", "[e] edit"}
	if s.Req.Remember != "" {
		choices = append(choices, "[r] remember")
	}
	lines := append([]string{rule}, s.row(choices...)...)
	room := s.Rows - len(lines) - 1
	status := ""
	switch {
	case s.message != "":
		status = s.message
	case body > room && !s.seen:
		status = fmt.Sprintf("Lines %d-%d of %d. More: down or space.", s.top+1, min(body, s.top+room), body)
	case body > room:
		status = fmt.Sprintf("Lines %d-%d of %d.", s.top+1, min(body, s.top+room), body)
	case s.Req.Waiting > 0:
		status = fmt.Sprintf("%d more waiting.", s.Req.Waiting)
	}
	if left := s.Req.Expires.Sub(s.Now); !s.Req.Expires.IsZero() && !s.Now.IsZero() && s.message == "" {
		status = strings.TrimSpace(fmt.Sprintf("%s %s left.", status, max(left, 0).Round(time.Second)))
	}
	return append(lines, fit([]string{status}, s.Cols, 1)...)
}

// Key applies a key. deliberate says that it came alone and after a pause; others do not decide anything.
func (s *Screen) Key(k Key, deliberate bool) Decision {
	s.message = ""
	small := s.Cols < MinColumns || s.Rows < MinRows
	if s.mode == editing && !small {
		return s.editKey(k)
	}
	page := max(1, s.Rows-5)
	switch k {
	case KeyUp:
		s.top = max(0, s.top-1)
		return Nothing
	case KeyDown, "\r":
		s.top++
		return Nothing
	case KeyPageUp, "b":
		s.top = max(0, s.top-page)
		return Nothing
	case KeyPageDown, " ":
		s.top += page
		return Nothing
	case KeyHome:
		s.top = 0
		return Nothing
	case KeyEnd:
		// Not to the end at once: what was not on the screen was not seen.
		s.top += page
		return Nothing
	}
	if !deliberate {
		s.message = "Keys that come fast are ignored."
		return Nothing
	}
	switch {
	case k == "d" && s.mode == asking:
		return Deny
	case small:
		return Nothing
	case s.mode == remembering && k == "y":
		return ApproveAndRemember
	case s.mode == remembering && (k == "n" || k == KeyEscape):
		s.mode, s.top = asking, 0
	case s.mode == remembering:
	case (k == "a" || k == "r") && !s.seen:
		s.message = "Read to the end first: down or space."
	case k == "a":
		return Approve
	case k == "r" && s.Req.Remember != "":
		s.mode, s.top = remembering, 0
	case k == "e":
		s.mode, s.top = editing, 0
		s.editor = newEditor(Join(s.Req.Argv))
	}
	return Nothing
}

func (s *Screen) editKey(k Key) Decision {
	switch k {
	case KeyEscape, "\x03":
		s.mode, s.top = asking, 0
	case "\r", "\n":
		argv, err := Split(string(s.editor.text))
		if err != nil {
			s.message = err.Error()
			return Nothing
		}
		if len(argv) == 0 || argv[0] == "" {
			s.message = "There is no command."
			return Nothing
		}
		return Recheck
	default:
		s.editor.key(k)
	}
	return Nothing
}

// Edited returns the edited argument vector, after Recheck.
func (s *Screen) Edited() []string {
	argv, _ := Split(string(s.editor.text))
	return argv
}

// Replace shows another request, from its beginning.
func (s *Screen) Replace(q Request) { *s = Screen{Req: q, Cols: s.Cols, Rows: s.Rows, Now: s.Now} }

// Reject keeps the editor open and says why the edit cannot be.
func (s *Screen) Reject(why error) { s.message = escape(why.Error(), "") }
