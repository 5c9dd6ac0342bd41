package routes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/fib"
	"lazaret.dev/lazaret/routes/filter"
	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

// Spec is what [Setup] needs to know.
type Spec struct {
	Table policy.Table // the policy at start; Table.IPv6 also says whether the links have IPv6 at all

	EscalationPort uint16 // TCP port of the escalation endpoint on the sidecar's address; 0: no listener

	// Sidecar is the argument vector that makes this program run [SidecarMain].
	Sidecar []string
	// Exe is the program; "" means this one (/proc/self/exe).
	Exe string

	step func(b *builder, name string) error // of tests: called before each step; an error fails it
}

// Descriptors are what the domain process sends to the coordinator. Whoever holds them closes
// them; see the comment of each for how long a copy may live.
type Descriptors struct {
	Agent      *os.File // the agent's network namespace; runsc is started in it
	Packet     *os.File // of the uplink alone: while any copy is open, its death is not seen
	DNSUDP     *os.File // bound to port 53 of the sidecar's address; the coordinator keeps a copy
	DNSTCP     *os.File // listening there; the coordinator keeps a copy
	Escalation *os.File // TCP listener, or nil
	Control    *os.File // of the sidecar, for [NewSidecar]; its end is the sidecar's end
}

// Close closes what is still open.
func (d *Descriptors) Close() error {
	var err error
	for _, f := range []*os.File{d.Agent, d.Packet, d.DNSUDP, d.DNSTCP, d.Escalation, d.Control} {
		if f != nil {
			if e := f.Close(); !errors.Is(e, os.ErrClosed) {
				err = errors.Join(err, e)
			}
		}
	}
	return err
}

// A Topology is a Domain's network as the domain process holds it. Its methods may be called from
// any goroutine.
type Topology struct {
	// Immutable after Setup.
	ipv6     bool
	sidecar  *place
	h        *netlink.Handle // in the sidecar's namespace
	exe      string
	argv     []string
	warnings []string

	ops sync.Mutex // held over ReplaceUplink, ReplaceSidecar and Close; taken before mu

	mu     sync.Mutex
	proc   *sidecarProcess // the sidecar whose life permits forwarding
	closed bool
}

// Setup makes the namespaces, links, denials, permissions and filters, starts the sidecar, and
// only then lets packets be forwarded. The caller is root in a user namespace of its own and has a
// writable /proc/sys. When it fails, nothing is left.
func Setup(spec Spec) (_ *Topology, _ *Descriptors, err error) {
	if err := spec.Table.Check(); err != nil {
		return nil, nil, err
	}
	if spec.Exe == "" {
		spec.Exe = "/proc/self/exe"
	}
	b := &builder{spec: spec, d: &Descriptors{}}
	for _, s := range b.steps() {
		if spec.step != nil {
			err = spec.step(b, s.name)
		}
		if err == nil {
			err = s.run()
		}
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("network: %s: %w", s.name, err), b.undo.run())
		}
	}
	b.u.leave() // from here the packet socket alone keeps the uplink's namespace
	b.a.leaveThread()
	return b.t, b.d, nil
}

type builder struct {
	spec    Spec
	a, s, u *place
	t       *Topology
	d       *Descriptors
	undo    undo
}

type step struct {
	name string
	run  func() error
}

// steps is the order in which the network comes to be (SR-6): what denies stands before there is
// anything to deny, and forwarding is last.
func (b *builder) steps() []step {
	return []step{
		{"sidecar namespace", b.sidecarNamespace},
		{"sidecar process", b.startSidecar}, // it gets ready while the rest is made
		{"agent namespace", b.agentNamespace},
		{"uplink namespace", b.uplinkNamespace},
		{"packet filter", b.packetFilter},
		{"agent link", b.agentLink},
		{"uplink link", b.uplinkLink},
		{"policy routes", func() error { return fib.Set(b.t.h, b.spec.Table) }},
		{"services", b.services},
		{"packet socket", b.packetSocket},
		{"sidecar ready", func() error { return b.t.proc.waitReady() }},
		{"forwarding", func() error { return b.t.forward() }},
	}
}

