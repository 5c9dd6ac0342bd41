// Package control is the conversation between the coordinator and a helper process over a
// SOCK_SEQPACKET socket: one JSON message is one packet.
//
//	coordinator                helper
//	  --- request {id, op} --->
//	  <-- reply {id, err} -----      each request gets one reply, in any order
//	  <-- event {op} ----------      at any time
//
// The end of the stream is the death of the other side: a helper then exits, and the coordinator
// repairs. Descriptors never travel here; the kernel drops any that a peer attaches.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxMessage is the longest packet in bytes; the kernel's default send buffer has room for it.
const maxMessage = 180 << 10

// A Message is one packet. A request has an ID that is not 0; its reply has the same ID.
type Message struct {
	ID   uint64          `json:"id,omitempty"`
	Op   string          `json:"op,omitempty"`
	Err  string          `json:"err,omitempty"`
	Body json.RawMessage `json:"body,omitempty"`
}

// Pair makes the two ends. The caller closes ours and theirs, or hands them on.
func Pair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make control socket: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control of the helper"), nil
}

// A Conn sends and receives whole messages. Send may be called from any goroutine.
type Conn struct {
	c   *net.UnixConn
	buf []byte // of Recv
}

// NewConn owns f from here on, even when it fails.
func NewConn(f *os.File) (*Conn, error) {
	defer f.Close() // FileConn makes its own copy
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("control socket: not a unix socket")
	}
	return &Conn{c: u, buf: make([]byte, maxMessage+1)}, nil
}

// Send sends m as one packet.
func (c *Conn) Send(m Message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.Op, err)
	}
	if len(b) > maxMessage {
		return fmt.Errorf("control message %s of %d bytes is over the limit of %d", m.Op, len(b), maxMessage)
	}
	_, err = c.c.Write(b)
	return err
}

// Recv waits for the next message. It returns io.EOF when the other side is gone. It must not be
// called from two goroutines at once.
func (c *Conn) Recv() (Message, error) {
	n, _, flags, _, err := c.c.ReadMsgUnix(c.buf, nil)
	switch {
	case err != nil:
		return Message{}, err
	case n == 0:
		return Message{}, io.EOF
	case n > maxMessage || flags&unix.MSG_TRUNC != 0:
		return Message{}, fmt.Errorf("control message is over the limit of %d bytes", maxMessage)
	}
	var m Message
	if err := json.Unmarshal(c.buf[:n], &m); err != nil {
		return Message{}, fmt.Errorf("control message: %w", err)
	}
	return m, nil
}

// Close makes Recv and Send return.
func (c *Conn) Close() error { return c.c.Close() }

// ErrGone is returned for a call whose helper died before it answered.
var ErrGone = errors.New("helper process is gone")

// A Client is the coordinator's end: calls from any goroutine, and events in order.
type Client struct {
	conn   *Conn
	events chan Message
	done   chan struct{}

	mu      sync.Mutex
	lastID  uint64
	waiting map[uint64]chan Message // nil once the helper is gone
}

// NewClient owns f. Events that nobody reads are dropped once 64 wait, so a helper cannot hold up
// the coordinator.
func NewClient(f *os.File) (*Client, error) {
	conn, err := NewConn(f)
	if err != nil {
		return nil, err
	}
	c := &Client{conn: conn, events: make(chan Message, 64), done: make(chan struct{}), waiting: make(map[uint64]chan Message)}
	go c.read()
	return c, nil
}

// Events gives what the helper reports; it is closed when the helper is gone.
func (c *Client) Events() <-chan Message { return c.events }

// Done is closed when the helper is gone or has broken the protocol.
func (c *Client) Done() <-chan struct{} { return c.done }

// Call sends a request and waits for its reply. An error text of the helper comes back as an error.
func (c *Client) Call(ctx context.Context, op string, body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	reply := make(chan Message, 1)
	c.mu.Lock()
	if c.waiting == nil {
		c.mu.Unlock()
		return fmt.Errorf("%s: %w", op, ErrGone)
	}
	c.lastID++
	id := c.lastID
	c.waiting[id] = reply
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
	}()
	if err := c.conn.Send(Message{ID: id, Op: op, Body: raw}); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	select {
	case m := <-reply:
		if m.Err != "" {
			return fmt.Errorf("%s: %s", op, m.Err)
		}
		return nil
	case <-c.done:
		return fmt.Errorf("%s: %w", op, ErrGone)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", op, ctx.Err())
	}
}

// Close ends the conversation; the helper reads its end and exits.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	return err
}

func (c *Client) read() {
	defer close(c.events)
	defer close(c.done)
	defer func() {
		c.mu.Lock()
		c.waiting = nil
		c.mu.Unlock()
	}()
	for {
		m, err := c.conn.Recv()
		if err != nil {
			c.conn.Close()
			return
		}
		if m.ID == 0 {
			select {
			case c.events <- m:
			default:
			}
			continue
		}
		c.mu.Lock()
		if w := c.waiting[m.ID]; w != nil {
			delete(c.waiting, m.ID)
			w <- m
		}
		c.mu.Unlock()
	}
}

// Serve answers requests one after the other until the other side is gone, which gives nil.
func Serve(c *Conn, handle func(Message) error) error {
	for {
		m, err := c.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		reply := Message{ID: m.ID}
		if err := handle(m); err != nil {
			reply.Err = err.Error()
		}
		if err := c.Send(reply); err != nil {
			return err
		}
	}
}
