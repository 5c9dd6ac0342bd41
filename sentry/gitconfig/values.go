package gitconfig

import (
	"iter"
	"strings"
)

// All yields the entries of one name in order. The section and key parts of name are compared without
// regard to case, the subsection exactly.
func (f *File) All(name string) iter.Seq[Entry] {
	name = canonical(name)
	return func(yield func(Entry) bool) {
		for _, e := range f.Entries {
			if e.Name() == name && !yield(e) {
				return
			}
		}
	}
}

func canonical(name string) string {
	first, last := strings.IndexByte(name, '.'), strings.LastIndexByte(name, '.')
	if first < 0 {
		return strings.ToLower(name)
	}
	return strings.ToLower(name[:first]) + name[first:last] + strings.ToLower(name[last:])
}

// Last returns the entry that counts for a setting with one value.
func (f *File) Last(name string) (last Entry, ok bool) {
	for e := range f.All(name) {
		last, ok = e, true
	}
	return last, ok
}

// String returns the value that counts, "" if there is none.
func (f *File) String(name string) string {
	e, _ := f.Last(name)
	return e.Value
}

// Bool returns the setting as Git reads a boolean, or def if it is absent. ok is false for a value that
// is no boolean, on which Git stops.
func (f *File) Bool(name string, def bool) (value, ok bool) {
	e, found := f.Last(name)
	if !found {
		return def, true
	}
	return e.Bool()
}

// Bool reads the value as Git does; ok is false if it is no boolean.
func (e Entry) Bool() (value, ok bool) {
	if e.NoValue {
		return true, true
	}
	switch strings.ToLower(e.Value) {
	case "true", "yes", "on":
		return true, true
	case "false", "no", "off", "":
		return false, true
	}
	digits := strings.TrimRight(strings.TrimPrefix(strings.TrimPrefix(e.Value, "-"), "+"), "kKmMgG")
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return false, false
	}
	return strings.Trim(digits, "0") != "", true
}

// ObjectFormat is extensions.objectFormat, "sha1" if it is not set.
func (f *File) ObjectFormat() string {
	if v := f.String("extensions.objectformat"); v != "" {
		return strings.ToLower(v)
	}
	return "sha1"
}

// Include is one include.path or includeIf.<condition>.path.
type Include struct {
	Condition string // "" if unconditional
	Path      string // as written: absolute, below "~/", or relative to the including file's directory
	Line      int
}

// Includes lists the includes in order.
func (f *File) Includes() []Include {
	var list []Include
	for _, e := range f.Entries {
		if in, ok := e.include(); ok {
			list = append(list, in)
		}
	}
	return list
}

func (e Entry) include() (Include, bool) {
	if e.Key != "path" || e.NoValue {
		return Include{}, false
	}
	switch {
	case e.Section == "include" && !e.HasSub:
		return Include{Path: e.Value, Line: e.Line}, true
	case e.Section == "includeif" && e.HasSub:
		return Include{Condition: e.Sub, Path: e.Value, Line: e.Line}, true
	}
	return Include{}, false
}
