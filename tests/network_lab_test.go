package tests

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The lab is a pretended host with a pretended world around it, both in namespaces of the user who tests:
//
//	Domains of the ordinary user labUser == host (192.168.50.2, public 198.51.100.77) == world: internet, LAN, private networks, metadata
//
// The test process is root in it, and so can listen to every packet that leaves the host.
const (
	labEnv  = "LAZARET_TEST_LAB"
	labUser = 4242 // has no subordinate ids there
)

const (
	internet  = "203.0.113.10"
	internet2 = "203.0.113.20"
	resolver  = "10.1.2.53" // private: the host may ask it, the agent may not
	proxyAddr = "10.1.2.3:3128"
)

// private is what the agent must not reach unless the profile allows it.
var private = []string{"10.1.2.3", "10.9.1.5", "172.16.5.5", "192.168.77.7", "192.168.50.10", "192.168.50.1", "100.64.1.1", "169.254.169.254", resolver}

// own are addresses of the host, with services on each; no profile can allow them.
var own = []string{"127.0.0.1", "192.168.50.2", "198.51.100.77"}

// inLab runs the calling test again in a lab, unless this is one already.
func inLab(t *testing.T) bool {
	if os.Getenv(labEnv) != "" {
		return true
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts"}
	if os.Getuid() != 0 {
		needsProgram(t, "newuidmap")
		args = append([]string{"--user", "--map-root-user", "--map-auto"}, args...)
	}
	pattern := "^" + t.Name() + "$"
	if _, sub, ok := strings.Cut(flag.Lookup("test.run").Value.String(), "/"); ok {
		pattern += "/" + sub
	}
	cmd := exec.Command(needsProgram(t, "unshare"), append(args, exe, "-test.run="+pattern, "-test.v", "-test.timeout=15m")...)
	cmd.Env = append(os.Environ(), labEnv+"=1", "LAZARET_BIN="+binDir)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	ownedMu.Lock()
	err = cmd.Start()
	if err == nil {
		owned[cmd.Process.Pid] = true
	}
	ownedMu.Unlock()
	needs(t, "a namespace for the lab", err)
	err = cmd.Wait()
	t.Log("\n" + out.String())
	if err != nil || strings.Contains(out.String(), "no tests to run") {
		t.Fatalf("in the lab: %v", err)
	}
	return false
}

// lab is the world as the test sees it.
type lab struct {
	t     *testing.T
	world *netlink.Handle

	mu      sync.Mutex
	visited map[string]int // "tcp 10.1.2.3:7" and how often
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

const echoPort = 7

func newLab(t *testing.T) *lab {
	l := &lab{t: t, visited: map[string]int{}}
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	must(t, os.WriteFile(conf, []byte("search lab.test\nnameserver "+resolver+"\n"), 0o644))
	must(t, unix.Mount(conf, "/etc/resolv.conf", "", unix.MS_BIND, ""))
	// As on hosts with containers; new namespaces inherit it.
	must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		errs <- l.makeWorld()
	}()
	must(t, <-errs)
	return l
}

// makeWorld makes the namespace of the world on this thread, with its services.
func (l *lab) makeWorld() error {
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	hostNS, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer hostNS.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	if l.world, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "lan0", 65520
	if err := l.world.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "lan0", PeerMTU: 65520, PeerNamespace: netlink.NsFd(hostNS.Fd())}); err != nil {
		return err
	}
	addrs := append([]string{internet, internet2}, private...)
	for _, a := range addrs {
		bits := "/32"
		if strings.HasPrefix(a, "192.168.50.") {
			bits = "/24"
		}
		if err := addAddr(l.world, "lan0", a+bits); err != nil {
			return err
		}
	}
	if err := errors.Join(linkUp(l.world, "lo"), linkUp(l.world, "lan0"), addAddr(host, "lo", "198.51.100.77/32"), addAddr(host, "lan0", "192.168.50.2/24"),
		linkUp(host, "lo"), linkUp(host, "lan0")); err != nil {
		return err
	}
	if err := host.RouteAdd(&netlink.Route{Gw: net.ParseIP("192.168.50.1")}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	for _, a := range addrs {
		if err := l.serve(a); err != nil {
			return err
		}
	}
	if err := errors.Join(l.serveDNS(), l.serveProxy()); err != nil {
		return err
	}
	// Back to the host for its own services: a socket stays where it was made.
	if err := unix.Setns(int(hostNS.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	for _, a := range own {
		if err := l.serve(a); err != nil {
			return err
		}
	}
	return nil
}

func addAddr(h *netlink.Handle, dev, prefix string) error {
	link, err := h.LinkByName(dev)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	return h.AddrAdd(link, a)
}

func linkUp(h *netlink.Handle, dev string) error {
	link, err := h.LinkByName(dev)
	if err != nil {
		return err
	}
	return h.LinkSetUp(link)
}

// serve offers echo over TCP and UDP on one address, and notes who comes.
func (l *lab) serve(addr string) error {
	tcp, err := net.Listen("tcp", net.JoinHostPort(addr, fmt.Sprint(echoPort)))
	if err != nil {
		return err
	}
	udp, err := net.ListenPacket("udp", net.JoinHostPort(addr, fmt.Sprint(echoPort)))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			l.visit("tcp " + addr)
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			l.visit("udp " + addr)
			_, _ = udp.WriteTo(b[:n], from)
		}
	}()
	return nil
}

