package wire

import (
	"bufio"
	"net"
	"sync"
)

// Bulk is a connection below TLS that can hold back writes, so that the records of one frame leave in one system call, and
// that reads ahead. TLS alone makes a call for each 16 KiB.
type Bulk struct {
	net.Conn
	in *bufio.Reader

	mu   sync.Mutex
	held []byte // writes since Hold
	hold bool
}

// NewBulk returns a Bulk over c.
func NewBulk(c net.Conn) *Bulk { return &Bulk{Conn: c, in: bufio.NewReaderSize(c, 64<<10)} }

// Read implements net.Conn.
func (b *Bulk) Read(p []byte) (int, error) { return b.in.Read(p) }

// Write implements net.Conn.
func (b *Bulk) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hold {
		b.held = append(b.held, p...)
		return len(p), nil
	}
	return b.Conn.Write(p)
}

// Hold makes the next writes wait for Flush. What is held is bounded by the frame that the caller writes meanwhile.
func (b *Bulk) Hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hold = true
}

// Flush writes what was held.
func (b *Bulk) Flush() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hold = false
	_, err := b.Conn.Write(b.held)
	if b.held = b.held[:0]; cap(b.held) > 128<<10 {
		b.held = nil
	}
	return err
}
