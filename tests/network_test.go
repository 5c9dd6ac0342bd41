package tests

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	uplinkTitle  = "lazaret [uplink]"
	sidecarTitle = "lazaret [sidecar]"
)

// TestNetwork drives Domains of an ordinary user on a pretended host; see [lab].
func TestNetwork(t *testing.T) {
	if !inLab(t) {
		return
	}
	l := newLab(t)
	t.Run("SR6NothingPrivate", l.testNothingPrivate)
	t.Run("Control", l.testControl)
	t.Run("SR7OtherDomain", l.testOtherDomain)
	t.Run("SR6LiveChange", l.testLiveChange)
	t.Run("SR6Reload", l.testReload)
	t.Run("SR6HelperDies", l.testHelperDies)
	t.Run("SR6HostChanges", l.testHostChanges)
	t.Run("SR6NoPolicyFits", l.testNoPolicyFits)
	t.Run("SR6HungHelper", l.testHungHelper)
	t.Run("HostTables", l.testHostTables)
	t.Run("Proxy", l.testProxy)
}

// forbidden lists where packets went that the default policy denies. The resolver is asked by the uplink.
func forbidden(sent []string) (bad []string) {
	for _, s := range sent {
		f := strings.Fields(s)
		addr := netip.MustParseAddr(f[1])
		if addr.String() == resolver && f[2] == "53" || addr == netip.MustParseAddr(internet) || addr == netip.MustParseAddr(internet2) {
			continue
		}
		bad = append(bad, s)
	}
	return bad
}

// testNothingPrivate attacks with the first instruction of the first session, and watches the wire from before the start
// until after the end.
func (l *lab) testNothingPrivate(t *testing.T) {
	b := l.box(t, "")
	w := l.listen(t)
	l.visits()
	good := append(targets(internet, internet2), "name:good.test", "ask-udp:good.test", "ask-tcp:good.test")
	bad := targets(slices.Concat(private, own, []string{"198.18.0.1", "198.18.0.5", "198.19.0.1", "198.19.0.2", "0.0.0.0", "255.255.255.255", "::1", "::ffff:10.1.2.3"})...)
	for _, port := range []int{22, 53, 80, 111, 443, 2375, 3000, 5432, 5353, 8080} {
		bad = append(bad, fmt.Sprintf("tcp:198.18.0.1:%d", port), fmt.Sprintf("tcp:127.0.0.1:%d", port), fmt.Sprintf("tcp:198.19.0.1:%d", port))
	}
	for i, s := range bad { // IPv6 needs brackets
		if kind, rest, _ := strings.Cut(s, ":"); strings.Count(rest, ":") > 1 {
			cut := strings.LastIndex(rest, ":")
			bad[i] = fmt.Sprintf("%s:[%s]%s", kind, rest[:cut], rest[cut:])
		}
	}
	bad = append(bad, "name:rebind.test", "ask-udp:rebind.test")
	said := l.probe(b, append(slices.Clone(good), bad...)...)
	for _, g := range good {
		if r := said[g]; r != "ok" && r != internet && r != "NOERROR" {
			t.Errorf("%s: %s", g, r)
		}
	}
	for _, s := range bad {
		switch r := said[s]; {
		case r == "ok", strings.Contains(r, "10.1.2.3") && strings.HasPrefix(s, "name:"), r == "NOERROR":
			t.Errorf("SR-6: %s: %s", s, r)
		}
	}
	b.wantNoProcess(gone + 3*time.Second)
	for what := range l.visits() {
		if addr := strings.Fields(what)[1]; addr != internet && addr != internet2 {
			t.Errorf("SR-6: the sandbox reached %s", what)
		}
	}
	sent := w.sent()
	for _, s := range forbidden(sent) {
		t.Errorf("SR-6: a packet went to %s", s)
	}
	if !slices.Contains(sent, fmt.Sprintf("6 %s %d", internet, echoPort)) {
		t.Error("the wire saw nothing")
	}
	t.Logf("%d ways tried, 0 open; %d allowed; packets went to %q", len(bad), len(good), sent)
}

