package uplink

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"lazaret.dev/lazaret/routes/link"
)

const (
	nicID   = 1
	gsoSize = 64 << 10 // bytes of one frame; the veth passes it whole whatever its MTU

	// A forwarder drops a SYN that meets a connection in TIME_WAIT, and a busy client comes back to
	// a port after a few thousand connections.
	timeWait = 100 * time.Millisecond
)

// serveStack begins to serve the packet socket. Every address of the world is local to the stack.
func serveStack(g *gate, d *dgramRelay, dial dialFunc, maxTCP int) (*tcpRelay, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	if err := tuneTCP(s); err != nil {
		return nil, err
	}
	wire, err := fdbased.New(&fdbased.Options{
		FDs: []int{FDPacket}, MTU: link.MTU, EthernetHeader: true, Address: tcpip.LinkAddress(link.UplinkMAC),
		PacketDispatchMode: fdbased.RecvMMsg, GSOMaxSize: gsoSize,
		RXChecksumOffload: true, // the link is memory; and the kernel leaves checksums to be filled in
		PreConfigured:     true, IsPacketSocket: []bool{true},
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errStack, err)
	}
	in := newIngress(wire, d)
	relay := &tcpRelay{gate: g, in: in, dial: dial, max: maxTCP, flows: make(map[*tcpFlow]struct{}),
		send: func(frame []byte) { _, _ = unix.Write(FDPacket, frame) }}
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxDials, relay.handle).HandlePacket)
	if err := s.CreateNIC(nicID, in); err != nil {
		return nil, fmt.Errorf("%w: %s", errStack, err)
	}
	if err := joinLinks(s); err != nil {
		return nil, err
	}
	s.SetPromiscuousMode(nicID, true)
	s.SetSpoofing(nicID, true)
	return relay, nil
}

func joinLinks(s *stack.Stack) error {
	for _, l := range []struct {
		proto        tcpip.NetworkProtocolNumber
		own, sidecar netip.Prefix
		all          tcpip.Subnet
	}{
		{ipv4.ProtocolNumber, link.Uplink4, link.SidecarUp4, header.IPv4EmptySubnet},
		{ipv6.ProtocolNumber, link.Uplink6, link.SidecarUp6, header.IPv6EmptySubnet},
	} {
		addr := tcpip.ProtocolAddress{Protocol: l.proto, AddressWithPrefix: tcpip.AddressWithPrefix{
			Address: tcpip.AddrFromSlice(l.own.Addr().AsSlice()), PrefixLen: l.own.Bits()}}
		if err := s.AddProtocolAddress(nicID, addr, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("%w: own address: %s", errStack, err)
		}
		gw := tcpip.AddrFromSlice(l.sidecar.Addr().AsSlice())
		if err := s.AddStaticNeighbor(nicID, l.proto, gw, tcpip.LinkAddress(link.SidecarUpMAC)); err != nil {
			return fmt.Errorf("%w: neighbour: %s", errStack, err)
		}
		s.AddRoute(tcpip.Route{Destination: l.all, Gateway: gw, NIC: nicID})
	}
	return nil
}

func tuneTCP(s *stack.Stack) error {
	sack, moderate, tw := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true), tcpip.TCPTimeWaitTimeoutOption(timeWait)
	// Above these sizes memory grows, speed does not.
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: 256 << 10, Max: 512 << 10}
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: 256 << 10, Max: 512 << 10}
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &tw, &rcv, &snd} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("%w: set %T: %s", errStack, o, err)
		}
	}
	return nil
}
