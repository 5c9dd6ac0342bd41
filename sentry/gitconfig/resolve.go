package gitconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"lazaret.dev/lazaret/sentry/ignore"
)

// Limits of includes.
const (
	maxDepth = 10 // as in Git
	maxFiles = 256
)

// Env is what decides which files Git reads for a repository. Paths are absolute, "" if there is none.
type Env struct {
	Home          string
	XDGConfigHome string // "" means Home/.config
	System        string // normally /etc/gitconfig
	GitDir        string // real path, for "gitdir:" conditions
	CommonDir     string // holds config; "" means GitDir
	Branch        string // short name of the checked out branch, for "onbranch:"

	// ReadFile reads a file of the host as the developer, at most MaxSource bytes. A missing one gives an
	// error that matches fs.ErrNotExist.
	ReadFile func(path string) ([]byte, error)
}

// Origin is a setting and the file it was read from.
type Origin struct {
	Entry
	Path string
}

// Effective is all settings that hold for a repository, lowest precedence first.
type Effective struct {
	Settings []Origin
	Files    []string // every file that was read or looked for and not found, in order; watch them
	// Problems are files that exist but could not be used, and conditions that were not understood.
	// Git itself would stop at most of them. A caller that hides by these settings says so.
	Problems []error
}

// Resolve reads the system, user, repository and worktree files with their includes.
func Resolve(env Env) *Effective {
	common := env.CommonDir
	if common == "" {
		common = env.GitDir
	}
	files := []string{env.System}
	if dir := env.xdg(); dir != "" {
		files = append(files, path.Join(dir, "git/config"))
	}
	if env.Home != "" {
		files = append(files, path.Join(env.Home, ".gitconfig"))
	}
	if common != "" {
		files = append(files, path.Join(common, "config"))
	}
	// Conditions on remote URLs see the URLs of all files that such a condition did not bring in.
	first := &resolver{env: env}
	first.read(files)
	if !first.asksURLs {
		return &first.out
	}
	second := &resolver{env: env, urls: first.remoteURLs()}
	second.read(files)
	return &second.out
}

type resolver struct {
	env      Env
	urls     []string // nil in the first pass
	asksURLs bool
	out      Effective
}

func (env Env) xdg() string {
	if env.XDGConfigHome != "" {
		return env.XDGConfigHome
	}
	if env.Home != "" {
		return path.Join(env.Home, ".config")
	}
	return ""
}

func (r *resolver) read(files []string) {
	for _, name := range files {
		if name != "" {
			r.file(name, 0)
		}
	}
	if on, _ := (&File{Entries: r.entries()}).Bool("extensions.worktreeconfig", false); on && r.env.GitDir != "" {
		r.file(path.Join(r.env.GitDir, "config.worktree"), 0)
	}
}

func (r *resolver) entries() []Entry {
	list := make([]Entry, len(r.out.Settings))
	for i, o := range r.out.Settings {
		list[i] = o.Entry
	}
	return list
}

func (r *resolver) remoteURLs() []string {
	var urls []string
	for _, o := range r.out.Settings {
		if o.Is("remote", "url") {
			urls = append(urls, o.Value)
		}
	}
	return urls
}

func (r *resolver) problem(name string, err error) {
	if len(r.out.Problems) < maxFiles {
		r.out.Problems = append(r.out.Problems, fmt.Errorf("git config %q: %w", name, err))
	}
}

func (r *resolver) file(name string, depth int) {
	switch {
	case depth > maxDepth:
		r.problem(name, errors.New("includes are too deep"))
		return
	case len(r.out.Files) >= maxFiles:
		r.problem(name, errors.New("too many files"))
		return
	}
	r.out.Files = append(r.out.Files, name)
	src, err := r.env.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		r.problem(name, err)
		return
	}
	file, err := Parse(src)
	if err != nil {
		r.problem(name, err)
		return
	}
	for _, e := range file.Entries {
		r.out.Settings = append(r.out.Settings, Origin{e, name})
		in, ok := e.include()
		if !ok {
			continue
		}
		if in.Condition != "" && !r.holds(in.Condition, name) {
			continue
		}
		target, ok := r.env.Expand(in.Path)
		if !ok {
			r.problem(name, fmt.Errorf("include of %q: home directory not known", in.Path))
			continue
		}
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(name), target)
		}
		r.file(target, depth+1)
	}
}

