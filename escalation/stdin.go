package escalation

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/escalation/wire"
)

// bigPipe returns a pipe with a large buffer, if the kernel grants one.
func bigPipe() (r, w *os.File, err error) {
	if r, w, err = os.Pipe(); err != nil {
		return nil, nil, fmt.Errorf("make pipe: %w", err)
	}
	if c, err := w.SyscallConn(); err == nil { // not Fd, which would make the pipe blocking for us
		_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 1<<20) })
	}
	return r, w, nil
}

// stdin passes a client's standard input to the command. The client sends one chunk and then waits for More, so a command
// that does not read stops its own input and nothing else.
type stdin struct {
	conn   *conn
	chunks chan []byte
	ended  bool // used by the connection's reader only
	w      *os.File

	mu sync.Mutex
	r  *os.File // until the command takes it
	on sync.Once
}

func newStdin(c *conn, on bool) (*stdin, error) {
	in := &stdin{conn: c}
	if !on {
		return in, nil
	}
	var err error
	if in.r, in.w, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	in.chunks = make(chan []byte, 1)
	return in, nil
}

// offer takes a chunk, or the end. It returns false if the client is out of turn, which ends the connection.
func (in *stdin) offer(chunk []byte, end bool) bool {
	if in.w == nil || in.ended {
		return false
	}
	if end {
		in.ended = true
		close(in.chunks)
		return true
	}
	select {
	case in.chunks <- append([]byte(nil), chunk...):
		return true
	default:
		return false
	}
}

// take gives the command's end away, once, and starts to feed it. It returns nil if there is no standard input.
func (in *stdin) take() *os.File {
	in.mu.Lock()
	defer in.mu.Unlock()
	r := in.r
	if r == nil {
		return nil
	}
	in.r = nil
	go in.feed()
	return r
}

// feed ends when the input does, or when the connection closes it: in both cases the chunks are closed.
func (in *stdin) feed() {
	defer in.w.Close()
	for c := range in.chunks {
		if _, err := in.w.Write(c); err != nil {
			continue // the command reads no more; the client is let finish
		}
		_ = in.conn.send(wire.KindMore, nil)
	}
}

// close ends the input; the connection's reader calls it last.
func (in *stdin) close() {
	if in.w == nil {
		return
	}
	in.on.Do(func() {
		if !in.ended {
			in.ended = true
			close(in.chunks)
		}
		in.mu.Lock()
		defer in.mu.Unlock()
		if in.r != nil { // the command never came
			in.r.Close()
			in.r = nil
			in.w.Close()
		}
	})
}