func (b *builder) v6() []sysctl {
	if b.spec.Table.IPv6 {
		return ipv6On
	}
	return ipv6Off
}

func (b *builder) sidecarNamespace() error {
	s, err := newPlace()
	if err != nil {
		return err
	}
	b.undo = append(b.undo, s.leave)
	b.s = s
	t := &Topology{ipv6: b.spec.Table.IPv6, sidecar: s, exe: b.spec.Exe, argv: b.spec.Sidecar}
	b.t = t
	return s.do(func() error {
		if err := write(append(append(quietEverywhere[:len(quietEverywhere):len(quietEverywhere)], sidecarOnly...), b.v6()...)); err != nil {
			return err
		}
		var err error
		if t.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		b.undo = append(b.undo, func() error { t.h.Close(); return nil })
		return nil
	})
}

func (b *builder) startSidecar() error {
	p, control, err := b.t.startSidecar()
	if err != nil {
		return err
	}
	b.t.mu.Lock()
	b.t.proc = p
	b.t.mu.Unlock()
	b.d.Control = control
	b.undo = append(b.undo, p.kill, control.Close)
	return nil
}

func (b *builder) agentNamespace() error {
	a, err := newPlace()
	if err != nil {
		return err
	}
	b.a = a
	b.undo = append(b.undo, a.leave)
	b.d.Agent = a.ns
	return a.do(func() error {
		return write(append(quietEverywhere[:len(quietEverywhere):len(quietEverywhere)], b.v6()...))
	})
}

func (b *builder) uplinkNamespace() error {
	u, err := newUplinkPlace()
	if err != nil {
		return err
	}
	b.u = u
	b.undo = append(b.undo, u.leave)
	return nil
}

// newUplinkPlace makes the namespace of the uplink's end. Its kernel takes part in nothing: the
// packet socket sees every frame, and no address is there that could answer.
func newUplinkPlace() (*place, error) {
	u, err := newPlace()
	if err != nil {
		return nil, err
	}
	if err := u.do(func() error {
		return write(append(quietEverywhere[:len(quietEverywhere):len(quietEverywhere)], ipv6Off...))
	}); err != nil {
		u.leave()
		return nil, err
	}
	return u, nil
}

func (b *builder) packetFilter() error {
	var ports []uint16
	if b.spec.EscalationPort != 0 {
		ports = []uint16{b.spec.EscalationPort}
	}
	err := b.s.do(func() error { return filter.Install(b.t.ipv6, ports...) })
	switch {
	case err == nil:
		return nil
	case b.t.ipv6:
		return fmt.Errorf("%w (IPv6 needs the kernel's nf_tables, or set ipv6 = \"off\")", err)
	}
	// IPv4 stands on the routes and the reverse-path filter alone.
	b.t.warnings = append(b.t.warnings, fmt.Sprintf("the second wall is missing: %v", err))
	return nil
}

func (b *builder) agentLink() error {
	s, err := addLink(b.t.h, link.SidecarDev, link.SidecarMAC, link.AgentDev, link.AgentMAC, b.a.ns)
	if err != nil {
		return err
	}
	ours := []netip.Prefix{link.Sidecar4}
	theirs := []netip.Prefix{link.Agent4}
	if b.t.ipv6 {
		ours, theirs = append(ours, link.Sidecar6), append(theirs, link.Agent6)
	}
	if err := raise(b.t.h, s, ours, theirs, link.AgentMAC); err != nil {
		return err
	}
	return b.a.do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		eth, err := h.LinkByName(link.AgentDev)
		if err != nil {
			return err
		}
		if err := raise(h, eth, theirs, ours, link.SidecarMAC); err != nil {
			return err
		}
		for _, gw := range ours {
			r := &netlink.Route{LinkIndex: eth.Attrs().Index, Gw: gw.Addr().AsSlice()}
			if err := h.RouteAdd(r); err != nil {
				return fmt.Errorf("add the agent's default route: %w", err)
			}
		}
		return nil
	})
}

func (b *builder) uplinkLink() error { return b.t.uplinkLink(b.u) }

