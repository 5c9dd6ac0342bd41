package routes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/host"
	"lazaret.dev/lazaret/routes/policy"
)

// The lab is a pretended world in namespaces of an ordinary user. The test process's own namespace
// is the host; one more holds the internet, a LAN and a metadata service.
//
//	agent, sidecar, uplink namespaces = host (192.168.50.2, own public 198.51.100.77) == world
const (
	sidecarRole = "lazaret-sidecar"
	uplinkRole  = "lazaret-uplink"
	labEnv      = "LAZARET_ROUTES_LAB"
)

func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case attackerRole:
		os.Exit(attack())
	case clientRole:
		os.Exit(client(os.Args[1:]))
	case sidecarRole:
		os.Exit(SidecarMain())
	case uplinkRole:
		os.Exit(UplinkMain())
	}
	if os.Getenv(labEnv) == "" {
		os.Exit(enterLab())
	}
	if err := theWorld.build(); err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// enterLab runs this test binary again in namespaces of its own.
func enterLab() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), labEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	runtime.LockOSThread() // Pdeathsig follows the thread
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		fmt.Fprintln(os.Stderr, "user namespaces are required here:", err)
		return 1
	}
	fmt.Println("no user namespaces, nothing was tested:", err)
	return 0
}

// Addresses of the lab. The first of each family is the internet.
var (
	worldAddrs = []string{
		"203.0.113.10", "203.0.113.20", "198.51.100.200", "10.1.2.3", "10.9.0.5", "10.9.1.5", "172.16.5.5", "192.168.77.7", "100.64.1.1", "169.254.169.254",
		"192.0.0.8", "2001:db8:1::10", "2001:db8:2::20", "fd12::10", "fec0::10", "2002:a01:203::1", "64:ff9b::a01:203", "2001:0:1::1",
	}
	lanAddrs = []string{"192.168.50.10", "2001:db8:50::10"}
	ownAddrs = []string{"192.168.50.2", "198.51.100.77", "2001:db8:50::2", "2001:db8:77::77"}
)

type world struct {
	place *place

	mu      sync.Mutex
	reached map[string]int // "tcp 10.1.2.3:80" and how often
}

var theWorld = &world{reached: make(map[string]int)}

func must(errs ...error) {
	for _, err := range errs {
		if err != nil {
			panic(err)
		}
	}
}

func (w *world) build() (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("proc", "/proc", "proc", 0, ""))
	must(os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 0"), 0))
	// The host forwards, as hosts with containers do: new namespaces inherit it.
	must(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	must(os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0))
	w.place, err = newPlace()
	must(err)
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(err)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "lan0", 65520
	must(h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "lan0", PeerMTU: 65520, PeerNamespace: netlink.NsFd(w.place.ns.Fd())}))
	up(h, "lo", ownAddrs[1]+"/32", ownAddrs[3]+"/128")
	up(h, "lan0", "192.168.50.2/24", "2001:db8:50::2/64")
	must(w.place.do(func() error {
		must(os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0))
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		must(err)
		up(h, "lan0", "192.168.50.1/24", "192.168.50.10/24", "2001:db8:50::1/64", "2001:db8:50::10/64")
		up(h, "lo")
		lo, err := h.LinkByName("lo")
		must(err)
		for _, a := range worldAddrs {
			addAddr(h, lo, netip.MustParseAddr(a).String(), true)
		}
		// No route back but the link: what is not here is unreachable, and said to be.
		must(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
		must(os.WriteFile("/proc/sys/net/ipv4/icmp_ratelimit", []byte("0"), 0))
		return nil
	}))
	route(h, "lan0", "0.0.0.0/0", "192.168.50.1")
	route(h, "lan0", "::/0", "2001:db8:50::1")
	must(w.place.do(func() error { w.serve(append(worldAddrs, lanAddrs...)); return nil }))
	w.serve(append([]string{"127.0.0.1", "::1"}, ownAddrs...))
	return nil
}

func up(h *netlink.Handle, dev string, prefixes ...string) {
	l, err := h.LinkByName(dev)
	must(err)
	for _, p := range prefixes {
		addAddr(h, l, p, false)
	}
	must(h.LinkSetUp(l))
}

func addAddr(h *netlink.Handle, l netlink.Link, s string, single bool) {
	if single {
		a := netip.MustParseAddr(s)
		s = netip.PrefixFrom(a, a.BitLen()).String()
	}
	a, err := netlink.ParseAddr(s)
	must(err)
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	must(h.AddrAdd(l, a))
}

func route(h *netlink.Handle, dev, dst, gw string) {
	l, err := h.LinkByName(dev)
	must(err)
	_, n, err := net.ParseCIDR(dst)
	must(err)
	must(h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: n, Gw: net.ParseIP(gw)}))
}

const (
	echoPort = 7 // TCP and UDP: sends back what it gets
	sinkPort = 9 // TCP: reads; UDP: counts
	sendPort = 19
)