// Expand replaces a leading "~/". ok is false for another user's home, which is not looked up.
func (env Env) Expand(p string) (expanded string, ok bool) {
	switch {
	case p == "~" && env.Home != "":
		return env.Home, true
	case strings.HasPrefix(p, "~/") && env.Home != "":
		return path.Join(env.Home, p[2:]), true
	}
	return p, !strings.HasPrefix(p, "~") && !strings.HasPrefix(p, "%(prefix)")
}

// holds decides an includeIf condition that stands in the file name.
func (r *resolver) holds(condition, name string) bool {
	kind, pattern, _ := strings.Cut(condition, ":")
	switch kind {
	case "gitdir", "gitdir/i":
		if r.env.GitDir == "" {
			return false
		}
		literal := 0 // bytes of pattern that are no pattern
		switch {
		case strings.HasPrefix(pattern, "~/"):
			home, ok := r.env.Expand("~")
			if !ok {
				r.problem(name, fmt.Errorf("condition %q: home directory not known", condition))
				return false
			}
			literal, pattern = len(home)+1, home+pattern[1:]
		case strings.HasPrefix(pattern, "./"):
			dir := path.Dir(name)
			literal, pattern = len(dir)+1, dir+pattern[1:]
		case !path.IsAbs(pattern):
			pattern = "**/" + pattern
		}
		return r.match(name, withTail(pattern), r.env.GitDir, literal, kind == "gitdir/i")
	case "onbranch":
		return r.env.Branch != "" && r.match(name, withTail(pattern), r.env.Branch, 0, false)
	case "hasconfig":
		of, url, _ := strings.Cut(pattern, ":")
		if of != "remote.*.url" {
			return false
		}
		r.asksURLs = true
		return slices.ContainsFunc(r.urls, func(u string) bool { return r.match(name, url, u, 0, false) })
	}
	return false
}

func withTail(pattern string) string {
	if strings.HasSuffix(pattern, "/") {
		return pattern + "**"
	}
	return pattern
}

// match compares the first literal bytes as they are and the rest as a pattern.
func (r *resolver) match(name, pattern, text string, literal int, fold bool) bool {
	if len(text) < literal || len(pattern) < literal {
		return false
	}
	head, tail := pattern[:literal], pattern[literal:]
	if fold && !strings.EqualFold(head, text[:literal]) || !fold && head != text[:literal] {
		return false
	}
	matched, ok := ignore.MatchPath(tail, text[literal:], fold)
	if !ok {
		r.problem(name, fmt.Errorf("condition %q takes too long", pattern))
	}
	return matched
}

// Last returns the setting that counts.
func (e *Effective) Last(name string) (Origin, bool) {
	name = canonical(name)
	for _, o := range slices.Backward(e.Settings) {
		if o.Name() == name {
			return o, true
		}
	}
	return Origin{}, false
}

// Excludes is the path of the file that core.excludesFile means for the repository, or of Git's default.
// "" means that there is none. A relative path is relative to the work tree's root.
func (env Env) Excludes(e *Effective) (string, error) {
	o, ok := e.Last("core.excludesfile")
	if !ok {
		if dir := env.xdg(); dir != "" {
			return path.Join(dir, "git/ignore"), nil
		}
		return "", nil
	}
	p, ok := env.Expand(o.Value)
	if !ok {
		return "", fmt.Errorf("core.excludesFile %q in %q: home directory not known", o.Value, o.Path)
	}
	return p, nil
}

// FilesBelow lists the config files that were read below dir, so that Git Sentry can protect those that
// lie in the workspace. It compares names only; the caller resolves symlinks.
func (e *Effective) FilesBelow(dir string) []string {
	var list []string
	for _, f := range e.Files {
		if strings.HasPrefix(f, strings.TrimSuffix(dir, "/")+"/") && !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	return list
}
