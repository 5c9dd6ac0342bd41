package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// A Table is a policy as plain data: both families have a default (a /0) in one of the lists, and
// no prefix occurs twice. It is what crosses a process boundary.
type Table struct {
	IPv6  bool           `json:"ipv6"`
	Allow []netip.Prefix `json:"allow"`
	Deny  []netip.Prefix `json:"deny"`
}

// Check tells whether t is what [Policy.Table] can give. An enforcer calls it on a table that it
// was sent: an undecided or ambiguous destination must be an error, never a guess.
func (t Table) Check() error {
	if n := len(t.Allow) + len(t.Deny); n > maxRules {
		return fmt.Errorf("policy table of %d rules is over the limit of %d", n, maxRules)
	}
	seen := make(map[netip.Prefix]bool, len(t.Allow)+len(t.Deny))
	for _, p := range slices.Concat(t.Allow, t.Deny) {
		switch {
		case !p.IsValid() || p != p.Masked() || p.Addr().Is4In6(): // the last has two readings
			return fmt.Errorf("policy table: %q is not a prefix", p)
		case seen[p]:
			return fmt.Errorf("policy table: %s occurs twice", p)
		}
		seen[p] = true
	}
	if !seen[allIPv4] || !seen[allIPv6] {
		return fmt.Errorf("policy table has no default for one of the address families")
	}
	return nil
}

// An Index answers for single addresses by the longest prefix. It is immutable; any goroutine may
// use it. The nil Index denies everything.
type Index struct {
	ipv6     bool
	verdicts map[netip.Prefix]Verdict
	len4     []int // prefix lengths in use, longest first
	len6     []int
}

// NewIndex builds an Index. Precondition: t.Check() == nil.
func NewIndex(t Table) *Index {
	x := &Index{ipv6: t.IPv6, verdicts: make(map[netip.Prefix]Verdict, len(t.Allow)+len(t.Deny))}
	add := func(p netip.Prefix, v Verdict) {
		x.verdicts[p] = v
		lens := &x.len4
		if p.Addr().Is6() {
			lens = &x.len6
		}
		if !slices.Contains(*lens, p.Bits()) {
			*lens = append(*lens, p.Bits())
		}
	}
	for _, p := range t.Deny {
		add(p, Deny)
	}
	for _, p := range t.Allow {
		add(p, Allow)
	}
	longestFirst := func(a, b int) int { return b - a }
	slices.SortFunc(x.len4, longestFirst)
	slices.SortFunc(x.len6, longestFirst)
	return x
}

// Verdict decides addr. An address that is not valid is denied.
func (x *Index) Verdict(addr netip.Addr) Verdict {
	if x == nil || !addr.IsValid() || addr.Is6() && !x.ipv6 {
		return Deny
	}
	addr = addr.WithZone("")
	lens := x.len4
	if addr.Is6() {
		lens = x.len6
	}
	for _, bits := range lens {
		p, err := addr.Prefix(bits)
		if err != nil {
			return Deny
		}
		if v, ok := x.verdicts[p]; ok {
			return v
		}
	}
	return Deny
}

// IPv6 tells whether any IPv6 destination can be reached.
func (x *Index) IPv6() bool { return x != nil && x.ipv6 }
