package routes

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/google/nftables"

	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

// A rawAttack is a frame put on the agent's link by a process that owns the agent's namespace, as a
// compromised sandbox would. It wins if anything leaves the sidecar's namespace that should not, or
// something but the named services hears of it there.
type rawAttack struct {
	name   string
	frames [][]byte
	// noControl is why the attack cannot work even without any policy: the kernel's own input checks.
	noControl string
}

type frameSpec struct {
	dmac, smac net.HardwareAddr
	src, dst   string
	proto      byte
	ttl        byte
	options    []byte
	fragment   uint16
	payload    []byte
	ethertype  uint16
}

func (f frameSpec) bytes() []byte {
	def := func(m, d net.HardwareAddr) net.HardwareAddr {
		if m == nil {
			return d
		}
		return m
	}
	if f.src == "" {
		f.src = link.Agent4.Addr().String()
	}
	if f.ttl == 0 {
		f.ttl = 64
	}
	if f.ethertype == 0 {
		f.ethertype = 0x0800
	}
	if f.payload == nil {
		f.payload = l4(f.proto, f.src, f.dst)
	}
	b := append(append([]byte{}, def(f.dmac, link.SidecarMAC)...), def(f.smac, link.AgentMAC)...)
	b = binary.BigEndian.AppendUint16(b, f.ethertype)
	src, dst := netip.MustParseAddr(f.src), netip.MustParseAddr(f.dst)
	if dst.Is6() {
		ip := make([]byte, 40)
		ip[0] = 0x60
		binary.BigEndian.PutUint16(ip[4:], uint16(len(f.payload)))
		ip[6], ip[7] = f.proto, f.ttl
		copy(ip[8:], src.AsSlice())
		copy(ip[24:], dst.AsSlice())
		return append(append(b, ip...), f.payload...)
	}
	ihl := 20 + len(f.options)
	ip := make([]byte, ihl)
	ip[0] = 0x40 | byte(ihl/4)
	binary.BigEndian.PutUint16(ip[2:], uint16(ihl+len(f.payload)))
	binary.BigEndian.PutUint16(ip[4:], 0x4c5a)
	binary.BigEndian.PutUint16(ip[6:], f.fragment)
	ip[8], ip[9] = f.ttl, f.proto
	copy(ip[12:], src.AsSlice())
	copy(ip[16:], dst.AsSlice())
	copy(ip[20:], f.options)
	binary.BigEndian.PutUint16(ip[10:], ^sum(ip, 0))
	return append(append(b, ip...), f.payload...)
}

func sum(b []byte, s uint32) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// l4 is a minimal valid packet of the protocol.
func l4(proto byte, src, dst string) []byte {
	ports := []byte{0x30, 0x39, 0, 7}
	var b []byte
	at := -1
	switch proto {
	case 6:
		b = append(ports, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0)
		at = 16
	case 17:
		b = append(ports, 0, 13, 0, 0, 'p', 'r', 'o', 'b', 'e')
		at = 6
	case 1:
		b = []byte{8, 0, 0, 0, 1, 2, 3, 4}
		binary.BigEndian.PutUint16(b[2:], ^sum(b, 0))
	case 58:
		b = []byte{128, 0, 0, 0, 1, 2, 3, 4}
		at = 2
	default:
		b = make([]byte, 16)
	}
	if at >= 0 {
		s := netip.MustParseAddr(src).AsSlice()
		d := netip.MustParseAddr(dst).AsSlice()
		p := append(append(append([]byte{}, s...), d...), 0, proto, byte(len(b)>>8), byte(len(b)))
		binary.BigEndian.PutUint16(b[at:], ^sum(append(p, b...), 0))
	}
	return b
}

func withPort(b []byte, port uint16) []byte {
	binary.BigEndian.PutUint16(b[2:], port)
	return b
}

func arp(op uint16, smac net.HardwareAddr, sip string, tmac net.HardwareAddr, tip string, dmac net.HardwareAddr) []byte {
	b := append(append([]byte{}, dmac...), smac...)
	b = append(b, 0x08, 0x06, 0, 1, 8, 0, 6, 4, byte(op>>8), byte(op))
	b = append(append(b, smac...), netip.MustParseAddr(sip).AsSlice()...)
	return append(append(b, tmac...), netip.MustParseAddr(tip).AsSlice()...)
}

