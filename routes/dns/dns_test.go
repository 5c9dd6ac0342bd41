package dns

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

type testGate struct{ ipv6 bool }

func (g testGate) Allowed(a netip.Addr) bool {
	return !a.IsPrivate() && !a.IsLoopback() && !a.Is4In6()
}
func (g testGate) IPv6() bool { return g.ipv6 }

// zone answers as the host's resolver would.
type zone struct {
	mu   sync.Mutex
	asks []string // "udp name type"
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	ask := q.Question[0]
	z.mu.Lock()
	z.asks = append(z.asks, w.RemoteAddr().Network()+" "+ask.Name+" "+dns.TypeToString[ask.Qtype])
	z.mu.Unlock()
	a := new(dns.Msg).SetReply(q)
	add := func(format string, args ...any) {
		rr, err := dns.NewRR(fmt.Sprintf(format, args...))
		if err != nil {
			panic(err)
		}
		a.Answer = append(a.Answer, rr)
	}
	switch name := strings.ToLower(ask.Name); {
	case name == "good." && ask.Qtype == dns.TypeA:
		add("good. 30 A 192.0.2.1")
	case name == "good." && ask.Qtype == dns.TypeAAAA:
		add("good. 30 AAAA 2001:db8::1")
	case name == "rebind.":
		add("rebind. 0 CNAME x.")
		add("x. 0 A 192.0.2.1")
		add("x. 0 A 10.0.0.1")
	case name == "rebind6.":
		add("rebind6. 0 AAAA fd00::1")
	case name == "mapped.":
		add("mapped. 0 AAAA ::ffff:192.0.2.1")
	case name == "svc.":
		add("svc. 0 HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1,10.0.0.1")
	case name == "glue.":
		add("glue. 0 MX 10 mail.glue.")
		for _, s := range []string{"mail.glue. 0 A 10.0.0.1", "mail.glue. 0 A 192.0.2.3"} {
			rr, _ := dns.NewRR(s)
			a.Extra = append(a.Extra, rr)
		}
	case name == "big.":
		for i := range 200 {
			add("big. 0 TXT %q", fmt.Sprintf("%03d %s", i, strings.Repeat("x", 40)))
		}
	case name == "slow.":
		time.Sleep(300 * time.Millisecond)
		add("slow. 0 A 192.0.2.1")
	default:
		a.Rcode = dns.RcodeNameError
	}
	if _, udp := w.RemoteAddr().(*net.UDPAddr); udp {
		size := dns.MinMsgSize
		if o := q.IsEdns0(); o != nil {
			size = int(o.UDPSize())
		}
		a.Truncate(size)
	}
	_ = w.WriteMsg(a)
}

func listen(t *testing.T) (net.PacketConn, net.Listener, netip.AddrPort) {
	t.Helper()
	for range 20 {
		tcp, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		udp, err := net.ListenPacket("udp4", tcp.Addr().String())
		if err == nil {
			return udp, tcp, netip.MustParseAddrPort(tcp.Addr().String())
		}
		tcp.Close()
	}
	t.Fatal("no free port")
	panic("unreachable")
}

func upstream(t *testing.T, h dns.Handler) netip.AddrPort {
	t.Helper()
	udp, tcp, addr := listen(t)
	u, s := &dns.Server{PacketConn: udp, Handler: h}, &dns.Server{Listener: tcp, Handler: h}
	go func() { _ = u.ActivateAndServe() }()
	go func() { _ = s.ActivateAndServe() }()
	t.Cleanup(func() { udp.Close(); tcp.Close() })
	return addr
}

func serve(t *testing.T, g Gate, up Upstream, journal func(Query)) (*Server, netip.AddrPort) {
	t.Helper()
	udp, tcp, addr := listen(t)
	s := New(udp, tcp, g, journal)
	s.SetUpstream(up)
	done := make(chan error, 1)
	go func() { done <- s.Serve() }()
	t.Cleanup(func() {
		s.Close()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			t.Error("Serve did not return")
		}
	})
	return s, addr
}