// serveDNS answers for good.test, an internet address, and rebind.test, a private one.
func (l *lab) serveDNS() error {
	udp, err := net.ListenPacket("udp", resolver+":53")
	if err != nil {
		return err
	}
	tcp, err := net.Listen("tcp", resolver+":53")
	if err != nil {
		return err
	}
	answers := map[string]string{"good.test.": internet, "rebind.test.": "10.1.2.3", "proxy.test.": "10.1.2.3"}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		a, known := answers[q.Question[0].Name]
		switch {
		case !known:
			m.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(a)}}
		}
		_ = w.WriteMsg(m)
	})
	go func() { _ = (&dns.Server{PacketConn: udp, Handler: handler}).ActivateAndServe() }()
	go func() { _ = (&dns.Server{Listener: tcp, Handler: handler}).ActivateAndServe() }()
	return nil
}

// serveProxy offers an HTTP proxy on a private address, which the host may use and the agent may not.
func (l *lab) serveProxy() error {
	ln, err := net.Listen("tcp", proxyAddr)
	if err != nil {
		return err
	}
	world, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	connect := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.visit("proxy " + r.Host + " " + r.Header.Get("Proxy-Authorization"))
		var out net.Conn
		err := inNamespace(world, func() (err error) { out, err = net.DialTimeout("tcp", r.Host, time.Second); return err })
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		in, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			out.Close()
			return
		}
		go func() { _, _ = io.Copy(out, in); out.Close() }()
		_, _ = io.Copy(in, out)
		in.Close()
	})
	go func() { _ = http.Serve(ln, connect) }()
	return nil
}

// inNamespace runs f on a thread in a network namespace.
func inNamespace(ns *os.File, f func() error) error {
	errc := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			errc <- err
			return
		}
		errc <- f()
	}()
	return <-errc
}

func (l *lab) visit(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.visited[what]++
}

// visits forgets what it returns.
func (l *lab) visits() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.visited
	l.visited = map[string]int{}
	return v
}

// box makes an ordinary developer of the lab, with the probe in his workspace.
func (l *lab) box(t *testing.T, network string) *box {
	b := newBox(t)
	b.wrap = []string{needsProgram(t, "setpriv"), "--reuid", fmt.Sprint(labUser), "--regid", fmt.Sprint(labUser), "--clear-groups", "--"}
	exe, err := os.ReadFile("/proc/self/exe")
	must(t, err, os.WriteFile(filepath.Join(b.ws, probeName), exe, 0o755))
	l.network(b, network)
	return b
}

// network writes the section [network] of the default profile.
func (l *lab) network(b *box, network string) {
	b.t.Helper()
	b.profile("default", "[network]\n"+network)
	must(b.t, filepath.WalkDir(b.dir, func(p string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(p, labUser, labUser))
	}))
}

// probe runs the probe in the sandbox and returns, by target, what it says.
func (l *lab) probe(b *box, targets ...string) map[string]string {
	b.t.Helper()
	said := map[string]string{}
	for line := range strings.Lines(b.ok(b.enter(append([]string{"./" + probeName}, targets...)...))) {
		target, what, _ := strings.Cut(strings.TrimSpace(line), " = ")
		said[target] = what
	}
	if len(said) != len(targets) {
		b.t.Errorf("%d answers for %d targets: %v", len(said), len(targets), said)
	}
	return said
}

// targets makes TCP and UDP targets for the echo service of addresses.
func targets(addrs ...string) (out []string) {
	for _, a := range addrs {
		out = append(out, fmt.Sprintf("tcp:%s:%d", a, echoPort), fmt.Sprintf("udp:%s:%d", a, echoPort))
	}
	return out
}

// wire listens to everything that the host sends and delivers to itself.
type wire struct {
	mu   sync.Mutex
	seen map[string]int // "PROTOCOL ADDRESS PORT" of the destination
}

func (l *lab) listen(t testing.TB) *wire {
	t.Helper()
	all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all))
	must(t, err, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50000}))
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	w := &wire{seen: map[string]int{}}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2048)
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			select {
			case <-stop:
				return
			default:
			}
			// Each packet once; those for the host itself go out over lo.
			if sll, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && sll.Pkttype == unix.PACKET_OUTGOING {
				w.note(buf[:n])
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done; unix.Close(fd) })
	return w
}

func (w *wire) note(b []byte) {
	if len(b) < 34 || binary.BigEndian.Uint16(b[12:]) != 0x0800 {
		return
	}
	port := uint16(0)
	if ihl := 14 + int(b[14]&15)*4; (b[23] == 6 || b[23] == 17) && len(b) >= ihl+4 {
		port = binary.BigEndian.Uint16(b[ihl+2:])
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[fmt.Sprintf("%d %s %d", b[23], netip.AddrFrom4([4]byte(b[30:])), port)]++
}

// sent waits for what is still on its way, and lists where packets went.
func (w *wire) sent() (out []string) {
	time.Sleep(200 * time.Millisecond)
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range w.seen {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}
