// Package policy decides which destinations a Domain may reach.
//
// A [Config] is what a developer wrote, a [Host] is what the host's kernel says about itself, and
// [Compile] turns both into a [Policy]: a set of prefixes with verdicts in which the longest prefix
// wins. The package does no I/O and reads no clock, so every decision can be tested and explained.
//
// Kept true, for whoever enforces the result:
//   - Every address has exactly one verdict; what no rule names gets the default of its family.
//   - Hard rules (loopback, multicast, tunnels that carry IPv4 inside IPv6, the host's own
//     addresses, Lazaret's own links) win whatever the configuration says (SR-7).
//   - IPv6 that is off is denied as a whole.
//
// [Table] is the same decision as plain data: it travels to the sidecar, which makes routes of it,
// and to the uplink, which evaluates it a second time with an [Index].
package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// A Verdict says whether a destination may be reached. The zero value denies.
type Verdict bool

// The two verdicts.
const (
	Deny  Verdict = false
	Allow Verdict = true
)

func (v Verdict) String() string {
	if v == Allow {
		return "allow"
	}
	return "deny"
}

// Config is the [network] section of an Agent Profile, undecoded.
type Config struct {
	Allow   []string // prefixes in CIDR notation
	Deny    []string // prefixes in CIDR notation
	IPv6    string   // "off" or "on"; "" means "off"
	Default string   // "allow" or "deny"; "" means "allow"
}

// Host is what must be denied because of where the host is.
type Host struct {
	Addrs  []netip.Addr   // the host's own addresses; can never be allowed
	OnLink []netip.Prefix // prefixes of the host's neighbours; an equal or longer allow opens them
}

// A LiveRule is a change made to a running Domain. It takes the place of a configured rule for
// the same prefix; of two for the same prefix the later in the list counts.
type LiveRule struct {
	Prefix  netip.Prefix
	Verdict Verdict
	Until   time.Time // zero: until the Domain ends
}

// Active gives the rules that hold at now, and when the next of them ends (zero: never).
func Active(live []LiveRule, now time.Time) (active []LiveRule, next time.Time) {
	for _, l := range live {
		if !l.Until.IsZero() && !now.Before(l.Until) {
			continue
		}
		active = append(active, l)
		if !l.Until.IsZero() && (next.IsZero() || l.Until.Before(next)) {
			next = l.Until
		}
	}
	return active, next
}

// Layer says where a rule came from. A later layer replaces an earlier one for an equal prefix.
type Layer uint8

// The layers, weakest first.
const (
	LayerDefault Layer = iota
	LayerBuiltin       // private, shared and special ranges
	LayerOnLink        // the host's neighbours
	LayerConfig        // the profile
	LayerLive          // the developer, on a running Domain
	LayerHard          // cannot be allowed
)

// A Rule is one prefix with its verdict and its reason.
type Rule struct {
	Prefix  netip.Prefix
	Verdict Verdict
	Layer   Layer
	Why     string // for people: "deny[2] of the profile", "RFC 1918 private network"
}

func (r Rule) String() string { return fmt.Sprintf("%s %s (%s)", r.Verdict, r.Prefix, r.Why) }

// A Policy is compiled and immutable; its methods may be called from any goroutine.
type Policy struct {
	ipv6  bool
	rules []Rule // one per prefix; sorted by [compareRules]
	index *Index
}

// A Decision explains what happens to one destination.
type Decision struct {
	Addr       netip.Addr
	Verdict    Verdict
	Rule       Rule   // the rule that decides
	Overridden []Rule // rules that contain Addr too and are less specific, longest first
}

func (d Decision) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s, by %s: %s", d.Addr, d.Verdict, d.Rule.Prefix, d.Rule.Why)
	for _, r := range d.Overridden {
		fmt.Fprintf(&b, "\n  more specific than %s", r)
	}
	return b.String()
}

// IPv6 tells whether any IPv6 destination can be reached.
func (p *Policy) IPv6() bool { return p.ipv6 }

// Rules lists all rules, IPv4 first, by address and then shorter prefixes first.
func (p *Policy) Rules() []Rule { return slices.Clone(p.rules) }

// Verdict decides addr.
func (p *Policy) Verdict(addr netip.Addr) Verdict { return p.index.Verdict(addr) }

// Explain decides addr and names the deciding rule.
func (p *Policy) Explain(addr netip.Addr) Decision {
	addr = addr.WithZone("")
	d := Decision{Addr: addr, Rule: Rule{Why: "not an address"}}
	if !addr.IsValid() {
		return d
	}
	if addr.Is6() && !p.ipv6 {
		d.Rule = Rule{Prefix: allIPv6, Layer: LayerDefault, Why: `IPv6 is off (ipv6 = "off")`}
		return d
	}
	var match []Rule
	for _, r := range p.rules {
		if r.Prefix.Contains(addr) {
			match = append(match, r)
		}
	}
	slices.SortFunc(match, func(a, b Rule) int { return b.Prefix.Bits() - a.Prefix.Bits() })
	d.Rule, d.Overridden, d.Verdict = match[0], match[1:], match[0].Verdict
	return d
}

// Table gives the decision as plain data.
func (p *Policy) Table() Table {
	t := Table{IPv6: p.ipv6}
	for _, r := range p.rules {
		if r.Verdict == Allow {
			t.Allow = append(t.Allow, r.Prefix)
		} else {
			t.Deny = append(t.Deny, r.Prefix)
		}
	}
	return t
}

func compareRules(a, b Rule) int {
	if c := a.Prefix.Addr().Compare(b.Prefix.Addr()); c != 0 {
		return c
	}
	return a.Prefix.Bits() - b.Prefix.Bits()
}
