package review

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// Status is everything that waits for the developer's attention.
type Status struct {
	Items    []*Item
	Reported []Change
	Repos    []*Repo
	Partial  []string // what was not looked at
}

// Take looks at the served trees, the workspace first. gitdir is as in [Tree.Repos].
func Take(trees []*Tree, gitdir *os.File) *Status {
	s := &Status{}
	for _, t := range trees {
		items, partial := t.Items()
		s.Items = append(s.Items, items...)
		s.Partial = append(s.Partial, partial...)
	}
	s.Repos = trees[0].Repos(gitdir)
	return s
}

// Empty reports whether there is nothing to say.
func (s *Status) Empty() bool {
	return len(s.Items)+len(s.Reported) == 0 && !slices.ContainsFunc(s.Repos, func(r *Repo) bool { return len(r.notes(time.Now())) > 0 })
}

// of returns the items of some kinds.
func (s *Status) of(kinds ...Kind) (list []*Item) {
	for _, i := range s.Items {
		if slices.Contains(kinds, i.Kind) {
			list = append(list, i)
		}
	}
	return list
}

// Since returns what is new or has changed since an earlier status of the same trees. Reported changes stay as they are.
func (s *Status) Since(before *Status) *Status {
	type key struct {
		path, what, lines string
		seen              Seen
	}
	keyOf := func(i *Item) key {
		return key{string(i.Kind) + i.Tree.Path + "\x00" + i.Path, i.What, strings.Join(i.Lines, "\n"), i.Seen}
	}
	had := map[key]bool{}
	for _, i := range before.Items {
		had[keyOf(i)] = true
	}
	n := &Status{Reported: s.Reported}
	for _, i := range s.Items {
		if !had[keyOf(i)] {
			n.Items = append(n.Items, i)
		}
	}
	old := map[string]*Repo{}
	for _, r := range before.Repos {
		old[r.Root] = r
	}
	for _, r := range s.Repos {
		n.Repos = append(n.Repos, r.since(old[r.Root]))
	}
	return n
}

// notes are the lines about one repository, without what was not looked at.
func (r *Repo) notes(now time.Time) (lines []string) {
	if len(r.Tracked) > 0 {
		lines = append(lines, fmt.Sprintf("tracked although hidden from the sandbox: %s; 'git commit -a' on the host would commit the host's content", few(r.Tracked, 20)))
	}
	if len(r.Flagged) > 0 {
		lines = append(lines, fmt.Sprintf("changes are not shown by git status: %s; 'git update-index --really-refresh --no-assume-unchanged --no-skip-worktree PATH' undoes it", few(r.Flagged, 20)))
	}
	if r.Findings != nil {
		f := *r.Findings
		f.Partial = nil
		lines = append(lines, f.Lines(now)...)
	}
	return lines
}

func (r *Repo) unseen() (lines []string) {
	lines = append(lines, r.Partial...)
	if r.Findings != nil {
		lines = append(lines, r.Findings.Partial...)
	}
	return lines
}

func (r *Repo) name() string {
	if r.Root == "" {
		return "repository"
	}
	return "repository " + Show(r.Root)
}

var sections = []struct {
	kind        Kind
	title, hint string
}{
	{Held, "Held: the host still has its own version", "lazaret workspace review PATH, then apply PATH or drop PATH"},
	{Config, "Repository configuration inside differs from the host's", "apply takes over branch tracking; the rest stays inside"},
	{RepoFile, "Hooks and info files inside differ from the host's", "they stay inside; drop PATH brings the host's back"},
	{Private, "Repositories that exist inside only", ""},
	{Unfinished, "Not finished inside (! runs a command)", ""},
	{Kept, "Private, although the rules that you consented to do not ignore them", "apply PATH copies a file to the host; drop PATH discards it"},
}

// Write prints the status for a person.
func (s *Status) Write(w io.Writer, now time.Time) {
	section := func(title, hint string, lines []string) {
		if len(lines) == 0 {
			return
		}
		fmt.Fprintf(w, "%s:\n", title)
		if hint != "" {
			fmt.Fprintf(w, "  (%s)\n", hint)
		}
		for _, l := range lines {
			fmt.Fprintf(w, "    %s\n", l)
		}
	}
	for _, sec := range sections {
		var lines []string
		for _, i := range s.of(sec.kind) {
			lines = append(lines, fmt.Sprintf("%s: %s", i.Name(), i.What))
			for _, l := range i.Lines {
				lines = append(lines, "  "+l)
			}
		}
		section(sec.title, sec.hint, lines)
	}
	var lines []string
	for _, c := range s.Reported {
		lines = append(lines, fmt.Sprintf("%s: %s", Show(c.Path), c.What))
	}
	section("Integration files that changed on the host since the sandbox started", "they run only when you call their tool; git diff shows them", lines)
	lines = nil
	unseen := slices.Clone(s.Partial)
	for _, r := range s.Repos {
		for _, l := range r.notes(now) {
			lines = append(lines, r.name()+": "+l)
		}
		for _, l := range r.unseen() {
			unseen = append(unseen, r.name()+": "+l)
		}
	}
	section("Remarkable", "", lines)
	section("Not looked at", "", unseen)
	if s.Empty() {
		fmt.Fprintln(w, "Nothing is held, private or remarkable.")
	}
}