// testControl shows that the private targets answer when the profile allows them, and the host itself not even then.
func (l *lab) testControl(t *testing.T) {
	b := l.box(t, `allow = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "192.168.50.0/24", "100.64.0.0/10", "169.254.0.0/16"]
deny = ["10.9.0.0/16"]
journal = true
`)
	l.visits()
	said := l.probe(b, append(targets(slices.Concat(private, own)...), "name:rebind.test")...)
	for _, a := range private {
		want := a != "10.9.1.5"
		for _, s := range targets(a) {
			if (said[s] == "ok") != want {
				t.Errorf("%s: %s", s, said[s])
			}
		}
	}
	if said["name:rebind.test"] != "10.1.2.3" {
		t.Errorf("a name in an allowed network: %s", said["name:rebind.test"])
	}
	for what := range l.visits() {
		if slices.Contains(own, strings.Fields(what)[1]) {
			t.Errorf("SR-7: the sandbox reached the host itself: %s", what)
		}
	}
	files, _ := filepath.Glob(filepath.Join(b.storage(), "domains/*/journal.jsonl"))
	if len(files) != 1 {
		t.Fatalf("journals: %q", files)
	}
	text, err := os.ReadFile(files[0])
	must(t, err)
	for _, want := range []string{`"event":"network.up"`, `"sidecar":"`, `"event":"network.query"`, `"name":"rebind.test."`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the journal lacks %s:\n%s", want, text)
		}
	}
}

// testOtherDomain runs a listener in one Domain, and looks for it from another.
func (l *lab) testOtherDomain(t *testing.T) {
	a, b := l.box(t, ""), l.box(t, "")
	script := `echo ready; exec timeout 60 python3 -c 'import socket
s = socket.socket(); s.bind(("0.0.0.0", 7777)); s.listen(); open("listening", "w").close(); c, f = s.accept(); open("reached", "w").close()'`
	p := a.start(a.shell(script))
	a.waitFile("listening")
	var at []string
	for _, addr := range []string{"198.18.0.2", "198.18.0.1", "198.18.0.6", "198.19.0.1", "198.19.0.2", "192.168.50.2", "127.0.0.1"} {
		at = append(at, "tcp:"+addr+":7777")
	}
	for target, r := range l.probe(b, at...) {
		if r == "ok" || r == "EOF" {
			t.Errorf("SR-7: %s: %s", target, r)
		}
	}
	if _, err := os.Stat(filepath.Join(a.ws, "reached")); err == nil {
		t.Error("SR-11: one Domain reached another")
	}
	_ = p.Process.Signal(os.Interrupt)
	p.wait(patience)
}

// session runs the probe beside what the test does, and returns its answer when it ends.
func (l *lab) session(b *box, target string) (said func() string) {
	var out, errs strings.Builder
	cmd := b.enter("./"+probeName, target)
	cmd.Stdout, cmd.Stderr = &out, &errs
	p := b.start(cmd)
	return func() string {
		p.wait(patience)
		_, what, _ := strings.Cut(strings.TrimSpace(out.String()), " = ")
		return what + "\n" + errs.String()
	}
}

