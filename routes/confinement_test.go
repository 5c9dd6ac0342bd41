package routes

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/host"
	"lazaret.dev/lazaret/routes/policy"
)

func status(t *testing.T, pid int, field string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(err)
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// TestSR7SidecarIsConfined looks at a running sidecar from outside.
func TestSR7SidecarIsConfined(t *testing.T) {
	n := start(t, labOptions{})
	pid := n.top.SidecarPID()
	const netAdmin = "0000000000001000"
	for _, f := range []string{"CapPrm", "CapEff", "CapBnd"} {
		if v := status(t, pid, f); v != netAdmin {
			t.Errorf("%s is %s", f, v)
		}
	}
	for f, want := range map[string]string{"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"} {
		if v := status(t, pid, f); v != want {
			t.Errorf("%s is %s", f, v)
		}
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	must(err)
	for _, task := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, task.Name()))
		must(err)
		if !strings.Contains(string(b), "CapEff:\t"+netAdmin) || !strings.Contains(string(b), "Seccomp:\t2") {
			t.Errorf("thread %s is not confined", task.Name())
		}
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", pid))
	must(err)
	if s := string(mounts); strings.Count(s, "\n") != 1 || !strings.HasPrefix(s, "tmpfs / tmpfs ro,") {
		t.Errorf("mounts:\n%s", s)
	}
	if es, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid)); err != nil || len(es) != 0 {
		t.Errorf("root: %v, %v", es, err)
	}
	ours, theirs := nsOf(t, os.Getpid(), "net"), nsOf(t, pid, "net")
	if ours == theirs || nsOf(t, os.Getpid(), "mnt") == nsOf(t, pid, "mnt") {
		t.Error("it shares a namespace with the domain process")
	}
	if cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); strings.Contains(string(cmdline), "HOME") {
		t.Errorf("environment %q", cmdline)
	}
}

func nsOf(t *testing.T, pid int, kind string) string {
	t.Helper()
	s, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	must(err)
	return s
}

// TestSR6NothingListensInTheSidecar lists the sockets of the sidecar's namespace: the passed ones.
func TestSR6NothingListensInTheSidecar(t *testing.T) {
	n := start(t, labOptions{})
	var listening []string
	must(n.top.sidecar.do(func() error {
		for _, f := range []string{"tcp", "tcp6", "udp", "udp6", "raw", "raw6"} {
			b, err := os.ReadFile("/proc/thread-self/net/" + f)
			if err != nil {
				continue
			}
			for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n")[1:] {
				listening = append(listening, f+" "+strings.Fields(line)[1])
			}
		}
		return nil
	}))
	slices.Sort(listening)
	want := []string{"tcp 010012C6:0035", "tcp 010012C6:1D13", "udp 010012C6:0035"}
	if !slices.Equal(listening, want) {
		t.Errorf("sockets %v, want %v", listening, want)
	}
}

func TestSR8UplinkIsConfined(t *testing.T) {
	n := start(t, labOptions{})
	pid := n.up.PID()
	for f, want := range map[string]string{"CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"} {
		if v := status(t, pid, f); v != want {
			t.Errorf("%s is %s", f, v)
		}
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	must(err)
	if !strings.Contains(strings.Join(strings.Fields(string(limits)), " "), "Max file size 0 0") {
		t.Errorf("limits:\n%s", limits)
	}
}

// TestWatchFollowsTheHost changes addresses, networks and resolvers of the host and wants each seen.
func TestSR7WatchFollowsTheHost(t *testing.T) {
	dir := t.TempDir()
	files := host.Files{ResolvConf: filepath.Join(dir, "resolv.conf"), Hosts: filepath.Join(dir, "hosts")}
	must(os.WriteFile(files.ResolvConf, []byte("nameserver 127.0.0.53\nsearch corp.example\n"), 0o644))
	must(os.WriteFile(files.Hosts, []byte("127.0.0.1 localhost\n10.0.0.5 Build.Example build # ci\n"), 0o644))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	facts, err := host.Watch(ctx, files)
	must(err)
	first := <-facts
	if !slices.Contains(first.Addrs, mustAddr("198.51.100.77")) || !slices.Contains(first.OnLink, netip.MustParsePrefix("192.168.50.0/24")) ||
		!slices.Contains(first.OnLink, netip.MustParsePrefix("2001:db8:50::/64")) || slices.Contains(first.Addrs, mustAddr("127.0.0.1")) {
		t.Errorf("facts: %+v", first)
	}
	if len(first.Resolvers) != 1 || first.Resolvers[0] != netip.MustParseAddrPort("127.0.0.53:53") || !slices.Equal(first.Search, []string{"corp.example"}) ||
		!slices.Equal(first.Hosts["build.example"], []netip.Addr{mustAddr("10.0.0.5")}) || len(first.Hosts) != 2 {
		t.Errorf("files: %+v", first)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(err)
	defer h.Close()
	// A VPN comes up: an interface, its network, and everything routed into it.
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "vpn0"
	began := time.Now()
	must(h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "vpn1"}))
	up(h, "vpn1")
	up(h, "vpn0", "203.0.113.130/25")
	l, err := h.LinkByName("vpn0")
	must(err)
	_, half, _ := net.ParseCIDR("0.0.0.0/1")
	must(h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: half, Scope: netlink.SCOPE_LINK}))
	vpn := netip.MustParsePrefix("203.0.113.128/25")
	var now host.Facts
	eventually(t, "the VPN is seen", 3*time.Second, func() bool { now = <-facts; return slices.Contains(now.OnLink, vpn) })
	t.Logf("seen after %v", time.Since(began))
	p, err := policy.Compile(policy.Config{}, now.Host, nil, nil)
	must(err)
	if p.Verdict(mustAddr("203.0.113.130")) || p.Verdict(mustAddr("203.0.113.140")) || !p.Verdict(mustAddr("1.1.1.1")) {
		t.Errorf("policy with the VPN: %v", p.Explain(mustAddr("1.1.1.1")))
	}
	must(h.LinkDel(l))
	eventually(t, "the VPN is gone", 3*time.Second, func() bool { now = <-facts; return !slices.Contains(now.OnLink, vpn) })
	must(os.WriteFile(files.ResolvConf+".new", []byte("nameserver 10.1.2.3\n"), 0o644), os.Rename(files.ResolvConf+".new", files.ResolvConf))
	eventually(t, "the resolver is seen", 5*time.Second, func() bool { now = <-facts; return now.Resolvers[0].Addr() == mustAddr("10.1.2.3") })
	cancel()
	for range facts {
	}
}