const (
	allowedDst = "203.0.113.10"
	deniedDst  = "10.1.2.3"
)

var broadcastMAC = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func rawAttacks() []rawAttack {
	var all []rawAttack
	add := func(name, noControl string, frames ...[]byte) {
		all = append(all, rawAttack{name, frames, noControl})
	}
	for _, proto := range []byte{1, 6, 17} {
		for _, dst := range []string{deniedDst, "172.16.5.5", "192.168.77.7", "192.168.50.10", "192.168.50.2", "198.51.100.77", "100.64.1.1", "169.254.169.254", "10.9.1.5"} {
			add(fmt.Sprintf("protocol %d to %s", proto, dst), "", frameSpec{dst: dst, proto: proto}.bytes())
		}
	}
	for _, src := range []string{"203.0.113.10", "10.1.2.3", "198.18.0.5", "192.168.50.2"} {
		add("forged source "+src, "", frameSpec{src: src, dst: allowedDst, proto: 17}.bytes())
	}
	for _, src := range []string{"198.18.0.1", "198.19.0.1", "198.19.0.2", "127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"} {
		add("impossible source "+src, "martian source", frameSpec{src: src, dst: allowedDst, proto: 17}.bytes())
	}
	for name, mac := range map[string]net.HardwareAddr{"broadcast": broadcastMAC, "multicast": {1, 0, 0x5e, 0, 0, 1}, "the uplink": link.UplinkMAC, "up0": link.SidecarUpMAC} {
		add("denied to the hardware address of "+name, "not for this host", frameSpec{dmac: mac, dst: deniedDst, proto: 17}.bytes())
	}
	hop := netip.MustParseAddr(deniedDst).AsSlice()
	add("loose source route", "", frameSpec{dst: allowedDst, proto: 17, options: append([]byte{131, 7, 4}, append(hop, 1)...)}.bytes())
	add("strict source route", "the next hop is no neighbour", frameSpec{dst: allowedDst, proto: 17, options: append([]byte{137, 7, 4}, append(hop, 1)...)}.bytes())
	add("source route through the sidecar", "", frameSpec{dst: "198.18.0.1", proto: 17, options: append([]byte{131, 7, 4}, append(hop, 1)...)}.bytes())
	inner := frameSpec{dst: deniedDst, proto: 17}.bytes()[14:]
	for name, proto := range map[string]byte{"IPIP": 4, "GRE": 47, "6in4": 41, "ESP": 50, "SCTP": 132, "UDP-Lite": 136, "DCCP": 33, "IGMP": 2, "OSPF": 89, "VRRP": 112, "raw 253": 253} {
		add(name+" to an allowed address", "", frameSpec{dst: allowedDst, proto: proto, payload: inner}.bytes())
	}
	add("IPIP to the sidecar", "no tunnel there", frameSpec{dst: "198.18.0.1", proto: 4, payload: inner}.bytes())
	add("fragments to a denied address", "", frameSpec{dst: deniedDst, proto: 17, fragment: 0x2000}.bytes(), frameSpec{dst: deniedDst, proto: 17, fragment: 1, payload: make([]byte, 24)}.bytes())
	add("a lone later fragment", "", frameSpec{dst: deniedDst, proto: 17, fragment: 100, payload: make([]byte, 24)}.bytes())
	add("time to live of 2", "", frameSpec{dst: deniedDst, proto: 17, ttl: 2}.bytes())
	vlan := frameSpec{dst: deniedDst, proto: 17}.bytes()
	tagged := func(types ...byte) []byte {
		return append(append(append([]byte{}, vlan[:12]...), types...), vlan[14:]...)
	}
	add("VLAN tag", "no such VLAN", tagged(0x81, 0, 0, 5, 0x08, 0))
	add("priority tag", "", tagged(0x81, 0, 0, 0, 0x08, 0))
	add("double VLAN tag", "no such VLAN", tagged(0x88, 0xa8, 0, 5, 0x81, 0, 0, 6, 0x08, 0))
	add("MPLS", "no such protocol", tagged(0x88, 0x47, 0, 1, 1, 64))
	add("PPPoE", "no such protocol", tagged(0x88, 0x64, 0x11, 0, 0, 1, 0, 40, 0, 0x21))
	add("802.3 frame", "no such protocol", tagged(0, 60, 0xaa, 0xaa, 3))
	for _, dst := range []string{"255.255.255.255", "198.18.0.3", "224.0.0.251", "239.255.255.250"} {
		add("broadcast or multicast "+dst, "never forwarded", frameSpec{dst: dst, dmac: broadcastMAC, proto: 17}.bytes(), frameSpec{dst: dst, proto: 17}.bytes())
	}
	add("0.0.0.0", "this host", frameSpec{dst: "0.0.0.0", proto: 17}.bytes())
	add("loopback of the sidecar", "martian destination", frameSpec{dst: "127.0.0.1", proto: 6, payload: withPort(l4(6, "198.18.0.2", "127.0.0.1"), 22)}.bytes())
	add("240.0.0.1", "", frameSpec{dst: "240.0.0.1", proto: 17}.bytes())
	for _, dst := range []string{"198.18.0.1", "198.19.0.2"} {
		add("a port of the sidecar at "+dst, "", frameSpec{dst: dst, proto: 17}.bytes())
	}
	for _, dst := range []string{"198.19.0.1", "198.18.0.5", "198.19.255.1"} {
		add("a link address "+dst, "", frameSpec{dst: dst, proto: 17}.bytes())
	}
	redirect := append([]byte{5, 1, 0, 0, 198, 18, 0, 2}, inner[:28]...)
	binary.BigEndian.PutUint16(redirect[2:], ^sum(redirect, 0))
	add("ICMP redirect, then denied", "", frameSpec{dst: "198.18.0.1", proto: 1, payload: redirect}.bytes(), frameSpec{dst: deniedDst, proto: 17}.bytes())
	add("forged ARP for the uplink, then denied", "", arp(2, link.AgentMAC, "198.19.0.1", link.SidecarMAC, "198.18.0.1", link.SidecarMAC), frameSpec{dst: deniedDst, proto: 17}.bytes())
	add("ARP request for the uplink", "answers only", arp(1, link.AgentMAC, "198.18.0.2", make(net.HardwareAddr, 6), "198.19.0.1", broadcastMAC))
	v6 := func(dst string, proto byte) []byte {
		return frameSpec{src: link.Agent6.Addr().String(), dst: dst, proto: proto, ethertype: 0x86dd}.bytes()
	}
	for _, dst := range []string{"2001:db8:1::10", "fd12::10", "::ffff:10.1.2.3", "2002:a01:203::1", "64:ff9b::a01:203", "fe80::1", "ff02::1", "::1"} {
		add("IPv6 although it is off: "+dst, "IPv6 is off in the control too", v6(dst, 17), v6(dst, 58))
	}
	ra := []byte{134, 0, 0, 0, 64, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0}
	add("router advertisement", "IPv6 is off in the control too", frameSpec{src: "fe80::1", dst: "ff02::1", proto: 58, ethertype: 0x86dd, ttl: 255, payload: ra}.bytes())
	bad := frameSpec{dst: deniedDst, proto: 17}.bytes()
	bad[14] = 0x55
	add("IP version 5", "not IP", bad)
	bad = frameSpec{dst: deniedDst, proto: 17}.bytes()
	bad[14] = 0x4f
	add("header longer than the packet", "not IP", bad)
	bad = frameSpec{dst: deniedDst, proto: 17}.bytes()
	bad[24]++
	add("wrong header checksum", "not IP", bad)
	add("truncated header", "not IP", frameSpec{dst: deniedDst, proto: 17}.bytes()[:30])
	return all
}