func (t *Topology) uplinkLink(u *place) error {
	s, err := addLink(t.h, link.SidecarUpDev, link.SidecarUpMAC, link.UplinkDev, link.UplinkMAC, u.ns)
	if err != nil {
		return err
	}
	ours, theirs := []netip.Prefix{link.SidecarUp4}, []netip.Prefix{link.Uplink4}
	if t.ipv6 {
		ours, theirs = append(ours, link.SidecarUp6), append(theirs, link.Uplink6)
	}
	if err := raise(t.h, s, ours, theirs, link.UplinkMAC); err != nil {
		return err
	}
	return u.do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		upx, err := h.LinkByName(link.UplinkDev)
		if err != nil {
			return err
		}
		return raise(h, upx, nil, nil, nil)
	})
}

// services binds what listens on the sidecar's address. Its sockets are served from outside the
// namespace, so no process in it accepts anything.
func (b *builder) services() error {
	return b.s.do(func() error {
		addr := net.UDPAddrFromAddrPort(netip.AddrPortFrom(link.Sidecar4.Addr(), link.DNSPort))
		udp, err := net.ListenUDP("udp4", addr)
		if err != nil {
			return fmt.Errorf("bind DNS: %w", err)
		}
		defer udp.Close()
		if b.d.DNSUDP, err = udp.File(); err != nil {
			return err
		}
		b.undo = append(b.undo, b.d.DNSUDP.Close)
		if b.d.DNSTCP, err = listen(link.DNSPort); err != nil {
			return fmt.Errorf("listen for DNS: %w", err)
		}
		b.undo = append(b.undo, b.d.DNSTCP.Close)
		if b.spec.EscalationPort == 0 {
			return nil
		}
		if b.d.Escalation, err = listen(b.spec.EscalationPort); err != nil {
			return fmt.Errorf("listen for escalations: %w", err)
		}
		b.undo = append(b.undo, b.d.Escalation.Close)
		return nil
	})
}

func listen(port uint16) (*os.File, error) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: link.Sidecar4.Addr().AsSlice(), Port: int(port)})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return l.File()
}

func (b *builder) packetSocket() error {
	f, err := packetSocket(b.u)
	if err != nil {
		return err
	}
	b.d.Packet = f
	b.undo = append(b.undo, f.Close)
	return nil
}

// packetSocket opens the socket through which the uplink exchanges frames, with a header that
// tells of segmentation and checksums left to do.
func packetSocket(u *place) (f *os.File, err error) {
	return f, u.do(func() error {
		dev, err := net.InterfaceByName(link.UplinkDev)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		f = os.NewFile(uintptr(fd), "packet socket of the uplink")
		for _, o := range []struct {
			name            string
			level, opt, val int
		}{
			{"PACKET_VNET_HDR", unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1},
			{"PACKET_IGNORE_OUTGOING", unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1},
			{"SO_RCVBUF", unix.SOL_SOCKET, unix.SO_RCVBUF, 4 << 20}, // as much as the host permits
			{"SO_SNDBUF", unix.SOL_SOCKET, unix.SO_SNDBUF, 4 << 20},
		} {
			if err := unix.SetsockoptInt(fd, o.level, o.opt, o.val); err != nil {
				f.Close()
				return fmt.Errorf("packet socket: set %s: %w", o.name, err)
			}
		}
		all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: dev.Index}); err != nil {
			f.Close()
			return fmt.Errorf("bind packet socket: %w", err)
		}
		return nil
	})
}

// addLink makes a veth pair with its far end in peerNS, both down.
func addLink(h *netlink.Handle, dev string, mac net.HardwareAddr, peer string, peerMAC net.HardwareAddr, peerNS *os.File) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = dev, link.MTU, mac
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerHardwareAddr: peerMAC, PeerMTU: link.MTU, PeerNamespace: netlink.NsFd(peerNS.Fd())}
	if err := h.LinkAdd(v); err != nil {
		return nil, fmt.Errorf("make the link %s to %s: %w", dev, peer, err)
	}
	l, err := h.LinkByName(dev)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", dev, err)
	}
	return l, nil
}

