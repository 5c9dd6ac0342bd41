// Package uplink is the process on the host's side of a Domain's network.
//
// It reads the frames that the sidecar forwarded, through a packet socket at the far end of a veth,
// and turns them into ordinary sockets of an unprivileged process: TCP by way of gVisor's network
// stack, UDP and ICMP echo by a relay of batches. It also answers DNS on the sidecar's address.
//
// Kept true:
//   - The policy is evaluated again here, and the host's routing table is asked before each dial:
//     nothing local to the host is reached, whatever the policy says (SR-7).
//   - A destination's refusal is the agent's refusal: the handshake with the agent is completed
//     only after the one with the destination.
//   - Flows and memory are bounded, whatever the agent does (SR-8).
//   - The process has no capability, opens no file, starts no program: a system call filter sees to
//     it. It ends with the coordinator's control socket; its packet socket then takes the uplink
//     namespace and the link with it, so that nothing is forwarded any more (SR-6).
package uplink

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/seccomp"

	"lazaret.dev/lazaret/routes/confine"
	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/policy"
)

// Main is the process; see the FD constants for its descriptors. It is started with an empty
// environment, in the host's network namespace.
func Main() int {
	for fd := FDControl; fd <= FDDNSTCP; fd++ {
		unix.CloseOnExec(fd)
	}
	conn, err := control.NewConn(os.NewFile(FDControl, "control"))
	if err != nil {
		return 1
	}
	u := &uplink{conn: conn}
	if err := control.Serve(conn, u.handle); err != nil {
		u.event(EventFailed, Failed{err.Error()})
		return 1
	}
	return 0
}

type uplink struct {
	conn *control.Conn

	// Set by start, then immutable.
	gate   *gate
	tcp    *tcpRelay
	dgrams *dgramRelay
	dns    *dns.Server
}

func (u *uplink) handle(m control.Message) error {
	if (u.gate == nil) != (m.Op == OpStart) {
		return fmt.Errorf("request %q out of order", m.Op)
	}
	switch m.Op {
	case OpStart:
		var c Config
		if err := json.Unmarshal(m.Body, &c); err != nil {
			return err
		}
		return u.start(c.orDefaults())
	case OpPolicy:
		var t policy.Table
		if err := json.Unmarshal(m.Body, &t); err != nil {
			return err
		}
		return u.setPolicy(t)
	case OpUpstream:
		var up dns.Upstream
		if err := json.Unmarshal(m.Body, &up); err != nil {
			return err
		}
		u.dns.SetUpstream(up)
		return nil
	}
	return fmt.Errorf("unknown request %q", m.Op)
}

func (u *uplink) event(op string, body any) {
	raw, err := json.Marshal(body)
	if err == nil {
		_ = u.conn.Send(control.Message{Op: op, Body: raw}) // the coordinator may be gone; Serve then ends
	}
}

// fail ends the process: a part that stopped must not leave the others running half a network.
func (u *uplink) fail(err error) {
	u.event(EventFailed, Failed{err.Error()})
	os.Exit(1)
}

func (u *uplink) start(c Config) error {
	if err := c.Table.Check(); err != nil {
		return err
	}
	limitSelf(&c)
	dial, err := dialer(c.Proxy)
	if err != nil {
		return err
	}
	routes, err := newHostRoutes()
	if err != nil {
		return err
	}
	g := &gate{routes: routes, proxied: c.Proxy != ""}
	g.policy.Store(policy.NewIndex(c.Table))
	if u.dns, err = u.newDNS(g, c); err != nil {
		return err
	}
	if u.dgrams, err = newDgramRelay(g, FDPacket, c.MaxDatagram); err != nil {
		return err
	}
	if err := u.confine(); err != nil {
		return err
	}
	if u.tcp, err = serveStack(g, u.dgrams, dial, c.MaxTCP); err != nil {
		return err
	}
	go u.dgrams.out()
	go func() { u.fail(u.dgrams.in()) }()
	go func() {
		for now := range time.Tick(5 * time.Second) {
			u.dgrams.expire(now)
		}
	}()
	go func() { u.fail(fmt.Errorf("DNS: %w", u.dns.Serve())) }()
	u.gate = g
	go u.watchMemory(c.Memory)
	return nil
}

func (u *uplink) newDNS(g *gate, c Config) (*dns.Server, error) {
	udpFile, tcpFile := os.NewFile(FDDNSUDP, "DNS UDP"), os.NewFile(FDDNSTCP, "DNS TCP")
	defer udpFile.Close()
	defer tcpFile.Close()
	udp, err := net.FilePacketConn(udpFile)
	if err != nil {
		return nil, fmt.Errorf("DNS socket: %w", err)
	}
	tcp, err := net.FileListener(tcpFile)
	if err != nil {
		return nil, fmt.Errorf("DNS listener: %w", err)
	}
	var journal func(dns.Query)
	if c.Journal {
		journal = func(q dns.Query) { u.event(EventQuery, q) }
	}
	s := dns.New(udp, tcp, dnsGate{g}, journal)
	s.SetUpstream(c.Upstream)
	return s, nil
}

type dnsGate struct{ g *gate }

func (d dnsGate) Allowed(a netip.Addr) bool { return d.g.index().Verdict(a) == policy.Allow }
func (d dnsGate) IPv6() bool                { return d.g.index().IPv6() }

// setPolicy puts t in force for new flows, then resets old ones that it denies.
func (u *uplink) setPolicy(t policy.Table) error {
	if err := t.Check(); err != nil {
		return err
	}
	x := policy.NewIndex(t)
	u.gate.policy.Store(x)
	r := Reset{TCP: u.tcp.revoke(x), Datagram: u.dgrams.revoke(x)}
	if r != (Reset{}) {
		u.event(EventReset, r)
	}
	return nil
}

// reservedFDs are descriptors for everything but flows.
const reservedFDs = 160

// limitSelf bounds what the process can use, and lowers the numbers of flows to what the limit of
// descriptors permits.
func limitSelf(c *Config) {
	debug.SetMemoryLimit(c.Memory * 2)
	runtime.GOMAXPROCS(min(runtime.NumCPU(), 4)) // said aloud, the runtime stops reading cgroup files
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		want := uint64(c.MaxTCP + c.MaxDatagram + reservedFDs)
		if lim.Max < want {
			share := int(max(lim.Max, reservedFDs+2) - reservedFDs)
			c.MaxTCP, c.MaxDatagram = share*2/3, share/3
			want = lim.Max
		}
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: want, Max: want})
	}
	for _, r := range []int{unix.RLIMIT_CORE, unix.RLIMIT_FSIZE} {
		_ = unix.Setrlimit(r, &unix.Rlimit{})
	}
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

func (u *uplink) confine() error {
	if err := confine.KeepCapabilities(); err != nil {
		return err
	}
	internet := seccomp.Or{
		seccomp.PerArg{seccomp.EqualTo(unix.AF_INET)},
		seccomp.PerArg{seccomp.EqualTo(unix.AF_INET6)},
	}
	return confine.Syscalls([]uintptr{
		unix.SYS_CONNECT, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME,
		unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKOPT, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PPOLL,
		unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_SENDMMSG, unix.SYS_RECVMMSG, unix.SYS_FCNTL,
	}, map[uintptr]seccomp.SyscallRule{unix.SYS_SOCKET: internet})
}

var errStack = errors.New("network stack")
