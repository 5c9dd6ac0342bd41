package report

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"lazaret.dev/lazaret/sentry/gitindex"
)

// OddName says what is dangerous about a name that scripts, prompts and terminals will handle, "" if
// nothing is. Git itself accepts all of these.
func OddName(name string) string {
	var found []string
	add := func(bad bool, what string) {
		if bad {
			found = append(found, what)
		}
	}
	add(!utf8.ValidString(name), "not UTF-8")
	add(strings.ContainsFunc(name, func(r rune) bool { return r != utf8.RuneError && unicode.Is(unicode.Cc, r) }), "control character")
	add(strings.ContainsFunc(name, invisible), "invisible or direction-changing character")
	add(strings.ContainsAny(name, "$`;|&<>(){}!'\"\n"), "shell metacharacter")
	add(strings.HasPrefix(name, "-") || strings.Contains(name, "/-"), "looks like an option")
	return strings.Join(found, ", ")
}

// invisible holds for format characters (bidirectional controls, zero width) and odd spaces.
func invisible(r rune) bool {
	return unicode.Is(unicode.Cf, r) || r != ' ' && unicode.Is(unicode.Z, r) || r >= 0xfe00 && r <= 0xfe0f || r >= 0xe0100 && r <= 0xe01ef
}

// HiddenTracked lists the tracked paths that hidden holds for, at most limit of them, and how many there
// are in all. hidden is asked for each path of the index in order.
func HiddenTracked(set *gitindex.Set, hidden func(path string) bool, limit int) (paths []string, total int) {
	for e := range set.All() {
		if e.Flags&gitindex.SparseTree != 0 || !hidden(e.Path) {
			continue
		}
		if total++; len(paths) < limit {
			paths = append(paths, e.Path)
		}
	}
	return paths, total
}
