package uplink

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"lazaret.dev/lazaret/routes/policy"
)

// TCP is terminated here twice: the stack talks to the agent, a host socket to the destination, and
// two goroutines copy between them. The host side is dialled first and the agent's handshake is
// completed only then, so a refusal of the destination is a refusal for the agent.
const (
	maxDials    = 1024             // connection attempts at a time
	dialTimeout = 75 * time.Second // a little over what an agent's kernel retries
	copyBuffer  = 64 << 10
)

type tcpRelay struct {
	gate *gate
	in   *ingress
	dial dialFunc
	send func(frame []byte) // to the agent
	max  int

	mu    sync.Mutex
	flows map[*tcpFlow]struct{}
}

// A tcpFlow is counted from its dial on.
type tcpFlow struct {
	dst    netip.Addr // immutable
	cancel context.CancelFunc

	// Guarded by tcpRelay.mu.
	reset bool
	ep    tcpip.Endpoint // nil before the handshake
	host  net.Conn       // nil before the dial succeeded
}

var copyBuffers = sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}

// handle serves one connection request on a goroutine of its own.
func (t *tcpRelay) handle(r *tcp.ForwarderRequest) {
	p, ok := pairOf(r.ID())
	seq, haveSYN := t.in.takeSYN(p)
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	f := &tcpFlow{dst: p.dst.Addr(), cancel: cancel}
	if !ok || !t.add(f) {
		r.Complete(true)
		return
	}
	defer t.remove(f)
	host, err := t.connect(ctx, f, p.dst)
	if err != nil {
		t.in.takeSYN(p) // a repeated SYN
		switch {
		case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, errDenied), errors.Is(err, errHostLocal):
			r.Complete(!haveSYN)
			if haveSYN {
				t.send(unreachableFrame(p, hostUnreachable, seq))
			}
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
			r.Complete(false) // silence is what the agent would have met
		default:
			r.Complete(true)
		}
		return
	}
	defer host.Close()

	var wq waiter.Queue
	ep, terr := r.CreateEndpoint(&wq)
	if terr != nil {
		r.Complete(true)
		return
	}
	r.Complete(false)
	ep.SocketOptions().SetDelayOption(false)
	ep.SocketOptions().SetKeepAlive(true)
	agent := gonet.NewTCPConn(&wq, ep)
	defer agent.Close()
	if !t.establish(f, ep, host) {
		return
	}
	t.copyBoth(f, agent, host.(*net.TCPConn))
}

// errDenied is the second evaluation of the policy saying no.
var errDenied = errors.New("denied by the policy")

// add counts f unless there are too many. The policy is evaluated under the same lock as its
// changes, so a flow is either refused here or found by revoke.
func (t *tcpRelay) add(f *tcpFlow) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.flows) >= t.max || t.gate.full.Load() {
		return false
	}
	t.flows[f] = struct{}{}
	return true
}

func (t *tcpRelay) remove(f *tcpFlow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.flows, f)
}

func (t *tcpRelay) connect(ctx context.Context, f *tcpFlow, dst netip.AddrPort) (net.Conn, error) {
	if t.gate.index().Verdict(dst.Addr()) == policy.Deny {
		return nil, errDenied
	}
	if err := t.gate.checkTCP(dst.Addr()); err != nil {
		return nil, err
	}
	c, err := t.dial(ctx, dst)
	if err != nil {
		return nil, err
	}
	// The host may have got this address since the check; then both ends have it.
	if l, ok := c.LocalAddr().(*net.TCPAddr); ok && l.AddrPort().Addr().Unmap() == dst.Addr() {
		c.Close()
		return nil, errHostLocal
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.reset || t.gate.index().Verdict(dst.Addr()) == policy.Deny {
		c.Close()
		return nil, errDenied
	}
	f.host = c
	return c, nil
}

// establish makes the flow's ends known to revoke, unless it was revoked meanwhile.
func (t *tcpRelay) establish(f *tcpFlow, ep tcpip.Endpoint, host net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.reset {
		ep.Abort()
		return false
	}
	f.ep = ep
	return true
}

// revoke resets every flow whose destination x denies, on both sides, and tells how many.
func (t *tcpRelay) revoke(x *policy.Index) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for f := range t.flows {
		if !f.reset && x.Verdict(f.dst) == policy.Deny {
			t.resetLocked(f)
			n++
		}
	}
	return n
}

func (t *tcpRelay) resetLocked(f *tcpFlow) {
	f.reset = true
	f.cancel()
	if f.host != nil {
		if c, ok := f.host.(*net.TCPConn); ok {
			_ = c.SetLinger(0) // RST, so that the far side does not take it for a proper end
		}
		f.host.Close()
	}
	if f.ep != nil {
		f.ep.Abort()
	}
}

func (t *tcpRelay) copyBoth(f *tcpFlow, agent *gonet.TCPConn, host *net.TCPConn) {
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		t.copyHalf(f, host, agent, host.CloseWrite)
	}()
	t.copyHalf(f, agent, host, agent.CloseWrite)
	wg.Wait()
}

// copyHalf copies one direction to its end, which it passes on as a half-close. A failure of
// either side is a reset for both.
func (t *tcpRelay) copyHalf(f *tcpFlow, dst io.Writer, src io.Reader, closeWrite func() error) {
	b := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(b)
	for {
		n, err := src.Read(*b)
		if n > 0 {
			if _, werr := dst.Write((*b)[:n]); werr != nil {
				err = werr
			}
		}
		if err == nil {
			continue
		}
		if errors.Is(err, io.EOF) {
			_ = closeWrite()
			return
		}
		t.mu.Lock()
		if !f.reset {
			t.resetLocked(f)
		}
		t.mu.Unlock()
		return
	}
}

// dialHost connects by the host's routes.
func dialHost(ctx context.Context, dst netip.AddrPort) (net.Conn, error) {
	network := "tcp6"
	if dst.Addr().Is4() {
		network = "tcp4"
	}
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 8}}
	return d.DialContext(ctx, network, dst.String())
}
