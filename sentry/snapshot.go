package sentry

import (
	"encoding/json"
	"fmt"
)

// SnapshotVersion is the version of the snapshot that this build reads.
const SnapshotVersion = 1

// SnapshotFile is the snapshot's name in the directory Workspace.Private.
const SnapshotFile = "snapshot.json"

// Snapshot is what decides, together with the live rules, which host paths are hidden: the rule files and tracked paths
// at the last start that the developer consented to. Loosening in the workspace changes nothing until it is replaced.
type Snapshot struct {
	Version  int
	Excludes []byte            // content of the developer's core.excludesFile
	Rules    map[string][]byte // content of each .gitignore, by its directory's path from the workspace root
	Unknown  []string          // directories whose .gitignore counts and is not in the work tree (sparse checkout): all is hidden
	Repos    []SnapshotRepo    // the root repository ("") and nested ones
}

// SnapshotRepo is one repository of a snapshot.
type SnapshotRepo struct {
	Root     string // of its work tree, from the workspace root
	FoldCase bool   // core.ignoreCase
	Exclude  []byte // content of info/exclude
	// ExcludeUnknown is true when there is an info/exclude that could not be read: all that is not tracked is hidden.
	ExcludeUnknown bool
	Tracked        [][]byte // paths from Root, sorted by bytes; bytes, not text
}

// ParseSnapshot reads a snapshot.
func ParseSnapshot(b []byte) (*Snapshot, error) {
	var s Snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read workspace snapshot: %w", err)
	}
	if s.Version != SnapshotVersion {
		return nil, fmt.Errorf("read workspace snapshot: version %d, want %d", s.Version, SnapshotVersion)
	}
	return &s, nil
}