// TestSR7NewHostAddressIsRefusedAtOnce gives the host an address that the policy allows: the uplink's
// own check refuses it before anyone compiled a new policy.
func TestSR7NewHostAddressIsRefusedAtOnce(t *testing.T) {
	n := start(t, labOptions{})
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(err)
	addAddr(h, lo, "203.0.113.200", true)
	defer func() {
		a, _ := netlink.ParseAddr("203.0.113.200/32")
		must(h.AddrDel(lo, a))
	}()
	l, err := net.Listen("tcp", "203.0.113.200:7")
	must(err)
	defer l.Close()
	go theWorld.accept(l, echo)
	if c, err := net.Dial("tcp", "203.0.113.200:7"); err != nil || !talks(c, time.Second) {
		t.Fatal("control: the service does not work", err)
	}
	theWorld.visits("tcp 203.0.113.200:7")
	if n.policy.Verdict(mustAddr("203.0.113.200")) == policy.Deny {
		t.Fatal("the policy knows already")
	}
	if n.reaches("tcp", "203.0.113.200") || n.reaches("udp", "203.0.113.200") || theWorld.visits("tcp 203.0.113.200:7") > 0 {
		t.Error("reached")
	}
}

// TestUpstreamProxy sends all TCP through a proxy on the host's loopback.
func TestUpstreamProxy(t *testing.T) {
	socks, http := startProxies(t)
	for _, url := range []string{"socks5://user:secret@" + socks, "http://user:secret@" + http} {
		t.Run(strings.SplitN(url, ":", 2)[0], func(t *testing.T) {
			n := start(t, labOptions{proxy: url})
			theWorld.visits("proxy")
			if !n.reaches("tcp", "203.0.113.10") || theWorld.visits("proxy") != 1 {
				t.Error("not through the proxy")
			}
			for _, a := range []string{"10.1.2.3", "198.51.100.77", "192.168.50.10"} {
				if n.reaches("tcp", a) || theWorld.visits("proxy") != 0 {
					t.Errorf("%s was asked of the proxy", a)
				}
			}
		})
	}
	n := start(t, labOptions{noUplink: true})
	_, err := StartUplink(t.Context(), "", []string{uplinkRole}, UplinkFiles{Packet: n.d.Packet, DNSUDP: n.d.DNSUDP, DNSTCP: n.d.DNSTCP}, UplinkConfig{Table: n.policy.Table(), Proxy: "ftp://127.0.0.1:1"})
	if err == nil || !strings.Contains(err.Error(), "ftp") {
		t.Errorf("a wrong proxy: %v", err)
	}
}

// TestRealClients runs programs of the host in the agent's namespace.
func TestRealClients(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		if os.Getenv("LAZARET_TEST_REQUIRE") != "" {
			t.Fatal("curl is required here")
		}
		t.Skip("curl is not installed")
	}
	serveHTTP(t, "203.0.113.10:80")
	n := start(t, labOptions{})
	for _, args := range [][]string{
		{"-sS", "--max-time", "10", "http://203.0.113.10/hello"},
		{"-sS", "--max-time", "20", "-o", "/dev/null", "-w", "%{size_download}", "http://203.0.113.10/large"},
		{"-sS", "--max-time", "20", "--data-binary", "@/proc/self/exe", "http://203.0.113.10/upload"},
	} {
		var out []byte
		err := n.agent.do(func() (err error) { out, err = exec.Command(curl, args...).CombinedOutput(); return err })
		t.Logf("%v: %s %v", args[len(args)-1], out, err)
		if err != nil || len(out) == 0 {
			t.Errorf("%v: %s, %v", args, out, err)
		}
	}
}
