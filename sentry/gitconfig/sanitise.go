package gitconfig

import (
	"path"
	"slices"
	"strings"
)

// A Reason says why the private copy differs from the host's file.
type Reason uint8

const (
	Credential   Reason = iota // dropped: holds or fetches credentials
	HostProgram                // dropped: names a program of the host
	UserInfo                   // changed: a user or password was taken out of a URL
	NotInside                  // kept or switched off: points to something that is not there inside
	NeedsProgram               // kept: works only if the program is installed inside
	Forced                     // set for the sandbox
)

func (r Reason) String() string {
	return [...]string{
		Credential:   "left out: it may hold credentials",
		HostProgram:  "left out: it names a program of the host",
		UserInfo:     "user or password taken out of the URL",
		NotInside:    "not available inside",
		NeedsProgram: "works only if its program is installed inside",
		Forced:       "set for the sandbox",
	}[r]
}

// Note is one remark on the private copy. It never holds a value of the host's file; a secret in the
// name's own URL is taken out.
type Note struct {
	Name   string // section.sub.key
	Line   int    // in the host's file; 0 if it has none
	Reason Reason
}

// SanitiseOptions say what exists inside. The zero value is the strictest.
type SanitiseOptions struct {
	// Allow lists full names, or a name's end after "*." ("*.extraheader"), that are copied as they are
	// although they may hold credentials or name host programs. From the developer's profile.
	Allow []string
	// Visible reports whether an absolute host path exists inside (as the workspace does). nil: none.
	Visible func(path string) bool
	// ExcludesFile is the path inside of the copy of the developer's excludes, put in place of
	// core.excludesFile. "" leaves that setting out.
	ExcludesFile string
	// Signing says that commits can be signed inside; else signing is switched off.
	Signing bool
}

// Sanitised is the private copy and what is to be said about it.
type Sanitised struct {
	File  *File
	Notes []Note // in the order of the host's file, forced settings last
}

// Sanitise makes the copy of a repository's configuration that the sandbox starts with.
// core.repositoryFormatVersion and extensions.* stay as they are; so does all that no Note names.
// Comments do not survive.
func Sanitise(host *File, o SanitiseOptions) Sanitised {
	s := Sanitised{File: &File{}}
	for _, e := range host.Entries {
		kept, keep, reasons := o.judge(e)
		for _, r := range reasons {
			name, _ := redact(e.Name())
			s.Notes = append(s.Notes, Note{Name: name, Line: e.Line, Reason: r})
		}
		if keep {
			kept.Line, kept.start, kept.end = 0, 0, 0
			s.File.Entries = append(s.File.Entries, kept)
		}
	}
	// A daemon inside would not see the host's edits; objects that only the host's private worktrees or
	// the agent's need must survive.
	for _, e := range []Entry{
		{Section: "core", Key: "fsmonitor", Value: "false"},
		{Section: "gc", Key: "auto", Value: "0"},
		{Section: "gc", Key: "pruneexpire", Value: "never"},
	} {
		s.File.Entries = append(s.File.Entries, e)
		if _, had := host.Last(e.Name()); had {
			s.Notes = append(s.Notes, Note{Name: e.Name(), Reason: Forced})
		}
	}
	return s
}

func (o SanitiseOptions) judge(e Entry) (kept Entry, keep bool, reasons []Reason) {
	switch {
	case e.Section == "extensions", e.Is("core", "repositoryformatversion"), o.allowed(e.Name()):
		return e, true, nil
	case holdsCredential(e):
		return e, false, []Reason{Credential}
	case namesProgram(e):
		return e, false, []Reason{HostProgram}
	case e.Is("core", "fsmonitor"), e.Is("gc", "auto"), e.Is("gc", "pruneexpire"):
		return e, false, nil // forced at the end
	case e.Is("core", "excludesfile"):
		e.Value, e.NoValue = o.ExcludesFile, false
		return e, o.ExcludesFile != "", []Reason{NotInside}
	case !o.Signing && signs(e):
		if on, ok := e.Bool(); ok && !on {
			return e, true, nil
		}
		e.Value, e.NoValue = "false", false
		return e, true, []Reason{NotInside}
	}
	if _, found := redact(e.Sub); found {
		return e, false, []Reason{Credential} // a URL as name: without its secret it would mean another
	}
	var found bool
	if e.Value, found = redact(e.Value); found {
		if e.Section == "url" {
			return e, false, []Reason{Credential}
		}
		reasons = append(reasons, UserInfo)
	}
	if o.missing(e) {
		reasons = append(reasons, NotInside)
	}
	if needsProgram(e) {
		reasons = append(reasons, NeedsProgram)
	}
	return e, true, reasons
}

func (o SanitiseOptions) allowed(name string) bool {
	return slices.ContainsFunc(o.Allow, func(a string) bool {
		if end, ok := strings.CutPrefix(a, "*."); ok {
			return strings.HasSuffix(name, "."+strings.ToLower(end))
		}
		return canonical(a) == name
	})
}

// secretWords mark keys of tools we do not know.
var secretWords = []string{"token", "password", "passwd", "passphrase", "secret", "apikey", "privatekey", "smtppass", "cookie", "extraheader", "credential", "bearer"}

