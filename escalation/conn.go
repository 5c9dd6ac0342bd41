package escalation

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/wire"
)

// conn is an authenticated connection, with at most one request.
type conn struct {
	*tls.Conn
	bulk    *wire.Bulk // below Conn
	id      broker.ConnID
	session string
	refused broker.Refusal // guarded by Server.mu

	wmu sync.Mutex // one frame at a time
}

// send writes one frame. It blocks as long as the peer does not read: that is the back-pressure on a command's output.
func (c *conn) send(k wire.Kind, body []byte) error {
	return c.write(wire.AppendFrame(make([]byte, 0, wire.HeaderLen+len(body)), k, body))
}

func (c *conn) write(frame []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if len(frame) <= 8<<10 {
		_, err := c.Write(frame)
		return err
	}
	c.bulk.Hold()
	_, err := c.Write(frame)
	return errors.Join(err, c.bulk.Flush())
}

// meet takes a new connection. Strangers are few: when there are too many, the oldest is cut off, so that silent ones
// cannot keep others out.
func (s *Server) meet(raw net.Conn) {
	x := &stranger{raw}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		raw.Close()
		return
	}
	if len(s.strangers) >= maxStrangers {
		s.strangers[0].Close()
		s.strangers = slices.Delete(s.strangers, 0, 1)
	}
	s.strangers = append(s.strangers, x)
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		defer raw.Close()
		if err := s.serve(x); err != nil && !errors.Is(err, io.EOF) {
			s.cfg.Journal(Entry{Time: s.cfg.Now(), Event: "peer", Detail: err.Error()})
		}
	}()
}

// serve authenticates a peer and follows its connection to the end.
func (s *Server) serve(x *stranger) error {
	bulk := wire.NewBulk(x.Conn)
	t := tls.Server(bulk, s.tls)
	_ = t.SetDeadline(time.Now().Add(s.cfg.Handshake))
	err := t.HandshakeContext(s.ctx)
	if err != nil {
		s.forget(x)
		return fmt.Errorf("authenticate peer: %w", err)
	}
	session, err := s.cfg.Anchor.Session(t.ConnectionState())
	if err != nil {
		s.forget(x)
		return err
	}
	c := s.admit(x, &conn{Conn: t, bulk: bulk, session: session})
	if c == nil {
		_ = (&conn{Conn: t, bulk: bulk}).send(wire.KindRefused, []byte{byte(broker.RefusedBusy)})
		return fmt.Errorf("session %s: too many connections", session)
	}
	defer s.dismiss(c)
	return s.converse(c)
}

func (s *Server) forget(x *stranger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strangers = slices.DeleteFunc(s.strangers, func(y *stranger) bool { return x == y })
}

// admit makes a stranger a peer, or returns nil if its session has too many of them.
func (s *Server) admit(x *stranger, c *conn) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strangers = slices.DeleteFunc(s.strangers, func(y *stranger) bool { return x == y })
	id := broker.SessionID(c.session)
	per := s.cfg.Limits.PerSession
	if per <= 0 {
		per = 64
	}
	if s.closed || s.peers[id] >= per+16 {
		return nil
	}
	s.nextConn++
	c.id = s.nextConn
	s.conns[c.id] = c
	s.peers[id]++
	s.stepLocked(broker.Authenticate{Conn: c.id, Session: id})
	return c
}

func (s *Server) dismiss(c *conn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c.id)
	id := broker.SessionID(c.session)
	if s.peers[id]--; s.peers[id] == 0 {
		delete(s.peers, id)
	}
	s.stepLocked(broker.Disconnect{Conn: c.id})
}

// converse reads a peer's messages.
func (s *Server) converse(c *conn) error {
	in := wire.Reader{R: c}
	k, body, err := in.Next()
	if err != nil {
		return fmt.Errorf("session %s: read request: %w", c.session, err)
	}
	if k != wire.KindSubmit {
		return fmt.Errorf("session %s: message %d instead of a request", c.session, k)
	}
	sub, err := wire.ParseSubmit(body)
	if err != nil {
		return fmt.Errorf("session %s: %w", c.session, err)
	}
	in = wire.Reader{R: c} // lets go of the request's bytes
	_ = c.SetDeadline(time.Time{})
	r, why := s.submit(c, sub)
	if r == nil {
		_ = c.SetWriteDeadline(time.Now().Add(s.cfg.Handshake))
		_ = c.send(wire.KindRefused, []byte{byte(why)})
		return fmt.Errorf("session %s: request refused: %s", c.session, why)
	}
	defer r.stdin.close()
	err = c.send(wire.KindAccepted, nil)
	close(r.accepted)
	if err != nil {
		return fmt.Errorf("session %s: %w", c.session, err)
	}
	for {
		_ = c.SetReadDeadline(time.Now().Add(s.cfg.Silence))
		k, body, err := in.Next()
		if err != nil {
			return fmt.Errorf("session %s: %w", c.session, err)
		}
		switch k {
		case wire.KindPing:
		case wire.KindCancel:
			s.step(broker.Cancel{ID: r.id})
		case wire.KindStdin, wire.KindStdinEnd:
			if !r.stdin.offer(body, k == wire.KindStdinEnd) {
				return fmt.Errorf("session %s: standard input out of turn", c.session)
			}
		case wire.KindReceived:
			s.step(broker.Deliver{ID: r.id})
			return nil
		default:
			return fmt.Errorf("session %s: unexpected message %d", c.session, k)
		}
	}
}

// submit offers a request to the machine. If it is refused, r is nil and why says the reason.
func (s *Server) submit(c *conn, sub wire.Submit) (r *request, why broker.Refusal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.refused != 0 {
		return nil, c.refused // its session left meanwhile
	}
	id := broker.RequestID(sub.ID)
	if s.live[id] != nil {
		return nil, broker.RefusedDuplicate
	}
	r, err := newRequest(s.ctx, id, c, sub)
	if err != nil {
		return nil, broker.RefusedBusy // out of descriptors
	}
	s.live[id] = r
	s.stepLocked(broker.Submit{Conn: c.id, ID: id, Wait: sub.Wait})
	if c.refused != 0 {
		delete(s.live, id)
		r.cancel()
		r.stdin.close()
		s.journal(r, "refused", "", c.refused.String())
		return nil, c.refused
	}
	s.journal(r, "accepted", "", "")
	return r, 0
}