// violation tells what is wrong with a frame that left, or "".
func violation(p *policy.Policy, b []byte) string {
	if len(b) < 10+14+20 {
		return "a runt"
	}
	eth := b[10:]
	if binary.BigEndian.Uint16(eth[12:]) != 0x0800 {
		return fmt.Sprintf("ethertype %x", eth[12:14])
	}
	ip := eth[14:]
	src, dst := netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
	switch {
	case p.Verdict(dst) == policy.Deny:
		return "to " + dst.String()
	case src != link.Agent4.Addr():
		return "from " + src.String()
	case ip[0] != 0x45:
		return "with options"
	case ip[9] != 1 && ip[9] != 6 && ip[9] != 17:
		return fmt.Sprintf("of protocol %d", ip[9])
	}
	return ""
}

// rawRange is a sidecar namespace with listeners planted in it, and the far end of its uplink.
type rawRange struct {
	t       *testing.T
	n       *network
	fd      int // packet socket in the agent's namespace
	planted *os.File
	ifindex int
}

func newRawRange(t *testing.T, table *policy.Table, bare bool) *rawRange {
	n := start(t, labOptions{table: table, noUplink: true, config: policy.Config{Allow: []string{"10.9.0.0/16"}, Deny: []string{"10.9.1.0/24"}}})
	r := &rawRange{t: t, n: n}
	must(n.agent.do(func() error {
		dev, err := net.InterfaceByName(link.AgentDev)
		must(err)
		r.ifindex = dev.Index
		r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	t.Cleanup(func() { unix.Close(r.fd) })
	must(n.top.sidecar.do(func() error {
		c, err := net.ListenPacket("udp4", "0.0.0.0:7")
		must(err)
		r.planted, err = c.(*net.UDPConn).File()
		c.Close()
		if !bare {
			return err
		}
		c2, err := nftables.New()
		must(err)
		c2.DelTable(&nftables.Table{Name: "lazaret", Family: nftables.TableFamilyINet})
		must(c2.Flush())
		var off []sysctl
		for _, dev := range []string{"all", "default", "ag0", "up0"} {
			off = append(off, sysctl{"ipv4/conf/" + dev + "/rp_filter", "0"}, sysctl{"ipv4/conf/" + dev + "/accept_source_route", "1"})
		}
		return write(off)
	}))
	t.Cleanup(func() { r.planted.Close() })
	return r
}

// fire sends the attack and tells what it achieved, or "".
func (r *rawRange) fire(a rawAttack) string {
	for _, f := range a.frames {
		err := unix.Sendto(r.fd, f, 0, &unix.SockaddrLinklayer{Ifindex: r.ifindex, Protocol: 0x0008, Halen: 6})
		if err != nil {
			r.t.Fatalf("%s: %v", a.name, err)
		}
	}
	time.Sleep(2 * time.Millisecond)
	won := ""
	b := make([]byte, 70000)
	for {
		k, _, err := unix.Recvfrom(int(r.n.d.Packet.Fd()), b, unix.MSG_DONTWAIT)
		if err != nil {
			break
		}
		if v := violation(r.n.policy, b[:k]); v != "" {
			won = "left " + v
		}
	}
	if _, _, err := unix.Recvfrom(int(r.planted.Fd()), b, unix.MSG_DONTWAIT); err == nil {
		won = "heard in the sidecar's namespace"
	}
	return won
}

// TestSR6RawBattery fires every frame three times: at the full policy, at routes alone (no packet
// filter, no reverse-path filter, as on a kernel that lacks them; informative), and at no policy,
// where it must win, or it would prove nothing.
func TestSR6RawBattery(t *testing.T) {
	attacks := rawAttacks()
	won, controlled, helpless := 0, 0, 0
	t.Run("policy", func(t *testing.T) {
		r := newRawRange(t, nil, false)
		// The watch works: an allowed packet arrives and is no violation.
		if v := r.fire(rawAttack{"control", [][]byte{frameSpec{dst: allowedDst, proto: 17}.bytes()}, ""}); v != "" {
			t.Fatal(v)
		}
		for _, a := range attacks {
			if what := r.fire(a); what != "" {
				won++
				t.Errorf("%s: %s", a.name, what)
			}
		}
	})
	t.Run("control", func(t *testing.T) {
		open := wideOpen
		open.IPv6 = false
		r := newRawRange(t, &open, true)
		for _, a := range attacks {
			what := r.fire(a)
			switch {
			case what != "":
				controlled++
			case a.noControl == "":
				t.Errorf("%s: does not work without a policy either", a.name)
			default:
				helpless++
			}
		}
	})
	t.Logf("%d attacks: %d reached; %d of them work without a policy, %d never do", len(attacks), won, controlled, helpless)
}
