package ignore

import "sync"

// A Memo remembers the verdicts of one [Dir]. Since a Dir never changes, a Memo is never stale: drop it
// together with its Dir. Safe for concurrent use.
type Memo struct {
	dir   *Dir
	limit int

	mu    sync.Mutex
	known map[string]uint8 // bits below; at most limit entries
}

const (
	knownFile = 1 << iota // the verdict as a file is known
	knownDir
	ignoredFile
	ignoredDir
)

// NewMemo makes a Memo that holds at most limit names; when full it starts afresh.
func NewMemo(d *Dir, limit int) *Memo {
	return &Memo{dir: d, limit: max(limit, 1), known: make(map[string]uint8)}
}

// Dir returns the directory that the Memo speaks for.
func (m *Memo) Dir() *Dir { return m.dir }

// Ignored is d.Match(name, isDir).Ignored.
func (m *Memo) Ignored(name string, isDir bool) bool {
	if len(m.dir.levels) == 0 || m.dir.verdict.Ignored {
		return m.dir.verdict.Ignored
	}
	know, bit := uint8(knownFile), uint8(ignoredFile)
	if isDir {
		know, bit = knownDir, ignoredDir
	}
	m.mu.Lock()
	bits := m.known[name]
	m.mu.Unlock()
	if bits&know != 0 {
		return bits&bit != 0
	}
	bits = know
	if m.dir.Match(name, isDir).Ignored {
		bits |= bit
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.known) >= m.limit {
		clear(m.known)
	}
	m.known[name] |= bits
	return bits&bit != 0
}
