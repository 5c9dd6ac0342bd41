package routes

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/fib"
	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

// TestSR6KernelAgreesWithThePolicy applies random policies over a small space, one after the other.
// After each the kernel's routes and the index must say the same of every address; and beneath all
// changes a prober asks the kernel for addresses that all policies deny, and never gets a route.
func TestSR6KernelAgreesWithThePolicy(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 2))
	n := start(t, labOptions{config: policy.Config{IPv6: "on", Default: "deny"}, noUplink: true})
	var h, prober *netlink.Handle
	must(n.top.sidecar.do(func() (err error) {
		if h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err == nil {
			prober, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		}
		return err
	}))
	defer h.Close()
	defer prober.Close()
	space := func(base string, i int) netip.Addr {
		b := netip.MustParseAddr(base).AsSlice()
		b[len(b)-1] = byte(i)
		a, _ := netip.AddrFromSlice(b)
		return a
	}
	bases := []string{"203.0.113.0", "10.1.2.0", "2001:db8:1::", "fd12::"}
	always := []netip.Addr{space(bases[0], 5), space(bases[1], 9), space(bases[2], 5)}
	stop := make(chan struct{})
	var asked, opened atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, a := range always {
				asked.Add(1)
				if routed(prober, a) {
					opened.Add(1)
				}
			}
		}
	})
	const changes = 300
	for range changes {
		cfg := policy.Config{IPv6: []string{"on", "on", "off"}[rnd.IntN(3)], Default: []string{"allow", "deny"}[rnd.IntN(2)]}
		for _, a := range always {
			cfg.Deny = append(cfg.Deny, netip.PrefixFrom(a, a.BitLen()).String())
		}
		for range rnd.IntN(6) {
			a := space(bases[rnd.IntN(len(bases))], rnd.IntN(16))
			p, _ := a.Prefix(a.BitLen() - rnd.IntN(5))
			if rnd.IntN(2) == 0 {
				cfg.Allow = append(cfg.Allow, p.String())
			} else {
				cfg.Deny = append(cfg.Deny, p.String())
			}
		}
		p, err := policy.Compile(cfg, policy.Host{}, nil, nil)
		if err != nil {
			continue // a contradiction
		}
		must(fib.Set(h, p.Table()))
		for _, base := range bases {
			for i := range 16 {
				if a := space(base, i); routed(h, a) != bool(p.Verdict(a)) {
					t.Fatalf("%s: kernel %v, policy %v; %+v", a, routed(h, a), p.Verdict(a), cfg)
				}
			}
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d changes, %d questions about what is always denied, %d opened", changes, asked.Load(), opened.Load())
	if opened.Load() > 0 || asked.Load() < changes {
		t.Error("a destination that all policies deny was routed, or nobody asked")
	}
}

// routed asks the kernel whether it would forward a packet of the agent.
func routed(h *netlink.Handle, dst netip.Addr) bool {
	src := net.IP(link.Agent4.Addr().AsSlice())
	if dst.Is6() {
		src = link.Agent6.Addr().AsSlice()
	}
	routes, err := h.RouteGetWithOptions(dst.AsSlice(), &netlink.RouteGetOptions{Iif: link.SidecarDev, SrcAddr: src})
	return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_UNICAST
}
