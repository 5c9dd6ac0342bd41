package policy

import "net/netip"

var (
	allIPv4 = netip.MustParsePrefix("0.0.0.0/0")
	allIPv6 = netip.MustParsePrefix("::/0")
)

// LinkRange4 and LinkRange6 hold the addresses of Lazaret's own links. The first is RFC 2544's
// benchmark range, which no real destination uses; the second is a unique local prefix of ours.
var (
	LinkRange4 = netip.MustParsePrefix("198.18.0.0/15")
	LinkRange6 = netip.MustParsePrefix("fd6c:617a:6172::/48")
)

// hard rules cannot be allowed: what they name is the host or its kernel itself, is never one
// machine, or carries an IPv4 destination past the IPv4 rules.
var hard = []Rule{
	hardRule("0.0.0.0/8", "this host (RFC 1122)"),
	hardRule("127.0.0.0/8", "loopback"),
	hardRule(LinkRange4.String(), "Lazaret's own links (RFC 2544 range)"),
	hardRule("224.0.0.0/4", "multicast"),
	hardRule("240.0.0.0/4", "reserved and broadcast"),

	hardRule("::/8", "unspecified, loopback, IPv4-compatible, IPv4-mapped and IPv4-translated addresses"),
	hardRule("64:ff9b::/96", "NAT64, which carries IPv4 destinations"),
	hardRule("64:ff9b:1::/48", "local NAT64, which carries IPv4 destinations"),
	hardRule("2001::/32", "Teredo, which carries IPv4 destinations"),
	hardRule("2002::/16", "6to4, which carries IPv4 destinations"),
	hardRule("fe80::/10", "link-local addresses"),
	hardRule("ff00::/8", "multicast"),
	hardRule(LinkRange6.String(), "Lazaret's own links"),
}

// builtin rules are denied unless the developer allows an equal or longer prefix.
var builtin = []Rule{
	softRule("10.0.0.0/8", "RFC 1918 private network"),
	softRule("172.16.0.0/12", "RFC 1918 private network"),
	softRule("192.168.0.0/16", "RFC 1918 private network"),
	softRule("100.64.0.0/10", "carrier-grade NAT and overlay networks (RFC 6598)"),
	softRule("169.254.0.0/16", "link-local addresses and cloud metadata services"),
	softRule("192.0.0.0/24", "IETF protocol assignments (RFC 6890)"),

	softRule("fc00::/7", "unique local network, the IPv6 form of RFC 1918"),
	softRule("fec0::/10", "site-local network"),
	softRule("100::/64", "discard-only addresses"),
}

func hardRule(prefix, why string) Rule {
	return Rule{netip.MustParsePrefix(prefix), Deny, LayerHard, why + "; cannot be allowed"}
}

func softRule(prefix, why string) Rule {
	return Rule{netip.MustParsePrefix(prefix), Deny, LayerBuiltin, why}
}