// secretValues mark values: headers, query parameters, and tokens that have a known look.
var secretValues = []string{"authorization:", "bearer ", "token=", "password=", "passwd=", "secret=", "apikey=", "api_key=", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "xoxb-"}

func holdsCredential(e Entry) bool {
	switch e.Section {
	case "credential", "sendemail", "imap", "credentialcache", "credentialstore":
		return true
	}
	if e.Is("http", "sslcertpasswordprotected") {
		return false
	}
	if e.Key == "pass" || e.Key == "auth" {
		return true
	}
	if (e.Is("http", "proxy") || e.Is("remote", "proxy")) && !strings.Contains(e.Value, "://") && strings.Contains(e.Value, "@") {
		return true
	}
	value := strings.ToLower(e.Value)
	if slices.ContainsFunc(secretValues, func(w string) bool { return strings.Contains(value, w) }) {
		return true
	}
	key := strings.ReplaceAll(e.Key, "-", "")
	return slices.ContainsFunc(secretWords, func(w string) bool { return strings.Contains(key, w) })
}

// programs are keys whose value is a command of the host, by "section.key".
var programs = map[string]bool{
	"core.sshcommand": true, "core.askpass": true, "core.gitproxy": true, "core.alternaterefscommand": true, "core.pager": true,
	"core.editor": true, "sequence.editor": true, "diff.external": true, "diff.command": true, "diff.textconv": true,
	"interactive.difffilter": true, "gpg.program": true, "gpg.defaultkeycommand": true, "uploadpack.packobjectshook": true,
	"remote.uploadpack": true, "remote.receivepack": true, "remote.vcs": true, "trailer.command": true, "trailer.cmd": true,
	"web.browser": true, "help.browser": true,
}

func namesProgram(e Entry) bool {
	switch e.Section {
	case "pager", "difftool", "mergetool", "guitool", "browser", "man", "instaweb", "hook", "gui", "gitk":
		return true
	}
	return programs[e.Section+"."+e.Key] || e.Section == "submodule" && e.Key == "update" && strings.HasPrefix(e.Value, "!")
}

// needsProgram names what is kept because leaving it out would change what a commit contains: without a
// clean filter (git-crypt), plain text would be committed.
func needsProgram(e Entry) bool {
	switch e.Section {
	case "filter":
		return e.Key == "clean" || e.Key == "smudge" || e.Key == "process"
	case "merge":
		return e.HasSub && e.Key == "driver"
	case "alias":
		return strings.HasPrefix(e.Value, "!")
	}
	return false
}

func signs(e Entry) bool {
	switch e.Section {
	case "commit", "tag":
		return e.Key == "gpgsign" || e.Key == "forcesignannotated"
	case "push":
		return e.Key == "gpgsign"
	}
	return false
}

// missing reports whether e points to a file or directory that is not there inside.
func (o SanitiseOptions) missing(e Entry) bool {
	switch {
	case e.Is("core", "hookspath"), e.Is("core", "attributesfile"), e.Is("core", "worktree"), e.Is("commit", "template"),
		e.Is("init", "templatedir"), e.Is("mailmap", "file"), e.Is("blame", "ignorerevsfile"), e.Is("gpg", "allowedsignersfile"),
		e.Section == "http" && (e.Key == "sslcainfo" || e.Key == "sslcapath" || e.Key == "sslcert" || e.Key == "sslkey"):
	case e.Is("remote", "url"), e.Is("remote", "pushurl"):
		if !strings.HasPrefix(e.Value, "/") && !strings.HasPrefix(e.Value, "file://") {
			return false
		}
	default:
		if _, ok := e.include(); !ok {
			return false
		}
	}
	p := strings.TrimPrefix(e.Value, "file://")
	if strings.HasPrefix(p, "~") {
		return true
	}
	return path.IsAbs(p) && (o.Visible == nil || !o.Visible(path.Clean(p)))
}

// redact takes user names and passwords out of the URLs in s. An ssh user without a password is no
// secret and stays, since the URL would not work without it.
func redact(s string) (clean string, found bool) {
	var b strings.Builder
	for {
		at := strings.Index(s, "://")
		if at < 0 {
			b.WriteString(s)
			return b.String(), found
		}
		scheme := at
		for scheme > 0 && (isKeyChar(s[scheme-1]) || s[scheme-1] == '+' || s[scheme-1] == '.') {
			scheme--
		}
		at += len("://")
		b.WriteString(s[:at])
		name := strings.ToLower(s[scheme : at-len("://")])
		s = s[at:]
		// Not at '?' or '#': a careless password may hold them.
		end := strings.IndexAny(s, "/ \t\n\"'")
		if end < 0 {
			end = len(s)
		}
		if user := strings.LastIndexByte(s[:end], '@'); user >= 0 {
			keep := ""
			if strings.Contains(name, "ssh") {
				keep, _, _ = strings.Cut(s[:user], ":")
			}
			if keep == s[:user] {
				b.WriteString(s[:user+1])
			} else {
				found = true
				if keep != "" {
					b.WriteString(keep + "@")
				}
			}
			s = s[user+1:]
		}
	}
}