func (l *lab) testLiveChange(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	at := fmt.Sprintf("%s:%d", internet, echoPort)
	said := l.session(b, "stream:"+at)
	b.waitFile("streaming")
	if out := b.ok(b.lazaret("network", "deny", internet+"/32")); !strings.Contains(out, internet) {
		t.Errorf("deny says %q", out)
	}
	begin := time.Now()
	b.waitFile("cut")
	cut := time.Since(begin)
	if s := said(); !strings.Contains(s, "reset by peer") || !strings.Contains(s, "connections were cut: the policy now forbids them") {
		t.Errorf("a forbidden flow must be reset, and the session told: %s", s)
	}
	t.Logf("a forbidden flow was cut %v after the change", cut.Round(time.Millisecond))
	if s := l.probe(b, "tcp:"+at)["tcp:"+at]; s == "ok" {
		t.Errorf("SR-6: %s is open although denied", at)
	}
	r := b.run(b.lazaret("network", "test", internet))
	if r.status != 1 || !strings.Contains(r.out, "a live change") {
		t.Errorf("test of a denied destination: %v", r)
	}
	b.ok(b.lazaret("network", "reset", internet+"/32"))
	b.ok(b.lazaret("network", "allow", "10.1.2.3/32", "--for", "20s"))
	until := time.Now().Add(20 * time.Second)
	said2 := l.probe(b, "tcp:"+at, "tcp:10.1.2.3:7", "tcp:10.9.1.5:7")
	if time.Now().Before(until) && (said2["tcp:"+at] != "ok" || said2["tcp:10.1.2.3:7"] != "ok" || said2["tcp:10.9.1.5:7"] == "ok") {
		t.Errorf("after allow and reset: %v", said2)
	}
	time.Sleep(time.Until(until.Add(200 * time.Millisecond)))
	if s := l.probe(b, "tcp:10.1.2.3:7")["tcp:10.1.2.3:7"]; s == "ok" {
		t.Error("SR-6: a rule outlived its time")
	}
	b.refused(b.lazaret("network", "allow", "127.0.0.0/8"), "loopback", "lazaret: hint:")
	b.refused(b.lazaret("network", "allow", "10.1.2.3/8"), "host bits", "did you mean")
	b.refused(b.lazaret("network", "reset", "10.7.0.0/16"), "no live rule")
	var report struct {
		Running bool
		Sidecar string
		Rules   []struct{ Prefix, Verdict, Layer, Why string }
	}
	must(t, json.Unmarshal([]byte(b.ok(b.lazaret("network", "show", "--json"))), &report))
	if !report.Running || len(report.Sidecar) != 16 || len(report.Rules) < 10 {
		t.Errorf("show: %+v", report)
	}
	release()
	b.refused(b.lazaret("network", "deny", "203.0.113.0/24"), "no Domain", "lazaret: hint:")
}

func (l *lab) testReload(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	l.network(b, `allow = [
  "10.1.0.0/16",
  "10.1.2.1/16",
]`)
	b.refused(b.lazaret("network", "reload"), "default.toml:4: allow[1]", "host bits")
	l.network(b, `allow = [ "10.1.0.0/16" ]
deny = ["10.1.0.0/16"]`)
	b.refused(b.lazaret("network", "reload"), "default.toml:2: allow[0]", "default.toml:3: deny[0]", "contradicts")
	l.network(b, `ipv6 = "on"`)
	b.refused(b.lazaret("network", "reload"), "IPv6 cannot be switched on")
	l.network(b, `allow = ["10.1.0.0/16"]`)
	b.refused(b.enter("true"), "another configuration", "network")
	b.ok(b.lazaret("network", "reload"))
	if s := l.probe(b, "tcp:10.1.2.3:7")["tcp:10.1.2.3:7"]; s != "ok" {
		t.Errorf("after the reload: %s", s)
	}
	if out := b.ok(b.lazaret("network", "test", "10.1.2.3")); !strings.Contains(out, "default.toml:2: allow[0]") {
		t.Errorf("the deciding line is not named: %s", out)
	}
	release()
}

