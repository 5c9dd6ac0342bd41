package routes

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"golang.org/x/net/ipv4"

	"lazaret.dev/lazaret/routes/policy"
)

// clientRole is this test binary as a measuring client in the sandbox. Its arguments are a mode,
// an address with port, a number of flows and a number of seconds; it prints one number.
const clientRole = "lazaret-client"

func client(args []string) int {
	mode, addr := args[0], args[1]
	flows, _ := strconv.Atoi(args[2])
	secs, _ := strconv.ParseFloat(args[3], 64)
	limit := time.Duration(secs * float64(time.Second))
	switch mode {
	case "up", "down":
		fmt.Printf("%.3f\n", bulk(mode, addr, flows, limit)) // Gbit/s
	case "udp-up":
		fmt.Printf("%.3f\n", blast(addr, limit)) // Gbit/s offered
	case "udp-down":
		fmt.Printf("%.3f\n", drink(addr, limit)) // Gbit/s
	case "rtt":
		fmt.Printf("%.1f\n", pingPong(addr, limit)) // microseconds
	case "conns":
		fmt.Printf("%.0f\n", connects(addr, flows, limit)) // per second
	case "dial":
		began := time.Now()
		c, err := net.DialTimeout("tcp", addr, 5*time.Second)
		if err == nil && !talks(c, time.Second) {
			err = errors.New("connected but silent")
		}
		var e syscall.Errno
		errors.As(err, &e)
		fmt.Printf("%d %q %v\n", time.Since(began).Milliseconds(), e.Error(), err)
	case "udp":
		c, err := net.Dial("udp", addr)
		must(err)
		fmt.Println(talks(c, time.Second))
	case "dns":
		q := new(mdns.Msg).SetQuestion("good.test.", mdns.TypeA)
		for _, network := range []string{"udp", "tcp"} {
			a, _, err := (&mdns.Client{Net: network, Timeout: 2 * time.Second}).Exchange(q, addr)
			if err != nil {
				fmt.Println(network, err)
				continue
			}
			fmt.Println(network, mdns.RcodeToString[a.Rcode], len(a.Answer))
		}
	}
	return 0
}

