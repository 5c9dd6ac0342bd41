package routes

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

// attackerRole is this test binary as a program of the agent: it tries every way out and prints
// how many it tried. What was reached is seen by the world and the host, never by the attacker.
const attackerRole = "lazaret-attacker"

// targets4 and targets6 are all to be denied; 203.0.113.20 and 2001:db8:2::20 by configuration.
var (
	targets4 = []string{"203.0.113.20", "10.1.2.3", "10.9.1.5", "172.16.5.5", "192.168.77.7", "192.168.50.10", "192.168.50.1", "100.64.1.1", "169.254.169.254", "192.0.0.8"}
	targets6 = []string{"2001:db8:2::20", "fd12::10", "fec0::10", "2002:a01:203::1", "64:ff9b::a01:203", "2001:0:1::1", "2001:db8:50::10", "2001:db8:50::1"}
	// hostTargets are the host itself: denied by the policy and by the uplink's own check.
	hostTargets = []string{"192.168.50.2", "198.51.100.77", "2001:db8:50::2", "2001:db8:77::77"}
	// oddTargets cannot be routed by anyone, but are tried.
	oddTargets = []string{"127.0.0.1", "127.0.0.53", "0.0.0.0", "255.255.255.255", "192.168.50.255", "224.0.0.251", "239.255.255.250", "240.0.0.1",
		"198.18.0.1", "198.18.0.5", "198.19.0.1", "198.19.0.2", "::1", "::ffff:10.1.2.3", "::ffff:192.168.50.2", "ff02::1", "fe80::1", "fd6c:617a:6172:1::1", "fd6c:617a:6172:2::1"}
)

func attack() int {
	var wg sync.WaitGroup
	tried := 0
	try := func(f func()) {
		tried++
		wg.Go(f)
	}
	for _, a := range append(append(append(append([]string{}, targets4...), targets6...), hostTargets...), oddTargets...) {
		try(func() { touch("tcp", a, echoPort, nil) })
		try(func() { touch("udp", a, echoPort, nil) })
		try(func() { pingAny(a) })
	}
	for _, a := range targets4[:4] {
		lsrr := append([]byte{131, 7, 4}, append(netip.MustParseAddr(a).AsSlice(), 1)...)
		try(func() {
			touch("udp", allowedDst, sinkPort, func(fd int) { _ = unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, string(lsrr)) })
		})
		try(func() {
			touch("tcp", a, echoPort, func(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, link.Mark) })
		})
		try(func() {
			touch("tcp", a, echoPort, func(fd int) {
				_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1)
				_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
				_ = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{198, 19, 0, 1}})
			})
		})
	}
	for _, proto := range []int{4, 41, 47, 50, 132, 253} {
		try(func() { rawIP(proto, allowedDst, nil) })
	}
	for _, a := range targets4 {
		try(func() { rawIP(unix.IPPROTO_RAW, a, frameSpec{dst: a, proto: 17}.bytes()[14:]) })
		try(func() { rawIP(unix.IPPROTO_RAW, a, frameSpec{src: "192.168.50.2", dst: a, proto: 17}.bytes()[14:]) })
	}
	touch("tcp", allowedDst, echoPort, nil) // to be seen: the attacker has a network
	wg.Wait()
	for _, a := range rawAttacks() {
		tried++
		sendRaw(a.frames)
	}
	fmt.Println("tried", tried)
	return 0
}

func touch(network, addr string, port int, setup func(fd int)) {
	d := net.Dialer{Timeout: 1500 * time.Millisecond}
	if setup != nil {
		d.Control = func(_, _ string, c syscall.RawConn) error { return c.Control(func(fd uintptr) { setup(int(fd)) }) }
	}
	c, err := d.Dial(network, net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		return
	}
	defer c.Close()
	for range 3 { // a datagram of a control may be lost on a busy machine
		_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond))
		_, _ = c.Write([]byte("probe"))
		if _, err := c.Read(make([]byte, 8)); err == nil {
			return
		}
	}
}

func pingAny(addr string) {
	a := netip.MustParseAddr(addr)
	af, proto, sa := unix.AF_INET, unix.IPPROTO_ICMP, unix.Sockaddr(nil)
	if a.Is4() {
		sa = &unix.SockaddrInet4{Addr: a.As4()}
	} else {
		af, proto, sa = unix.AF_INET6, unix.IPPROTO_ICMPV6, &unix.SockaddrInet6{Addr: a.As16()}
	}
	b := []byte{8, 0, 0, 0, 1, 2, 3, 4}
	if a.Is6() {
		b[0] = 128
	}
	binary.BigEndian.PutUint16(b[2:], ^sum(b, 0))
	for _, typ := range []int{unix.SOCK_DGRAM, unix.SOCK_RAW} {
		if fd, err := unix.Socket(af, typ, proto); err == nil {
			_ = unix.Sendto(fd, b, 0, sa)
			unix.Close(fd)
		}
	}
}

