package route

import "strings"

// Git gives the verdict for name in a directory of a repository that the host has. host is what the host has there now.
// It must not be called with the zones Work, Private or HeldTree.
func Git(z Zone, name string, host Host) Verdict {
	switch z {
	case ReadOnly:
		return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
	case Gitdir, WorktreeDir:
		return top(z, name, host)
	}
	// Deeper in a repository no component may look like a repository of its own.
	if c := Classify(name); c == DotGit || c == Variant {
		return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
	}
	if host == Link || host == Special {
		return Verdict{Kind: RO, Child: ReadOnly} // the host made it; the sandbox may neither use nor replace it
	}
	switch z {
	case Objects:
		switch name {
		case "info":
			return Verdict{Kind: Pin, Child: ObjectsInfo}
		case "pack":
			return Verdict{Kind: Pin, Child: ObjectsBelow}
		}
		return Verdict{Kind: G, Child: ObjectsBelow}
	case ObjectsInfo:
		if strings.HasPrefix(name, "alternates") || strings.HasPrefix(name, "http-alternates") {
			return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
		}
		return Verdict{Kind: G, Child: ObjectsBelow}
	case ObjectsBelow:
		// A quarantine of a push has an info directory of its own.
		if strings.HasPrefix(name, "alternates") || strings.HasPrefix(name, "http-alternates") {
			return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
		}
		return Verdict{Kind: G, Child: ObjectsBelow}
	case Refs:
		if name == "heads" || name == "tags" {
			return Verdict{Kind: Pin, Child: Shared}
		}
		return Verdict{Kind: G, Child: Shared}
	case Logs:
		if name == "refs" {
			return Verdict{Kind: Pin, Child: LogsBelow}
		}
		return Verdict{Kind: G, Child: LogsBelow}
	case LogsBelow:
		return Verdict{Kind: G, Child: LogsBelow}
	case Shared:
		return Verdict{Kind: G, Child: Shared}
	case Modules:
		// The caller tells a repository from a directory that leads to one (a submodule may be named a/b).
		if host == Dir {
			return Verdict{Kind: Pin, Child: Modules}
		}
		return Verdict{Kind: privateOr(RO, host), Child: Private}
	case Worktrees:
		if host == Dir {
			return Verdict{Kind: Pin, Child: WorktreeDir}
		}
		return Verdict{Kind: privateOr(RO, host), Child: Private}
	}
	return Verdict{Kind: No, Child: ReadOnly}
}

// top is the table for the names directly in a repository directory (notes: unknown names are private).
func top(z Zone, name string, host Host) Verdict {
	if name == "HEAD.lock" { // its target is not created by rename like others, but it is shared
		return plainShared(host, Shared)
	}
	base := strings.TrimSuffix(name, ".lock") // a lock must be on the side of its target
	if c := Classify(base); c == DotGit || c == Variant {
		return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
	}
	switch base {
	case "HEAD":
		if host == Link || host == Special || host == Dir {
			return Verdict{Kind: RO, Child: ReadOnly}
		}
		return Verdict{Kind: Head}
	case "config", "config.worktree":
		return Verdict{Kind: P, Child: Private, Seed: seedIf(base == name, SeedConfig)}
	case "hooks", "info", "rebase-merge", "rebase-apply", "sequencer":
		return Verdict{Kind: P, Child: Private, Seed: seedIf(base == name, SeedCopy)}
	case "commondir", "gitdir", "locked":
		return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
	case "branches", "remotes":
		return Verdict{Kind: readOnlyOr(No, host), Child: ReadOnly}
	case "shallow":
		if host == None {
			return Verdict{Kind: No, Child: ReadOnly}
		}
		return plainShared(host, Shared)
	case "objects":
		return pinned(host, Objects)
	case "refs":
		return pinned(host, Refs)
	case "logs":
		return pinned(host, Logs)
	case "reftable", "lfs":
		if host == None && base == "reftable" {
			return Verdict{Kind: No, Child: ReadOnly} // would turn a repository of loose refs into something else
		}
		return plainShared(host, Shared)
	case "modules":
		if z == WorktreeDir || host == None {
			return Verdict{Kind: P, Child: Private}
		}
		return pinned(host, Modules)
	case "worktrees":
		if z == WorktreeDir || host == None {
			return Verdict{Kind: P, Child: Private}
		}
		return pinned(host, Worktrees)
	}
	if sharedName(base) {
		return plainShared(host, Shared)
	}
	return Verdict{Kind: P, Child: Private}
}

// sharedName lists what Git shares with every other process at the top of a repository directory.
func sharedName(base string) bool {
	switch base {
	case "packed-refs", "packed-refs.new", "AUTO_MERGE", "COMMIT_EDITMSG", "MERGE_MSG", "MERGE_MODE", "MERGE_RR",
		"SQUASH_MSG", "TAG_EDITMSG", "EDIT_DESCRIPTION", "description", "gc.pid", "gc.log", "ADD_EDIT.patch",
		"addp-hunk-edit.diff":
		return true
	}
	for _, prefix := range [...]string{"index", "sharedindex.", "sharedindex_", "next-index-", "NOTES_", "BISECT_", "tmp_"} {
		if strings.HasPrefix(base, prefix) {
			return true
		}
	}
	return strings.HasSuffix(base, "_HEAD")
}

func plainShared(host Host, child Zone) Verdict {
	if host == Link || host == Special {
		return Verdict{Kind: RO, Child: ReadOnly}
	}
	return Verdict{Kind: G, Child: child}
}

func pinned(host Host, child Zone) Verdict {
	if host != Dir && host != None {
		return Verdict{Kind: RO, Child: ReadOnly}
	}
	return Verdict{Kind: Pin, Child: child}
}

func readOnlyOr(absent Kind, host Host) Kind {
	if host == None {
		return absent
	}
	return RO
}

func privateOr(present Kind, host Host) Kind {
	if host == None {
		return P
	}
	return present
}

func seedIf(is bool, s Seed) Seed {
	if is {
		return s
	}
	return NoSeed
}

// MayRewrite reports whether an existing file of a zone whose files are written once may be opened for writing: only
// what Git is still writing.
func MayRewrite(name string) bool {
	return strings.HasPrefix(name, "tmp_") || strings.HasSuffix(name, ".lock")
}

// ValidHead reports whether b is content that Git writes to HEAD: a symbolic reference below refs/, or an object name.
func ValidHead(b []byte) bool {
	s, ok := strings.CutSuffix(string(b), "\n")
	if !ok {
		return false
	}
	if ref, ok := strings.CutPrefix(s, "ref: "); ok {
		return validRef(ref)
	}
	if len(s) != 40 && len(s) != 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// validRef follows the documented rules of git check-ref-format for a full reference name.
func validRef(ref string) bool {
	if !strings.HasPrefix(ref, "refs/") || len(ref) > 4096 || strings.HasSuffix(ref, ".") || strings.Contains(ref, "@{") || strings.Contains(ref, "..") {
		return false
	}
	for part := range strings.SplitSeq(ref, "/") {
		if part == "" || part[0] == '.' || strings.HasSuffix(part, ".lock") {
			return false
		}
	}
	for i := range len(ref) {
		if c := ref[i]; c < ' ' || c == 0x7f || strings.IndexByte(" ~^:?*[\\", c) >= 0 {
			return false
		}
	}
	return true
}