// raise gives l its addresses and permanent neighbours and sets it up.
func raise(h *netlink.Handle, l netlink.Link, addrs, neighbours []netip.Prefix, mac net.HardwareAddr) error {
	for _, p := range addrs {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(l, a); err != nil {
			return fmt.Errorf("give %s the address %s: %w", l.Attrs().Name, p, err)
		}
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", l.Attrs().Name, err)
	}
	for _, p := range neighbours {
		n := &netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: p.Addr().AsSlice(), HardwareAddr: mac}
		if err := h.NeighSet(n); err != nil {
			return fmt.Errorf("set the neighbour %s of %s: %w", p.Addr(), l.Attrs().Name, err)
		}
	}
	return nil
}

// forward lets packets pass, provided that the sidecar lives.
func (t *Topology) forward() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.proc.dead {
		return errors.New("the sidecar is gone")
	}
	return t.sidecar.do(func() error { return forwarding(true, t.ipv6) })
}

func (t *Topology) isClosed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closed
}

// Warnings tells what the kernel lacks, for the developer.
func (t *Topology) Warnings() []string { return t.warnings }

// SidecarDone is closed once the present sidecar is dead and forwarding is off because of it.
func (t *Topology) SidecarDone() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.proc.done
}

// SidecarPID is the process ID of the present sidecar in the caller's namespace.
func (t *Topology) SidecarPID() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.proc.cmd.Process.Pid
}

// ReplaceUplink makes a new uplink namespace with its link after the uplink died, under the policy
// table, and returns the packet socket for the next uplink process. The sandbox need not know. No
// call to the sidecar may be under way.
func (t *Topology) ReplaceUplink(table policy.Table) (*os.File, error) {
	t.ops.Lock()
	defer t.ops.Unlock()
	// A closed netlink handle would open a new socket, in the caller's namespace.
	if t.isClosed() {
		return nil, fmt.Errorf("replace the uplink: %w", os.ErrClosed)
	}
	u, err := newUplinkPlace()
	if err != nil {
		return nil, fmt.Errorf("replace the uplink: %w", err)
	}
	defer u.leave()
	// The old link dies with the old packet socket, but a moment later.
	if old, err := t.h.LinkByName(link.SidecarUpDev); err == nil {
		if err := t.h.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
			return nil, fmt.Errorf("replace the uplink: remove the old link: %w", err)
		}
	}
	if err := t.uplinkLink(u); err != nil {
		return nil, fmt.Errorf("replace the uplink: %w", err)
	}
	f, err := packetSocket(u)
	if err != nil {
		return nil, fmt.Errorf("replace the uplink: %w", err)
	}
	if err := fib.Set(t.h, table); err != nil {
		f.Close()
		return nil, fmt.Errorf("replace the uplink: %w", err)
	}
	return f, nil
}

// ReplaceSidecar starts another sidecar after one died, makes table the policy, lets packets pass
// again, and returns the new control socket.
func (t *Topology) ReplaceSidecar(table policy.Table) (*os.File, error) {
	t.ops.Lock()
	defer t.ops.Unlock()
	if t.isClosed() {
		return nil, fmt.Errorf("replace the sidecar: %w", os.ErrClosed)
	}
	p, control, err := t.startSidecar()
	if err != nil {
		return nil, fmt.Errorf("replace the sidecar: %w", err)
	}
	t.mu.Lock()
	old := t.proc
	t.proc = p
	t.mu.Unlock()
	err = old.kill()
	if err == nil {
		err = p.waitReady()
	}
	if err == nil {
		err = fib.Set(t.h, table)
	}
	if err == nil {
		err = t.forward()
	}
	if err != nil {
		control.Close()
		return nil, errors.Join(fmt.Errorf("replace the sidecar: %w", err), p.kill())
	}
	return control, nil
}

// Close ends the sidecar and releases the namespace. The agent's and the uplink's namespaces go
// with their last descriptors.
func (t *Topology) Close() error {
	t.ops.Lock()
	defer t.ops.Unlock()
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil
	}
	t.closed = true
	p := t.proc
	err := t.sidecar.do(func() error { return forwarding(false, t.ipv6) })
	t.mu.Unlock()
	err = errors.Join(err, p.kill())
	t.h.Close()
	return errors.Join(err, t.sidecar.leave())
}
