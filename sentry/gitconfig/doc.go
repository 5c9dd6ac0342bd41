// Package gitconfig reads and writes Git's configuration files for Git Sentry, without running Git.
//
// Four jobs, all pure functions over bytes:
//
//   - [Parse] and [File.Bytes]: the syntax of git-config(1), checked against git.
//   - [Sanitise]: the Domain-private copy of a repository's config. It starts without credentials and
//     host programs, and says by name (never by value) what is missing (SR-4).
//   - [Compare], [Adoptable] and [Edit]: what the agent changed in its copy, the few branch settings the
//     developer may take over, and the host file with exactly these changed.
//   - [Resolve]: the settings in effect over system, user and repository files with their includes, for
//     core.excludesFile, core.hooksPath and the list of files that host Git reads.
//
// To wire it: on the first write of the agent to <gitdir>/config or config.worktree, store
// Sanitise(host file) privately, next to a copy of it as the seed. At session end and for "workspace
// status" Compare(seed, private) is shown; "apply" passes what [Adoptable] accepts to [Edit] and replaces
// the host file atomically. A config file included from inside the workspace is copied in the same way.
//
// Config from a workspace is hostile text: names and values are shown with %q, limits are fixed, and an
// error means that nothing of the file is used.
package gitconfig
