package uplink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"lazaret.dev/lazaret/routes/policy"
)

// dgramRelay carries UDP and ICMP echo. Each flow has one connected host socket, so the host's
// kernel delivers answers of the one destination only. Two goroutines move batches: out sends what
// the agent sent, in waits for all sockets at once and writes frames.
type dgramRelay struct {
	gate   *gate
	packet int // descriptor of the packet socket; not owned
	epoll  int
	queue  chan dgram
	queued atomic.Int64 // bytes in queue
	max    int

	mu    sync.Mutex
	flows map[endpointPair]*dgramFlow
	byFD  map[int32]*dgramFlow
}

const (
	queueLen   = 2048
	queueBytes = 8 << 20

	udpIdle  = 2 * time.Minute
	pingIdle = 20 * time.Second
	dnsIdle  = 15 * time.Second
)

// A dgram is one datagram from the agent. Payload is a whole ICMP message or the content of a UDP
// datagram.
type dgram struct {
	pair    endpointPair
	payload []byte
	pooled  *[]byte // backs payload, or nil
}

type dgramFlow struct {
	pair endpointPair
	fd   int
	used atomic.Int64 // unix seconds of the last datagram in either direction
}

// idle is the time after which a flow without datagrams is forgotten.
func (f *dgramFlow) idle() time.Duration {
	switch {
	case f.pair.proto != header.UDPProtocolNumber:
		return pingIdle
	case f.pair.dst.Port() == 53:
		return dnsIdle
	}
	return udpIdle
}

func newDgramRelay(g *gate, packet, maxFlows int) (*dgramRelay, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll: %w", err)
	}
	return &dgramRelay{gate: g, packet: packet, epoll: ep, queue: make(chan dgram, queueLen), max: maxFlows,
		flows: make(map[endpointPair]*dgramFlow), byFD: make(map[int32]*dgramFlow)}, nil
}

var smallBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 2048); return &b }}

// enqueue copies n bytes of pkt from off on, or all the rest for n < 0. What does not fit is
// dropped, as on any congested link.
func (r *dgramRelay) enqueue(p endpointPair, pkt *stack.PacketBuffer, off, n int) {
	if rest := pkt.Data().Size() - off; n < 0 {
		n = rest
	} else if n > rest {
		return
	}
	if r.queued.Load() > queueBytes {
		return
	}
	d := dgram{pair: p}
	if off+n <= 2048 {
		d.pooled = smallBuffers.Get().(*[]byte)
		w := sliceWriter((*d.pooled)[:0])
		_, _ = pkt.Data().ReadTo(&w, true)
		d.payload = w[off : off+n]
	} else {
		d.payload = pkt.Data().AsRange().SubRange(off).Capped(n).ToSlice()
	}
	r.queued.Add(int64(n))
	select {
	case r.queue <- d:
	default:
		r.release(d)
	}
}

type sliceWriter []byte

func (w *sliceWriter) Write(b []byte) (int, error) {
	*w = append(*w, b...)
	return len(b), nil
}

var _ io.Writer = (*sliceWriter)(nil)

func (r *dgramRelay) release(d dgram) {
	r.queued.Add(-int64(len(d.payload)))
	if d.pooled != nil {
		smallBuffers.Put(d.pooled)
	}
}

// out sends what is queued until the process ends. Neighbours in the queue that belong to one flow
// go out with one system call.
func (r *dgramRelay) out() {
	var b batch
	pending := make([]dgram, 0, batchSize)
	for d := range r.queue {
		pending = append(pending[:0], d)
	drain:
		for len(pending) < batchSize {
			select {
			case d := <-r.queue:
				pending = append(pending, d)
			default:
				break drain
			}
		}
		for i := 0; i < len(pending); {
			j := i + 1
			for j < len(pending) && pending[j].pair == pending[i].pair {
				j++
			}
			r.sendAll(&b, pending[i:j])
			i = j
		}
		for _, d := range pending {
			r.release(d)
		}
	}
}

func (r *dgramRelay) sendAll(b *batch, ds []dgram) {
	f, err := r.flow(ds[0].pair)
	if err != nil {
		r.tellUnreachable(ds[0].pair, err)
		return
	}
	f.used.Store(time.Now().Unix())
	for i, d := range ds {
		b.set(i, d.payload)
	}
	for sent := 0; sent < len(ds); {
		n, err := b.send(f.fd, len(ds)-sent)
		if err != nil {
			// A pending error of an earlier datagram is reported once and this one not sent; full
			// buffers lose the rest.
			r.tellUnreachable(f.pair, err)
			return
		}
		sent += n
		if sent < len(ds) {
			for i, d := range ds[sent:] {
				b.set(i, d.payload)
			}
		}
	}
}