func ask(t *testing.T, server netip.AddrPort, network, name string, typ uint16, edns uint16) *dns.Msg {
	t.Helper()
	q := new(dns.Msg).SetQuestion(name, typ)
	if edns > 0 {
		q.SetEdns0(edns, false)
	}
	c := dns.Client{Net: network, Timeout: 3 * time.Second, UDPSize: max(edns, dns.MinMsgSize)}
	var a *dns.Msg
	var err error
	for range 10 { // the server may not listen yet
		if a, _, err = c.Exchange(q, server.String()); err == nil {
			return a
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s %s %s: %v", network, name, dns.TypeToString[typ], err)
	return nil
}

func TestAnswers(t *testing.T) {
	z := &zone{}
	up := Upstream{Servers: []netip.AddrPort{upstream(t, z)}, Hosts: map[string][]netip.Addr{
		"printer": {netip.MustParseAddr("10.0.0.9")}, "known.test": {netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("2001:db8::77")},
	}}
	for _, tt := range []struct {
		name    string
		typ     uint16
		ipv6    bool
		rcode   int
		answers int
	}{
		{"good.", dns.TypeA, false, dns.RcodeSuccess, 1},
		{"GooD.", dns.TypeA, false, dns.RcodeSuccess, 1},
		{"good.", dns.TypeAAAA, false, dns.RcodeSuccess, 0}, // IPv6 is off
		{"good.", dns.TypeAAAA, true, dns.RcodeSuccess, 1},
		{"none.", dns.TypeA, false, dns.RcodeNameError, 0},
		{"rebind.", dns.TypeA, false, dns.RcodeRefused, 0},
		{"rebind6.", dns.TypeAAAA, true, dns.RcodeRefused, 0},
		{"mapped.", dns.TypeAAAA, true, dns.RcodeRefused, 0},
		{"svc.", dns.TypeHTTPS, true, dns.RcodeRefused, 0},
		{"glue.", dns.TypeMX, true, dns.RcodeSuccess, 1},
		{"printer.", dns.TypeA, false, dns.RcodeRefused, 0},
		{"known.test.", dns.TypeA, false, dns.RcodeSuccess, 1},
		{"known.test.", dns.TypeAAAA, true, dns.RcodeSuccess, 1},
		{"good.", dns.TypeAXFR, false, dns.RcodeRefused, 0},
	} {
		_, addr := serve(t, testGate{tt.ipv6}, up, nil)
		for _, network := range []string{"udp", "tcp"} {
			if network == "udp" && tt.typ == dns.TypeAXFR {
				continue
			}
			for _, edns := range []uint16{0, 1232} {
				a := ask(t, addr, network, tt.name, tt.typ, edns)
				if a.Rcode != tt.rcode || len(a.Answer) != tt.answers {
					t.Errorf("%s %s %s: %s with %d answers", network, tt.name, dns.TypeToString[tt.typ], dns.RcodeToString[a.Rcode], len(a.Answer))
				}
				if (a.IsEdns0() != nil) != (edns > 0) {
					t.Errorf("%s %s: EDNS %v, asked with %d", network, tt.name, a.IsEdns0() != nil, edns)
				}
				for _, rr := range a.Extra {
					if g, ok := rr.(*dns.A); ok && g.A.IsPrivate() {
						t.Errorf("%s: glue %v", tt.name, rr)
					}
				}
			}
		}
	}
}

func TestTruncationAndTCP(t *testing.T) {
	z := &zone{}
	_, addr := serve(t, testGate{}, Upstream{Servers: []netip.AddrPort{upstream(t, z)}}, nil)
	a := ask(t, addr, "udp", "big.", dns.TypeTXT, 0)
	if !a.Truncated || a.Len() > 512 {
		t.Errorf("UDP: truncated %v, %d bytes", a.Truncated, a.Len())
	}
	if a = ask(t, addr, "udp", "big.", dns.TypeTXT, 4096); !a.Truncated || a.Len() > 4096 {
		t.Errorf("UDP with EDNS: truncated %v, %d bytes", a.Truncated, a.Len())
	}
	if a = ask(t, addr, "tcp", "big.", dns.TypeTXT, 0); a.Truncated || len(a.Answer) != 200 {
		t.Errorf("TCP: truncated %v, %d answers", a.Truncated, len(a.Answer))
	}
}

func TestUpstreamIsFollowed(t *testing.T) {
	dead := netip.MustParseAddrPort("127.0.0.1:9") // refused at once
	s, addr := serve(t, testGate{}, Upstream{Servers: []netip.AddrPort{dead}}, nil)
	if a := ask(t, addr, "udp", "good.", dns.TypeA, 0); a.Rcode != dns.RcodeServerFailure {
		t.Errorf("no resolver: %s", dns.RcodeToString[a.Rcode])
	}
	live := upstream(t, &zone{})
	s.SetUpstream(Upstream{Servers: []netip.AddrPort{dead, live}})
	if a := ask(t, addr, "udp", "good.", dns.TypeA, 0); a.Rcode != dns.RcodeSuccess {
		t.Errorf("second resolver: %s", dns.RcodeToString[a.Rcode])
	}
	s.SetUpstream(Upstream{})
	if a := ask(t, addr, "udp", "good.", dns.TypeA, 0); a.Rcode != dns.RcodeServerFailure {
		t.Errorf("none: %s", dns.RcodeToString[a.Rcode])
	}
}

func TestSR8DNSIsBounded(t *testing.T) {
	slow := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { time.Sleep(time.Second) })
	s, addr := serve(t, testGate{}, Upstream{Servers: []netip.AddrPort{upstream(t, slow)}}, nil)
	c, err := net.Dial("udp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	q, _ := new(dns.Msg).SetQuestion("slow.", dns.TypeA).Pack()
	for range 5000 {
		_, _ = c.Write(q)
	}
	time.Sleep(100 * time.Millisecond)
	if n := len(s.inFlight); n > maxInFlight {
		t.Errorf("%d questions in flight", n)
	}
	var conns []net.Conn
	for range maxTCP + 20 {
		if c, err := net.Dial("tcp", addr.String()); err == nil {
			conns = append(conns, c)
		}
	}
	for _, c := range conns {
		c.Close()
	}
}

func TestJournal(t *testing.T) {
	got := make(chan Query, 4)
	_, addr := serve(t, testGate{}, Upstream{Servers: []netip.AddrPort{upstream(t, &zone{})}}, func(q Query) { got <- q })
	ask(t, addr, "udp", "rebind.", dns.TypeA, 0)
	if q := <-got; q != (Query{"rebind.", "A", "REFUSED"}) {
		t.Errorf("%+v", q)
	}
}

func FuzzAnswer(f *testing.F) {
	q, _ := new(dns.Msg).SetQuestion("good.", dns.TypeA).Pack()
	f.Add(q)
	s := &Server{gate: testGate{}}
	s.upstream.Store(&Upstream{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m dns.Msg
		if m.Unpack(b) != nil {
			return
		}
		a := s.answer(&m, false)
		a.Truncate(answerSize(&m, false))
		if _, err := a.Pack(); err == nil && a.Id != m.Id {
			t.Fatal("answer to another question")
		}
		s.filter(&m, m.Copy())
	})
}
