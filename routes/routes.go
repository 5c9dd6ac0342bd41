// Package routes gives a Domain the internet and nothing of the developer's private world.
//
// Three network namespaces of the Domain's user namespace are joined by two links:
//
//	agent namespace            sidecar namespace: the policy            uplink namespace       host
//	runsc's stack --packet--> eth0 ==veth== ag0 [routes] up0 ==veth== upx --packet socket--> uplink process
//
// Kept true, for the developer:
//   - Every packet of the sandbox is decided by the routes of the sidecar's namespace, where no
//     process of the sandbox ever is (SR-6, SR-12). They stand before the links can carry anything.
//   - The uplink evaluates the policy a second time and never reaches the host itself (SR-7).
//   - Death of uplink or sidecar stops all traffic; each can be replaced under the same policy
//     without the sandbox noticing more than reset flows.
//   - A change of policy is one switch of a routing rule. No packet sees half a policy.
//
// Who does what:
//
//	domain process    [Setup], then sends [Descriptors] to the coordinator and closes its copies;
//	                  [Topology.ReplaceUplink] and [Topology.ReplaceSidecar] on request;
//	                  watches [Topology.SidecarDone]
//	sidecar process   [SidecarMain]; started by Setup, lives in the sidecar's namespace
//	coordinator       [WatchHost] and package policy compile the table; [NewSidecar];
//	                  [StartUplink]; one [Control] changes both in the safe order
//	uplink process    [UplinkMain]; started by StartUplink, in the host's namespaces
//
// Parsing of configuration files, and what a session is told, are not done here.
package routes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/host"
	"lazaret.dev/lazaret/routes/policy"
	"lazaret.dev/lazaret/routes/sidecar"
	"lazaret.dev/lazaret/routes/uplink"
)

// SidecarMain is the sidecar process.
func SidecarMain() int { return sidecar.Main() }

// UplinkMain is the uplink process.
func UplinkMain() int { return uplink.Main() }

// HostFacts is what the host knows about its network.
type HostFacts = host.Facts

// WatchHost sends the present facts, and again each time they differ. The channel is closed when
// ctx ends, or when the host can no longer be watched, which is a failure of the network.
func WatchHost(ctx context.Context) (<-chan HostFacts, error) {
	return host.Watch(ctx, host.Files{})
}

// UplinkConfig configures an uplink process; see its fields.
type UplinkConfig = uplink.Config

// UplinkFiles are the descriptors of an uplink process. StartUplink closes Packet in any case: while
// a copy is open anywhere, the uplink's death is not seen. The others stay the caller's.
type UplinkFiles struct {
	Packet *os.File
	DNSUDP *os.File
	DNSTCP *os.File
}

// An Uplink is a running uplink process.
type Uplink struct {
	*control.Client
	cmd  *exec.Cmd
	done chan struct{}
}

// StartUplink starts argv (exe "" is this program) as the uplink process in the caller's
// namespaces, and returns once it serves. It ends with its control socket, so with the caller.
func StartUplink(ctx context.Context, exe string, argv []string, files UplinkFiles, c UplinkConfig) (*Uplink, error) {
	if exe == "" {
		exe = "/proc/self/exe"
	}
	ours, theirs, err := control.Pair()
	if err != nil {
		files.Packet.Close()
		return nil, err
	}
	u := &Uplink{done: make(chan struct{})}
	u.cmd = &exec.Cmd{Path: exe, Args: argv, Env: []string{"GOTRACEBACK=none"}, Dir: "/",
		ExtraFiles:  []*os.File{theirs, files.Packet, files.DNSUDP, files.DNSTCP},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	err = u.cmd.Start()
	theirs.Close()
	files.Packet.Close()
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("start the uplink: %w", err)
	}
	go func() {
		_ = u.cmd.Wait()
		close(u.done)
	}()
	if u.Client, err = control.NewClient(ours); err != nil {
		return nil, errors.Join(err, u.kill())
	}
	if err := u.Call(ctx, uplink.OpStart, c); err != nil {
		return nil, errors.Join(fmt.Errorf("start the uplink: %w", err), u.Close())
	}
	return u, nil
}

// Exited is closed when the process is reaped.
func (u *Uplink) Exited() <-chan struct{} { return u.done }

// PID is the process ID.
func (u *Uplink) PID() int { return u.cmd.Process.Pid }

// SetUpstream changes who is asked for names.
func (u *Uplink) SetUpstream(ctx context.Context, up dns.Upstream) error {
	return u.Call(ctx, uplink.OpUpstream, up)
}

func (u *Uplink) kill() error {
	_ = u.cmd.Process.Kill() // it may be gone already
	<-u.done
	return nil
}

// Close ends the process and waits for it.
func (u *Uplink) Close() error {
	err := u.kill()
	_ = u.Client.Close()
	return err
}

// NewSidecar takes the coordinator's end of a sidecar's control socket, which it owns.
func NewSidecar(controlSocket *os.File) (*control.Client, error) {
	return control.NewClient(controlSocket)
}

// A Control changes the policy of a running Domain. Its methods may be called from any goroutine.
type Control struct {
	mu      sync.Mutex
	table   policy.Table // what was last asked for; in force unless the last Apply failed
	sidecar *control.Client
	uplink  *Uplink
}

// NewControl joins the two enforcers. table is the policy that both have.
func NewControl(table policy.Table, sidecar *control.Client, up *Uplink) *Control {
	return &Control{table: table, sidecar: sidecar, uplink: up}
}

// Table is the present policy, for [Topology.ReplaceUplink] and [Topology.ReplaceSidecar].
func (c *Control) Table() policy.Table {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table
}

// Apply makes t the policy: the uplink first, which resets flows that t denies while the resets can
// still pass the reverse-path check of the old routes, then the routes, in one switch. In between a
// destination is open only if both policies allow it, so there is no window in either direction for
// what both agree on. When Apply fails, one of both may still have the old policy; calling it again
// with any table repairs that, and a dead helper is replaced.
func (c *Control) Apply(ctx context.Context, t policy.Table) error {
	if err := t.Check(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.IPv6 && !c.table.IPv6 {
		return ErrIPv6
	}
	c.table = t
	return errors.Join(c.uplink.Call(ctx, uplink.OpPolicy, t), c.sidecar.Call(ctx, sidecar.OpApply, t))
}

// ErrIPv6 is returned when IPv6 is to be switched on in a running Domain, whose links have none.
var ErrIPv6 = errors.New("IPv6 cannot be switched on in a running Domain; leave all its sessions and enter again")

// Replace runs f, which replaces a helper under the given policy, while no change can be under way,
// and takes what it returns; nil keeps the present one.
func (c *Control) Replace(f func(policy.Table) (*control.Client, *Uplink, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, u, err := f(c.table)
	if err != nil {
		return err
	}
	if s != nil {
		c.sidecar = s
	}
	if u != nil {
		c.uplink = u
	}
	return nil
}
