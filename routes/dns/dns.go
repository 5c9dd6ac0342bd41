// Package dns answers the agent's questions on the sidecar's address, from the host's side of the
// wall: no process in the sidecar's namespace listens, only sockets that were passed out of it.
//
// Questions go to the host's resolvers, whichever they are at that moment, or to configured ones.
// The agent cannot reach those itself. An answer that names a denied address is refused, so a name
// on the internet cannot lead a client to the developer's network (rebinding); the routes would
// stop it anyway, this is the clear answer. Questions, connections and rates are bounded.
//
// DNS remains a way to send small amounts of data to whoever runs a name server; [Query] lets the
// coordinator write a journal of it.
package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
	"golang.org/x/time/rate"
)

// Limits of the server.
const (
	maxInFlight  = 256  // questions being answered at a time
	perSecond    = 2000 // questions a second, with a burst of as many
	maxTCP       = 64   // connections at a time
	maxTCPAsks   = 256  // questions on one connection
	tcpIdle      = 10 * time.Second
	askTimeout   = 2 * time.Second // for one resolver
	totalTimeout = 5 * time.Second
	ednsSize     = 1232 // bytes of a UDP answer that we ask for; fits any path
	localTTL     = 60   // seconds, for answers from the hosts table
)

// Upstream is where answers come from.
type Upstream struct {
	Servers []netip.AddrPort        `json:"servers"`         // asked in this order
	Hosts   map[string][]netip.Addr `json:"hosts,omitempty"` // lower-case names without final dot; answered before asking
}

// A Query is one answered question, for the journal. Name is the agent's text: quote it.
type Query struct {
	Name string `json:"name"`
	Type string `json:"type"`
	Code string `json:"code"` // of the answer, such as NOERROR, or REFUSED for a denied one
}

// Gate is the policy as the server needs it.
type Gate interface {
	Allowed(netip.Addr) bool
	IPv6() bool
}

// A Server answers on one UDP and one TCP socket.
type Server struct {
	gate     Gate
	journal  func(Query) // nil: none
	upstream atomic.Pointer[Upstream]
	limit    *rate.Limiter
	inFlight chan struct{}

	once    sync.Once
	servers [2]*dns.Server
}

// New owns both sockets. A nil journal keeps none.
func New(udp net.PacketConn, tcp net.Listener, gate Gate, journal func(Query)) *Server {
	s := &Server{gate: gate, journal: journal, limit: rate.NewLimiter(perSecond, perSecond), inFlight: make(chan struct{}, maxInFlight)}
	s.upstream.Store(&Upstream{})
	idle := func() time.Duration { return tcpIdle }
	s.servers = [2]*dns.Server{
		{PacketConn: udp, Handler: s, UDPSize: dns.MinMsgSize * 8},
		{Listener: netutil.LimitListener(tcp, maxTCP), Handler: s, ReadTimeout: tcpIdle, WriteTimeout: tcpIdle, IdleTimeout: idle, MaxTCPQueries: maxTCPAsks},
	}
	return s
}

// SetUpstream takes effect with the next question.
func (s *Server) SetUpstream(u Upstream) { s.upstream.Store(&u) }

// Serve answers until Close or a failure of one of the sockets.
func (s *Server) Serve() error {
	errc := make(chan error, len(s.servers))
	for _, d := range s.servers {
		go func() { errc <- d.ActivateAndServe() }()
	}
	err := <-errc
	s.Close()
	return errors.Join(err, <-errc)
}

// Close stops Serve.
func (s *Server) Close() {
	s.once.Do(func() {
		for _, d := range s.servers {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			_ = d.ShutdownContext(ctx)
			cancel()
			if d.PacketConn != nil {
				d.PacketConn.Close()
			}
			if d.Listener != nil {
				d.Listener.Close()
			}
		}
	})
}

// ServeDNS implements dns.Handler.
func (s *Server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	select {
	case s.inFlight <- struct{}{}:
		defer func() { <-s.inFlight }()
	default:
		return // the client asks again
	}
	if !s.limit.Allow() {
		return
	}
	_, overTCP := w.RemoteAddr().(*net.TCPAddr)
	a := s.answer(q, overTCP)
	a.Truncate(answerSize(q, overTCP))
	_ = w.WriteMsg(a) // a client that went away is its own business
	if s.journal != nil && len(q.Question) == 1 {
		s.journal(Query{q.Question[0].Name, dns.TypeToString[q.Question[0].Qtype], dns.RcodeToString[a.Rcode]})
	}
}

func answerSize(q *dns.Msg, overTCP bool) int {
	if overTCP {
		return dns.MaxMsgSize
	}
	if opt := q.IsEdns0(); opt != nil {
		return min(max(int(opt.UDPSize()), dns.MinMsgSize), 4096)
	}
	return dns.MinMsgSize
}

// answer never returns nil.
func (s *Server) answer(q *dns.Msg, overTCP bool) *dns.Msg {
	if q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 || q.Response {
		return failed(q, dns.RcodeFormatError, "")
	}
	ask := q.Question[0]
	switch {
	case ask.Qclass != dns.ClassINET, ask.Qtype == dns.TypeAXFR, ask.Qtype == dns.TypeIXFR:
		return failed(q, dns.RcodeRefused, "")
	case ask.Qtype == dns.TypeAAAA && !s.gate.IPv6():
		return failed(q, dns.RcodeSuccess, "") // no address of this family: clients take the other at once
	}
	up := s.upstream.Load()
	a := fromHosts(up.Hosts, q)
	if a == nil {
		a = s.forward(up, q, overTCP)
	}
	return s.filter(q, a)
}

