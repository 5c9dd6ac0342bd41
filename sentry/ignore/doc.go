// Package ignore decides which names of a work tree Git ignores, for the routing gofer that keeps
// Ignored Workspace State out of the host's tree (SR-13).
//
// It follows gitignore(5) as git 2.39 behaves, byte for byte: names are bytes, not text. It does no
// I/O: the caller reads the rule files (regular files only, never through a symlink) and hands their
// bytes to [Parse], which accepts anything. [Patterns] and [Dir] are immutable and may be shared by
// goroutines; a changed rule file means a new Dir for its directory and for what lies below.
//
// To wire it, mirror the walk from the root of one repository's work tree:
//
//	root := ignore.Root(ignore.Config{Excludes: global, Info: info, Own: rootRules, FoldCase: fold})
//	v := root.Match("node_modules", true)
//	sub := root.Child("src", srcRules) // excluded itself if "src" is; then srcRules do not count
//
// What is kept true:
//
//   - Precedence, low to high: core.excludesFile, info/exclude, the root's .gitignore, and so on to the
//     nearest one; within a file the last matching line wins; below an excluded directory nothing is
//     included again.
//   - A verdict costs a bounded number of steps and no allocation on common paths. When the bound is
//     reached, or a rule file is over [MaxSource] or [MaxRules], the verdict is "ignored": the host's
//     content stays hidden (fail closed). [Verdict.Cause] tells.
//
// Which files Git reads: a ".gitignore" only if it is a regular file, never through a symbolic link;
// info/exclude and core.excludesFile through links too. If a ".gitignore" is not in the work tree but the
// index lists it as skip-worktree (sparse checkout), Git takes the index's version: see
// gitindex.Set.RulesElsewhere, and pass [Unknown] there.
//
// What lives elsewhere: "tracked wins" (package gitindex), the snapshot of rules the developer
// consented to, and the exception that a live rule never hides a rule file. A nested repository's work
// tree gets a Root of its own; outer rules stop at its ".git".
package ignore
