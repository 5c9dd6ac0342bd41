package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/routes/policy"
)

// NetworkOptions name a Domain, which need not run.
type NetworkOptions struct {
	Profile   string
	Workspace string // a directory; empty: the work tree around the current directory
}

// NetworkReport is what decides the destinations of a Domain.
type NetworkReport struct {
	Profile   string            `json:"profile"`
	Workspace string            `json:"workspace"`
	Domain    string            `json:"domain"`
	Running   bool              `json:"running"` // if not: what configuration and host would decide now
	Sidecar   string            `json:"sidecar,omitempty"`
	UplinkPID int               `json:"uplink_pid,omitempty"`
	Broken    string            `json:"broken,omitempty"` // the helper that is being replaced; nothing passes
	Default   string            `json:"default"`
	IPv6      bool              `json:"ipv6"`
	Resolvers []netip.AddrPort  `json:"resolvers"`
	Proxy     string            `json:"proxy,omitempty"`
	Rules     []NetworkRule     `json:"rules"`
	Decisions []NetworkDecision `json:"decisions,omitempty"` // of a test
}

// NetworkRule is one rule of a policy.
type NetworkRule struct {
	Prefix  netip.Prefix `json:"prefix"`
	Verdict string       `json:"verdict"`
	Layer   string       `json:"layer"`
	Why     string       `json:"why"`
}

// NetworkDecision tells what happens to one address.
type NetworkDecision struct {
	Addr       netip.Addr    `json:"addr"`
	Allowed    bool          `json:"allowed"`
	Rule       NetworkRule   `json:"rule"`
	Overridden []NetworkRule `json:"overridden,omitempty"` // less specific, longest first
}

var layerNames = map[policy.Layer]string{policy.LayerDefault: "default", policy.LayerBuiltin: "built-in", policy.LayerOnLink: "host",
	policy.LayerConfig: "profile", policy.LayerLive: "live", policy.LayerHard: "fixed"}

func ruleOf(r policy.Rule) NetworkRule {
	return NetworkRule{r.Prefix, r.Verdict.String(), layerNames[r.Layer], r.Why}
}

// ShowNetwork tells the policy of a Domain, the running one's if it runs.
func ShowNetwork(opt NetworkOptions) (NetworkReport, error) {
	r, _, err := inspectNetwork(opt)
	return r, err
}

// TestNetwork tells what happens to dest, an address or a name that the host can resolve.
func TestNetwork(ctx context.Context, opt NetworkOptions, dest string) (NetworkReport, error) {
	addrs, err := addressesOf(ctx, dest)
	if err != nil {
		return NetworkReport{}, err
	}
	r, pol, err := inspectNetwork(opt)
	if err != nil {
		return r, err
	}
	for _, a := range addrs {
		d := pol.Explain(a)
		out := NetworkDecision{Addr: d.Addr, Allowed: d.Verdict == policy.Allow, Rule: ruleOf(d.Rule)}
		for _, o := range d.Overridden {
			out.Overridden = append(out.Overridden, ruleOf(o))
		}
		r.Decisions = append(r.Decisions, out)
	}
	return r, nil
}

