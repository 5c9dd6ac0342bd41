package supervisor

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/routes/link"
	"lazaret.dev/lazaret/routes/policy"
)

// escalationPort is the TCP port of the escalation endpoint on the sidecar's address.
const escalationPort = 7391

// agentNetNS is the file of the staging directory on which the agent's network namespace is mounted.
const agentNetNS = "netns"

// networkPlan is what the processes of a Domain are told about its network.
type networkPlan struct {
	Places    Places       // from the client: where the entries of the profile stand
	Proxy     string       // from the client, for the coordinator alone: it may hold a password
	Table     policy.Table // from the coordinator
	Search    []string     // the same: domains for the resolver inside
	SidecarID string       // the same: names this instance of the sidecar in log and journal
}

// networkReplace asks for a new helper in the place of a dead one, under the given policy.
type networkReplace struct {
	Seq       int          // the answer has it too
	Table     policy.Table // in force from the first packet
	SidecarID string       // replace the sidecar; "": the uplink
}

// networkReady comes from the domain process with descriptors: when the network stands, in the order of
// [routes.Descriptors] without the first; in answer to a networkReplace, the one of the new helper.
type networkReady struct {
	Seq      int
	Err      string   // of a networkReplace
	Warnings []string // of the start
}

// networkSetup is what routes.Setup returns.
type networkSetup struct {
	top *routes.Topology
	fds *routes.Descriptors
	err error
}

// beginNetwork makes the namespaces, links, routes and filters and starts the sidecar, while the steps that follow put
// the file system together; makeNetwork waits for it.
//
// Whatever fails from here on, nothing is left: all of it is in namespaces that end with this process.
func (d *domain) beginNetwork() error {
	d.setup = make(chan networkSetup, 1)
	go func() {
		top, fds, err := routes.Setup(routes.Spec{Table: d.plan.Network.Table, EscalationPort: escalationPort, Sidecar: []string{nsenter.RoleName("sidecar")}})
		d.setup <- networkSetup{top, fds, err}
	}()
	return nil
}

// makeNetwork takes the network when it stands. It sends the coordinator what that needs at once, so that the uplink
// starts while the sandbox does; but there is no sandbox before all of this stands (SR-6).
func (d *domain) makeNetwork() error {
	made := <-d.setup
	if made.err != nil {
		return made.err
	}
	top, fds := made.top, made.fds
	defer fds.Close() // also of the packet socket: a copy kept here would hide the uplink's death
	d.network = top
	d.logSidecar(d.plan.Network.SidecarID)
	if err := raiseLoopback(fds.Agent); err != nil {
		return err
	}
	if err := d.pinNetNS(fds.Agent); err != nil {
		return err
	}
	file := filepath.Join(d.path("base"), "etc/resolv.conf")
	if err := os.WriteFile(file, resolvConf(link.Sidecar4.Addr(), d.plan.Network.Search), 0o644); err != nil {
		return err
	}
	return d.control.Send(domainEvent{Network: &networkReady{Warnings: top.Warnings()}}, fds.Packet, fds.DNSUDP, fds.DNSTCP, fds.Escalation, fds.Control)
}

// raiseLoopback gives the sandbox a loopback interface of its own: runsc takes only interfaces that are up.
func raiseLoopback(ns *os.File) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("enter the agent's network namespace: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("set up the agent's loopback interface: %w", err)
	}
	return nil
}

// pinNetNS gives the agent's namespace a name that only this mount namespace has.
func (d *domain) pinNetNS(ns *os.File) error {
	f, err := os.OpenFile(d.path(agentNetNS), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), f.Name(), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount the agent's network namespace: %w", err)
	}
	return nil
}

// resolvConf is resolv.conf(5) of the sandbox. Search domains are words, so they cannot add a line.
func resolvConf(server netip.Addr, search []string) []byte {
	var b strings.Builder
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(search, " "))
	}
	fmt.Fprintf(&b, "nameserver %s\n", server)
	return []byte(b.String())
}

// logSidecar writes the Network Sidecar's ID into the domain's log.
func (d *domain) logSidecar(id string) {
	fmt.Fprintf(os.Stderr, "sidecar %s: pid %d in the Domain\n", id, d.network.SidecarPID())
}

// replaceNetwork answers one networkReplace; they come one after the other.
func (d *domain) replaceNetwork(r networkReplace) {
	var f *os.File
	var err error
	if r.SidecarID != "" {
		if f, err = d.network.ReplaceSidecar(r.Table); err == nil {
			d.logSidecar(r.SidecarID)
		}
	} else {
		f, err = d.network.ReplaceUplink(r.Table)
	}
	answer := &networkReady{Seq: r.Seq}
	if err != nil {
		answer.Err = err.Error()
		_ = d.control.Send(domainEvent{Network: answer}) // without a coordinator, this process ends
		return
	}
	_ = d.control.Send(domainEvent{Network: answer}, f)
	f.Close()
}