func failed(q *dns.Msg, rcode int, why string) *dns.Msg {
	a := new(dns.Msg).SetRcode(q, rcode)
	a.RecursionAvailable = true
	if opt := q.IsEdns0(); opt != nil {
		a.SetEdns0(ednsSize, opt.Do())
		if why != "" {
			a.IsEdns0().Option = append(a.IsEdns0().Option, &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeBlocked, ExtraText: why})
		}
	}
	return a
}

// forward asks the resolvers one after the other. A question over UDP is asked over UDP, so that a
// truncated answer is passed on as such and the client comes back over TCP.
func (s *Server) forward(up *Upstream, q *dns.Msg, overTCP bool) *dns.Msg {
	ctx, cancel := context.WithTimeout(context.Background(), totalTimeout)
	defer cancel()
	out := q.Copy()
	out.Id = dns.Id()
	out.Extra = nil
	out.RecursionDesired = true
	out.SetEdns0(ednsSize, q.IsEdns0() != nil && q.IsEdns0().Do())
	for _, server := range up.Servers {
		a, err := exchange(ctx, out, server, overTCP)
		if err != nil || a.Rcode == dns.RcodeServerFailure || a.Rcode == dns.RcodeRefused {
			continue
		}
		a.Id = q.Id
		return a
	}
	return failed(q, dns.RcodeServerFailure, "no resolver of the host answers")
}

func exchange(ctx context.Context, q *dns.Msg, server netip.AddrPort, overTCP bool) (*dns.Msg, error) {
	network := "udp"
	if overTCP {
		network = "tcp"
	}
	if server.Addr().Is4() {
		network += "4"
	} else {
		network += "6"
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := dns.Client{UDPSize: 4096, Timeout: askTimeout}
	a, _, err := c.ExchangeWithConnContext(ctx, q, &dns.Conn{Conn: conn})
	if err != nil {
		return nil, err
	}
	if !a.Response || len(a.Question) != 1 || !strings.EqualFold(a.Question[0].Name, q.Question[0].Name) || a.Question[0].Qtype != q.Question[0].Qtype {
		return nil, fmt.Errorf("answer of %s is to another question", server)
	}
	return a, nil
}

// filter refuses an answer with a denied address, and takes such addresses out of the sections
// that nobody asked for.
func (s *Server) filter(q, a *dns.Msg) *dns.Msg {
	keep := a.Answer[:0]
	for _, rr := range a.Answer {
		if rr.Header().Rrtype == dns.TypeAAAA && !s.gate.IPv6() {
			continue
		}
		if bad, denied := s.denied(rr); denied {
			return failed(q, dns.RcodeRefused, fmt.Sprintf("the answer names %s, which the network policy denies", bad))
		}
		keep = append(keep, rr)
	}
	a.Answer = keep
	a.Extra = without(a.Extra, func(rr dns.RR) bool {
		_, denied := s.denied(rr)
		return denied || rr.Header().Rrtype == dns.TypeOPT
	})
	if opt := q.IsEdns0(); opt != nil {
		a.SetEdns0(ednsSize, opt.Do())
	}
	return a
}

func without(rrs []dns.RR, drop func(dns.RR) bool) []dns.RR {
	keep := rrs[:0]
	for _, rr := range rrs {
		if !drop(rr) {
			keep = append(keep, rr)
		}
	}
	return keep
}

// denied finds an address in rr that the policy denies.
func (s *Server) denied(rr dns.RR) (netip.Addr, bool) {
	var ips []net.IP
	switch rr := rr.(type) {
	case *dns.A:
		ips = []net.IP{rr.A}
	case *dns.AAAA:
		ips = []net.IP{rr.AAAA.To16()}
	case *dns.SVCB:
		ips = hints(rr.Value)
	case *dns.HTTPS:
		ips = hints(rr.Value)
	}
	for _, ip := range ips {
		addr, ok := netip.AddrFromSlice(ip)
		if _, isA := rr.(*dns.A); isA {
			addr = addr.Unmap()
		}
		if !ok || !s.gate.Allowed(addr) && (addr.Is4() || s.gate.IPv6()) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

func hints(kvs []dns.SVCBKeyValue) (ips []net.IP) {
	for _, kv := range kvs {
		switch kv := kv.(type) {
		case *dns.SVCBIPv4Hint:
			for _, ip := range kv.Hint {
				ips = append(ips, ip.To4())
			}
		case *dns.SVCBIPv6Hint:
			ips = append(ips, kv.Hint...)
		}
	}
	return ips
}

// fromHosts answers for a name of the hosts table, or gives nil.
func fromHosts(hosts map[string][]netip.Addr, q *dns.Msg) *dns.Msg {
	ask := q.Question[0]
	addrs, ok := hosts[strings.ToLower(strings.TrimSuffix(ask.Name, "."))]
	if !ok {
		return nil
	}
	a := failed(q, dns.RcodeSuccess, "")
	h := dns.RR_Header{Name: ask.Name, Rrtype: ask.Qtype, Class: dns.ClassINET, Ttl: localTTL}
	for _, addr := range addrs {
		switch {
		case ask.Qtype == dns.TypeA && addr.Is4():
			a.Answer = append(a.Answer, &dns.A{Hdr: h, A: addr.AsSlice()})
		case ask.Qtype == dns.TypeAAAA && addr.Is6():
			a.Answer = append(a.Answer, &dns.AAAA{Hdr: h, AAAA: addr.AsSlice()})
		}
	}
	return a
}
