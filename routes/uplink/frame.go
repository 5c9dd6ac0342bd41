package uplink

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"lazaret.dev/lazaret/routes/link"
)

// A frame on the packet socket is a virtio header, an Ethernet header, an IP header and the rest.
const (
	vnetLen    = 10
	ethLen     = header.EthernetMinimumSize
	udpLen     = header.UDPMinimumSize
	icmpLen    = 8
	maxIPLen   = header.IPv6MinimumSize
	maxPayload = link.MTU - header.IPv4MinimumSize - udpLen // bytes of one UDP datagram towards the agent
)

// An endpointPair is a flow: the agent's port (or echo identifier) and where it leads.
type endpointPair struct {
	proto tcpip.TransportProtocolNumber
	port  uint16 // of the agent; the identifier for ICMP echo
	dst   netip.AddrPort
}

func (p endpointPair) agent() netip.Addr {
	if p.dst.Addr().Is4() {
		return link.Agent4.Addr()
	}
	return link.Agent6.Addr()
}

func ipLen(dst netip.Addr) int {
	if dst.Is4() {
		return header.IPv4MinimumSize
	}
	return header.IPv6MinimumSize
}

// putFrame writes all headers up to and with the IP header at the start of b, for a packet from src
// to the agent whose IP payload of n bytes follows. It returns the length of the headers.
func putFrame(b []byte, src netip.Addr, proto tcpip.TransportProtocolNumber, n int) int {
	clear(b[:vnetLen])
	eth := header.Ethernet(b[vnetLen:])
	fields := &header.EthernetFields{SrcAddr: tcpip.LinkAddress(link.UplinkMAC), DstAddr: tcpip.LinkAddress(link.SidecarUpMAC), Type: header.IPv4ProtocolNumber}
	if src.Is6() {
		fields.Type = header.IPv6ProtocolNumber
	}
	eth.Encode(fields)
	putIP(b[vnetLen+ethLen:], src, link.Agent4.Addr(), link.Agent6.Addr(), proto, n)
	return vnetLen + ethLen + ipLen(src)
}

// putIP writes an IP header from src to the address of the same family.
func putIP(b []byte, src, dst4, dst6 netip.Addr, proto tcpip.TransportProtocolNumber, n int) {
	if src.Is4() {
		ip := header.IPv4(b)
		ip.Encode(&header.IPv4Fields{
			TotalLength: uint16(header.IPv4MinimumSize + n), TTL: 64, Protocol: uint8(proto),
			SrcAddr: tcpip.AddrFrom4(src.As4()), DstAddr: tcpip.AddrFrom4(dst4.As4()),
		})
		ip.SetChecksum(^ip.CalculateChecksum())
		return
	}
	header.IPv6(b).Encode(&header.IPv6Fields{
		PayloadLength: uint16(n), TransportProtocol: proto, HopLimit: 64,
		SrcAddr: tcpip.AddrFrom16(src.As16()), DstAddr: tcpip.AddrFrom16(dst6.As16()),
	})
}

func pseudo(src, dst netip.Addr, proto tcpip.TransportProtocolNumber, n int) uint16 {
	return header.PseudoHeaderChecksum(proto, tcpip.AddrFromSlice(src.AsSlice()), tcpip.AddrFromSlice(dst.AsSlice()), uint16(n))
}

// putUDP completes a frame whose payload of n bytes stands at b[off+udpLen:]; off is the length of
// the headers before UDP's. The checksum is left to whoever needs it, as the virtio header says.
func putUDP(b []byte, p endpointPair, off, n int) {
	udp := header.UDP(b[off:])
	udp.Encode(&header.UDPFields{SrcPort: p.dst.Port(), DstPort: p.port, Length: uint16(udpLen + n)})
	udp.SetChecksum(pseudo(p.dst.Addr(), p.agent(), header.UDPProtocolNumber, udpLen+n))
	b[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	binary.NativeEndian.PutUint16(b[6:], uint16(off-vnetLen))
	binary.NativeEndian.PutUint16(b[8:], 6) // offset of the checksum in a UDP header
}

// putICMPChecksum sets the checksum of the ICMP message that is b.
func putICMPChecksum(b []byte, src, dst netip.Addr) {
	b[2], b[3] = 0, 0
	var sum uint16
	if src.Is6() {
		sum = pseudo(src, dst, header.ICMPv6ProtocolNumber, len(b))
	}
	binary.BigEndian.PutUint16(b[2:], ^checksum.Checksum(b, sum))
}

// An unreachable is the reason of an ICMP destination unreachable message.
type unreachable uint8

const (
	hostUnreachable unreachable = iota
	portUnreachable
)

func (u unreachable) typeCode(v6 bool) (typ, code byte) {
	switch {
	case v6 && u == portUnreachable:
		return byte(header.ICMPv6DstUnreachable), byte(header.ICMPv6PortUnreachable)
	case v6: // gVisor's stack passes on no code but this one and the port's
		return byte(header.ICMPv6DstUnreachable), byte(header.ICMPv6NetworkUnreachable)
	case u == portUnreachable:
		return byte(header.ICMPv4DstUnreachable), byte(header.ICMPv4PortUnreachable)
	}
	return byte(header.ICMPv4DstUnreachable), byte(header.ICMPv4HostUnreachable)
}

// unreachableFrame is an ICMP error from the destination about a packet of the agent. seq is the
// sequence number of a TCP SYN; other protocols ignore it.
func unreachableFrame(p endpointPair, why unreachable, seq uint32) []byte {
	dst := p.dst.Addr()
	proto := header.ICMPv4ProtocolNumber
	if dst.Is6() {
		proto = header.ICMPv6ProtocolNumber
	}
	ip := ipLen(dst)
	b := make([]byte, vnetLen+ethLen+ip+icmpLen+ip+20)
	off := putFrame(b, dst, proto, icmpLen+ip+20)
	icmp := b[off:]
	icmp[0], icmp[1] = why.typeCode(dst.Is6())

	// The packet that it is about, as far as ICMP quotes it.
	quoted := icmp[icmpLen:]
	putIP(quoted, p.agent(), dst, dst, p.proto, 20)
	l4 := quoted[ip:]
	switch p.proto {
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		binary.BigEndian.PutUint16(l4, p.port)
		binary.BigEndian.PutUint16(l4[2:], p.dst.Port())
		if p.proto == header.TCPProtocolNumber {
			binary.BigEndian.PutUint32(l4[4:], seq)
		} else {
			binary.BigEndian.PutUint16(l4[4:], udpLen)
		}
	default:
		l4[0] = byte(header.ICMPv4Echo)
		if dst.Is6() {
			l4[0] = byte(header.ICMPv6EchoRequest)
		}
		binary.BigEndian.PutUint16(l4[4:], p.port)
	}
	putICMPChecksum(icmp, dst, p.agent())
	return b
}

// pairOf names the flow of a TCP connection request; the local side of the stack is the far end.
func pairOf(id stack.TransportEndpointID) (endpointPair, bool) {
	addr, ok := netip.AddrFromSlice(id.LocalAddress.AsSlice())
	return endpointPair{header.TCPProtocolNumber, id.RemotePort, netip.AddrPortFrom(addr, id.LocalPort)}, ok
}