func rawIP(proto int, addr string, packet []byte) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, proto)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if packet == nil {
		packet = make([]byte, 32)
	}
	_ = unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: netip.MustParseAddr(addr).As4()})
}

func sendRaw(frames [][]byte) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	ifs, _ := net.Interfaces()
	for _, i := range ifs {
		if i.Flags&net.FlagLoopback != 0 {
			continue
		}
		for _, f := range frames {
			_ = unix.Sendto(fd, f, 0, &unix.SockaddrLinklayer{Ifindex: i.Index, Protocol: 0x0008, Halen: 6})
		}
	}
}

// A watch sees every packet that arrives on an interface.
type watch struct {
	mu   sync.Mutex
	seen map[string]int // "17 10.1.2.3"
	stop func()
}

// watchWire watches what leaves the host towards the world, and what the host says to itself.
func watchWire(t *testing.T) *watch {
	w := &watch{seen: make(map[string]int)}
	var fds []int
	open := func(dev string) error {
		i, err := net.InterfaceByName(dev)
		must(err)
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0x0300)
		must(err)
		must(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20))
		must(unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: i.Index, Protocol: 0x0300}))
		fds = append(fds, fd)
		return nil
	}
	must(theWorld.place.do(func() error { return open("lan0") }), open("lo"))
	var wg sync.WaitGroup
	done := make(chan struct{})
	for _, fd := range fds {
		wg.Go(func() {
			b := make([]byte, 70000)
			for {
				n, from, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
				if err == nil {
					if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
						w.note(b[:n])
					}
					continue
				}
				select {
				case <-done:
					return
				case <-time.After(time.Millisecond):
				}
			}
		})
	}
	w.stop = func() {
		time.Sleep(50 * time.Millisecond)
		close(done)
		wg.Wait()
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
	return w
}

