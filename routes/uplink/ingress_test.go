package uplink

import (
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"lazaret.dev/lazaret/routes/link"
)

// deliver gives b to an ingress as one packet and returns the datagrams that it took.
func deliver(e *ingress, proto tcpip.NetworkProtocolNumber, b []byte) (got []dgram) {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	defer pkt.DecRef()
	e.DeliverNetworkPacket(proto, pkt)
	for {
		select {
		case d := <-e.dgrams.queue:
			got = append(got, d)
			e.dgrams.release(d)
		default:
			return got
		}
	}
}

func testIngress(t testing.TB) *ingress {
	d, err := newDgramRelay(&gate{}, -1, 4)
	if err != nil {
		t.Fatal(err)
	}
	return newIngress(nil, d)
}

func udpPacket(src, dst string, payload string) []byte {
	b := make([]byte, 28+len(payload))
	s, d := netip.MustParseAddr(src), netip.MustParseAddr(dst)
	putIP(b, s, d, d, header.UDPProtocolNumber, udpLen+len(payload))
	header.UDP(b[20:]).Encode(&header.UDPFields{SrcPort: 1234, DstPort: 53, Length: uint16(udpLen + len(payload))})
	copy(b[28:], payload)
	return b
}

func TestIngressTakesWholePacketsOfTheAgent(t *testing.T) {
	e := testIngress(t)
	agent := link.Agent4.Addr().String()
	good := udpPacket(agent, "203.0.113.10", "payload")
	got := deliver(e, header.IPv4ProtocolNumber, good)
	want := endpointPair{header.UDPProtocolNumber, 1234, netip.MustParseAddrPort("203.0.113.10:53")}
	if len(got) != 1 || got[0].pair != want || string(got[0].payload) != "payload" {
		t.Fatalf("got %+v", got)
	}
	bad := map[string][]byte{"foreign source": udpPacket("203.0.113.1", "203.0.113.10", "x"), "empty": {}, "runt": good[:21]}
	for name, change := range map[string]func([]byte){
		"fragment":      func(b []byte) { b[6] = 0x20 },
		"later part":    func(b []byte) { b[7] = 1 },
		"version":       func(b []byte) { b[0] = 0x65 },
		"options":       func(b []byte) { b[0] = 0x46 },
		"length":        func(b []byte) { b[3] = 200 },
		"UDP length":    func(b []byte) { b[25] = 200 },
		"short UDP":     func(b []byte) { b[25] = 7 },
		"port 0":        func(b []byte) { b[22], b[23] = 0, 0 },
		"odd protocol":  func(b []byte) { b[9] = 47 },
		"echo reply":    func(b []byte) { b[9], b[20] = 1, 0 },
		"ICMPv6 in IP4": func(b []byte) { b[9], b[20], b[21] = 58, 128, 0 },
	} {
		b := append([]byte{}, good...)
		change(b)
		bad[name] = b
	}
	for name, b := range bad {
		if got := deliver(e, header.IPv4ProtocolNumber, b); len(got) != 0 {
			t.Errorf("%s: taken as %+v", name, got)
		}
	}
	if n := e.dgrams.queued.Load(); n != 0 {
		t.Errorf("%d bytes are counted as queued", n)
	}
}

func FuzzIngress(f *testing.F) {
	f.Add(true, udpPacket(link.Agent4.Addr().String(), "203.0.113.10", "x"))
	f.Add(false, make([]byte, 60))
	e := testIngress(f)
	f.Fuzz(func(t *testing.T, v4 bool, b []byte) {
		proto := header.IPv6ProtocolNumber
		if v4 {
			proto = header.IPv4ProtocolNumber
		}
		for _, d := range deliver(e, proto, b) {
			if !d.pair.dst.Addr().IsValid() || len(d.payload) > len(b) {
				t.Fatalf("%+v", d)
			}
		}
		if e.dgrams.queued.Load() != 0 {
			t.Fatal("queue count")
		}
	})
}

// TestUnreachableFramesAreValid parses what is sent to the agent.
func TestUnreachableFramesAreValid(t *testing.T) {
	for _, dst := range []string{"203.0.113.10:80", "[2001:db8::1]:80"} {
		for _, proto := range []tcpip.TransportProtocolNumber{header.TCPProtocolNumber, header.UDPProtocolNumber, header.ICMPv4ProtocolNumber} {
			p := endpointPair{proto, 4242, netip.MustParseAddrPort(dst)}
			b := unreachableFrame(p, portUnreachable, 99)[vnetLen+ethLen:]
			if p.dst.Addr().Is4() {
				ip := header.IPv4(b)
				if !ip.IsValid(len(b)) || !ip.IsChecksumValid() || header.ICMPv4(ip.Payload()).Code() != header.ICMPv4PortUnreachable {
					t.Errorf("%s %d: % x", dst, proto, b)
				}
			} else if ip := header.IPv6(b); !ip.IsValid(len(b)) || header.ICMPv6(ip.Payload()).Code() != header.ICMPv6PortUnreachable {
				t.Errorf("%s %d: % x", dst, proto, b)
			}
		}
	}
}