// serve offers services on each address, one socket per address, so it is known which was reached.
func (w *world) serve(addrs []string) {
	for _, a := range addrs {
		for port, handle := range map[int]func(net.Conn){echoPort: echo, sinkPort: sink, sendPort: send} {
			l, err := net.Listen("tcp", net.JoinHostPort(a, fmt.Sprint(port)))
			must(err)
			go w.accept(l, handle)
		}
		c, err := net.ListenPacket("udp", net.JoinHostPort(a, fmt.Sprint(echoPort)))
		must(err)
		go w.echoUDP(c)
	}
}

func (w *world) note(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reached[what]++
}

// visits tells how often what was reached, and forgets it.
func (w *world) visits(what string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.reached[what]
	delete(w.reached, what)
	return n
}

func (w *world) accept(l net.Listener, handle func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		w.note("tcp " + c.LocalAddr().String())
		go func() {
			defer c.Close()
			handle(c)
		}()
	}
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }
func sink(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
func send(c net.Conn) {
	b := make([]byte, 256<<10)
	for {
		if _, err := c.Write(b); err != nil {
			return
		}
	}
}

func (w *world) echoUDP(c net.PacketConn) {
	b := make([]byte, 65536)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		w.note("udp " + c.LocalAddr().String())
		_, _ = c.WriteTo(b[:n], from)
	}
}

// A network is a Domain's network in the lab, whole.
type network struct {
	t       testing.TB
	top     *Topology
	d       *Descriptors
	up      *Uplink
	ctl     *Control
	policy  *policy.Policy
	agent   *place
	sidecar *control.Client
}

type labOptions struct {
	config   policy.Config
	table    *policy.Table // in place of config: to show what an attack does without a policy
	upstream dns.Upstream
	journal  bool
	proxy    string
	noUplink bool
}

func facts(t testing.TB) policy.Host {
	t.Helper()
	f, err := host.Read(host.Files{})
	if err != nil {
		t.Fatal(err)
	}
	return f.Host
}

func compileFor(t testing.TB, c policy.Config) *policy.Policy {
	t.Helper()
	p, err := policy.Compile(c, facts(t), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// wideOpen is no policy at all.
var wideOpen = policy.Table{IPv6: true, Allow: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}

func start(t testing.TB, o labOptions) *network {
	t.Helper()
	n := &network{t: t}
	n.policy = compileFor(t, o.config)
	table := n.policy.Table()
	if o.table != nil {
		table = *o.table
	}
	var err error
	n.top, n.d, err = Setup(Spec{Table: table, EscalationPort: escalationPort, Sidecar: []string{sidecarRole}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.top.Close(); err != nil {
			t.Error(err)
		}
		n.d.Close()
	})
	for _, w := range n.top.Warnings() {
		t.Log("warning:", w)
	}
	side, err := NewSidecar(n.d.Control)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { side.Close() })
	n.sidecar = side
	n.agent = visit(t, n.d.Agent)
	if o.noUplink {
		return n
	}
	n.startUplink(UplinkConfig{Table: table, Upstream: o.upstream, Journal: o.journal, Proxy: o.proxy}, n.d.Packet)
	n.ctl = NewControl(table, side, n.up)
	return n
}

func (n *network) startUplink(c UplinkConfig, packet *os.File) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	u, err := StartUplink(ctx, "", []string{uplinkRole}, UplinkFiles{Packet: packet, DNSUDP: n.d.DNSUDP, DNSTCP: n.d.DNSTCP}, c)
	if err != nil {
		n.t.Fatal(err)
	}
	n.up = u
	n.t.Cleanup(func() { u.Close() })
}

const escalationPort = 7443

// visit gives a thread in an existing namespace.
func visit(t testing.TB, ns *os.File) *place {
	t.Helper()
	p := &place{jobs: make(chan func())}
	errc := make(chan error)
	onOwnThread(func() {
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		errc <- err
		if err != nil {
			return
		}
		for job := range p.jobs {
			job()
		}
	})
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.leaveThread)
	return p
}

// dial connects from the agent's namespace with a kernel socket.
func (n *network) dial(proto, addr string, timeout time.Duration) (c net.Conn, err error) {
	err = n.agent.do(func() error {
		c, err = (&net.Dialer{Timeout: timeout}).Dial(proto, addr)
		return err
	})
	return c, err
}

// talks sends a probe and wants it back.
func talks(c net.Conn, timeout time.Duration) bool {
	_ = c.SetDeadline(time.Now().Add(timeout))
	if _, err := c.Write([]byte("probe")); err != nil {
		return false
	}
	b := make([]byte, 5)
	_, err := io.ReadFull(c, b)
	return err == nil && string(b) == "probe"
}

// reaches tells whether the echo service of addr answers over proto.
func (n *network) reaches(proto, addr string) bool {
	c, err := n.dial(proto, net.JoinHostPort(addr, fmt.Sprint(echoPort)), 2*time.Second)
	if err != nil {
		return false
	}
	defer c.Close()
	timeout := 2 * time.Second
	if proto != "udp" {
		return talks(c, timeout)
	}
	for range 3 { // a busy machine may lose a datagram
		if talks(c, 300*time.Millisecond) {
			return true
		}
	}
	return false
}

func eventually(t testing.TB, what string, limit time.Duration, f func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !f() {
		if time.Since(began) > limit {
			t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}
