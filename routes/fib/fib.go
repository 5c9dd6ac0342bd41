// Package fib makes a policy table true in the sidecar's network namespace, as routes.
//
// Two tables take turns. [Set] fills the idle one, then adds or removes a single routing rule, and
// the kernel decides every later packet by the new table. Both steps of a turn are one operation
// of the kernel, so no packet ever sees half a policy:
//
//	priority 100   iif ag0 lookup A    present: A decides
//	priority 101   iif ag0 lookup B    decides once the rule above is gone
//	priority 300   iif ag0 unreachable what no table decides, for instance after the uplink died
//
// The same pair exists at 200 and 201 for the packet filter's question "could this be routed?",
// which is about quick refusals only and never opens anything.
//
// Set reads the state from the kernel, so any process with CAP_NET_ADMIN over the namespace can
// call it, and a call that was cut short is repaired by the next. Calls must not overlap.
// Where Set fails, the old policy stays in force, or, when the kernel refused to remove a stale
// rule, one of the two policies.
package fib

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

const (
	prioAgent    = 100
	prioMark     = 200
	prioTerminal = 300
	tableBase    = 1000 // tables 1000 and 1001; a table belongs to priority prioAgent+i and prioMark+i

	protocol = 0x6c // rtm_protocol of our routes
)

type family struct {
	af      int
	all     netip.Prefix
	gateway netip.Addr
}

var (
	ipv4 = family{unix.AF_INET, netip.MustParsePrefix("0.0.0.0/0"), link.Uplink4.Addr()}
	ipv6 = family{unix.AF_INET6, netip.MustParsePrefix("::/0"), link.Uplink6.Addr()}
)

// Set makes t the policy for everything that comes from the agent. h is bound to the sidecar's
// namespace, where both links exist and have their addresses.
func Set(h *netlink.Handle, t policy.Table) error {
	if err := t.Check(); err != nil {
		return err
	}
	up, err := h.LinkByName(link.SidecarUpDev)
	if err != nil {
		return fmt.Errorf("set routes: find %s: %w", link.SidecarUpDev, err)
	}
	// The family that can be switched off first: should it fail, nothing has been opened.
	if err := set(h, ipv6, t, up.Attrs().Index); err != nil && (t.IPv6 || !errors.Is(err, unix.EAFNOSUPPORT)) {
		return fmt.Errorf("set IPv6 routes: %w", err)
	}
	if err := set(h, ipv4, t, up.Attrs().Index); err != nil {
		return fmt.Errorf("set IPv4 routes: %w", err)
	}
	return nil
}

func set(h *netlink.Handle, f family, t policy.Table, up int) error {
	if err := ensureTerminal(h, f); err != nil {
		return err
	}
	now, err := current(h, f)
	if err != nil {
		return err
	}
	next := 0
	if now == 0 {
		next = 1
	}
	// A rule for the idle table is left over from a call that was cut short; without removing it
	// first, filling the table would change what is in force.
	if err := drop(h, f, next); err != nil {
		return err
	}
	if err := flush(h, f, tableBase+next); err != nil {
		return err
	}
	if err := fill(h, f, t, tableBase+next, up); err != nil {
		return err
	}
	if err := flip(h, f, now, next); err != nil {
		return err
	}
	if now >= 0 {
		return flush(h, f, tableBase+now)
	}
	return nil
}

// current tells which table decides, or -1 when none does yet.
func current(h *netlink.Handle, f family) (int, error) {
	rules, err := h.RuleList(f.af)
	if err != nil {
		return 0, fmt.Errorf("list rules: %w", err)
	}
	now := -1
	for _, r := range rules {
		if i := r.Priority - prioAgent; (i == 0 || i == 1) && (now < 0 || i < now) {
			now = i
		}
	}
	return now, nil
}

// flip puts next in force. Table 0 has the better priority: adding its rule is the flip, and
// removing it is the flip to table 1.
func flip(h *netlink.Handle, f family, now, next int) error {
	for _, base := range []int{prioAgent, prioMark} {
		if err := h.RuleAdd(lookup(f, base, next)); err != nil {
			return fmt.Errorf("add rule %d: %w", base+next, err)
		}
	}
	if now >= 0 {
		return drop(h, f, now)
	}
	return nil
}

// drop removes the rules of table i, if any.
func drop(h *netlink.Handle, f family, i int) error {
	for _, base := range []int{prioAgent, prioMark} {
		if err := h.RuleDel(lookup(f, base, i)); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove rule %d: %w", base+i, err)
		}
	}
	return nil
}

func lookup(f family, base, i int) *netlink.Rule {
	r := netlink.NewRule()
	r.Family = f.af
	r.Priority = base + i
	r.Table = tableBase + i
	if base == prioMark {
		r.Mark = link.Mark
	} else {
		r.IifName = link.SidecarDev
	}
	return r
}

func ensureTerminal(h *netlink.Handle, f family) error {
	r := netlink.NewRule()
	r.Family = f.af
	r.Priority = prioTerminal
	r.IifName = link.SidecarDev
	r.Type = unix.FR_ACT_UNREACHABLE
	if err := h.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add the last rule: %w", err)
	}
	return nil
}

func fill(h *netlink.Handle, f family, t policy.Table, table, up int) error {
	deny, allow := ofFamily(f, t.Deny), ofFamily(f, t.Allow)
	if f.af == unix.AF_INET6 && !t.IPv6 {
		deny, allow = []netip.Prefix{f.all}, nil
	}
	for _, p := range deny {
		r := &netlink.Route{Dst: ipNet(p), Table: table, Type: unix.RTN_UNREACHABLE, Protocol: protocol, Family: f.af}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("deny %s: %w", p, err)
		}
	}
	for _, p := range allow {
		r := &netlink.Route{Dst: ipNet(p), Table: table, Gw: f.gateway.AsSlice(), LinkIndex: up, Protocol: protocol, Family: f.af}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("allow %s: %w", p, err)
		}
	}
	return nil
}

func flush(h *netlink.Handle, f family, table int) error {
	routes, err := h.RouteListFiltered(f.af, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("list table %d: %w", table, err)
	}
	for _, r := range routes {
		// Removing an interface removes its routes, also between our list and this call.
		if err := h.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("empty table %d: %w", table, err)
		}
	}
	return nil
}

func ofFamily(f family, all []netip.Prefix) (some []netip.Prefix) {
	for _, p := range all {
		if p.Addr().Is4() == (f.af == unix.AF_INET) {
			some = append(some, p)
		}
	}
	return some
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