// JSON is the status for programs, in printable ASCII. A path that is not UTF-8 has its bytes beside it, in base64.
func (s *Status) JSON(now time.Time) ([]byte, error) {
	type entry struct {
		Kind  string   `json:"kind"`
		Path  string   `json:"path"`
		Bytes []byte   `json:"path_bytes,omitempty"`
		Tree  string   `json:"tree,omitempty"`
		What  string   `json:"what,omitempty"`
		Lines []string `json:"lines,omitempty"`
	}
	out := struct {
		Changes []entry  `json:"changes"`
		Unseen  []string `json:"not_looked_at,omitempty"`
	}{Changes: []entry{}, Unseen: slices.Clone(s.Partial)}
	add := func(e entry, p string) {
		if e.Path = strings.ToValidUTF8(p, "\ufffd"); e.Path != p {
			e.Bytes = []byte(p)
		}
		out.Changes = append(out.Changes, e)
	}
	for _, i := range s.Items {
		add(entry{Kind: string(i.Kind), Tree: i.Tree.Path, What: i.What, Lines: i.Lines}, i.Path)
	}
	for _, c := range s.Reported {
		add(entry{Kind: "reported", What: c.What}, c.Path)
	}
	for _, r := range s.Repos {
		if lines := r.notes(now); len(lines) > 0 {
			add(entry{Kind: "remarkable", Lines: lines}, r.Root)
		}
		for _, l := range r.unseen() {
			out.Unseen = append(out.Unseen, r.name()+": "+l)
		}
	}
	return ASCII(out)
}

// Brief is the report at the end of a session: a few lines, none if there is nothing to say.
func (s *Status) Brief(now time.Time) (lines []string) {
	names := func(items []*Item) (list []string) {
		for _, i := range items {
			list = append(list, i.Path)
		}
		return list
	}
	say := func(items []*Item, one, many string) {
		switch n := len(items); {
		case n == 1:
			lines = append(lines, one+": "+few(names(items), 5))
		case n > 1:
			lines = append(lines, fmt.Sprintf("%d %s: %s", n, many, few(names(items), 5)))
		}
	}
	say(s.of(Held), "a change of an integration file is held", "changes of integration files are held")
	if list := s.of(Config); len(list) > 0 {
		n := 0
		for _, i := range list {
			n += len(i.Lines)
		}
		lines = append(lines, fmt.Sprintf("repository configuration was changed inside only (%d lines): %s", n, few(names(list), 5)))
	}
	say(s.of(RepoFile), "a file of hooks/ or info/ was changed inside only", "files of hooks/ or info/ were changed inside only")
	say(s.of(Private), "a repository exists inside only", "repositories exist inside only")
	say(s.of(Unfinished), "a rebase or sequence is not finished inside", "rebases or sequences are not finished inside")
	say(s.of(Kept), "a path is private although no rule ignores it", "paths are private although no rule ignores them")
	if n := len(s.Reported); n > 0 {
		var list []string
		for _, c := range s.Reported {
			list = append(list, c.Path)
		}
		lines = append(lines, fmt.Sprintf("integration files changed on the host (%d): %s", n, few(list, 5)))
	}
	for _, r := range s.Repos {
		notes := r.notes(now)
		for _, l := range notes[:min(len(notes), 3)] {
			lines = append(lines, r.name()+": "+l)
		}
		if len(notes) > 3 {
			lines = append(lines, fmt.Sprintf("%s: and %d more remarks", r.name(), len(notes)-3))
		}
	}
	const most = 8
	for i, l := range lines {
		if r := []rune(l); len(r) > 400 {
			lines[i] = string(r[:400]) + "…"
		}
	}
	if len(lines) > most {
		lines = append(lines[:most], fmt.Sprintf("and %d more lines", len(lines)-most))
	}
	if len(lines) > 0 {
		lines = append(lines, "to see it all: lazaret workspace status")
	}
	return lines
}
