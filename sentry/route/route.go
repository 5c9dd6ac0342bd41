// Package route decides on which side of a workspace a name lives and what the sandbox may do there.
//
// It is pure: it opens nothing, and every fact about the host arrives as an argument, asked at the moment of the
// operation. The workspace server (package gofer) walks one component at a time; each directory it stands on has a
// [Zone], and for each name below it asks [Git] (or the work tree's own rules) for a [Verdict]: the [Kind] of that name
// and the zone of a directory of that name. The kind then answers each operation with [Kind.Check].
//
// What is kept true, for the developer's host Git (SR-4): nothing that Git reads as configuration, as a program to
// run, or as a redirection to another repository can be written, created, replaced or aliased from inside, at any depth,
// whether it was there when the Domain began or not.
package route

import "golang.org/x/sys/unix"

// Kind is what the sandbox may do with one name.
type Kind uint8

const (
	// W is an ordinary work tree path, shared with the host.
	W Kind = iota
	// Pin is a shared directory that may not be renamed, removed or replaced; its children have their own kinds.
	Pin
	// G is shared repository data: regular files and directories only.
	G
	// Head is a repository's HEAD: it changes by a validated rename of HEAD.lock alone.
	Head
	// RO can be read and nothing else.
	RO
	// No never exists; it cannot be created.
	No
	// P lives in the Domain's private twin.
	P
	// Hold is read from the host until the first write, which makes a private copy.
	Hold
)

func (k Kind) String() string {
	return [...]string{"W", "PIN", "G", "HEAD", "RO", "NO", "P", "HOLD"}[k]
}

// Private reports whether creating a name of this kind creates it in the private twin.
func (k Kind) Private() bool { return k == P || k == Hold }

// Zone says which rules apply to the names directly in a directory.
type Zone uint8

const (
	Work         Zone = iota // the work tree: ignore rules, held names, `.git`
	Private                  // a directory of the private twin; no rule applies below it
	HeldTree                 // below a held directory: host content shows until it is written
	ReadOnly                 // below RO: everything is RO, nothing can be made
	Gitdir                   // a repository's own directory, root or submodule
	WorktreeDir              // the administrative directory of a linked worktree
	Objects                  // <gitdir>/objects
	ObjectsInfo              // <gitdir>/objects/info
	ObjectsBelow             // below objects: packs, loose fan-out, quarantines
	Refs                     // <gitdir>/refs
	Logs                     // <gitdir>/logs
	LogsBelow                // below logs
	Shared                   // below refs, reftable, lfs
	Modules                  // <gitdir>/modules and the directories that lead to a nested name
	Worktrees                // <gitdir>/worktrees
)

// InGitdir reports whether names in the zone belong to a repository that the host has.
func (z Zone) InGitdir() bool { return z >= Gitdir }

// OnceWritten reports whether files of the zone are repository objects, which never change once they have their name.
func (z Zone) OnceWritten() bool { return z == Objects || z == ObjectsBelow || z == ObjectsInfo }

// Appended reports whether writers of the zone's files append, so that both sides' writes must land at the end.
func (z Zone) Appended() bool { return z == Logs || z == LogsBelow }

// Host is what the host has at a name, asked without following links.
type Host uint8

const (
	None Host = iota
	File
	Dir
	Link
	Special // device, FIFO, socket
)

// HostOf translates a file mode.
func HostOf(mode uint32) Host {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return File
	case unix.S_IFDIR:
		return Dir
	case unix.S_IFLNK:
		return Link
	}
	return Special
}

// Seed says how a private name starts.
type Seed uint8

const (
	NoSeed     Seed = iota
	SeedCopy        // a copy of what the host has, files and directories
	SeedConfig      // a copy of a Git configuration file without credentials and host programs
)

// Verdict is the answer for one name.
type Verdict struct {
	Kind  Kind
	Child Zone // of a directory of this name
	Seed  Seed // for P
}

// Op is an operation on a name.
type Op uint8

const (
	OpenWrite  Op = iota // open for writing or truncation
	SetAttr              // mode, times, extended attributes
	CreateFile           // regular file
	Mkdir
	Symlink
	Unlink
	Rmdir
	RenameFrom
	RenameTo
	LinkFrom
	LinkTo
)

func (op Op) String() string {
	return [...]string{"write", "setattr", "create", "mkdir", "symlink", "unlink", "rmdir", "rename-from", "rename-to", "link-from", "link-to"}[op]
}

// Check answers an operation with nil or the error the sandbox sees. Whether the name exists is the caller's business.
func (k Kind) Check(op Op) error {
	switch k {
	case W, P, Hold:
		return nil
	case G:
		if op == Symlink {
			return unix.EPERM
		}
		return nil
	case Pin:
		switch op {
		case SetAttr, Mkdir:
			return nil
		case CreateFile, Symlink, OpenWrite, LinkTo, LinkFrom:
			return unix.EPERM
		}
		return unix.EBUSY
	case Head:
		switch op {
		case RenameTo: // the rename itself decides
			return nil
		case RenameFrom, Unlink, Rmdir:
			return unix.EBUSY
		}
		return unix.EPERM
	case RO:
		switch op {
		case RenameFrom, RenameTo:
			return unix.EBUSY
		case LinkFrom, LinkTo:
			return unix.EPERM
		}
		return unix.EROFS
	case No:
		switch op {
		case RenameFrom, RenameTo:
			return unix.EBUSY
		}
		return unix.EPERM
	}
	return unix.EPERM
}