func (w *watch) note(b []byte) {
	if len(b) < 34 {
		return
	}
	var dst netip.Addr
	var proto byte
	switch binary.BigEndian.Uint16(b[12:]) {
	case 0x0800:
		dst, proto = netip.AddrFrom4([4]byte(b[30:])), b[23]
	case 0x86dd:
		if len(b) < 54 {
			return
		}
		dst, proto = netip.AddrFrom16([16]byte(b[38:])), b[20]
		if proto == 58 && len(b) > 54 && b[54] >= 133 && b[54] <= 137 || proto == 0 {
			return // the lab's own neighbour discovery
		}
	default:
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[fmt.Sprintf("%d %s", proto, dst)]++
}

// forbidden lists what was seen but the policy denies, or is of a protocol that never passes.
func (w *watch) forbidden(p *policy.Policy) (bad []string) {
	for k := range w.seen {
		proto, addr, _ := strings.Cut(k, " ")
		if p.Verdict(netip.MustParseAddr(addr)) == policy.Deny || proto != "1" && proto != "6" && proto != "17" && proto != "58" {
			bad = append(bad, k)
		}
	}
	sort.Strings(bad)
	return bad
}

var batteryPolicy = policy.Config{IPv6: "on", Allow: []string{"10.9.0.0/16"}, Deny: []string{"10.9.1.0/24", "203.0.113.20/32", "2001:db8:2::/48"}}

// runAttacker runs the attacker and gives its output.
type runAttacker func(t *testing.T, n *network) string

// TestSR7Battery runs the attacker in three places: as a process of the agent's namespace with all
// its power, and in the sandbox with and without all capabilities. Each place is first shown to
// work without a policy.
func TestSR7Battery(t *testing.T) {
	inSandbox := func(caps bool) runAttacker {
		return func(t *testing.T, n *network) string {
			out, err := n.sandbox(caps, attackerRole)
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			return out
		}
	}
	for _, place := range []struct {
		name string
		run  runAttacker
	}{
		{"namespace", func(t *testing.T, n *network) string {
			var out []byte
			must(n.agent.do(func() (err error) {
				out, err = exec.Command(copySelf(t, attackerRole)).CombinedOutput()
				return err
			}))
			return string(out)
		}},
		{"sandbox", inSandbox(false)},
		{"sandbox with all capabilities", inSandbox(true)},
	} {
		t.Run(place.name, func(t *testing.T) {
			control := 0
			t.Run("control", func(t *testing.T) {
				n := start(t, labOptions{table: &wideOpen, config: batteryPolicy})
				w := watchWire(t)
				out := place.run(t, n)
				w.stop()
				for _, a := range append(append([]string{}, targets4...), targets6...) {
					for _, proto := range []int{6, 17} {
						if w.seen[fmt.Sprintf("%d %s", proto, a)] == 0 {
							t.Errorf("protocol %d does not reach %s without a policy\n%s", proto, a, out)
						}
					}
				}
				bad := w.forbidden(n.policy)
				control = len(bad)
				// The uplink's own check stands without any policy.
				for _, b := range bad {
					for _, own := range append(hostTargets, "127.0.0.1", "127.0.0.53", "::1") {
						if strings.HasSuffix(b, " "+own) {
							t.Errorf("the host itself was reached: %s", b)
						}
					}
				}
			})
			n := start(t, labOptions{config: batteryPolicy})
			w := watchWire(t)
			out := place.run(t, n)
			w.stop()
			if w.seen["6 "+allowedDst] == 0 {
				t.Error("the attacker has no network at all")
			}
			bad := w.forbidden(n.policy)
			for _, b := range bad {
				t.Errorf("reached: %s", b)
			}
			t.Logf("%s; reached %d; without a policy %d", strings.TrimSpace(out), len(bad), control)
		})
	}
}

// copySelf gives this binary under another name, which chooses its role.
func copySelf(t testing.TB, name string) string {
	t.Helper()
	dir := t.TempDir()
	b, err := os.ReadFile("/proc/self/exe")
	must(err)
	path := filepath.Join(dir, name)
	must(os.WriteFile(path, b, 0o755))
	return path
}

// sandbox runs this binary in runsc, in the agent's namespace, and gives its output.
func (n *network) sandbox(caps bool, role string, args ...string) (string, error) {
	t := n.t
	runsc := runscPath(t)
	bundle := t.TempDir()
	root := filepath.Join(bundle, "rootfs")
	must(os.MkdirAll(filepath.Join(root, "proc"), 0o755), os.MkdirAll(filepath.Join(root, "tmp"), 0o755))
	must(os.Rename(copySelf(t, role), filepath.Join(root, role)))
	type m map[string]any
	process := m{"user": m{"uid": 0, "gid": 0}, "cwd": "/", "args": append([]string{"/" + role}, args...), "env": []string{}}
	state, err := os.MkdirTemp("", "runsc") // runsc leaves a mount in it, which goes with the lab
	must(err)
	flags := []string{"--root=" + state, "--ignore-cgroups", "--network=sandbox"}
	if caps {
		all := []string{"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SETUID", "CAP_SETGID", "CAP_DAC_OVERRIDE", "CAP_SYS_CHROOT", "CAP_MKNOD"}
		process["capabilities"] = m{"bounding": all, "effective": all, "permitted": all, "inheritable": all, "ambient": all}
		flags = append(flags, "--net-raw", "--allow-packet-socket-write")
	}
	spec, err := json.Marshal(m{"ociVersion": "1.2.0", "process": process, "root": m{"path": "rootfs", "readonly": true}, "hostname": "agent",
		"mounts": []m{{"destination": "/proc", "type": "proc", "source": "proc"}, {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}},
		"linux":  m{"namespaces": []m{{"type": "network", "path": fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.d.Agent.Fd())}, {"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}}}})
	must(err, os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o644))
	cmd := exec.Command(runsc, append(flags, "run", "--bundle="+bundle, "lab")...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.agent.do(cmd.Start); err != nil {
		return "", err
	}
	err = cmd.Wait()
	return out.String(), err
}

// runscPath finds the runtime of this repository.
func runscPath(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	must(err)
	for ; dir != "/"; dir = filepath.Dir(dir) {
		p := filepath.Join(dir, "bin", "lazaret-runsc")
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	if os.Getenv("LAZARET_TEST_REQUIRE") != "" {
		t.Fatal("bin/lazaret-runsc is required here")
	}
	t.Skip("bin/lazaret-runsc is not built")
	return ""
}

// TestSR7BatteryDuringChanges attacks while the uplink is killed and replaced, the policy flips, and
// all is torn down.
func TestSR7BatteryDuringChanges(t *testing.T) {
	n := start(t, labOptions{config: batteryPolicy})
	other := compileFor(t, policy.Config{IPv6: "on", Default: "deny", Allow: []string{"203.0.113.0/28", "2001:db8:1::/48", "10.9.0.0/16"}, Deny: []string{"10.9.1.0/24"}})
	w := watchWire(t)
	attacker := copySelf(t, attackerRole)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	rounds := 0
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = n.agent.do(exec.Command(attacker).Run)
			rounds++
		}
	})
	ctx := t.Context()
	for i := range 3 {
		for range 50 {
			must(n.ctl.Apply(ctx, other.Table()), n.ctl.Apply(ctx, n.policy.Table()))
		}
		must(syscall.Kill(n.up.PID(), syscall.SIGKILL))
		<-n.up.Exited()
		time.Sleep(100 * time.Millisecond)
		packet, err := n.top.ReplaceUplink(n.ctl.Table())
		must(err)
		must(n.ctl.Replace(func(table policy.Table) (*control.Client, *Uplink, error) {
			n.startUplink(UplinkConfig{Table: table}, packet)
			return nil, n.up, nil
		}))
		if !n.reaches("tcp", allowedDst) {
			t.Errorf("round %d: no network after the repair", i)
		}
	}
	must(n.top.Close())
	time.Sleep(200 * time.Millisecond)
	close(stop)
	wg.Wait()
	w.stop()
	for _, b := range w.forbidden(n.policy) {
		t.Errorf("reached: %s", b)
	}
	t.Logf("%d rounds of the battery, 300 flips, 3 deaths, one teardown", rounds)
}
