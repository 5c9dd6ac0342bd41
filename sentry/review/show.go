package review

import (
	"fmt"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Review prints an item for the developer's decision, and stores in i.Seen the content that was shown.
func (t *Tree) Review(w io.Writer, i *Item) {
	fmt.Fprintf(w, "=== %s: %s\n", i.Name(), i.What)
	defer fmt.Fprintln(w)
	switch i.Kind {
	case Held, Kept, RepoFile:
		if !i.Dir {
			t.reviewFile(w, i)
			return
		}
	}
	for _, l := range i.Lines {
		fmt.Fprintln(w, l)
	}
	if i.Kind == Config {
		if list := i.adoptable(); len(list) > 0 {
			fmt.Fprintln(w, "apply would set on the host:")
			for _, e := range list {
				fmt.Fprintf(w, "    %s = %s\n", Show(e.Name()), Show(e.Value))
			}
		}
	}
	if i.Dir {
		fmt.Fprintf(w, "private copy: %s\n", Show(path.Join(t.Private, "tree", i.Path)))
	}
}

// reviewFile prints the difference between the host's file and the private one.
func (t *Tree) reviewFile(w io.Writer, i *Item) {
	p, done := t.bothSides(i.Path)
	defer done()
	host, hostText, hostSeen := side(p, i.Path, true)
	private, privateText, privateSeen := side(p, i.Path, false)
	i.Seen = Seen{Private: privateSeen, Host: hostSeen}
	fmt.Fprintf(w, "--- host     %s\n+++ private  %s\n", host, private)
	if hostText == nil || privateText == nil {
		return
	}
	lines := unified(hostText.bytes, privateText.bytes)
	if len(lines) > 0 {
		fmt.Fprintln(w, strings.Join(lines, "\n"))
	}
}

// bothSides opens the directories of rel as far as they are there.
func (t *Tree) bothSides(rel string) (p place, done func()) {
	p.rel = path.Dir(rel)
	p.twin, _ = openDir(t.twin, p.rel)
	p.host, _ = openDir(t.host, p.rel)
	return p, func() {
		p.twin.Close() // a nil file only says so
		p.host.Close()
	}
}

// text is content that can be shown; an absent file is empty text.
type text struct{ bytes []byte }

// side describes one side of a file; its text is nil if it cannot be shown line by line.
func side(p place, rel string, host bool) (about string, t *text, seen string) {
	dir := p.twin
	if host {
		dir = p.host
	}
	name := path.Base(rel)
	var st unix.Stat_t
	if statAt(dir, name, &st) != nil {
		return "(no file)", &text{}, ""
	}
	switch st.Mode & unix.S_IFMT {
	case fifo:
		if !host {
			return "(removed)", &text{}, ""
		}
	case symlink:
		target, _ := readLink(dir, name)
		return "symbolic link to " + Show(target), nil, "link:" + target
	case regular:
		if st.Size <= maxDiffBytes {
			b, st, err := readFile(dir, name, maxDiffBytes)
			if err == nil {
				about = fmt.Sprintf("%d bytes, mode %03o", len(b), st.Mode&0o777)
				if !isText(b) {
					return about + ", binary, sha256 " + sum(b), nil, sum(b)
				}
				return about, &text{b}, sum(b)
			}
		}
		seen, err := contentOf(dir, name)
		if err != nil {
			return fmt.Sprintf("cannot be read: %v", err), nil, unreadable
		}
		return fmt.Sprintf("%d bytes, mode %03o, too large to show, sha256 %s", st.Size, st.Mode&0o777, seen), nil, seen
	}
	return "neither a file nor a link", nil, fmt.Sprintf("type:%o", st.Mode&unix.S_IFMT)
}
