package policy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func compile(t *testing.T, cfg Config, host Host, live ...LiveRule) *Policy {
	t.Helper()
	p, err := Compile(cfg, host, live, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSR6BuiltinDenials(t *testing.T) {
	p := compile(t, Config{IPv6: "on"}, Host{
		Addrs:  []netip.Addr{netip.MustParseAddr("198.51.100.77"), netip.MustParseAddr("2001:db8:77::1")},
		OnLink: []netip.Prefix{netip.MustParsePrefix("198.51.100.64/27"), netip.MustParsePrefix("2001:db8:77::/64")},
	})
	for _, tt := range []struct {
		addr string
		want Verdict
	}{
		{"1.1.1.1", Allow}, {"9.255.255.255", Allow}, {"11.0.0.0", Allow}, {"172.15.255.255", Allow}, {"172.32.0.0", Allow},
		{"192.167.255.255", Allow}, {"192.169.0.0", Allow}, {"100.63.255.255", Allow}, {"100.128.0.0", Allow},
		{"198.17.255.255", Allow}, {"198.20.0.0", Allow}, {"223.255.255.255", Allow}, {"198.51.100.63", Allow}, {"198.51.100.96", Allow},
		{"10.0.0.0", Deny}, {"10.255.255.255", Deny}, {"172.16.0.1", Deny}, {"172.31.255.255", Deny}, {"192.168.0.1", Deny},
		{"100.64.0.1", Deny}, {"100.127.255.255", Deny}, {"169.254.169.254", Deny}, {"127.0.0.1", Deny}, {"127.255.255.254", Deny},
		{"0.0.0.0", Deny}, {"224.0.0.1", Deny}, {"239.255.255.255", Deny}, {"240.0.0.1", Deny}, {"255.255.255.255", Deny},
		{"198.18.0.1", Deny}, {"198.19.255.255", Deny}, {"198.51.100.77", Deny}, {"198.51.100.65", Deny},
		{"2606:4700::1111", Allow}, {"2001:db8:78::1", Allow}, {"2003::1", Allow},
		{"::", Deny}, {"::1", Deny}, {"::a01:203", Deny}, {"::ffff:10.1.2.3", Deny}, {"::ffff:1.1.1.1", Deny}, {"64:ff9b::a01:203", Deny},
		{"64:ff9b:1::1", Deny}, {"2002:a01:203::1", Deny}, {"2001:0:1::1", Deny}, {"fe80::1", Deny}, {"ff02::1", Deny},
		{"fd00::1", Deny}, {"fc00::1", Deny}, {"fec0::1", Deny}, {"2001:db8:77::1", Deny}, {"2001:db8:77::abcd", Deny},
	} {
		a := netip.MustParseAddr(tt.addr)
		if got := p.Verdict(a); got != tt.want {
			t.Errorf("%s: %v, want %v", a, got, tt.want)
		}
		if d := p.Explain(a); d.Verdict != tt.want || d.Rule.Why == "" {
			t.Errorf("explain %s: %v", a, d)
		}
	}
}

func TestSR6IPv6OffDeniesAllOfIt(t *testing.T) {
	p := compile(t, Config{Allow: []string{"2001:db8::/32"}}, Host{})
	a := netip.MustParseAddr("2001:db8::1")
	if p.Verdict(a) != Deny || p.IPv6() || p.Table().IPv6 {
		t.Fatal("IPv6 is reachable although it is off")
	}
	if why := p.Explain(a).Rule.Why; !strings.Contains(why, "off") {
		t.Fatalf("explained as %q", why)
	}
}

func TestSR7HostAddressCannotBeAllowed(t *testing.T) {
	own := netip.MustParseAddr("192.0.2.9")
	host := Host{Addrs: []netip.Addr{own}, OnLink: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
	p := compile(t, Config{Allow: []string{"192.0.2.9/32", "192.0.2.0/24"}}, host, LiveRule{Prefix: netip.MustParsePrefix("192.0.2.9/32"), Verdict: Allow})
	if p.Verdict(own) != Deny {
		t.Error("the host's own address was allowed")
	}
	if p.Verdict(netip.MustParseAddr("192.0.2.10")) != Allow {
		t.Error("an allow equal to an on-link prefix must open it")
	}
	mapped := compile(t, Config{}, Host{Addrs: []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.9")}})
	if mapped.Verdict(own) != Deny {
		t.Error("a mapped host address was not recognised")
	}
}

func TestLongestPrefixAndLayers(t *testing.T) {
	p := compile(t, Config{Allow: []string{"10.9.0.0/16", "192.168.0.0/16"}, Deny: []string{"10.9.1.0/24", "203.0.113.0/24"}}, Host{},
		LiveRule{Prefix: netip.MustParsePrefix("203.0.113.0/24"), Verdict: Allow, Until: time.Unix(0, 0)})
	for addr, want := range map[string]Verdict{
		"10.9.0.1": Allow, "10.9.1.1": Deny, "10.8.0.1": Deny, "192.168.3.4": Allow, "203.0.113.1": Allow,
	} {
		if got := p.Verdict(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v, want %v", addr, got, want)
		}
	}
	d := p.Explain(netip.MustParseAddr("10.9.1.1"))
	if d.Rule.Why != "network.deny[0]" || len(d.Overridden) != 3 || d.Overridden[0].Why != "network.allow[0]" {
		t.Errorf("explained as %v", d)
	}
	if s := d.String(); !strings.Contains(s, "deny, by 10.9.1.0/24") || !strings.Contains(s, "RFC 1918") {
		t.Errorf("printed as %q", s)
	}
}

func TestConfigErrors(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
		want []string // parts of the text, one error each
	}{
		{"conflict names both", Config{Allow: []string{"1.0.0.0/8", "10.0.0.0/8"}, Deny: []string{"10.0.0.0/8"}}, []string{`network.allow[1]: "10.0.0.0/8" contradicts network.deny[0]`}},
		{"host bits", Config{Allow: []string{"10.0.0.1/8"}}, []string{"host bits"}},
		{"host bits 6", Config{Deny: []string{"2001:db8::1/32"}}, []string{"host bits"}},
		{"name", Config{Allow: []string{"example.com"}}, []string{"is a name"}},
		{"name with length", Config{Allow: []string{"example.com/24"}}, []string{"is a name"}},
		{"no length", Config{Deny: []string{"10.1.2.3"}}, []string{"no prefix length"}},
		{"empty", Config{Deny: []string{""}}, []string{"neither"}},
		{"too long", Config{Deny: []string{"10.0.0.0/33"}}, []string{`length "33"`}},
		{"odd length", Config{Deny: []string{"10.0.0.0/08"}}, []string{`length "08"`}},
		{"octal", Config{Deny: []string{"010.0.0.0/8"}}, []string{"neither"}},
		{"short form", Config{Deny: []string{"10/8"}}, []string{"neither"}},
		{"mapped", Config{Deny: []string{"::ffff:10.0.0.0/104"}}, []string{"IPv6 form"}},
		{"zone", Config{Deny: []string{"fe80::%eth0/64"}}, []string{"zone"}},
		{"loopback", Config{Allow: []string{"127.0.0.1/32"}}, []string{"loopback"}},
		{"nat64", Config{Allow: []string{"64:ff9b::/96"}}, []string{"NAT64"}},
		{"own links", Config{Allow: []string{"198.18.0.0/24"}}, []string{"Lazaret"}},
		{"default", Config{Default: "yes"}, []string{`network.default: "yes"`}},
		{"ipv6", Config{IPv6: "auto"}, []string{`network.ipv6: "auto"`}},
		{"all at once", Config{IPv6: "auto", Allow: []string{"x", "y"}}, []string{"ipv6", "allow[0]", "allow[1]"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Compile(tt.cfg, Host{}, nil, nil)
			if err == nil {
				t.Fatal("accepted")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tt.want) {
				t.Fatalf("%d errors, want %d: %v", len(lines), len(tt.want), err)
			}
			for i, w := range tt.want {
				if !strings.Contains(lines[i], w) {
					t.Errorf("error %q lacks %q", lines[i], w)
				}
			}
			if ce := (*ConfigError)(nil); !errors.As(err, &ce) || ce.Hint == "" {
				t.Errorf("no hint in %v", err)
			}
		})
	}
}

func TestConfigAccepted(t *testing.T) {
	for _, cfg := range []Config{
		{},
		{Allow: []string{"0.0.0.0/0"}, Default: "deny"},
		{Allow: []string{"::/0"}, IPv6: "on", Default: "deny"},
		{Allow: []string{"10.0.0.0/8", "10.0.0.0/8"}}, // twice the same is no contradiction
		{Deny: []string{"127.0.0.0/8", "255.255.255.255/32"}},
		{Allow: []string{"169.254.169.254/32"}},
	} {
		if p, err := Compile(cfg, Host{}, nil, nil); err != nil {
			t.Errorf("%+v: %v", cfg, err)
		} else if err := p.Table().Check(); err != nil {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestCheckLive(t *testing.T) {
	if _, err := CheckLive("10.1.0.0/16", Allow); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"127.0.0.0/8", "10.1.0.1/16", "host", ""} {
		if _, err := CheckLive(bad, Allow); err == nil {
			t.Errorf("allow %q was accepted", bad)
		}
	}
	if _, err := CheckLive("127.0.0.0/8", Deny); err != nil {
		t.Errorf("denying what is denied anyway: %v", err)
	}
}

func TestActive(t *testing.T) {
	now := time.Unix(1000, 0)
	p := netip.MustParsePrefix("10.0.0.0/8")
	live := []LiveRule{{p, Allow, now}, {p, Deny, now.Add(2)}, {p, Allow, time.Time{}}, {p, Allow, now.Add(1)}}
	active, next := Active(live, now)
	if len(active) != 3 || !next.Equal(now.Add(1)) {
		t.Errorf("%v, %v", active, next)
	}
	if active, next = Active(live[2:3], now); len(active) != 1 || !next.IsZero() {
		t.Errorf("%v, %v", active, next)
	}
}

// slowVerdict is the reference: it scans all rules and keeps the longest, strongest match.
func slowVerdict(cfg Config, host Host, live []LiveRule, addr netip.Addr) Verdict {
	if addr.Is6() && cfg.IPv6 != "on" {
		return Deny
	}
	bits, layer, verdict := -1, Layer(0), Deny
	see := func(p netip.Prefix, l Layer, v Verdict) {
		if p.Contains(addr) && (p.Bits() > bits || p.Bits() == bits && l >= layer) {
			bits, layer, verdict = p.Bits(), l, v
		}
	}
	see(allIPv4, LayerDefault, Verdict(cfg.Default != "deny"))
	see(allIPv6, LayerDefault, Verdict(cfg.Default != "deny"))
	for _, r := range builtin {
		see(r.Prefix, LayerBuiltin, Deny)
	}
	for _, p := range host.OnLink {
		see(p, LayerOnLink, Deny)
	}
	for _, s := range cfg.Allow {
		see(netip.MustParsePrefix(s), LayerConfig, Allow)
	}
	for _, s := range cfg.Deny {
		see(netip.MustParsePrefix(s), LayerConfig, Deny)
	}
	for _, l := range live {
		see(l.Prefix, LayerLive, l.Verdict)
	}
	for _, r := range hard {
		see(r.Prefix, LayerHard, Deny)
	}
	for _, a := range host.Addrs {
		see(netip.PrefixFrom(a, a.BitLen()), LayerHard, Deny)
	}
	return verdict
}

// TestSR6CompilerAgainstReference compares all 16 addresses of a small space, in both families,
// over random configurations.
func TestSR6CompilerAgainstReference(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	bases := []netip.Addr{netip.MustParseAddr("203.0.113.0"), netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("2001:db8::"), netip.MustParseAddr("fd00::")}
	addr := func() netip.Addr {
		b := bases[rnd.IntN(len(bases))].AsSlice()
		b[len(b)-1] = byte(rnd.IntN(16))
		a, _ := netip.AddrFromSlice(b)
		return a
	}
	prefix := func() netip.Prefix {
		a := addr()
		p, _ := a.Prefix(a.BitLen() - rnd.IntN(5))
		return p
	}
	accepted := 0
	for range 20000 {
		cfg := Config{IPv6: []string{"off", "on"}[rnd.IntN(2)], Default: []string{"allow", "deny"}[rnd.IntN(2)]}
		for range rnd.IntN(4) {
			cfg.Allow = append(cfg.Allow, prefix().String())
		}
		for range rnd.IntN(4) {
			cfg.Deny = append(cfg.Deny, prefix().String())
		}
		var host Host
		for range rnd.IntN(3) {
			host.OnLink = append(host.OnLink, prefix())
		}
		for range rnd.IntN(2) {
			host.Addrs = append(host.Addrs, addr())
		}
		var live []LiveRule
		for range rnd.IntN(3) {
			live = append(live, LiveRule{Prefix: prefix(), Verdict: Verdict(rnd.IntN(2) == 0)})
		}
		p, err := Compile(cfg, host, live, nil)
		if err != nil {
			if !strings.Contains(err.Error(), "contradicts") {
				t.Fatalf("%+v: %v", cfg, err)
			}
			continue
		}
		accepted++
		if err := p.Table().Check(); err != nil {
			t.Fatal(err)
		}
		for _, base := range bases {
			b := base.AsSlice()
			for i := range 16 {
				b[len(b)-1] = byte(i)
				a, _ := netip.AddrFromSlice(b)
				want := slowVerdict(cfg, host, live, a)
				if got, ex := p.Verdict(a), p.Explain(a).Verdict; got != want || ex != want {
					t.Fatalf("%s: index %v, explain %v, reference %v; %+v %+v %+v", a, got, ex, want, cfg, host, live)
				}
			}
		}
	}
	if accepted < 1000 {
		t.Fatalf("only %d configurations were accepted", accepted)
	}
}

func TestTableCheck(t *testing.T) {
	good := compile(t, Config{}, Host{}).Table()
	for name, bad := range map[string]Table{
		"empty":      {},
		"no default": {Allow: []netip.Prefix{allIPv4}},
		"twice":      {Allow: append(good.Allow, good.Deny[0]), Deny: good.Deny},
		"host bits":  {Allow: good.Allow, Deny: append([]netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("10.0.0.1"), 8)}, good.Deny...)},
		"zero":       {Allow: good.Allow, Deny: append([]netip.Prefix{{}}, good.Deny...)},
	} {
		if bad.Check() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	var none *Index
	if none.Verdict(netip.MustParseAddr("1.1.1.1")) != Deny || NewIndex(Table{}).Verdict(netip.Addr{}) != Deny {
		t.Error("no index must deny")
	}
}

func FuzzParsePrefix(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "::/0", "x", "1.2.3.4", "::ffff:1.2.3.4/128", "fe80::%a/64", "/", "1/1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, text, hint := parsePrefix(s)
		if text == "" && (!p.IsValid() || p != p.Masked() || p.Addr().Is4In6()) {
			t.Fatalf("%q gave %v", s, p)
		}
		if text != "" && hint == "" {
			t.Fatalf("%q: %q without a hint", s, text)
		}
	})
}

func ExamplePolicy_Explain() {
	p, _ := Compile(Config{Allow: []string{"10.9.0.0/16"}}, Host{}, nil, nil)
	fmt.Println(p.Explain(netip.MustParseAddr("10.9.3.4")))
	// Output:
	// 10.9.3.4: allow, by 10.9.0.0/16: network.allow[0]
	//   more specific than deny 10.0.0.0/8 (RFC 1918 private network)
	//   more specific than allow 0.0.0.0/0 (the default of the profile)
}
