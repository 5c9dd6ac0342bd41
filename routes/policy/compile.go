package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxRules bounds a policy, and with it the message that carries it and the time a change takes.
const maxRules = 2048

// A ConfigError is one fault of a [Config]. Hint is what a developer can do about it, or "".
type ConfigError struct {
	Where string // as told by the locate callback, such as "claude.toml:12: allow[0]"
	Text  string
	Hint  string
}

func (e *ConfigError) Error() string { return e.Where + ": " + e.Text }

// Locate names the place of an entry for error texts and explanations: list is "allow", "deny",
// "ipv6" or "default", and index the entry's position, or -1 for a single value.
type Locate func(list string, index int) string

func plainLocate(list string, index int) string {
	if index < 0 {
		return "network." + list
	}
	return fmt.Sprintf("network.%s[%d]", list, index)
}

// Compile checks cfg and joins it with the built-in rules, what is known about the host, and the
// live changes. A nil locate names fields without file positions. All faults of cfg are reported
// at once, each as a [*ConfigError].
func Compile(cfg Config, host Host, live []LiveRule, locate Locate) (*Policy, error) {
	if locate == nil {
		locate = plainLocate
	}
	c := compiler{rules: make(map[netip.Prefix]Rule), where: make(map[netip.Prefix]string), locate: locate}
	verdict, ipv6 := c.choices(cfg)

	c.put(Rule{allIPv4, verdict, LayerDefault, "the default of the profile"})
	c.put(Rule{allIPv6, verdict, LayerDefault, "the default of the profile"})
	for _, r := range builtin {
		c.put(r)
	}
	for _, p := range host.OnLink {
		c.put(Rule{p.Masked(), Deny, LayerOnLink, "a network that the host is attached to"})
	}
	c.list("deny", cfg.Deny, Deny)
	c.list("allow", cfg.Allow, Allow)
	for _, l := range live {
		c.live(l)
	}
	for _, r := range hard {
		c.put(r)
	}
	for _, a := range host.Addrs {
		a = a.WithZone("").Unmap()
		c.put(Rule{netip.PrefixFrom(a, a.BitLen()), Deny, LayerHard, "the host's own address; cannot be allowed"})
	}
	if len(c.rules) > maxRules {
		c.fail("network", fmt.Sprintf("%d prefixes are over the limit of %d", len(c.rules), maxRules), "join neighbouring prefixes")
	}
	if len(c.errs) > 0 {
		return nil, errors.Join(c.errs...)
	}
	p := &Policy{ipv6: ipv6}
	for _, r := range c.rules {
		p.rules = append(p.rules, r)
	}
	slices.SortFunc(p.rules, compareRules)
	p.index = NewIndex(p.Table())
	return p, nil
}

// CheckLive tells whether a live rule for prefix can be made, with the reason if not.
func CheckLive(prefix string, v Verdict) (netip.Prefix, error) {
	p, text, hint := parsePrefix(prefix)
	if text == "" && v == Allow {
		text, hint = hardConflict(p)
	}
	if text != "" {
		return netip.Prefix{}, &ConfigError{Where: fmt.Sprintf("%s %q", v, prefix), Text: text, Hint: hint}
	}
	return p, nil
}

type compiler struct {
	rules  map[netip.Prefix]Rule
	where  map[netip.Prefix]string // place of a LayerConfig rule
	locate Locate
	errs   []error
}

func (c *compiler) fail(where, text, hint string) {
	c.errs = append(c.errs, &ConfigError{Where: where, Text: text, Hint: hint})
}

// put adds r, replacing what a weaker layer says about the same prefix.
func (c *compiler) put(r Rule) {
	if !r.Prefix.IsValid() {
		return
	}
	if old, ok := c.rules[r.Prefix]; !ok || old.Layer <= r.Layer {
		c.rules[r.Prefix] = r
	}
}

