// Package client is the Escalation Client's side: it asks for one command, relays its output, and returns the result.
//
// It runs inside the sandbox, and is trusted by nobody but its user. What it needs lies in files:
//
//	/run/lazaret/escalate/endpoint      "address:port" of the coordinator's listener
//	/run/lazaret/escalate/ca.pem        the Trust Anchor
//	$LAZARET_SESSION_DIR/cert.pem       the session's certificate
//	$LAZARET_SESSION_DIR/key.pem        and its key, readable by the agent alone
//
// The directory defaults to /run/lazaret/session. A process that another session started has that session's variable, so
// its requests are asked about on that session's terminal.
package client

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/trust"
	"lazaret.dev/lazaret/escalation/wire"
)

// Where the coordinator puts what the client needs.
const (
	Dir        = "/run/lazaret/escalate"
	SessionDir = "/run/lazaret/session"
	SessionEnv = "LAZARET_SESSION_DIR"
	DirEnv     = "LAZARET_ESCALATE_DIR" // replaces Dir; only tests need it
)

// ErrNoConnection means that there is no coordinator to ask, or that it went away before there was a result.
var ErrNoConnection = errors.New("no connection to Lazaret")

// ErrRefused means that the coordinator did not accept the request; nothing was shown to anybody.
var ErrRefused = errors.New("request refused")

// Endpoint is a coordinator and this session's identity.
type Endpoint struct {
	Addr string
	TLS  *tls.Config
}

// Load reads an endpoint from the files of dir and of the session's directory.
func Load(dir, sessionDir string) (Endpoint, error) {
	var texts [4][]byte
	for i, p := range []string{filepath.Join(dir, "endpoint"), filepath.Join(dir, "ca.pem"),
		filepath.Join(sessionDir, "cert.pem"), filepath.Join(sessionDir, "key.pem")} {
		b, err := os.ReadFile(p)
		if err != nil {
			return Endpoint{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
		}
		texts[i] = b
	}
	c, err := trust.ClientConfig(texts[1], texts[2], texts[3])
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
	}
	return Endpoint{strings.TrimSpace(string(texts[0])), c}, nil
}

// Default loads the endpoint of the session that this process belongs to.
func Default() (Endpoint, error) {
	return Load(orElse(os.Getenv(DirEnv), Dir), orElse(os.Getenv(SessionEnv), SessionDir))
}

func orElse(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

// Request is what to ask for.
type Request struct {
	Argv   []string
	Dir    string // absolute
	Reason string
	Wait   time.Duration // for an answer; 0: as long as the coordinator allows
	Stdin  io.Reader     // nil: none
	Stdout io.Writer
	Stderr io.Writer
}

// Run asks for a command and follows it to its result. When ctx ends, the request is cancelled and its result (Cancelled,
// as a rule) awaited for a short while. The error wraps [ErrNoConnection], [ErrRefused] or [wire.ErrMalformed].
func (e Endpoint) Run(ctx context.Context, q Request) (wire.Result, error) {
	sub := wire.Submit{Argv: q.Argv, Dir: q.Dir, Reason: q.Reason, Wait: q.Wait, Stdin: q.Stdin != nil}
	_, _ = rand.Read(sub.ID[:]) // it cannot fail
	if err := sub.Check(); err != nil {
		return wire.Result{}, err
	}
	raw, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", e.Addr)
	if err != nil {
		return wire.Result{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
	}
	defer raw.Close()
	nc := tls.Client(wire.NewBulk(raw), e.TLS)
	_ = raw.SetDeadline(time.Now().Add(10 * time.Second))
	if err := nc.HandshakeContext(ctx); err != nil {
		return wire.Result{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
	}
	_ = raw.SetDeadline(time.Time{})
	defer nc.Close()
	c := &conversation{conn: nc, more: make(chan struct{}, 1)}
	if err := c.send(wire.KindSubmit, sub.Append(nil)); err != nil {
		return wire.Result{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
	}
	done := make(chan struct{})
	defer close(done)
	go c.keepAlive(ctx, done)
	if q.Stdin != nil {
		go c.feed(q.Stdin, done)
	}
	return c.listen(q)
}

type conversation struct {
	conn net.Conn
	more chan struct{} // a chunk of standard input may be sent
	wmu  sync.Mutex
}

func (c *conversation) send(k wire.Kind, body []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	_, err := c.conn.Write(wire.AppendFrame(make([]byte, 0, wire.HeaderLen+len(body)), k, body))
	return err
}

// keepAlive shows that we are here, and passes on the wish to stop.
func (c *conversation) keepAlive(ctx context.Context, done <-chan struct{}) {
	t := time.NewTicker(wire.PingEvery)
	defer t.Stop()
	for {
		select {
		case <-done:
			return
		case <-t.C:
			_ = c.send(wire.KindPing, nil) // a failure shows in listen too
		case <-ctx.Done():
			_ = c.send(wire.KindCancel, nil)
			select {
			case <-done:
			case <-time.After(10 * time.Second):
				c.conn.Close()
			}
			return
		}
	}
}

func (c *conversation) feed(in io.Reader, done <-chan struct{}) {
	buf := make([]byte, wire.MaxChunk)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			if c.send(wire.KindStdin, buf[:n]) != nil {
				return
			}
			select {
			case <-c.more:
			case <-done:
				return
			}
		}
		if err != nil {
			_ = c.send(wire.KindStdinEnd, nil)
			return
		}
	}
}

// listen relays output until the result.
func (c *conversation) listen(q Request) (wire.Result, error) {
	in := wire.Reader{R: c.conn}
	var outErr error
	for {
		k, body, err := in.Next()
		if err != nil {
			return wire.Result{}, fmt.Errorf("%w: %w", ErrNoConnection, err)
		}
		switch k {
		case wire.KindAccepted:
		case wire.KindMore:
			select {
			case c.more <- struct{}{}:
			default:
			}
		case wire.KindRefused:
			if len(body) != 1 {
				return wire.Result{}, wire.ErrMalformed
			}
			return wire.Result{}, fmt.Errorf("%w: %s", ErrRefused, refusal(body[0]))
		case wire.KindStdout, wire.KindStderr:
			w := q.Stdout
			if k == wire.KindStderr {
				w = q.Stderr
			}
			if _, err := w.Write(body); err != nil && outErr == nil {
				outErr = err // as with a command of our own, a reader that went away ends it
				_ = c.send(wire.KindCancel, nil)
			}
		case wire.KindResult:
			r, err := wire.ParseResult(body)
			if err != nil {
				return wire.Result{}, err
			}
			_ = c.send(wire.KindReceived, nil)
			return r, nil
		default:
			return wire.Result{}, wire.ErrMalformed
		}
	}
}

func refusal(b byte) string {
	switch broker.Refusal(b) {
	case broker.RefusedSession:
		return "the session has ended"
	case broker.RefusedBusy:
		return "too many open requests; wait for them first"
	}
	return "the coordinator could not take it"
}
