package tree

import (
	"os"

	"golang.org/x/sys/unix"
)

// Usage is what a tree occupies.
type Usage struct {
	Bytes   int64 `json:"bytes"`   // allocated on disk; a hard-linked file counts once
	Entries int64 `json:"entries"` // names, the tree's own directory left out
	Partial bool  `json:"partial,omitempty"`
}

// maxLinks bounds the hard-linked inodes that Measure remembers; beyond it they count repeatedly.
const maxLinks = 1 << 20

// Measure adds up the tree below dir. A tree in use is measured as far as it holds still:
// Partial is set when it was moved, is too large to remember, or has parts on other mounts.
func Measure(dir *os.File) (Usage, error) {
	type inode struct{ dev, ino uint64 }
	seen := map[inode]struct{}{}
	var u Usage
	err := Walk(dir, Visitor{Enter: func(e Entry) error {
		u.Entries++
		u.Partial = u.Partial || e.Closed != nil
		if e.Stat.Nlink > 1 && !e.IsDir() {
			id := inode{e.Stat.Dev, e.Stat.Ino}
			if _, dup := seen[id]; dup {
				return nil
			}
			if len(seen) < maxLinks {
				seen[id] = struct{}{}
			}
		}
		u.Bytes += e.Stat.Blocks * 512
		return nil
	}})
	switch {
	case err == nil:
		return u, nil
	case isPartial(err):
		u.Partial = true
		return u, nil
	}
	return u, err
}

// MeasurePath is Measure of a path; a missing directory uses nothing.
func MeasurePath(dir string) (Usage, error) {
	f, err := OpenDir(dir)
	if os.IsNotExist(err) {
		return Usage{}, nil
	}
	if err != nil {
		return Usage{}, err
	}
	defer f.Close()
	return Measure(f)
}

// Free is the space of dir's file system that an unprivileged process may still fill, in bytes.
func Free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// Limits are sizes in bytes; 0 means no limit. The Ephemeral limit is enforced by runsc's own
// overlay and gives ENOSPC inside. The others are watched: see [Limits.Check].
type Limits struct {
	Ephemeral int64 // runsc's overlay
	Anchors   int64 // all State Anchors of a Domain together
	Ignored   int64 // Ignored Workspace State of a Domain
	Reserve   int64 // free space on the Storage Root's file system to leave to the host
}

// Level says how near a use is to its limit.
type Level int

// Levels, in rising order.
const (
	Below Level = iota
	Near        // nine tenths are used: tell the developer
	Full        // stop the Domain from growing and tell the developer
)

func (l Level) String() string { return [...]string{"below", "near", "full"}[l] }

// State is one measurement.
type State struct{ Anchors, Ignored, Free int64 } // bytes

// Finding is one limit that is near or full.
type Finding struct {
	What        string `json:"what"` // "anchors", "ignored", "disk"
	Level       Level  `json:"level"`
	Used, Limit int64  // bytes; for "disk" the free space and the reserve
}

// Check compares a measurement with the limits; it lists what is near or full.
func (l Limits) Check(s State) []Finding {
	var out []Finding
	add := func(what string, used, limit int64) {
		if limit <= 0 {
			return
		}
		switch {
		case used >= limit:
			out = append(out, Finding{what, Full, used, limit})
		case used >= limit-limit/10:
			out = append(out, Finding{what, Near, used, limit})
		}
	}
	add("anchors", s.Anchors, l.Anchors)
	add("ignored", s.Ignored, l.Ignored)
	if l.Reserve > 0 {
		switch {
		case s.Free <= l.Reserve:
			out = append(out, Finding{"disk", Full, s.Free, l.Reserve})
		case s.Free <= l.Reserve+l.Reserve/4:
			out = append(out, Finding{"disk", Near, s.Free, l.Reserve})
		}
	}
	return out
}
