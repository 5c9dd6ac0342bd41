package routes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
	"lazaret.dev/lazaret/routes/uplink"
)

func TestIPv6IsEquivalent(t *testing.T) {
	n := start(t, labOptions{config: policy.Config{IPv6: "on", Allow: []string{"10.9.0.0/16"}, Deny: []string{"2001:db8:2::/48"}}})
	for _, tt := range []struct {
		addr string
		want bool
	}{
		{"2001:db8:1::10", true}, {"203.0.113.10", true}, {"10.9.0.5", true},
		{"2001:db8:2::20", false}, {"fd12::10", false}, {"fec0::10", false}, {"2002:a01:203::1", false}, {"64:ff9b::a01:203", false}, {"2001:0:1::1", false},
		{"2001:db8:50::10", false}, {"2001:db8:50::2", false}, {"2001:db8:77::77", false}, {"10.1.2.3", false},
	} {
		for _, proto := range []string{"tcp", "udp"} {
			if got := n.reaches(proto, tt.addr); got != tt.want {
				t.Errorf("%s %s: reached %v, want %v", proto, tt.addr, got, tt.want)
			}
		}
	}
	if !n.pings("2001:db8:1::10") || n.pings("fd12::10") {
		t.Error("echo over IPv6 is wrong")
	}
	// A change resets IPv6 flows too.
	c, err := n.dial("tcp", "[2001:db8:1::10]:7", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	deny := compileFor(t, policy.Config{IPv6: "on", Deny: []string{"2001:db8:1::/48"}})
	if err := n.ctl.Apply(context.Background(), deny.Table()); err != nil {
		t.Fatal(err)
	}
	if talks(c, time.Second) || n.reaches("tcp", "2001:db8:1::10") {
		t.Error("IPv6 is not revoked")
	}
	off := compileFor(t, policy.Config{})
	if err := n.ctl.Apply(context.Background(), off.Table()); err != nil {
		t.Fatal(err)
	}
	if n.reaches("tcp", "2001:db8:1::10") || !n.reaches("tcp", "203.0.113.10") {
		t.Error("IPv6 cannot be switched off live")
	}
}

// pings sends an echo request from the agent's namespace with a raw socket.
func (n *network) pings(addr string) bool {
	a := netip.MustParseAddr(addr)
	network, proto, src := "ip4:icmp", 1, link.Agent4.Addr()
	var typ icmp.Type = ipv4.ICMPTypeEcho
	var reply icmp.Type = ipv4.ICMPTypeEchoReply
	if a.Is6() {
		network, proto, typ, reply, src = "ip6:ipv6-icmp", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, link.Agent6.Addr()
	}
	var c net.PacketConn
	if err := n.agent.do(func() (err error) { c, err = net.ListenPacket(network, src.String()); return err }); err != nil {
		n.t.Fatal(err)
	}
	defer c.Close()
	m := icmp.Message{Type: typ, Body: &icmp.Echo{ID: 0x4242, Seq: 7, Data: []byte("echo payload")}}
	var pseudo []byte
	if a.Is6() {
		pseudo = icmp.IPv6PseudoHeader(src.AsSlice(), a.AsSlice())
	}
	b, err := m.Marshal(pseudo)
	if err != nil {
		n.t.Fatal(err)
	}
	_, _ = c.WriteTo(b, &net.IPAddr{IP: a.AsSlice()})
	_ = c.SetDeadline(time.Now().Add(500 * time.Millisecond))
	buf := make([]byte, 1500)
	for {
		k, from, err := c.ReadFrom(buf)
		if err != nil {
			return false
		}
		m, err := icmp.ParseMessage(proto, buf[:k])
		if err == nil && m.Type == reply && from.(*net.IPAddr).IP.Equal(a.AsSlice()) {
			e := m.Body.(*icmp.Echo)
			return e.ID == 0x4242 && e.Seq == 7 && string(e.Data) == "echo payload"
		}
	}
}

func TestEchoThroughPingSockets(t *testing.T) {
	n := start(t, labOptions{})
	for addr, want := range map[string]bool{"203.0.113.10": true, "203.0.113.99": false, "10.1.2.3": false, "192.168.50.2": false, "198.51.100.77": false} {
		if got := n.pings(addr); got != want {
			t.Errorf("%s: answered %v, want %v", addr, got, want)
		}
	}
}

// TestTimeWaitDoesNotStall connects often enough to come back to used ports.
func TestTimeWaitDoesNotStall(t *testing.T) {
	n := start(t, labOptions{})
	const count = 4000
	began := time.Now()
	for i := range count {
		err := n.agent.do(func() error {
			// One port for all: each connection meets its predecessor in TIME_WAIT.
			d := net.Dialer{Timeout: 3 * time.Second, LocalAddr: &net.TCPAddr{Port: 20000 + i%500}}
			c, err := d.Dial("tcp", "203.0.113.10:7")
			if err != nil {
				return err
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			return c.Close()
		})
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	t.Logf("%.0f connections a second", count/time.Since(began).Seconds())
}

func TestManyFlowsAndBytes(t *testing.T) {
	n := start(t, labOptions{})
	const flows, size = 300, 256 << 10
	var wg sync.WaitGroup
	errs := make(chan error, flows)
	for range flows {
		c, err := n.dial("tcp", "203.0.113.10:7", 3*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			go func() {
				_, _ = c.Write(make([]byte, size))
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			if k, err := io.Copy(io.Discard, c); err != nil || k != size {
				errs <- fmt.Errorf("%d bytes: %w", k, err)
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

// TestSR8FlowsAreBounded opens more than is permitted of each kind.
func TestSR8FlowsAreBounded(t *testing.T) {
	n := start(t, labOptions{noUplink: true})
	n.startUplink(UplinkConfig{Table: n.policy.Table(), MaxTCP: 20, MaxDatagram: 20}, n.d.Packet)
	var open []net.Conn
	refused := 0
	for range 40 {
		c, err := n.dial("tcp", "203.0.113.10:7", time.Second)
		if err != nil {
			refused++
			continue
		}
		open = append(open, c)
	}
	if len(open) > 20 || refused == 0 {
		t.Errorf("%d flows of 20 opened", len(open))
	}
	for _, c := range open {
		c.Close()
	}
	for range 200 {
		if c, err := n.dial("udp", "203.0.113.10:7", time.Second); err == nil {
			_, _ = c.Write([]byte("x"))
			c.Close()
		}
	}
	time.Sleep(200 * time.Millisecond)
	if k := openFDsOf(t, n.up.PID()); k > 20+20+40 {
		t.Errorf("the uplink has %d descriptors", k)
	}
	eventually(t, "flows can be opened again", 3*time.Second, func() bool { return n.reaches("tcp", "203.0.113.10") })
	if !n.reaches("udp", "203.0.113.10") {
		t.Error("UDP is stuck after a flood")
	}
}

func TestLargeDatagrams(t *testing.T) {
	n := start(t, labOptions{})
	c, err := n.dial("udp", "203.0.113.10:7", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, size := range []int{0, 1, 1400, 2019, 2020, 2021, 9000, 40000, 65492} {
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write(make([]byte, size)); err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		b := make([]byte, 65536)
		if k, err := c.Read(b); err != nil || k != size {
			t.Errorf("%d bytes: %d came back, %v", size, k, err)
		}
	}
}

func TestDNSInTheLab(t *testing.T) {
	var servers []netip.AddrPort
	answer := mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
		a := new(mdns.Msg).SetReply(q)
		to := "203.0.113.10"
		if q.Question[0].Name == "rebind.test." {
			to = "10.1.2.3"
		}
		rr, _ := mdns.NewRR(q.Question[0].Name + " 5 A " + to)
		a.Answer = append(a.Answer, rr)
		_ = w.WriteMsg(a)
	})
	// The host's resolver is on its loopback, where the agent can never get.
	for _, addr := range []string{"127.0.0.53:53"} {
		pc, err := net.ListenPacket("udp", addr)
		must(err)
		l, err := net.Listen("tcp", addr)
		must(err)
		t.Cleanup(func() { pc.Close(); l.Close() })
		go func() { _ = (&mdns.Server{PacketConn: pc, Handler: answer}).ActivateAndServe() }()
		go func() { _ = (&mdns.Server{Listener: l, Handler: answer}).ActivateAndServe() }()
		servers = append(servers, netip.MustParseAddrPort(addr))
	}
	n := start(t, labOptions{upstream: dns.Upstream{Servers: servers}, journal: true})
	ask := func(network, name string) (*mdns.Msg, error) {
		q := new(mdns.Msg).SetQuestion(name, mdns.TypeA)
		c, err := n.dial(network, netip.AddrPortFrom(link.Sidecar4.Addr(), 53).String(), time.Second)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		a, _, err := (&mdns.Client{Net: network, Timeout: 2 * time.Second}).ExchangeWithConn(q, &mdns.Conn{Conn: c})
		return a, err
	}
	for _, network := range []string{"udp", "tcp"} {
		if a, err := ask(network, "good.test."); err != nil || len(a.Answer) != 1 {
			t.Errorf("%s: %v, %v", network, a, err)
		}
		if a, err := ask(network, "rebind.test."); err != nil || a.Rcode != mdns.RcodeRefused {
			t.Errorf("%s rebinding: %v, %v", network, a, err)
		}
	}
	if e := <-n.up.Events(); e.Op != uplink.EventQuery {
		t.Errorf("event %s", e.Op)
	}
	if err := n.up.SetUpstream(context.Background(), dns.Upstream{}); err != nil {
		t.Fatal(err)
	}
	if a, err := ask("udp", "good.test."); err != nil || a.Rcode != mdns.RcodeServerFailure {
		t.Errorf("without a resolver: %v, %v", a, err)
	}
}

// TestSR8MemoryIsBounded asks for streams that nobody reads, far above the limit of memory.
func TestSR8MemoryIsBounded(t *testing.T) {
	n := start(t, labOptions{noUplink: true})
	n.startUplink(UplinkConfig{Table: n.policy.Table(), Memory: 24 << 20}, n.d.Packet)
	var open []net.Conn
	for range 200 {
		if c, err := n.dial("tcp", "203.0.113.10:19", 3*time.Second); err == nil {
			_ = c.(*net.TCPConn).SetReadBuffer(4096)
			open = append(open, c)
		}
	}
	peak := 0.0
	for range 40 {
		time.Sleep(25 * time.Millisecond)
		peak = max(peak, residentMB(n.up.PID()))
	}
	t.Logf("%d streams opened, peak %.0f MB", len(open), peak)
	if peak > 160 {
		t.Errorf("the uplink took %.0f MB", peak)
	}
	for _, c := range open {
		c.Close()
	}
	eventually(t, "the network serves again", 10*time.Second, func() bool { return n.reaches("tcp", "203.0.113.10") })
}

// TestNoNetworkAtStart begins offline: refusals are quick, and the network is there as soon as the
// host has it, without anyone doing anything.
func TestNoNetworkAtStart(t *testing.T) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(err)
	defer h.Close()
	lan, err := h.LinkByName("lan0")
	must(err)
	def := &netlink.Route{LinkIndex: lan.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: net.ParseIP("192.168.50.1")}
	must(h.RouteDel(def))
	online := false
	defer func() {
		if !online {
			must(h.RouteAdd(def))
		}
	}()
	n := start(t, labOptions{})
	began := time.Now()
	_, err = n.dial("tcp", "203.0.113.10:7", 5*time.Second)
	if !errors.Is(err, syscall.EHOSTUNREACH) || time.Since(began) > time.Second {
		t.Errorf("offline: %v after %v", err, time.Since(began))
	}
	must(h.RouteAdd(def))
	online = true
	if !n.reaches("tcp", "203.0.113.10") || !n.reaches("udp", "203.0.113.10") {
		t.Error("the network that came up is not used")
	}
}