func (c *compiler) choices(cfg Config) (def Verdict, ipv6 bool) {
	switch cfg.Default {
	case "", "allow":
		def = Allow
	case "deny":
	default:
		c.fail(c.locate("default", -1), fmt.Sprintf("%q is not a default", cfg.Default), `write "allow" or "deny"`)
	}
	switch cfg.IPv6 {
	case "", "off":
	case "on":
		ipv6 = true
	default:
		c.fail(c.locate("ipv6", -1), fmt.Sprintf("%q is not a mode", cfg.IPv6), `write "off" or "on"`)
	}
	return def, ipv6
}

func (c *compiler) list(name string, entries []string, v Verdict) {
	for i, s := range entries {
		where := c.locate(name, i)
		p, text, hint := parsePrefix(s)
		if text == "" && v == Allow {
			text, hint = hardConflict(p)
		}
		if text != "" {
			c.fail(where, fmt.Sprintf("%q: %s", s, text), hint)
			continue
		}
		if old, ok := c.rules[p]; ok && old.Layer == LayerConfig && old.Verdict != v {
			c.fail(where, fmt.Sprintf("%q contradicts %s, which says %s for the same prefix", s, c.where[p], old.Verdict),
				"remove one of them, or make one more specific")
			continue
		}
		c.where[p] = where
		c.put(Rule{p, v, LayerConfig, where})
	}
}

func (c *compiler) live(l LiveRule) {
	why := "a live change"
	if !l.Until.IsZero() {
		why += " until " + l.Until.Format("15:04:05")
	}
	if l.Verdict == Allow {
		if text, hint := hardConflict(l.Prefix); text != "" {
			c.fail(fmt.Sprintf("allow %q", l.Prefix), text, hint)
			return
		}
	}
	c.put(Rule{l.Prefix.Masked(), l.Verdict, LayerLive, why})
}

// parsePrefix gives the prefix, or what is wrong with s and a hint.
func parsePrefix(s string) (p netip.Prefix, text, hint string) {
	host, bits, slash := strings.Cut(s, "/")
	addr, err := netip.ParseAddr(host)
	switch {
	case err != nil && strings.ContainsAny(host, ":") || err != nil && digitsAndDots(host):
		return p, "is neither an IPv4 nor an IPv6 prefix", `write it like "203.0.113.0/24" or "2001:db8::/32"`
	case err != nil:
		return p, "is a name; only prefixes can be routed", `names change their addresses: look it up and write prefixes like "203.0.113.0/24"`
	case addr.Zone() != "":
		return p, "has a zone", "leave out the part that begins with %"
	case !slash:
		return p, "has no prefix length", fmt.Sprintf(`write "%s/%d" for the single address`, addr, addr.BitLen())
	}
	p, err = netip.ParsePrefix(s)
	switch {
	case err != nil:
		return p, fmt.Sprintf("has the prefix length %q", bits), fmt.Sprintf("write a number from 0 to %d", addr.BitLen())
	case p != p.Masked():
		return p, "has host bits set", fmt.Sprintf("did you mean %q, or %q?", p.Masked(), netip.PrefixFrom(addr, addr.BitLen()))
	case addr.Is4In6():
		return p, "is an IPv4 prefix in IPv6 form", fmt.Sprintf("write it in IPv4 form, such as %q", addr.Unmap())
	}
	return p, "", ""
}

// hardConflict tells why p cannot be allowed. A shorter prefix that merely contains a hard one can:
// the hard one wins inside it.
func hardConflict(p netip.Prefix) (text, hint string) {
	bits := -1
	for _, r := range hard {
		if r.Prefix.Bits() <= p.Bits() && r.Prefix.Contains(p.Addr()) && r.Prefix.Bits() > bits {
			bits = r.Prefix.Bits()
			text = fmt.Sprintf("lies in %s: %s", r.Prefix, r.Why)
			hint = "remove it; what runs on the host can be offered through a Host Escalation"
		}
	}
	return text, hint
}

func digitsAndDots(s string) bool {
	return s == "" || strings.Trim(s, "0123456789.") == ""
}
