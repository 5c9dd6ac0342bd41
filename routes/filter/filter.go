// Package filter is the second wall of the sidecar's namespace: a small set of nftables rules that
// keeps no state. The routes alone already deny what the policy denies; the filter also
//
//   - lets nothing reach the sidecar's own addresses but the named services (SR-7),
//   - lets nothing pass between the links but TCP, UDP and ICMP of the agent's one address, which
//     for IPv6, where the kernel has no reverse-path check, is the only check of a forged source,
//   - lets nothing that is sent from within the namespace leave through the uplink,
//   - answers denied packets at once, where the kernel limits its own answers to one a second.
package filter

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/link"
)

// Install replaces the rules in one transaction. The calling thread is in the sidecar's namespace;
// both links need not exist yet, since rules name them. tcpPorts are the services on the sidecar's
// address besides DNS.
func Install(ipv6 bool, tcpPorts ...uint16) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("packet filter: %w", err)
	}
	t := c.AddTable(&nftables.Table{Name: "lazaret", Family: nftables.TableFamilyINet})
	drop, accept := nftables.ChainPolicyDrop, nftables.ChainPolicyAccept
	chain := func(name string, hook *nftables.ChainHook, policy *nftables.ChainPolicy) func(...[]expr.Any) {
		ch := c.AddChain(&nftables.Chain{Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook,
			Priority: nftables.ChainPriorityFilter, Policy: policy})
		return func(parts ...[]expr.Any) {
			var all []expr.Any
			for _, p := range parts {
				all = append(all, p...)
			}
			c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: all})
		}
	}
	type ends struct{ agent, sidecar netip.Addr }
	families := []ends{{link.Agent4.Addr(), link.Sidecar4.Addr()}}
	if ipv6 {
		families = append(families, ends{link.Agent6.Addr(), link.Sidecar6.Addr()})
	}

	pre := chain("prerouting", nftables.ChainHookPrerouting, &accept)
	for _, f := range families {
		pre(iif(link.SidecarDev), daddr(f.sidecar), verdict(expr.VerdictAccept))
	}
	pre(iif(link.SidecarDev), setMark(link.Mark))
	pre(iif(link.SidecarDev), unrouted(), refuse())

	input := chain("input", nftables.ChainHookInput, &drop)
	for _, f := range families {
		from := concat(iif(link.SidecarDev), saddr(f.agent), daddr(f.sidecar))
		input(from, l4(unix.IPPROTO_UDP), dport(link.DNSPort), verdict(expr.VerdictAccept))
		for _, p := range append([]uint16{link.DNSPort}, tcpPorts...) {
			input(from, l4(unix.IPPROTO_TCP), dport(p), verdict(expr.VerdictAccept))
		}
	}

	forward := chain("forward", nftables.ChainHookForward, &drop)
	for _, f := range families {
		icmp := byte(unix.IPPROTO_ICMP)
		if f.agent.Is6() {
			icmp = unix.IPPROTO_ICMPV6
		}
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, icmp} {
			forward(iif(link.SidecarDev), oif(link.SidecarUpDev), saddr(f.agent), l4(proto), verdict(expr.VerdictAccept))
		}
		forward(iif(link.SidecarUpDev), oif(link.SidecarDev), daddr(f.agent), verdict(expr.VerdictAccept))
	}

	output := chain("output", nftables.ChainHookOutput, &drop)
	output(oif(link.SidecarDev), verdict(expr.VerdictAccept))

	if err := c.Flush(); err != nil {
		return fmt.Errorf("install packet filter: %w", err)
	}
	return nil
}

func concat(parts ...[]expr.Any) (all []expr.Any) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func name(dev string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, dev)
	return b
}

func match(load expr.Any, want []byte) []expr.Any {
	return []expr.Any{load, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: want}}
}

func iif(dev string) []expr.Any {
	return match(&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, name(dev))
}

func oif(dev string) []expr.Any {
	return match(&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, name(dev))
}

func l4(proto byte) []expr.Any {
	return match(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, []byte{proto})
}

func dport(port uint16) []expr.Any {
	return match(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, binary.BigEndian.AppendUint16(nil, port))
}

func saddr(a netip.Addr) []expr.Any { return address(a, 12, 8) }

func daddr(a netip.Addr) []expr.Any { return address(a, 16, 24) }

func address(a netip.Addr, offset4, offset6 uint32) []expr.Any {
	proto, offset := byte(unix.NFPROTO_IPV4), offset4
	if a.Is6() {
		proto, offset = unix.NFPROTO_IPV6, offset6
	}
	b := a.AsSlice()
	return concat(
		match(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, []byte{proto}),
		match(&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(len(b))}, b))
}

func setMark(mark uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint32(nil, mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	}
}

// unrouted matches a packet that the routing table, asked with the packet's mark, would not send
// anywhere.
func unrouted() []expr.Any {
	return match(&expr.Fib{Register: 1, ResultOIF: true, FlagDADDR: true, FlagMARK: true, FlagPRESENT: true}, []byte{0})
}

// refuse sends the one ICMP error that gVisor's stack understands in both families.
func refuse() []expr.Any {
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_NO_ROUTE}}
}

func verdict(k expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: k}} }