func bulk(mode, addr string, flows int, limit time.Duration) float64 {
	var total atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for range flows {
		wg.Go(func() {
			c, err := net.DialTimeout("tcp", addr, 5*time.Second)
			must(err)
			defer c.Close()
			_ = c.SetDeadline(began.Add(limit))
			b := make([]byte, 256<<10)
			for {
				var n int
				if mode == "up" {
					n, err = c.Write(b)
				} else {
					n, err = c.Read(b)
				}
				total.Add(int64(n))
				if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(total.Load()) * 8 / time.Since(began).Seconds() / 1e9
}

func blast(addr string, limit time.Duration) float64 {
	c, err := net.Dial("udp", addr)
	must(err)
	p := ipv4.NewPacketConn(c.(net.PacketConn))
	msgs := make([]ipv4.Message, 32)
	for i := range msgs {
		msgs[i].Buffers = [][]byte{make([]byte, 1400)}
	}
	sent := 0
	began := time.Now()
	for time.Since(began) < limit {
		n, err := p.WriteBatch(msgs, 0)
		if err != nil {
			continue
		}
		sent += n * 1400
	}
	return float64(sent) * 8 / time.Since(began).Seconds() / 1e9
}

// drink asks for datagrams and counts what comes.
func drink(addr string, limit time.Duration) float64 {
	c, err := net.Dial("udp", addr)
	must(err)
	_ = c.(*net.UDPConn).SetReadBuffer(4 << 20)
	_, err = c.Write([]byte("send"))
	must(err)
	p := ipv4.NewPacketConn(c.(net.PacketConn))
	msgs := make([]ipv4.Message, 64)
	for i := range msgs {
		msgs[i].Buffers = [][]byte{make([]byte, 2048)}
	}
	total := 0
	began := time.Now()
	_ = c.SetDeadline(began.Add(limit))
	for {
		n, err := p.ReadBatch(msgs, 0)
		if err != nil {
			break
		}
		for _, m := range msgs[:n] {
			total += m.N
		}
	}
	return float64(total) * 8 / time.Since(began).Seconds() / 1e9
}

func pingPong(addr string, limit time.Duration) float64 {
	c, err := net.Dial("tcp", addr)
	must(err)
	b := make([]byte, 1)
	n := 0
	began := time.Now()
	for time.Since(began) < limit {
		_, err := c.Write(b)
		must(err)
		_, err = io.ReadFull(c, b)
		must(err)
		n++
	}
	return float64(time.Since(began).Microseconds()) / float64(n)
}

func connects(addr string, flows int, limit time.Duration) float64 {
	var total atomic.Int64
	var wg sync.WaitGroup
	began := time.Now()
	for range flows {
		wg.Go(func() {
			for time.Since(began) < limit {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					continue
				}
				if talks(c, time.Second) {
					total.Add(1)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	return float64(total.Load()) / time.Since(began).Seconds()
}

// TestSandboxClients runs single clients in the sandbox and wants from each what a program there
// would meet.
func TestSandboxClients(t *testing.T) {
	for _, tt := range []struct {
		name, mode, addr string
		want             string // in the output
		quick            bool   // within half a second
	}{
		{"allowed", "dial", "203.0.113.10:7", `"errno 0" <nil>`, true},
		{"allowed IPv6", "dial", "[2001:db8:1::10]:7", `"errno 0" <nil>`, false},
		{"refused", "dial", "203.0.113.10:81", "connection refused", true},
		{"denied", "dial", "10.1.2.3:7", "network is unreachable", true},
		{"denied IPv6", "dial", "[fd12::10]:7", "network is unreachable", true},
		{"host", "dial", "198.51.100.77:7", "network is unreachable", true},
		{"UDP", "udp", "203.0.113.10:7", "true", false},
		{"denied UDP", "udp", "10.1.2.3:7", "false", false},
		{"DNS", "dns", "198.18.0.1:53", "tcp SERVFAIL", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := start(t, labOptions{config: policy.Config{IPv6: "on"}})
			out, err := n.sandbox(false, clientRole, tt.mode, tt.addr, "1", "1")
			if err != nil || !strings.Contains(out, tt.want) {
				t.Fatalf("got %q, %v, want %q", out, err, tt.want)
			}
			var ms int
			if _, err := fmt.Sscan(out, &ms); tt.quick && (err != nil || ms > 500) {
				t.Errorf("it took %s", out)
			}
		})
	}
}

// BenchmarkNetwork measures from inside the sandbox, and for some rows from a process of the agent's
// namespace; "veth" is the sandbox's own limit: a server in the sidecar's namespace, with no uplink
// between. Each figure is one run of two seconds.
func BenchmarkNetwork(b *testing.B) {
	const internet = "203.0.113.10"
	veth := fmt.Sprintf("198.18.0.1:%d", escalationPort)
	for _, row := range []struct {
		name, mode, addr string
		flows            int
		unit             string
		handle           func(net.Conn) // of the server at the veth
	}{
		{"up/1/ours", "up", internet + ":9", 1, "Gbit/s", nil},
		{"up/1/veth", "up", veth, 1, "Gbit/s", sink},
		{"up/4/ours", "up", internet + ":9", 4, "Gbit/s", nil},
		{"down/1/ours", "down", internet + ":19", 1, "Gbit/s", nil},
		{"down/1/veth", "down", veth, 1, "Gbit/s", send},
		{"down/4/ours", "down", internet + ":19", 4, "Gbit/s", nil},
		{"rtt/ours", "rtt", internet + ":7", 1, "us", nil},
		{"rtt/veth", "rtt", veth, 1, "us", echo},
		{"conns/1/ours", "conns", internet + ":7", 1, "conn/s", nil},
		{"conns/16/ours", "conns", internet + ":7", 16, "conn/s", nil},
		{"conns/16/veth", "conns", veth, 16, "conn/s", echo},
		{"udp-up/ours", "udp-up", internet + ":11", 1, "offered-Gbit/s", nil},
		{"udp-down/ours", "udp-down", internet + ":12", 1, "Gbit/s", nil},
		{"namespace/up/1/ours", "up", internet + ":9", 1, "Gbit/s", nil},
		{"namespace/down/1/ours", "down", internet + ":19", 1, "Gbit/s", nil},
		{"namespace/udp-up/ours", "udp-up", internet + ":11", 1, "offered-Gbit/s", nil},
		{"namespace/udp-down/ours", "udp-down", internet + ":12", 1, "Gbit/s", nil},
		{"namespace/rtt/ours", "rtt", internet + ":7", 1, "us", nil},
		{"namespace/conns/16/ours", "conns", internet + ":7", 16, "conn/s", nil},
	} {
		b.Run(row.name, func(b *testing.B) {
			for range b.N {
				n := start(b, labOptions{})
				if row.handle != nil {
					l, err := net.FileListener(n.d.Escalation)
					must(err)
					defer l.Close()
					go theWorld.accept(l, row.handle)
				}
				count := countUDP(b, internet+":11")
				cpu, began := cpuSeconds(n.up.PID()), time.Now()
				pourUDP(b, internet+":12")
				args := []string{row.mode, row.addr, strconv.Itoa(row.flows), "2"}
				run := func() (string, error) { return n.sandbox(false, clientRole, args...) }
				if strings.HasPrefix(row.name, "namespace") {
					run = func() (string, error) {
						cmd := exec.Command(copySelf(b, clientRole), args...)
						var out strings.Builder
						cmd.Stdout = &out
						must(n.agent.do(cmd.Start))
						err := cmd.Wait()
						return out.String(), err
					}
				}
				out, err := run()
				value, perr := strconv.ParseFloat(strings.TrimSpace(out), 64)
				if err != nil || perr != nil {
					b.Fatalf("%q, %v, %v", out, err, perr)
				}
				b.ReportMetric(value, row.unit)
				if row.handle == nil {
					b.ReportMetric(cpuSeconds(n.up.PID())-cpu, "cpu-s")
					b.ReportMetric(residentMB(n.up.PID()), "MB")
				}
				if row.mode == "udp-up" {
					b.ReportMetric(float64(count())*8/min(time.Since(began).Seconds(), 2)/1e9, "arrived-Gbit/s")
				}
				b.ReportMetric(0, "ns/op")
			}
		})
	}
}

// countUDP counts the bytes that arrive at an address of the world.
func countUDP(t testing.TB, addr string) func() int64 {
	t.Helper()
	var c net.PacketConn
	must(theWorld.place.do(func() (err error) { c, err = net.ListenPacket("udp", addr); return err }))
	_ = c.(*net.UDPConn).SetReadBuffer(4 << 20)
	var total atomic.Int64
	go func() {
		p := ipv4.NewPacketConn(c)
		msgs := make([]ipv4.Message, 64)
		for i := range msgs {
			msgs[i].Buffers = [][]byte{make([]byte, 2048)}
		}
		for {
			n, err := p.ReadBatch(msgs, 0)
			if err != nil {
				return
			}
			for _, m := range msgs[:n] {
				total.Add(int64(m.N))
			}
		}
	}()
	t.Cleanup(func() { c.Close() })
	return total.Load
}

// pourUDP sends datagrams for two seconds to whoever asks at an address of the world.
func pourUDP(t testing.TB, addr string) {
	t.Helper()
	var c net.PacketConn
	must(theWorld.place.do(func() (err error) { c, err = net.ListenPacket("udp", addr); return err }))
	t.Cleanup(func() { c.Close() })
	go func() {
		_, to, err := c.ReadFrom(make([]byte, 16))
		if err != nil {
			return
		}
		p := ipv4.NewPacketConn(c)
		msgs := make([]ipv4.Message, 32)
		for i := range msgs {
			msgs[i] = ipv4.Message{Buffers: [][]byte{make([]byte, 1400)}, Addr: to}
		}
		for began := time.Now(); time.Since(began) < 2*time.Second; {
			_, _ = p.WriteBatch(msgs, 0)
		}
	}()
}

func cpuSeconds(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	u, _ := strconv.Atoi(f[11])
	s, _ := strconv.Atoi(f[12])
	return float64(u+s) / 100
}

func residentMB(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.Fields(string(b))[1])
	return float64(n) * float64(os.Getpagesize()) / 1e6
}
