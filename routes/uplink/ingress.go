package uplink

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/nested"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"lazaret.dev/lazaret/routes/link"
)

// ingress stands between the packet socket and the network stack. The stack sees TCP alone;
// datagrams are relayed without it. Whatever is not a whole TCP, UDP or echo packet of the agent's
// own address is dropped here, ARP and neighbour discovery too: all neighbours are permanent.
type ingress struct {
	nested.Endpoint
	dgrams *dgramRelay

	mu   sync.Mutex
	syns map[endpointPair]uint32 // sequence number of a SYN whose answer is pending
}

// maxSyns bounds ingress.syns; it is above what the TCP forwarder lets be in flight.
const maxSyns = 4 * maxDials

func newIngress(child stack.LinkEndpoint, d *dgramRelay) *ingress {
	e := &ingress{dgrams: d, syns: make(map[endpointPair]uint32)}
	e.Init(child, e)
	return e
}

// DeliverNetworkPacket implements stack.NetworkDispatcher.
func (e *ingress) DeliverNetworkPacket(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	src, dst, proto, off, ok := parseIP(protocol, pkt)
	if !ok || src != link.Agent4.Addr() && src != link.Agent6.Addr() {
		return
	}
	h, ok := pkt.Data().PullUp(off + 8)
	if !ok {
		return
	}
	h = h[off:]
	p := endpointPair{proto, binary.BigEndian.Uint16(h), netip.AddrPortFrom(dst, binary.BigEndian.Uint16(h[2:]))}
	switch proto {
	case header.TCPProtocolNumber:
		e.noteSYN(p, pkt, off)
		e.Endpoint.DeliverNetworkPacket(protocol, pkt)
	case header.UDPProtocolNumber:
		if n := int(binary.BigEndian.Uint16(h[4:])); n >= udpLen && p.dst.Port() != 0 {
			e.dgrams.enqueue(p, pkt, off+udpLen, n-udpLen)
		}
	case header.ICMPv4ProtocolNumber, header.ICMPv6ProtocolNumber:
		if (proto == header.ICMPv4ProtocolNumber) == dst.Is4() && isEchoRequest(proto, h) {
			p = endpointPair{proto, binary.BigEndian.Uint16(h[4:]), netip.AddrPortFrom(dst, 0)}
			e.dgrams.enqueue(p, pkt, off, -1)
		}
	}
}

func isEchoRequest(proto tcpip.TransportProtocolNumber, icmp []byte) bool {
	if proto == header.ICMPv4ProtocolNumber {
		return icmp[0] == byte(header.ICMPv4Echo) && icmp[1] == 0
	}
	return icmp[0] == byte(header.ICMPv6EchoRequest) && icmp[1] == 0
}

// parseIP gives addresses, protocol and the offset of its header. Fragments and IPv6 extension
// headers are refused: the link carries whole packets, so only an attacker sends them.
func parseIP(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) (src, dst netip.Addr, proto tcpip.TransportProtocolNumber, off int, ok bool) {
	switch protocol {
	case header.IPv4ProtocolNumber:
		b, ok := pkt.Data().PullUp(header.IPv4MinimumSize)
		if !ok {
			return src, dst, 0, 0, false
		}
		ip := header.IPv4(b)
		off = int(ip.HeaderLength())
		if !ip.IsValid(pkt.Data().Size()) || off != header.IPv4MinimumSize || ip.More() || ip.FragmentOffset() != 0 {
			return src, dst, 0, 0, false
		}
		return netip.AddrFrom4(ip.SourceAddress().As4()), netip.AddrFrom4(ip.DestinationAddress().As4()), ip.TransportProtocol(), off, true
	case header.IPv6ProtocolNumber:
		b, ok := pkt.Data().PullUp(header.IPv6MinimumSize)
		if !ok {
			return src, dst, 0, 0, false
		}
		ip := header.IPv6(b)
		if !ip.IsValid(pkt.Data().Size()) {
			return src, dst, 0, 0, false
		}
		return netip.AddrFrom16(ip.SourceAddress().As16()), netip.AddrFrom16(ip.DestinationAddress().As16()), tcpip.TransportProtocolNumber(ip.NextHeader()), header.IPv6MinimumSize, true
	}
	return src, dst, 0, 0, false
}

// noteSYN remembers what an ICMP error about a refused connection must quote.
func (e *ingress) noteSYN(p endpointPair, pkt *stack.PacketBuffer, off int) {
	b, ok := pkt.Data().PullUp(off + header.TCPMinimumSize)
	if !ok {
		return
	}
	t := header.TCP(b[off:])
	if t.Flags()&(header.TCPFlagSyn|header.TCPFlagAck) != header.TCPFlagSyn {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.syns) >= maxSyns {
		clear(e.syns) // costs refused connections their quick answer, nothing else
	}
	e.syns[p] = t.SequenceNumber()
}

func (e *ingress) takeSYN(p endpointPair) (seq uint32, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	seq, ok = e.syns[p]
	delete(e.syns, p)
	return seq, ok
}