// testHelperDies kills uplink and sidecar: nothing passes until they are replaced, under the same policy; the sandbox lives.
func (l *lab) testHelperDies(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	at := fmt.Sprintf("%s:%d", internet, echoPort)
	must(t, os.WriteFile(filepath.Join(b.ws, "hammer"), nil, 0o644))
	w := l.listen(t)
	attack, use := l.session(b, "hammer:10.1.2.3:7"), l.session(b, "hammer:"+at)
	b.waitFile("hammering")
	for _, title := range []string{uplinkTitle, sidecarTitle} {
		// With the coordinator stopped nobody repairs: what is seen is the kernel's doing alone.
		coord := b.theOne(coordinator).pid
		_ = os.Remove(filepath.Join(b.ws, "streaming"))
		said := l.session(b, "stream:"+at)
		b.waitFile("streaming")
		must(t, syscall.Kill(coord, syscall.SIGSTOP))
		old := b.theOne(title).pid
		l.visits()
		eventually(t, 20*time.Second, "an allowed destination in use", func() bool { return l.visitsOf("tcp "+internet) > 2 })
		must(t, syscall.Kill(old, syscall.SIGKILL))
		time.Sleep(100 * time.Millisecond)
		before := l.visitsOf("tcp " + internet)
		packets := w.count(internet)
		time.Sleep(400 * time.Millisecond)
		if n := l.visitsOf("tcp "+internet) - before; n != 0 {
			t.Errorf("SR-6: %d connections after the death of the %s", n, title)
		}
		// A live uplink still closes at the far end what it had opened.
		if n := w.count(internet) - packets; title == uplinkTitle && n > 0 {
			t.Errorf("SR-6: %d packets more than 100 ms after the death of the %s", n, title)
		}
		must(t, syscall.Kill(coord, syscall.SIGCONT))
		begin := time.Now()
		eventually(t, 10*time.Second, title+" replaced", func() bool { ps := find(title); return len(ps) == 1 && ps[0].pid != old })
		eventually(t, 30*time.Second, "the network works again", func() bool { return l.probe(b, "tcp:"+at)["tcp:"+at] == "ok" })
		t.Logf("%s: replaced and used %v after the coordinator could", title, time.Since(begin).Round(time.Millisecond))
		if title == uplinkTitle {
			if s := said(); !strings.Contains(s, "its uplink ended; nothing passes until it is replaced") || strings.Contains(s, "never cut") {
				t.Errorf("the session of a cut flow: %s", s)
			}
		} // the sidecar's routes have a successor: the flow may go on, and ends with the test
	}
	must(t, os.Remove(filepath.Join(b.ws, "hammer")))
	if s := attack(); !strings.HasPrefix(s, "0 of ") || strings.HasPrefix(s, "0 of 0") {
		t.Errorf("SR-6: connections to a denied address during the deaths: %s", s)
	} else {
		t.Logf("denied connections that worked: %s", strings.SplitN(s, "\n", 2)[0])
	}
	t.Logf("allowed connections that worked, deaths included: %s", strings.SplitN(use(), "\n", 2)[0])
	for _, s := range forbidden(w.sent()) {
		t.Errorf("SR-6: a packet went to %s", s)
	}
	// A helper that dies again and again is not restarted without a pause.
	deaths := 0
	for begin := time.Now(); time.Since(begin) < 3*time.Second; {
		if ps := find(uplinkTitle); len(ps) == 1 && syscall.Kill(ps[0].pid, syscall.SIGKILL) == nil {
			deaths++
			eventually(t, time.Second, "the end of the uplink", func() bool { return syscall.Kill(ps[0].pid, 0) != nil || len(find(uplinkTitle)) == 0 })
		}
		time.Sleep(20 * time.Millisecond)
	}
	if deaths > 6 {
		t.Errorf("%d uplinks within 3 s", deaths)
	}
	t.Logf("%d uplinks killed within 3 s", deaths)
	release()
}

func (l *lab) visitsOf(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.visited[what]
}

// count is the number of TCP packets to an address.
func (w *wire) count(addr string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, v := range w.seen {
		if strings.HasPrefix(k, "6 "+addr+" ") {
			n += v
		}
	}
	return n
}

