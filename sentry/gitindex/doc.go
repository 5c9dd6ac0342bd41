// Package gitindex reads Git's index so that the routing gofer knows which paths are tracked, without
// running Git (SR-13: tracked wins over ignored).
//
// It reads versions 2, 3 and 4, split indexes ("link") and sparse ones ("sdir"), with SHA-1 and SHA-256
// names. The bytes come from a repository that the sandbox writes: [Parse] checks every length, the
// order of entries and the trailing checksum, spends memory in proportion to fixed limits, never panics,
// and fails as a whole. On an error the caller keeps the last good [Set]; an index file that is missing
// is the caller's to judge (a new repository tracks nothing: use the zero Set).
//
// To wire it: read the index below the gitdir by descriptor (a regular file, not through a symlink, at
// most [MaxIndex] bytes), stamp it by (mtime, ctime, size, inode), and parse again when the stamp
// changes. Options.Shared opens a file of the given name in the same directory by the same rules. Stamp
// [Set.SharedName] too.
//
// Paths are compared byte by byte, also where core.ignoreCase makes Git find a tracked path under another
// spelling: that spelling then counts as not tracked (fail closed).
//
// A sparse directory entry stands for files the index does not list. They are not reported as tracked,
// since a host file below it may be an ignored secret (fail closed); [Set.HasTrackedBelow] holds for the
// directory.
package gitindex