func addressesOf(ctx context.Context, dest string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(dest); err == nil {
		return []netip.Addr{a}, nil
	}
	if _, _, err := net.SplitHostPort(dest); err == nil {
		return nil, refusal(fmt.Sprintf("%q: leave out the port; the policy decides addresses", dest), "lazaret network test ADDRESS or NAME")
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", dest)
	if err != nil {
		return nil, hint(err, "write an address, or a name that this host can resolve")
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	return addrs, nil
}

// ChangeNetwork changes the policy of a running Domain: op "allow" or "deny" adds a live rule for prefix that lasts for d (0:
// as long as the Domain), "reset" takes away that of prefix, or all when prefix is "", and "reload" reads the profile again.
func ChangeNetwork(opt NetworkOptions, op, prefix string, d time.Duration) (NetworkReport, error) {
	t, err := findTarget(opt)
	if err != nil {
		return NetworkReport{}, err
	}
	call := networkCall{Op: op, Prefix: prefix, For: d}
	if op == "reload" {
		p, err := LoadProfile(t.dirs, t.profile)
		if err != nil {
			return NetworkReport{}, err
		}
		call.Config, call.Places = p.Network, p.Network.Places
	}
	s, err := t.call(call)
	if err != nil {
		return NetworkReport{}, err
	}
	if s == nil {
		return NetworkReport{}, refusal(fmt.Sprintf("%s: no Domain of profile %q runs on %s", op, t.profile, t.workspace.Path),
			"write lasting rules into the profile, section [network]; see also --profile and --workspace")
	}
	r, _, err := t.report(*s, true)
	return r, err
}

// target is a Domain that a command is about.
type target struct {
	dirs      Dirs
	profile   string
	workspace Workspace
	id        string
}

func findTarget(opt NetworkOptions) (target, error) {
	dirs, err := FindDirs(os.Getenv)
	if err != nil {
		return target{}, err
	}
	if opt.Profile == "" {
		opt.Profile = DefaultProfile
	}
	if !profileName.MatchString(opt.Profile) {
		return target{}, refusal(fmt.Sprintf("profile %q: a name has lower-case letters, digits, - and _", opt.Profile), "lazaret network --profile NAME …")
	}
	dir := opt.Workspace
	if dir == "" {
		dir = "."
	}
	ws, err := FindWorkspace(dir, opt.Workspace != "")
	if err != nil {
		return target{}, err
	}
	return target{dirs, opt.Profile, ws, DomainID(opt.Profile, ws.Path)}, nil
}

// call asks the running coordinator; nil when there is none.
func (t target) call(call networkCall) (*networkState, error) {
	path := filepath.Join(t.dirs.Runtime, t.id)
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	dir, err := PrivateDir(path)
	if err != nil {
		return nil, err
	}
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: socketPath(dir)})
	dir.Close()
	if err != nil {
		return nil, nil // remains of one that was killed
	}
	conn := nsenter.FromUnix(uc)
	defer conn.Close()
	if err := conn.Send(request{Proto: protocolVersion, Op: "network", Network: &call}); err != nil {
		return nil, fmt.Errorf("ask the coordinator: %w", err)
	}
	var ev event
	files, err := conn.Recv(&ev)
	nsenter.CloseAll(files)
	switch {
	case err != nil:
		return nil, refusal("ask the coordinator: it ended meanwhile", "try again")
	case ev.Failed != nil:
		return nil, ev.Failed
	case ev.Busy:
		return nil, nil // it is ending
	}
	return ev.Network, nil
}

func inspectNetwork(opt NetworkOptions) (NetworkReport, *policy.Policy, error) {
	t, err := findTarget(opt)
	if err != nil {
		return NetworkReport{}, nil, err
	}
	s, err := t.call(networkCall{Op: "show"})
	if err != nil {
		return NetworkReport{}, nil, err
	}
	running := s != nil
	if !running {
		if s, err = t.planned(); err != nil {
			return NetworkReport{}, nil, err
		}
	}
	return t.report(*s, running)
}

// planned is the state that a Domain would begin with now.
func (t target) planned() (*networkState, error) {
	p, err := LoadProfile(t.dirs, t.profile)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), factsTimeout)
	defer cancel()
	facts, err := routes.WatchHost(ctx)
	if err != nil {
		return nil, err
	}
	n := network{cfg: p.Network, host: <-facts}
	s := networkState{Config: p.Network, Places: p.Network.Places, Host: n.host.Host, Resolvers: n.wantUpstream().Servers}
	if proxy, err := p.Network.proxyOf(os.Getenv); err == nil && proxy != "" {
		s.Proxy = redacted(proxy)
	}
	return &s, nil
}

func (t target) report(s networkState, running bool) (NetworkReport, *policy.Policy, error) {
	active, _ := policy.Active(s.Live, time.Now())
	pol, err := policy.Compile(s.Config.policy(), s.Host, active, s.Places.locate)
	if err != nil {
		return NetworkReport{}, nil, asRefusal(err)
	}
	r := NetworkReport{Profile: t.profile, Workspace: t.workspace.Path, Domain: t.id, Running: running, Sidecar: s.SidecarID,
		UplinkPID: s.UplinkPID, Broken: s.Broken, Default: s.Config.Default, IPv6: pol.IPv6(), Resolvers: s.Resolvers, Proxy: s.Proxy}
	for _, rule := range pol.Rules() {
		if rule.Prefix.Addr().Is4() || pol.IPv6() {
			r.Rules = append(r.Rules, ruleOf(rule))
		}
	}
	return r, pol, nil
}