// testHostChanges gives the host an address and a network that were the internet's until then.
func (l *lab) testHostChanges(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(t, err)
	defer h.Close()
	target := fmt.Sprintf("tcp:%s:%d", internet2, echoPort)
	if s := l.probe(b, target)[target]; s != "ok" {
		t.Fatal(s)
	}
	must(t, addAddr(h, "lan0", "203.0.113.30/28"))
	eventually(t, 3*time.Second, "the host's new network denied", func() bool {
		return strings.Contains(b.run(b.lazaret("network", "test", internet2)).out, "attached to")
	})
	if s := l.probe(b, target)[target]; s == "ok" {
		t.Error("SR-6: a neighbour of the host was reached")
	}
	lan, err := h.LinkByName("lan0")
	must(t, err)
	a, err := netlink.ParseAddr("203.0.113.30/28")
	must(t, err, h.AddrDel(lan, a))
	eventually(t, 3*time.Second, "the network open again", func() bool {
		return b.run(b.lazaret("network", "test", internet2)).status == 0
	})
	if s := l.probe(b, target)[target]; s != "ok" {
		t.Error(s)
	}
	release()
}

// testNoPolicyFits gives the host more addresses than a policy can name: nothing may pass until it has fewer.
func (l *lab) testNoPolicyFits(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(t, err)
	defer h.Close()
	lo, err := h.LinkByName("lo")
	must(t, err)
	addrs := make([]*netlink.Addr, 2100)
	for i := range addrs {
		addrs[i], err = netlink.ParseAddr(fmt.Sprintf("10.200.%d.%d/32", i/250, i%250+1))
		must(t, err, h.AddrAdd(lo, addrs[i]))
	}
	eventually(t, 10*time.Second, "no uplink", func() bool { return len(find(uplinkTitle)) == 0 })
	time.Sleep(500 * time.Millisecond)
	target := fmt.Sprintf("tcp:%s:%d", internet, echoPort)
	if s := l.probe(b, target)[target]; s == "ok" || len(find(uplinkTitle)) != 0 {
		t.Errorf("SR-6: open without a policy: %s", s)
	}
	for _, a := range addrs {
		must(t, h.AddrDel(lo, a))
	}
	eventually(t, 30*time.Second, "open again", func() bool { return l.probe(b, target)[target] == "ok" })
	release()
}

// testHungHelper stops the sidecar, so that a change cannot be made: both helpers are replaced under the new policy.
func (l *lab) testHungHelper(t *testing.T) {
	b := l.box(t, "")
	_, release := b.hold()
	side, up := b.theOne(sidecarTitle).pid, b.theOne(uplinkTitle).pid
	must(t, syscall.Kill(side, syscall.SIGSTOP))
	b.ok(b.lazaret("network", "deny", internet2+"/32"))
	eventually(t, 10*time.Second, "both replaced", func() bool {
		s, u := find(sidecarTitle), find(uplinkTitle)
		return len(s) == 1 && s[0].pid != side && len(u) == 1 && u[0].pid != up
	})
	eventually(t, 30*time.Second, "the network works", func() bool { return l.probe(b, targets(internet)...)[targets(internet)[0]] == "ok" })
	if s := l.probe(b, targets(internet2)...)[targets(internet2)[0]]; s == "ok" {
		t.Error("SR-6: the change was lost")
	}
	release()
}

// testProxy sends all TCP through the developer's proxy, named by a variable; the agent cannot reach the proxy itself.
func (l *lab) testProxy(t *testing.T) {
	b := l.box(t, `proxy_env = "MY_PROXY"`)
	b.extra = []string{"MY_PROXY=http://me:secret@proxy.test:3128"}
	l.visits()
	at := fmt.Sprintf("tcp:%s:%d", internet, echoPort)
	said := l.probe(b, at, "tcp:"+proxyAddr, "tcp:10.1.2.3:7")
	if said[at] != "ok" || said["tcp:"+proxyAddr] == "ok" || said["tcp:10.1.2.3:7"] == "ok" {
		t.Errorf("%v", said)
	}
	v := l.visits()
	want := fmt.Sprintf("proxy %s:%d Basic bWU6c2VjcmV0", internet, echoPort)
	if v[want] != 1 || v["tcp "+internet] != 1 || len(v) != 2 {
		t.Errorf("visits %v", v)
	}
	b.extra = []string{"MY_PROXY=http://nowhere.test:3128"}
	b.refused(b.enter("true"), "find the proxy", "nowhere.test", "lazaret: hint:")
	b.wantNothingLeft()
}

