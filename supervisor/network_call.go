package supervisor

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/routes/policy"
)

// networkCall is what a client asks about a running Domain's network, or changes in it.
type networkCall struct {
	Op     string // "show", "allow", "deny", "reset", "reload"
	Prefix string // of allow, deny and reset; reset: "" for all
	For    time.Duration
	Config Network // of reload: the validated section, as it is now
	Places Places
}

// networkState is everything that decides a destination, so that a client explains what the Domain does by compiling the same.
type networkState struct {
	Config    Network
	Places    Places
	Live      []policy.LiveRule
	Host      policy.Host
	Resolvers []netip.AddrPort
	Proxy     string `json:",omitempty"` // without its password
	SidecarID string `json:",omitempty"`
	UplinkPID int    `json:",omitempty"`
	Broken    string `json:",omitempty"` // which helper is being replaced; nothing passes then
}

// serveNetwork answers a client's call; the goroutine of the network does it.
func (c *coordinator) serveNetwork(call networkCall) event {
	<-c.started
	if c.startup != nil {
		return event{Failed: asFailure(c.startup)}
	}
	job := networkJob{call: call, reply: make(chan event, 1)}
	select {
	case c.net.calls <- job:
		return <-job.reply
	case <-c.net.ctx.Done():
		return event{Busy: true}
	}
}

func (n *network) answerCall(call networkCall) event {
	if err := n.change(call); err != nil {
		return event{Failed: asFailure(asRefusal(err))}
	}
	s := n.state()
	return event{Network: &s}
}

// change does what call asks; on an error, nothing has changed.
func (n *network) change(call networkCall) error {
	live, cfg := n.live, n.cfg
	switch call.Op {
	case "show":
		return nil
	case "allow", "deny":
		verdict := policy.Verdict(call.Op == "allow")
		p, err := policy.CheckLive(call.Prefix, verdict)
		if err != nil {
			return err
		}
		if p.Addr().Is6() && !n.ctl.Table().IPv6 {
			return refusal(fmt.Sprintf("%s %s: IPv6 is off, so nothing there can be reached", call.Op, p), `IPv6 is switched on in the profile: ipv6 = "on" in [network]; then leave all sessions and enter again`)
		}
		rule := policy.LiveRule{Prefix: p, Verdict: verdict}
		if call.For > 0 {
			rule.Until = time.Now().Add(call.For).Round(0) // by the wall clock: the host may sleep meanwhile
		}
		live = append(without(live, p), rule)
	case "reset":
		if call.Prefix == "" {
			live = nil
			break
		}
		p, err := policy.CheckLive(call.Prefix, policy.Deny)
		if err != nil {
			return err
		}
		if live = without(live, p); len(live) == len(n.live) {
			return refusal(fmt.Sprintf("reset %s: there is no live rule for it", p), "lazaret network show lists them")
		}
	case "reload":
		cfg = call.Config
		cfg.Places = call.Places
		if cfg.Proxy != n.cfg.Proxy || cfg.ProxyEnv != n.cfg.ProxyEnv || cfg.SearchDomains != n.cfg.SearchDomains || cfg.Journal != n.cfg.Journal {
			return refusal("reload: proxy, search_domains and journal cannot change while the Domain runs", "leave all its sessions and enter again")
		}
	default:
		return fmt.Errorf("this coordinator has no network operation %q", call.Op)
	}
	return n.adopt(cfg, live)
}

// adopt puts cfg and live in force, or neither.
func (n *network) adopt(cfg Network, live []policy.LiveRule) error {
	oldLive, oldNext := n.live, n.next
	n.live = live
	pol, err := n.compile(cfg)
	if err == nil && pol.IPv6() && !n.ctl.Table().IPv6 {
		err = routes.ErrIPv6
	}
	if err != nil {
		n.live, n.next = oldLive, oldNext
		return err
	}
	n.cfg = cfg
	n.c.mu.Lock()
	n.c.plan.Profile.Network = cfg // later sessions are compared with it
	n.c.mu.Unlock()
	n.enforce(pol.Table())
	return nil
}

func without(live []policy.LiveRule, p netip.Prefix) []policy.LiveRule {
	return slices.DeleteFunc(slices.Clone(live), func(l policy.LiveRule) bool { return l.Prefix == p })
}

func (n *network) state() networkState {
	s := networkState{Config: n.cfg, Places: n.cfg.Places, Live: n.live, Host: n.host.Host, Resolvers: n.upstream.Servers,
		SidecarID: n.sideID, UplinkPID: n.up.PID()}
	s.Config.Proxy = ""
	if n.proxy != "" {
		s.Proxy = redacted(n.proxy)
	}
	switch {
	case n.ill.sidecar:
		s.Broken = "sidecar"
	case n.ill.uplink:
		s.Broken = "uplink"
	}
	return s
}
