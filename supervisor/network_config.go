package supervisor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"

	"lazaret.dev/lazaret/routes/policy"
)

// Network is the section [network] of an Agent Profile.
type Network struct {
	// Allow and Deny are destinations in CIDR notation; of all rules the longest prefix decides.
	Allow []string `toml:"allow"`
	Deny  []string `toml:"deny"`
	// IPv6 is "off" or "on".
	IPv6 string `toml:"ipv6"`
	// Default is the verdict for what no rule names: "allow" or "deny".
	Default string `toml:"default"`
	// DNS are the resolvers that answer the agent, as ADDRESS or ADDRESS:PORT; empty: the host's.
	DNS []string `toml:"dns"`
	// SearchDomains gives the agent the host's search domains, HostsFile the names in its /etc/hosts.
	SearchDomains bool `toml:"search_domains"`
	HostsFile     bool `toml:"hosts_file"`
	// Journal writes every question to the resolver into the Domain's journal.
	Journal bool `toml:"journal"`
	// Proxy is the proxy through which all TCP of the agent goes, as socks5:// or http://; ProxyEnv names a variable of
	// the caller that holds one.
	Proxy    string `toml:"proxy"`
	ProxyEnv string `toml:"proxy_env"`

	// Places tells where the entries stand, for errors and explanations; it is no setting.
	Places Places `toml:"-" json:"-"`
}

// Places are the lines of the entries of [network] in a configuration file. The zero value knows none.
type Places struct {
	File  string
	Lines map[string]int // by "allow[0]", "ipv6"
}

// locate is a [policy.Locate].
func (p Places) locate(list string, index int) string {
	key := entryKey(list, index)
	if line, ok := p.Lines[key]; ok {
		return fmt.Sprintf("%s:%d: %s", p.File, line, key)
	}
	return "network." + key
}

func entryKey(list string, index int) string {
	if index < 0 {
		return list
	}
	return fmt.Sprintf("%s[%d]", list, index)
}

// String is for people; it keeps a proxy's password.
func (n Network) String() string {
	return fmt.Sprintf("{allow %q, deny %q, ipv6 %s, default %s, dns %q, search_domains %v, hosts_file %v, journal %v, proxy %q, proxy_env %q}",
		n.Allow, n.Deny, n.IPv6, n.Default, n.DNS, n.SearchDomains, n.HostsFile, n.Journal, redacted(n.Proxy), n.ProxyEnv)
}

func redacted(proxy string) string {
	u, err := url.Parse(proxy)
	if err != nil {
		return "…"
	}
	return u.Redacted()
}

func (n Network) policy() policy.Config {
	return policy.Config{Allow: n.Allow, Deny: n.Deny, IPv6: n.IPv6, Default: n.Default}
}

// check finds every fault of the section, each with its file and line.
func (n Network) check() error {
	var errs []error
	if _, err := policy.Compile(n.policy(), policy.Host{}, nil, n.Places.locate); err != nil {
		errs = append(errs, err)
	}
	for i, s := range n.DNS {
		if _, err := parseResolver(s); err != nil {
			errs = append(errs, &policy.ConfigError{Where: n.Places.locate("dns", i), Text: err.Error(), Hint: `write an address, like "9.9.9.9" or "10.0.0.53:5353"`})
		}
	}
	switch {
	case n.Proxy != "" && n.ProxyEnv != "":
		errs = append(errs, &policy.ConfigError{Where: n.Places.locate("proxy_env", -1), Text: "contradicts " + n.Places.locate("proxy", -1) + ": only one of both can be used", Hint: "remove one of them"})
	case n.Proxy != "":
		if _, err := parseProxy(n.Proxy); err != nil {
			errs = append(errs, &policy.ConfigError{Where: n.Places.locate("proxy", -1), Text: err.Error(), Hint: proxyHint})
		}
	case n.ProxyEnv != "" && !validEnvName(n.ProxyEnv):
		errs = append(errs, &policy.ConfigError{Where: n.Places.locate("proxy_env", -1), Text: fmt.Sprintf("%q is no name of a variable", n.ProxyEnv), Hint: `write for example "HTTPS_PROXY"`})
	}
	return asRefusal(errors.Join(errs...))
}

const proxyHint = `write "socks5://HOST:PORT" or "http://HOST:PORT", with USER:PASSWORD@ before HOST if the proxy asks for it`

// asRefusal turns the errors of package policy into one that carries a hint.
func asRefusal(err error) error {
	var ce *policy.ConfigError
	if errors.As(err, &ce) {
		return refusal(err.Error(), ce.Hint)
	}
	return err
}

func parseResolver(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil && ap.Port() != 0 {
		return ap, nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is not the address of a resolver", s)
	}
	return netip.AddrPortFrom(a, 53), nil
}

// parseProxy never quotes s: it may hold a password.
func parseProxy(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("is not a URL")
	case u.Scheme != "socks5" && u.Scheme != "http":
		return nil, fmt.Errorf("the scheme %q is neither socks5 nor http", u.Scheme)
	case u.Hostname() == "":
		return nil, errors.New("names no host")
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "":
		return nil, errors.New("has a path; a proxy is a host and a port")
	}
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), map[string]string{"socks5": "1080", "http": "80"}[u.Scheme])
	}
	u.Path = ""
	return u, nil
}

// proxyOf gives the proxy to use, from the profile or the caller's environment; "" is none.
func (n Network) proxyOf(getenv func(string) string) (string, error) {
	if n.ProxyEnv == "" {
		return n.Proxy, nil
	}
	v := getenv(n.ProxyEnv)
	if v == "" {
		return "", refusal(fmt.Sprintf("%s: the variable %s is not set", n.Places.locate("proxy_env", -1), n.ProxyEnv), "set it, or remove proxy_env to connect without a proxy")
	}
	if _, err := parseProxy(v); err != nil {
		return "", refusal(fmt.Sprintf("%s: the proxy in %s: %v", n.Places.locate("proxy_env", -1), n.ProxyEnv, err), proxyHint)
	}
	return v, nil
}

// findPlaces reads the lines of [network] from a file that has been decoded without error.
func findPlaces(file string, b []byte) Places {
	places := Places{File: file, Lines: map[string]int{}}
	var p unstable.Parser
	p.Reset(b)
	var table []string
	for p.NextExpression() {
		e := p.Expression()
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			table, _ = keyOf(e)
		case unstable.KeyValue:
			places.note(&p, table, e)
		}
	}
	return places
}

func (p Places) note(parser *unstable.Parser, table []string, kv *unstable.Node) {
	key, first := keyOf(kv)
	path := append(append([]string{}, table...), key...)
	value := kv.Value()
	switch {
	case len(path) == 1 && path[0] == "network" && value.Kind == unstable.InlineTable:
		for it := value.Children(); it.Next(); {
			p.note(parser, path, it.Node())
		}
	case len(path) == 2 && path[0] == "network":
		p.Lines[path[1]] = lineOf(parser, first)
		if value.Kind != unstable.Array {
			return
		}
		i := 0
		for it := value.Children(); it.Next(); {
			if it.Node().Kind == unstable.Comment {
				continue
			}
			p.Lines[entryKey(path[1], i)] = lineOf(parser, it.Node())
			i++
		}
	}
}

func keyOf(n *unstable.Node) (parts []string, first *unstable.Node) {
	for it := n.Key(); it.Next(); {
		if first == nil {
			first = it.Node()
		}
		parts = append(parts, string(it.Node().Data))
	}
	return parts, first
}

func lineOf(p *unstable.Parser, n *unstable.Node) int { return p.Shape(n.Raw).Start.Line }