// testHostTables uses the host's search domains and hosts file, and a resolver of the profile.
func (l *lab) testHostTables(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts")
	must(t, os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"+internet2+" table.lab.test\n"), 0o644))
	must(t, unix.Mount(hosts, "/etc/hosts", "", unix.MS_BIND, ""))
	defer func() { must(t, unix.Unmount("/etc/hosts", unix.MNT_DETACH)) }()
	b := l.box(t, "search_domains = true\nhosts_file = true\ndns = [\""+resolver+"\"]\n")
	said := l.probe(b, "name:table", "name:good.test", "name:localhost")
	if said["name:table"] != internet2 || said["name:good.test"] != internet || !strings.Contains(said["name:localhost"], "127.0.0.1") {
		t.Errorf("%v", said)
	}
}

// TestNetworkConfigErrors needs no lab: a fault is told before anything starts.
func TestNetworkConfigErrors(t *testing.T) {
	b := newBox(t)
	for _, tt := range []struct {
		network string
		want    []string
	}{
		{"allow = [\"10.0.0.1/8\"]", []string{"default.toml:2: allow[0]", "host bits", `did you mean "10.0.0.0/8"`}},
		{"allow = [\n # ours\n \"10.0.0.0/8\", \"example.com\" ]", []string{"default.toml:4: allow[1]", "is a name"}},
		{"deny = [\"1.2.3.4\"]\nipv6 = \"yes\"\n", []string{"default.toml:2: deny[0]", "no prefix length", "default.toml:3: ipv6", `"yes"`}},
		{"allow = [\"9.0.0.0/8\"]\ndeny = [\"8.0.0.0/8\", \"9.0.0.0/8\"]", []string{"default.toml:2: allow[0]", "contradicts", "default.toml:3: deny[1]"}},
		{"allow = [\"127.0.0.1/32\"]", []string{"allow[0]", "loopback"}},
		{"dns = [\"9.9.9.9\", \"dns.test\"]", []string{"default.toml:2: dns[1]", "address of a resolver"}},
		{"proxy = \"ftp://u:secret@h\"", []string{"default.toml:2: proxy", "neither socks5 nor http"}},
		{"proxy = \"http://h\"\nproxy_env = \"HTTPS_PROXY\"", []string{"default.toml:3: proxy_env", "default.toml:2: proxy"}},
		{"proxy_env = \"HTTPS_PROXY\"", []string{"HTTPS_PROXY is not set"}},
		{"alow = []", []string{"alow"}},
	} {
		b.profile("default", "[network]\n"+tt.network+"\n")
		cmd := b.enter("true")
		b.refused(cmd, append(tt.want, "lazaret: hint:")...)
		if r := b.run(b.enter("true")); strings.Contains(r.err, "secret") {
			t.Errorf("a password is shown: %v", r)
		}
	}
	b.profile("default", "network = {allow = [\"10.2.0.0/16\"], deny = [\"10.2.3.0/24\"]}\n")
	if r := b.run(b.lazaret("network", "test", "10.2.3.4")); r.status != 1 || !strings.Contains(r.out, "default.toml:1: deny[0]") || !strings.Contains(r.out, "default.toml:1: allow[0]") {
		t.Errorf("test without a Domain: %v", r)
	}
	if r := b.run(b.lazaret("network", "test", "10.2.4.4")); r.status != 0 {
		t.Errorf("test without a Domain: %v", r)
	}
	if out := b.ok(b.lazaret("network", "show")); !strings.Contains(out, "not running") || !strings.Contains(out, "RFC 1918") {
		t.Errorf("show without a Domain: %s", out)
	}
}
