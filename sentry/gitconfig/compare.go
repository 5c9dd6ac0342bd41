package gitconfig

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Difference is one name whose values differ between two files. Old or New may be empty.
type Difference struct {
	Name     string
	Old, New []Entry
}

// String shows the difference in lines that start with '-' or '+', safe for a terminal.
func (d Difference) String() string {
	var b strings.Builder
	show := func(sign string, list []Entry) {
		for _, e := range list {
			if e.NoValue {
				fmt.Fprintf(&b, "%s %s\n", sign, plain(d.Name))
			} else {
				fmt.Fprintf(&b, "%s %s = %s\n", sign, plain(d.Name), plain(e.Value))
			}
		}
	}
	show("-", d.Old)
	show("+", d.New)
	return b.String()
}

// plain quotes whatever is not printable ASCII without quotes.
func plain(s string) string {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e || r == '"' || r == '\\' }) {
		return fmt.Sprintf("%+q", s)
	}
	return s
}

// Compare lists the names whose values differ, sorted by name. Order between names has no meaning here.
func Compare(from, to *File) []Difference {
	byName := map[string]*Difference{}
	at := func(name string) *Difference {
		if byName[name] == nil {
			byName[name] = &Difference{Name: name}
		}
		return byName[name]
	}
	for _, e := range from.Entries {
		d := at(e.Name())
		d.Old = append(d.Old, e)
	}
	for _, e := range to.Entries {
		d := at(e.Name())
		d.New = append(d.New, e)
	}
	var list []Difference
	for _, d := range byName {
		same := slices.EqualFunc(d.Old, d.New, func(a, b Entry) bool { return a.Value == b.Value && a.NoValue == b.NoValue })
		if !same {
			list = append(list, *d)
		}
	}
	slices.SortFunc(list, func(a, b Difference) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Adoptable returns the setting that a difference would put into the host's file, or an error that says
// why it stays private. Only tracking of branches may be adopted: branch.<n>.{remote, pushRemote, merge,
// rebase} with one value, where the remote exists on the host (or is ".") and merge is a branch.
func Adoptable(d Difference, host *File) (Entry, error) {
	if len(d.New) != 1 {
		return Entry{}, errors.New("only a setting with exactly one value can be adopted")
	}
	e := d.New[0]
	if e.Section != "branch" || !e.HasSub {
		return Entry{}, errors.New("only settings of branches can be adopted")
	}
	if !ValidRef("refs/heads/" + e.Sub) {
		return Entry{}, errors.New("the branch has no valid name")
	}
	switch e.Key {
	case "remote", "pushremote":
		if e.Value != "." && !hasRemote(host, e.Value) {
			return Entry{}, errors.New("the host's file has no such remote")
		}
	case "merge":
		if name, ok := strings.CutPrefix(e.Value, "refs/heads/"); !ok || name == "" || !ValidRef(e.Value) {
			return Entry{}, errors.New("the value is not a branch")
		}
	case "rebase":
		if e.NoValue {
			e.Value = "true"
		}
		if !slices.Contains([]string{"true", "false", "merges"}, e.Value) {
			return Entry{}, errors.New("the value is not true, false or merges")
		}
	default:
		return Entry{}, errors.New("only remote, pushRemote, merge and rebase of a branch can be adopted")
	}
	return Entry{Section: "branch", Sub: e.Sub, HasSub: true, Key: e.Key, Value: e.Value}, nil
}

func hasRemote(f *File, name string) bool {
	return name != "" && slices.ContainsFunc(f.Entries, func(e Entry) bool {
		return e.Is("remote", "url") && e.HasSub && e.Sub == name
	})
}

// ValidRef reports whether name is a full reference name by git-check-ref-format(1), and printable: no
// control characters, no bytes that are not UTF-8, no character that changes the direction of text.
func ValidRef(name string) bool {
	if !strings.Contains(name, "/") || strings.HasSuffix(name, ".") || strings.Contains(name, "..") || strings.Contains(name, "@{") {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part[0] == '.' || strings.HasSuffix(part, ".lock") {
			return false
		}
	}
	return !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r >= 0x7f && r < 0xa0 || r == 0xfffd || strings.ContainsRune(`~^:?*[\`, r) ||
			r == 0x61c || r >= 0x200b && r <= 0x200f || r >= 0x2028 && r <= 0x202e || r >= 0x2066 && r <= 0x2069 || r == 0xfeff
	})
}

// Edit returns src with each of the settings given that one value, and every other byte as it was.
// It checks its own work: an error means that src could not be changed as asked.
func Edit(src []byte, settings []Entry) ([]byte, error) {
	file, err := Parse(src)
	if err != nil {
		return nil, err
	}
	type change struct {
		start, end int
		text       string
	}
	var changes []change
	var added []Entry
	want := slices.Clone(file.Entries)
	for _, set := range settings {
		name := set.Name()
		last := -1
		for i, e := range want {
			if e.Name() == name && e.end > 0 {
				last = i
			}
		}
		for i, e := range slices.Backward(want) {
			switch {
			case e.Name() != name:
			case i == last:
				changes = append(changes, change{e.start, e.end, strings.TrimPrefix(set.line(), "\t")})
				want[i].Value, want[i].NoValue = set.Value, false
			default:
				changes = append(changes, change{e.start, e.end, "\n"})
				want = slices.Delete(want, i, i+1)
			}
		}
		if last < 0 {
			added = append(added, set)
			want = append(want, set)
		}
	}
	slices.SortFunc(changes, func(a, b change) int { return a.start - b.start })
	var out []byte
	at := 0
	for _, c := range changes {
		if c.start < at {
			return nil, errors.New("edit git config: the same setting twice")
		}
		out = append(append(out, src[at:c.start]...), c.text...)
		at = c.end
	}
	out = append(out, src[at:]...)
	if len(added) > 0 {
		if len(out) > 0 && out[len(out)-1] != '\n' {
			out = append(out, '\n')
		}
		out = append(out, (&File{Entries: added}).Bytes()...)
	}
	have, err := Parse(out)
	if err != nil {
		return nil, fmt.Errorf("edit git config: result: %w", err)
	}
	same := slices.EqualFunc(have.Entries, want, func(a, b Entry) bool {
		return a.Name() == b.Name() && a.Value == b.Value && a.NoValue == b.NoValue
	})
	if !same {
		return nil, errors.New("edit git config: the file cannot be changed safely")
	}
	return out, nil
}