// flow finds or makes the flow. It is called by one goroutine only.
func (r *dgramRelay) flow(p endpointPair) (*dgramFlow, error) {
	r.mu.Lock()
	f := r.flows[p]
	r.mu.Unlock()
	if f != nil {
		return f, nil
	}
	if r.gate.index().Verdict(p.dst.Addr()) == policy.Deny {
		return nil, errDenied
	}
	if err := r.gate.routes.check(p.dst.Addr()); err != nil {
		return nil, err
	}
	fd, err := dgramSocket(p)
	if err != nil {
		return nil, err
	}
	f = &dgramFlow{pair: p, fd: fd}
	f.used.Store(time.Now().Unix())
	r.mu.Lock()
	defer r.mu.Unlock()
	// Evaluated under the lock of revoke, so a change of policy cannot pass between.
	if r.gate.index().Verdict(p.dst.Addr()) == policy.Deny {
		unix.Close(fd)
		return nil, errDenied
	}
	for len(r.flows) >= r.max {
		r.evictLocked()
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	if err := unix.EpollCtl(r.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		unix.Close(fd)
		return nil, err
	}
	r.flows[p], r.byFD[int32(fd)] = f, f
	return f, nil
}

// dgramSocket connects a host socket for the flow. Ping sockets need the host's permission
// (net.ipv4.ping_group_range); without it echo requests are refused.
func dgramSocket(p endpointPair) (int, error) {
	af, proto := unix.AF_INET6, 0
	var sa unix.Sockaddr
	if a := p.dst.Addr(); a.Is4() {
		af, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(p.dst.Port()), Addr: a.As4()}
	} else {
		sa = &unix.SockaddrInet6{Port: int(p.dst.Port()), Addr: a.As16()}
	}
	switch p.proto {
	case header.ICMPv4ProtocolNumber:
		proto = unix.IPPROTO_ICMP
	case header.ICMPv6ProtocolNumber:
		proto = unix.IPPROTO_ICMPV6
	}
	fd, err := unix.Socket(af, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, sa); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if p.proto == header.UDPProtocolNumber {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<20) // as much as the host permits
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	}
	return fd, nil
}

// evictLocked forgets the longest unused of a few flows taken at random.
func (r *dgramRelay) evictLocked() {
	var oldest *dgramFlow
	seen := 0
	for _, f := range r.flows {
		if oldest == nil || f.used.Load() < oldest.used.Load() {
			oldest = f
		}
		if seen++; seen == 16 {
			break
		}
	}
	if oldest != nil {
		r.closeLocked(oldest)
	}
}

func (r *dgramRelay) closeLocked(f *dgramFlow) {
	delete(r.flows, f.pair)
	delete(r.byFD, int32(f.fd))
	unix.Close(f.fd) // leaves the epoll set by itself
}

// revoke forgets every flow whose destination x denies.
func (r *dgramRelay) revoke(x *policy.Index) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, f := range r.flows {
		if x.Verdict(f.pair.dst.Addr()) == policy.Deny {
			r.closeLocked(f)
			n++
		}
	}
	return n
}

// expire forgets idle flows.
func (r *dgramRelay) expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.flows {
		if now.Sub(time.Unix(f.used.Load(), 0)) > f.idle() {
			r.closeLocked(f)
		}
	}
}

// in writes what the destinations answer to the agent, until the process ends.
func (r *dgramRelay) in() error {
	slots := make([][]byte, batchSize)
	for i := range slots {
		slots[i] = make([]byte, vnetLen+ethLen+maxIPLen+udpLen+64<<10)
	}
	var b batch
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(r.epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for datagrams: %w", err)
		}
		for _, ev := range events[:max(n, 0)] {
			r.receive(&b, slots, ev.Fd)
		}
	}
}

func (r *dgramRelay) receive(b *batch, slots [][]byte, fd int32) {
	// The lock is held over the read, so the descriptor cannot become another flow's meanwhile.
	r.mu.Lock()
	f := r.byFD[fd]
	if f == nil {
		r.mu.Unlock()
		return
	}
	off := vnetLen + ethLen + ipLen(f.pair.dst.Addr())
	skip := off
	if f.pair.proto == header.UDPProtocolNumber {
		skip += udpLen
	}
	for i, s := range slots {
		b.set(i, s[skip:])
	}
	n, err := b.recv(f.fd, len(slots))
	r.mu.Unlock()
	if err != nil {
		r.tellUnreachable(f.pair, err)
		return
	}
	f.used.Store(time.Now().Unix())
	frames := 0
	var lens [batchSize]int
	for i := range n {
		size, truncated := b.length(i)
		if truncated || size > maxPayload {
			continue
		}
		if total, ok := complete(slots[i], f.pair, off, size); ok {
			slots[frames], slots[i] = slots[i], slots[frames]
			lens[frames] = total
			frames++
		}
	}
	for sent := 0; sent < frames; {
		for i := sent; i < frames; i++ {
			b.set(i-sent, slots[i][:lens[i]])
		}
		k, err := b.send(r.packet, frames-sent)
		if err != nil {
			return // full: lost, as on any congested link
		}
		sent += k
	}
}

// complete makes a frame of the slot whose received bytes are in place.
func complete(slot []byte, p endpointPair, off, size int) (total int, ok bool) {
	if p.proto == header.UDPProtocolNumber {
		putFrame(slot, p.dst.Addr(), p.proto, udpLen+size)
		putUDP(slot, p, off, size)
		return off + udpLen + size, true
	}
	icmp := slot[off : off+size]
	if size < icmpLen || !isEchoReply(p.proto, icmp) {
		return 0, false
	}
	putFrame(slot, p.dst.Addr(), p.proto, size)
	binary.BigEndian.PutUint16(icmp[4:], p.port) // the kernel used an identifier of its own
	putICMPChecksum(icmp, p.dst.Addr(), p.agent())
	return off + size, true
}

func isEchoReply(proto tcpip.TransportProtocolNumber, icmp []byte) bool {
	if proto == header.ICMPv4ProtocolNumber {
		return icmp[0] == byte(header.ICMPv4EchoReply)
	}
	return icmp[0] == byte(header.ICMPv6EchoReply)
}

// tellUnreachable passes on what the host's kernel learned about a destination.
func (r *dgramRelay) tellUnreachable(p endpointPair, err error) {
	why := hostUnreachable
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		why = portUnreachable
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, errDenied), errors.Is(err, errHostLocal):
	default:
		return
	}
	_, _ = unix.Write(r.packet, unreachableFrame(p, why, 0))
}
