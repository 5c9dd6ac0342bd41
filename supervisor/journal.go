package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// journalLimit is the size in bytes at which the journal becomes the old one. What the agent does can make entries, so
// both together are bounded (SR-8).
const journalLimit = 16 << 20

// journal is the Domain's record of what concerns security: journal.jsonl in the Domain Root, one JSON object a line. Its
// methods may be called from any goroutine.
type journal struct {
	path string

	mu   sync.Mutex
	file *os.File // nil after close
	size int64
}

func openJournal(domainRoot string) (*journal, error) {
	j := &journal{path: filepath.Join(domainRoot, "journal.jsonl")}
	return j, j.open()
}

func (j *journal) open() error {
	f, err := os.OpenFile(j.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	j.file, j.size = f, st.Size()
	return nil
}

// write adds an entry. A journal that cannot be written, as on a full disk, does not stop the Domain.
func (j *journal) write(event string, fields any) {
	line, err := json.Marshal(struct {
		Time   time.Time `json:"time"`
		Event  string    `json:"event"`
		Fields any       `json:"fields,omitempty"`
	}{time.Now().UTC(), event, fields})
	if err != nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file == nil {
		return
	}
	if j.size >= journalLimit {
		j.file.Close()
		j.file = nil
		if err := os.Rename(j.path, j.path+".old"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return
		}
		if j.open() != nil {
			return
		}
	}
	n, _ := j.file.Write(append(line, '\n'))
	j.size += int64(n)
}

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != nil {
		j.file.Close()
		j.file = nil
	}
}
