package routes

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/policy"
	"lazaret.dev/lazaret/routes/sidecar"
	"lazaret.dev/lazaret/routes/uplink"
)

// flips is how many policy changes the flip test makes; LAZARET_TEST_FLIPS asks for more.
func flips(t *testing.T) int {
	if s := os.Getenv("LAZARET_TEST_FLIPS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return 2000
}

// TestSR6NoWindowInAPolicyChange flips between two policies beneath probers. One destination is
// allowed by both, one denied by both, and each of the two differs in the rest.
func TestSR6NoWindowInAPolicyChange(t *testing.T) {
	n := start(t, labOptions{config: policy.Config{Deny: []string{"203.0.113.20/32"}}})
	tables := []policy.Table{
		compileFor(t, policy.Config{Default: "deny", Allow: []string{"203.0.113.0/24", "10.9.0.0/16"}, Deny: []string{"203.0.113.20/32"}}).Table(),
		compileFor(t, policy.Config{Allow: []string{"10.1.0.0/16"}, Deny: []string{"203.0.113.16/28", "10.1.2.0/24"}}).Table(),
	}
	theWorld.visits("tcp 203.0.113.20:7")
	theWorld.visits("tcp 10.1.2.3:7")
	theWorld.visits("udp 203.0.113.20:7")
	ctx, cancel := context.WithCancel(context.Background())
	var allowed, failed, denied, opened atomic.Int64
	var wg sync.WaitGroup
	probe := func(f func(p *place)) {
		p := visit(t, n.d.Agent)
		wg.Go(func() {
			for ctx.Err() == nil {
				f(p)
			}
		})
	}
	connect := func(p *place, addr string) (err error) {
		return p.do(func() error {
			c, err := (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp", addr)
			if err == nil {
				_ = c.(*net.TCPConn).SetLinger(0)
				c.Close()
			}
			return err
		})
	}
	probe(func(p *place) {
		allowed.Add(1)
		if err := connect(p, "203.0.113.10:7"); err != nil {
			failed.Add(1)
			t.Log("allowed by both:", err)
		}
	})
	for _, addr := range []string{"203.0.113.20:7", "10.1.2.3:7"} {
		probe(func(p *place) {
			denied.Add(1)
			if connect(p, addr) == nil {
				opened.Add(1)
			}
		})
	}
	probe(func(p *place) {
		_ = p.do(func() error {
			c, err := net.Dial("udp", "203.0.113.20:7")
			if err == nil {
				_, _ = c.Write([]byte("x"))
				c.Close()
			}
			return nil
		})
		time.Sleep(100 * time.Microsecond)
	})
	began := time.Now()
	count := flips(t)
	for i := range count {
		// Most changes go to the routes alone, where a window would be; some to both enforcers.
		var err error
		if i%50 == 0 {
			err = n.ctl.Apply(ctx, tables[i%2])
		} else {
			err = n.sidecar.Call(ctx, sidecar.OpApply, tables[i%2])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	took := time.Since(began)
	cancel()
	wg.Wait()
	t.Logf("%d flips in %v; allowed by both: %d connects, %d failed; denied by both: %d connects, %d opened", count, took, allowed.Load(), failed.Load(), denied.Load(), opened.Load())
	reached := theWorld.visits("tcp 203.0.113.20:7") + theWorld.visits("tcp 10.1.2.3:7") + theWorld.visits("udp 203.0.113.20:7")
	if failed.Load() > 0 || opened.Load() > 0 || reached > 0 {
		t.Errorf("a window: %d failed, %d opened, %d reached", failed.Load(), opened.Load(), reached)
	}
	if allowed.Load() < 50 || denied.Load() < 50 {
		t.Errorf("the probers hardly ran")
	}
}

// TestSR6RevokedFlowsAreReset opens flows, denies their destination, and wants both sides reset.
func TestSR6RevokedFlowsAreReset(t *testing.T) {
	n := start(t, labOptions{})
	keep, err := n.dial("tcp", "198.51.100.200:7", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	c, err := n.dial("tcp", "203.0.113.10:7", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !talks(c, time.Second) || !talks(keep, time.Second) {
		t.Fatal("no flow to revoke")
	}
	_ = c.SetDeadline(time.Time{})
	got := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		got <- err
	}()
	deny := compileFor(t, policy.Config{Deny: []string{"203.0.113.0/24"}})
	began := time.Now()
	if err := n.ctl.Apply(context.Background(), deny.Table()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-got:
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the flow ended with %v", err)
		}
		t.Logf("reset after %v", time.Since(began))
	case <-time.After(2 * time.Second):
		t.Error("the flow was not reset")
	}
	if !talks(keep, time.Second) {
		t.Error("a flow that is still allowed was disturbed")
	}
	select {
	case e := <-n.up.Events():
		if e.Op != uplink.EventReset {
			t.Errorf("event %s", e.Op)
		}
	case <-time.After(time.Second):
		t.Error("the reset was not reported")
	}
	if n.reaches("tcp", "203.0.113.10") || n.reaches("udp", "203.0.113.10") {
		t.Error("still reachable")
	}
	if err := n.ctl.Apply(context.Background(), compileFor(t, policy.Config{}).Table()); err != nil {
		t.Fatal(err)
	}
	if !n.reaches("tcp", "203.0.113.10") || !n.reaches("udp", "203.0.113.10") {
		t.Error("not reachable again")
	}
}

func TestIPv6CannotBeSwitchedOnLive(t *testing.T) {
	n := start(t, labOptions{})
	if err := n.ctl.Apply(context.Background(), compileFor(t, policy.Config{IPv6: "on"}).Table()); !errors.Is(err, ErrIPv6) {
		t.Errorf("got %v", err)
	}
	if err := n.ctl.Apply(context.Background(), policy.Table{}); err == nil {
		t.Error("an empty table was applied")
	}
}

// TestSR6UplinkDeathFailsClosed kills the uplink under traffic and wants silence within 100 ms,
// then replaces it under the same policy.
func TestSR6UplinkDeathFailsClosed(t *testing.T) {
	n := start(t, labOptions{config: policy.Config{Deny: []string{"203.0.113.20/32"}}})
	c, err := n.dial("tcp", "203.0.113.10:19", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.ReadFull(c, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	must(syscall.Kill(n.up.PID(), syscall.SIGKILL))
	<-n.up.Done() // the coordinator's notice
	died := time.Now()
	gone := eventually(t, "the link is gone", time.Second, func() bool { _, err := n.top.h.LinkByName("up0"); return err != nil })
	t.Logf("link gone %v after the notice", gone)
	if n.reaches("tcp", "203.0.113.10") {
		t.Error("reached without an uplink")
	}
	if d := time.Since(died); d > 100*time.Millisecond {
		t.Logf("failing took %v", d)
	}
	packet, err := n.top.ReplaceUplink(n.ctl.Table())
	if err != nil {
		t.Fatal(err)
	}
	err = n.ctl.Replace(func(table policy.Table) (*control.Client, *Uplink, error) {
		n.startUplink(UplinkConfig{Table: table}, packet)
		return nil, n.up, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("repaired %v after the notice", time.Since(died))
	if !n.reaches("tcp", "203.0.113.10") || !n.reaches("udp", "203.0.113.10") {
		t.Error("not reachable after the repair")
	}
	for _, a := range []string{"203.0.113.20", "10.1.2.3", "198.51.100.77"} {
		if n.reaches("tcp", a) {
			t.Errorf("%s is open after the repair", a)
		}
	}
	_ = c.SetDeadline(time.Now().Add(3 * time.Second))
	_, werr := c.Write([]byte("x")) // the reset is told once, here or there
	if _, err := io.Copy(io.Discard, c); !errors.Is(errors.Join(werr, err), syscall.ECONNRESET) {
		t.Errorf("the old flow ended with %v, want a reset", err)
	}
	if err := n.ctl.Apply(context.Background(), compileFor(t, policy.Config{Deny: []string{"203.0.113.10/32"}}).Table()); err != nil {
		t.Fatal(err)
	}
	if n.reaches("tcp", "203.0.113.10") {
		t.Error("a change after the repair has no effect")
	}
}

// TestSR6SidecarDeathFailsClosed kills the sidecar: forwarding is off before anyone is told.
func TestSR6SidecarDeathFailsClosed(t *testing.T) {
	n := start(t, labOptions{})
	if !n.reaches("tcp", "203.0.113.10") {
		t.Fatal("no network")
	}
	done := n.top.SidecarDone()
	began := time.Now()
	must(syscall.Kill(n.top.SidecarPID(), syscall.SIGKILL))
	<-done
	t.Logf("forwarding off %v after the kill", time.Since(began))
	if d := time.Since(began); d > 100*time.Millisecond {
		t.Errorf("took %v", d)
	}
	if n.reaches("tcp", "203.0.113.10") || n.reaches("udp", "203.0.113.10") {
		t.Error("reached without a sidecar")
	}
	<-n.sidecar.Done()
	if err := n.ctl.Apply(context.Background(), n.ctl.Table()); !errors.Is(err, control.ErrGone) {
		t.Errorf("a change without a sidecar: %v", err)
	}
	err := n.ctl.Replace(func(table policy.Table) (*control.Client, *Uplink, error) {
		f, err := n.top.ReplaceSidecar(table)
		if err != nil {
			return nil, nil, err
		}
		c, err := NewSidecar(f)
		t.Cleanup(func() { c.Close() })
		return c, nil, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if !n.reaches("tcp", "203.0.113.10") || n.reaches("tcp", "10.1.2.3") {
		t.Error("the repaired network is wrong")
	}
	if err := n.ctl.Apply(context.Background(), compileFor(t, policy.Config{Deny: []string{"203.0.113.10/32"}}).Table()); err != nil {
		t.Fatal(err)
	}
	if n.reaches("tcp", "203.0.113.10") {
		t.Error("the new sidecar does not apply changes")
	}
}

// TestClosedTopology wants errors, not more, from calls that come too late.
func TestClosedTopology(t *testing.T) {
	n := start(t, labOptions{})
	if err := errors.Join(n.top.Close(), n.top.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.top.ReplaceSidecar(n.ctl.Table()); err == nil {
		t.Error("a sidecar was started")
	}
	if _, err := n.top.ReplaceUplink(n.ctl.Table()); err == nil {
		t.Error("an uplink link was made")
	}
	if n.reaches("tcp", "203.0.113.10") {
		t.Error("reached after the end")
	}
}

// TestSR6CoordinatorDeathEndsHelpers closes the coordinator's ends: both helpers end, and with them all
// forwarding.
func TestSR6CoordinatorDeathEndsHelpers(t *testing.T) {
	n := start(t, labOptions{})
	done := n.top.SidecarDone()
	n.sidecar.Close()
	n.up.Client.Close()
	for name, ch := range map[string]<-chan struct{}{"sidecar": done, "uplink": n.up.Exited()} {
		select {
		case <-ch:
		case <-time.After(time.Second):
			t.Errorf("the %s outlives the coordinator", name)
		}
	}
	if n.reaches("tcp", "203.0.113.10") {
		t.Error("reached without a coordinator")
	}
}

// TestSR6NoPacketBeforeRoutes sends to denied destinations from the agent's namespace while the
// network is made, and reads every frame that arrives at the uplink's end.
func TestSR6NoPacketBeforeRoutes(t *testing.T) {
	p := compileFor(t, policy.Config{})
	stop := make(chan struct{})
	var sent atomic.Int64
	var wg sync.WaitGroup
	hook := func(b *builder, step string) error {
		if step != "uplink namespace" { // the agent's has just been made
			return nil
		}
		flood := visit(t, b.a.ns)
		wg.Go(func() {
			fd := -1
			_ = flood.do(func() (err error) {
				fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				return err
			})
			defer unix.Close(fd)
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, a := range []string{"10.1.2.3", "192.168.50.10", "169.254.169.254", "198.51.100.77"} {
					if unix.Sendto(fd, []byte("early"), 0, &unix.SockaddrInet4{Port: 7, Addr: netip.MustParseAddr(a).As4()}) == nil {
						sent.Add(1)
					}
				}
				time.Sleep(20 * time.Microsecond)
			}
		})
		return nil
	}
	top, d, err := Setup(Spec{Table: p.Table(), Sidecar: []string{sidecarRole}, step: hook})
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	defer d.Close()
	allowed := visit(t, d.Agent)
	must(allowed.do(func() error {
		c, err := net.Dial("udp", "203.0.113.10:7")
		if err == nil {
			defer c.Close()
			_, err = c.Write([]byte("control"))
		}
		return err
	}))
	time.Sleep(50 * time.Millisecond)
	close(stop)
	wg.Wait()
	frames, controls := 0, 0
	b := make([]byte, 70000)
	for {
		n, _, err := unix.Recvfrom(int(d.Packet.Fd()), b, unix.MSG_DONTWAIT)
		if err != nil {
			break
		}
		frames++
		if n < 10+14+20 {
			t.Fatalf("frame of %d bytes", n)
		}
		dst := netip.AddrFrom4([4]byte(b[10+14+16:]))
		if dst == netip.MustParseAddr("203.0.113.10") {
			controls++
			continue
		}
		t.Errorf("a packet for %s left", dst)
	}
	t.Logf("%d packets sent, %d frames left, %d of them allowed", sent.Load(), frames, controls)
	if sent.Load() == 0 || controls != 1 {
		t.Error("the watch saw nothing")
	}
}
