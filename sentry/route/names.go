package route

import (
	"strings"
	"unicode/utf8"
)

// NameClass sorts the names that mean something to Git wherever they stand.
type NameClass uint8

const (
	Plain   NameClass = iota
	DotGit            // exactly ".git"
	Variant           // something that another file system would read as ".git"
	Layout            // a name that a repository directory has at its top
)

// Classify sorts a name. It does not allocate for plain ASCII names.
func Classify(name string) NameClass {
	if name == ".git" {
		return DotGit
	}
	if likeDotGit(name) {
		return Variant
	}
	if isLayout(name) {
		return Layout
	}
	return Plain
}

// likeDotGit reports whether a file system that folds case, drops ignorable code points, trailing dots and spaces, or
// keeps short names or streams would take name for ".git". Git itself refuses the same spellings (core.protectHFS,
// core.protectNTFS).
func likeDotGit(name string) bool {
	if len(name) < 4 {
		return false
	}
	switch name[0] {
	case '.', 'g', 'G':
	default:
		if name[0] < utf8.RuneSelf {
			return false
		}
	}
	s := name
	if i := strings.IndexByte(s, ':'); i >= 0 {
		s = s[:i]
	}
	s = strings.TrimRight(s, ". ")
	if len(s) >= 4 && hasFold(s, "git~") && digits(s[4:]) {
		return true
	}
	i := 0
	const want = ".git"
	for _, r := range s {
		if ignorable(r) {
			continue
		}
		if i == len(want) || lower(r) != rune(want[i]) {
			return false
		}
		i++
	}
	return i == len(want)
}

func hasFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

func lower(r rune) rune {
	switch {
	case 'A' <= r && r <= 'Z':
		return r + 'a' - 'A'
	case r == 'ı', r == 'İ': // dotless and dotted i fold to i in some tables
		return 'i'
	}
	return r
}

// ignorable reports the code points that HFS+ leaves out of a comparison.
func ignorable(r rune) bool {
	return 0x200c <= r && r <= 0x200f || 0x202a <= r && r <= 0x202e || 0x206a <= r && r <= 0x206f || r == 0xfeff
}

// isLayout knows every name of the table that Gitdir gives a rule to, so that a bare repository in the work tree, which
// is found by asking when one of these is touched, is ruled in full.
func isLayout(name string) bool {
	base := strings.TrimSuffix(name, ".lock")
	switch base {
	case "HEAD", "objects", "refs", "config", "config.worktree", "hooks", "info", "commondir", "gitdir", "locked",
		"branches", "remotes", "logs", "packed-refs", "shallow", "modules", "worktrees", "rebase-merge", "rebase-apply",
		"sequencer", "index", "reftable", "lfs", "rr-cache", "description", "gc.pid", "gc.log":
		return true
	}
	return sharedName(base)
}

// Completes reports whether a directory would be taken for a repository by Git once it has name, given what it has now.
// The guard must be asked and the name made in one step that excludes every other creation in that directory.
func Completes(name string, head, objects, refs, commondir bool) bool {
	switch name {
	case "HEAD":
		head = true
	case "objects":
		objects = true
	case "refs":
		refs = true
	case "commondir":
		commondir = true
	default:
		return false
	}
	return head && (objects && refs || commondir)
}
