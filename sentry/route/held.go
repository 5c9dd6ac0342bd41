package route

import (
	"fmt"
	"path"
	"strings"
)

// DefaultHeld are the integration files that programs on the host act on without being asked. A pattern has one or more
// components, matches at any depth, takes the wildcards of path.Match, and may end in a slash, which
// says that a directory is meant and changes nothing: a symbolic link of that name would do on the host as well.
var DefaultHeld = []string{
	".envrc", ".direnv/", ".vscode/", "*.code-workspace", ".idea/", ".run/", ".fleet/", ".zed/", ".nova/", ".vim/", ".vimrc",
	".nvim.lua", ".nvimrc", ".exrc", ".devcontainer/", ".devcontainer.json", ".husky/", ".githooks/", ".pre-commit-config.yaml",
	"lefthook.yml", "lefthook.yaml", ".lefthook/", ".overcommit.yml", ".lintstagedrc*", "commitlint.config.*", ".mise.toml",
	"mise.toml", ".mise/", ".tool-versions", ".nvmrc", ".sdkmanrc", ".lfsconfig", ".claude/", ".mcp.json", ".cursor/", ".codex/",
	".gemini/", ".windsurf/", ".continue/", ".aider*", ".github/copilot*", "lazaret.*",
}

// Held is a set of patterns for held names. Its zero value holds nothing.
type Held struct {
	exact map[string]bool // single component without wildcard
	globs []heldGlob
	paths map[string]bool // exact paths from the workspace root
}

type heldGlob struct {
	parent string // components before the last, "" for none
	last   string
}

// NewHeld compiles patterns, and paths that are held exactly (the derived set: files that the host's Git configuration
// or hooks name).
func NewHeld(patterns, paths []string) (*Held, error) {
	h := &Held{exact: make(map[string]bool), paths: make(map[string]bool)}
	for _, p := range patterns {
		trimmed := strings.TrimSuffix(p, "/")
		if trimmed == "" || strings.HasPrefix(trimmed, "/") || path.Clean(trimmed) != trimmed || strings.HasPrefix(trimmed, "..") {
			return nil, fmt.Errorf("held pattern %q: want a relative name or path", p)
		}
		if _, err := path.Match(trimmed, ""); err != nil {
			return nil, fmt.Errorf("held pattern %q: %w", p, err)
		}
		dir, last := path.Split(trimmed)
		if dir == "" && !strings.ContainsAny(last, `*?[\`) {
			h.exact[last] = true
			continue
		}
		h.globs = append(h.globs, heldGlob{parent: strings.TrimSuffix(dir, "/"), last: last})
	}
	for _, p := range paths {
		if p == "" || path.Clean(p) != p || path.IsAbs(p) || p == ".." || strings.HasPrefix(p, "../") {
			return nil, fmt.Errorf("held path %q: want a clean path below the workspace", p)
		}
		h.paths[p] = true
	}
	return h, nil
}

// Match reports whether name in directory dir (relative to the workspace root, "" for the root itself) is held as a
// file and as a directory.
func (h *Held) Match(dir, name string) (file, isDir bool) {
	if h.exact[name] {
		return true, true
	}
	for i := range h.globs {
		g := &h.globs[i]
		if ok, _ := path.Match(g.last, name); ok && (g.parent == "" || tailMatches(g.parent, dir)) {
			return true, true
		}
	}
	if len(h.paths) != 0 && h.paths[join(dir, name)] {
		return true, true
	}
	return false, false
}

// Below reports whether an exactly held path lies below the directory rel.
func (h *Held) Below(rel string) bool {
	for p := range h.paths {
		if strings.HasPrefix(p, rel+"/") {
			return true
		}
	}
	return false
}

func tailMatches(pattern, dir string) bool {
	if dir == "" {
		return false
	}
	n := strings.Count(pattern, "/") + 1
	i := len(dir)
	for ; n > 0; n-- {
		if i < 0 {
			return false
		}
		i = strings.LastIndexByte(dir[:i], '/')
		if i < 0 && n > 1 {
			return false
		}
	}
	ok, _ := path.Match(pattern, dir[i+1:])
	return ok
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}
