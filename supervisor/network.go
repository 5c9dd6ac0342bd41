package supervisor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"time"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/policy"
	"lazaret.dev/lazaret/routes/uplink"
)

// Time limits of what the network waits for.
const (
	factsTimeout  = 5 * time.Second  // the first look at the host's network
	shedNotices   = time.Minute      // between notices about connections that the sandbox had too many of
	watchPause    = time.Second      // between attempts to watch the host
	helperTimeout = 10 * time.Second // the start of a helper, one change of the policy, one answer of the domain process
)

// network is a Domain's network as the coordinator has it: it compiles the policy from profile, host and live changes,
// runs the uplink, and replaces uplink and sidecar when they die.
//
// Start: newNetwork, connect (the domain process has made everything, the uplink starts), serve (both are ready; from here
// one goroutine owns the state). A session starts only after serve.
// End, by close: the goroutine, the uplink (nothing gets out any more), the sidecar's control socket, the sockets that were
// passed out of the sidecar's namespace. The namespaces end with the domain process, which is killed next.
//
// A dead uplink or sidecar stops all traffic without any of this: its descriptors were what let packets through (SR-6).
type network struct {
	c       *coordinator
	ctx     context.Context // ends with the network
	cancel  context.CancelFunc
	journal *journal
	facts   <-chan routes.HostFacts
	proxy   string // URL with a name or an address, "" for none

	calls   chan networkJob
	answers chan domainAnswer
	started chan error    // of the first uplink; one value
	done    chan struct{} // closed when run has ended; nil before serve
	once    sync.Once

	// State of run; before serve, of the goroutine that starts the Domain.
	dom      *nsenter.Conn
	cfg      Network
	live     []policy.LiveRule
	host     routes.HostFacts
	upstream dns.Upstream // what the uplink has
	ctl      *routes.Control
	side     *control.Client
	up       *routes.Uplink
	ipv6     bool // the links have IPv6
	sideID   string
	dnsUDP   *os.File
	dnsTCP   *os.File
	seq      int
	ill      illness
	next     time.Time // when the next live rule ends, by the wall clock; zero: never
	unseen   time.Time // when to try again to watch the host; zero: it is watched
	shed     time.Time // of the last notice about connections given up
}

// networkJob is one call of a client for run to answer.
type networkJob struct {
	call  networkCall
	reply chan event // one value
}

type domainAnswer struct {
	ready networkReady
	files []*os.File
}

// newNetwork looks at the host and compiles the first policy. It pushes what it makes on u.
func newNetwork(c *coordinator, u *undo) (*network, error) {
	n := &network{c: c, cfg: c.plan.Profile.Network, proxy: c.plan.Network.Proxy, sideID: newSidecarID(),
		calls: make(chan networkJob), answers: make(chan domainAnswer), started: make(chan error, 1)}
	n.cfg.Places = c.plan.Network.Places
	n.ctx, n.cancel = context.WithCancel(context.Background())
	u.push(n.cancel)
	var err error
	if n.journal, err = openJournal(domainRoot(c.plan)); err != nil {
		return nil, err
	}
	u.push(n.journal.close)
	if n.facts, err = routes.WatchHost(n.ctx); err != nil {
		return nil, err
	}
	select {
	case n.host = <-n.facts:
	case <-time.After(factsTimeout):
		return nil, errors.New("network: the kernel does not tell the host's addresses")
	}
	pol, err := n.compile(n.cfg)
	if err != nil {
		return nil, asRefusal(err)
	}
	n.ctl, n.ipv6 = routes.NewControl(pol.Table(), nil, nil), pol.IPv6()
	return n, nil
}

func newSidecarID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return hex.EncodeToString(b)
}

// domainPlan is the plan as the domain process gets it.
func (n *network) domainPlan() Plan {
	p := n.c.plan
	p.Profile.Network.Proxy = "" // it is for the uplink alone
	p.Network = networkPlan{Table: n.ctl.Table(), SidecarID: n.sideID}
	if n.cfg.SearchDomains {
		p.Network.Search = n.host.Search
	}
	return p
}

// compile joins cfg with the host and with the live rules that hold now.
func (n *network) compile(cfg Network) (*policy.Policy, error) {
	active, next := policy.Active(n.live, time.Now())
	pol, err := policy.Compile(cfg.policy(), n.host.Host, active, cfg.Places.locate)
	if err == nil {
		n.live, n.next = active, next
	}
	return pol, err
}

// connect takes the network that the domain process has made, and starts the uplink while that goes on. It owns files.
func (n *network) connect(dom *nsenter.Conn, ready networkReady, files []*os.File) {
	if len(files) != 5 || n.dom != nil {
		nsenter.CloseAll(files) // serve then misses them
		return
	}
	n.dom = dom
	packet, listener, ctlSocket := files[0], files[3], files[4]
	n.dnsUDP, n.dnsTCP = files[1], files[2]
	var err error
	if n.side, err = routes.NewSidecar(ctlSocket); err == nil {
		n.c.escalation, err = net.FileListener(listener)
	}
	listener.Close()
	if err != nil {
		packet.Close()
		n.started <- err
		return
	}
	n.c.notes = append(n.c.notes, ready.Warnings...)
	cfg := n.uplinkConfig(n.ctl.Table())
	go func() {
		up, err := n.startUplink(packet, cfg)
		n.up = up // read after the receive from started
		n.started <- err
	}()
}

func (n *network) uplinkConfig(t policy.Table) routes.UplinkConfig {
	n.upstream = n.wantUpstream()
	return routes.UplinkConfig{Table: t, Upstream: n.upstream, Journal: n.cfg.Journal}
}

// wantUpstream is who is to answer the agent's questions.
func (n *network) wantUpstream() dns.Upstream {
	u := dns.Upstream{Servers: n.host.Resolvers}
	if len(n.cfg.DNS) > 0 {
		u.Servers = nil
		for _, s := range n.cfg.DNS {
			if a, err := parseResolver(s); err == nil { // checked with the profile
				u.Servers = append(u.Servers, a)
			}
		}
	}
	if n.cfg.HostsFile {
		u.Hosts = n.host.Hosts
	}
	return u
}

// startUplink owns packet.
func (n *network) startUplink(packet *os.File, cfg routes.UplinkConfig) (*routes.Uplink, error) {
	ctx, cancel := context.WithTimeout(n.ctx, helperTimeout)
	defer cancel()
	var err error
	if cfg.Proxy, err = resolveProxy(ctx, n.proxy); err != nil {
		packet.Close()
		return nil, err
	}
	return routes.StartUplink(ctx, "", []string{nsenter.RoleName("uplink")}, routes.UplinkFiles{Packet: packet, DNSUDP: n.dnsUDP, DNSTCP: n.dnsTCP}, cfg)
}

// resolveProxy puts an address in the place of the proxy's name: the uplink itself asks no resolver.
func resolveProxy(ctx context.Context, proxy string) (string, error) {
	if proxy == "" {
		return "", nil
	}
	u, err := parseProxy(proxy)
	if err != nil {
		return "", refusal("the proxy "+err.Error(), proxyHint)
	}
	if _, err := netip.ParseAddr(u.Hostname()); err == nil {
		return u.String(), nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil || len(addrs) == 0 {
		return "", hint(fmt.Errorf("find the proxy %s: %w", u.Redacted(), err), "see that the host can resolve its name, or write its address")
	}
	u.Host = net.JoinHostPort(addrs[0].Unmap().String(), u.Port())
	return u.String(), nil
}

// serve waits for the uplink and starts to look after the network.
func (n *network) serve() error {
	if n.dom == nil {
		return errors.New("network: the domain process has not made it")
	}
	if err := <-n.started; err != nil {
		n.started <- nil // for close
		return err
	}
	n.started <- nil
	n.ctl = routes.NewControl(n.ctl.Table(), n.side, n.up)
	n.journal.write("network.up", map[string]any{"sidecar": n.sideID, "uplink_pid": n.up.PID()})
	n.done = make(chan struct{})
	go n.run()
	return nil
}

// close ends the network; see the type for the order. It is idempotent.
func (n *network) close() {
	n.once.Do(func() {
		n.cancel()
		if n.done != nil {
			<-n.done
		} else if n.dom != nil {
			<-n.started
		}
		if n.up != nil {
			_ = n.up.Close()
		}
		if n.side != nil {
			_ = n.side.Close()
		}
		if n.c.escalation != nil {
			_ = n.c.escalation.Close()
		}
		for _, f := range []*os.File{n.dnsUDP, n.dnsTCP} {
			if f != nil {
				f.Close()
			}
		}
	})
}

// run owns the state until the network ends.
func (n *network) run() {
	defer close(n.done)
	// Facts may have changed while the sandbox started.
	for {
		select {
		case <-n.ctx.Done():
			return
		case f, ok := <-n.facts:
			n.hostChanged(f, ok)
		case m, ok := <-n.uplinkEvents():
			if ok {
				n.uplinkSaid(m)
			} else {
				n.uplinkDied()
			}
		case <-n.sidecarDied():
			n.helperDied(&n.ill.sidecar, "sidecar", "")
		case <-after(n.unseen):
			n.watchAgain()
		case <-atWallTime(n.next):
			n.refresh()
		case <-after(n.ill.retry):
			n.repair()
		case job := <-n.calls:
			job.reply <- n.answerCall(job.call)
		}
		if n.ctx.Err() != nil {
			return
		}
	}
}

// after is a channel that is ready at t; never for the zero time.
func after(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(time.Until(t))
}

// atWallTime is ready at t or some seconds before. Timers do not count the time that the host sleeps; a rule's end does.
func atWallTime(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(min(time.Until(t), 5*time.Second))
}

// uplinkEvents is nil while the uplink is known to be dead.
func (n *network) uplinkEvents() <-chan control.Message {
	if n.ill.uplink {
		return nil
	}
	return n.up.Events()
}

func (n *network) sidecarDied() <-chan struct{} {
	if n.ill.sidecar {
		return nil
	}
	return n.side.Done()
}

// hostChanged follows the host: other addresses, other neighbours, other resolvers.
func (n *network) hostChanged(f routes.HostFacts, ok bool) {
	switch {
	case ok:
		n.host = f
		n.refresh()
	case n.ctx.Err() != nil:
	default:
		// Nobody tells us of a new address of the host any more, so nothing may go out until somebody does.
		n.shut("the host's network could no longer be watched")
		n.watchAgain()
	}
}

// watchAgain looks for the host's network until it finds it; the first facts come at once then.
func (n *network) watchAgain() {
	n.unseen = time.Time{}
	var err error
	if n.facts, err = routes.WatchHost(n.ctx); err != nil {
		n.facts, n.unseen = nil, time.Now().Add(watchPause)
		n.journal.write("network.unwatched", err.Error())
	}
}

// refresh puts in force what profile, host and live rules now say.
func (n *network) refresh() {
	pol, err := n.compile(n.cfg)
	if err != nil {
		n.next = time.Time{}
		n.shut("no policy fits the host's network: " + err.Error())
		return
	}
	n.enforce(pol.Table())
}

// enforce makes t the policy, and ends what shut began.
func (n *network) enforce(t policy.Table) {
	if n.ill.shut {
		n.ill.shut = false
		n.ill.retry = time.Now()
	}
	n.apply(t)
}

// shut closes the network until there is a policy that fits.
func (n *network) shut(why string) {
	if !n.ill.shut {
		n.ill.shut = true
		n.stop(why)
	}
}

// apply changes both enforcers. When one does not do as told, which of the policies it has is in doubt, so both are replaced;
// a dead one has closed the way already, and its successor starts with this policy.
func (n *network) apply(t policy.Table) {
	ctx, cancel := context.WithTimeout(n.ctx, helperTimeout)
	defer cancel()
	if !reflect.DeepEqual(t, n.ctl.Table()) {
		n.journal.write("network.policy", t)
		if err := n.ctl.Apply(ctx, t); err != nil && !errors.Is(err, control.ErrGone) {
			n.stop("the policy could not be changed: " + err.Error())
			_ = n.side.Close()
		}
	}
	if up := n.wantUpstream(); !n.ill.uplink && !reflect.DeepEqual(up, n.upstream) {
		if err := n.up.SetUpstream(ctx, up); err == nil {
			n.upstream = up
		} else if !errors.Is(err, control.ErrGone) {
			n.stop("the resolvers could not be changed: " + err.Error())
		}
	}
}

// stop kills the uplink, which closes the only way out; run sees its end and starts another one.
func (n *network) stop(why string) {
	n.ill.why = why
	_ = n.up.Close()
}

// uplinkSaid takes an event of the uplink.
func (n *network) uplinkSaid(m control.Message) {
	switch m.Op {
	case uplink.EventQuery:
		var q dns.Query
		if json.Unmarshal(m.Body, &q) == nil {
			n.journal.write("network.query", q)
		}
	case uplink.EventReset, uplink.EventShed:
		var r uplink.Reset
		if json.Unmarshal(m.Body, &r) != nil {
			return
		}
		n.journal.write("network."+m.Op, r)
		why := "the policy now forbids them"
		if m.Op == uplink.EventShed {
			if time.Since(n.shed) < shedNotices {
				return // the sandbox decides how often this comes (SR-8)
			}
			n.shed = time.Now()
			why = "the sandbox holds too many"
		}
		n.tell(fmt.Sprintf("network: %d connections were cut: %s", r.TCP+r.Datagram, why))
	case uplink.EventFailed:
		var f uplink.Failed
		if json.Unmarshal(m.Body, &f) == nil && n.ill.why == "" {
			n.ill.why = fmt.Sprintf("%q", f.Error) // it has read what the sandbox sent
		}
	}
}

func (n *network) uplinkDied() {
	_ = n.up.Close() // it may live on without its control socket
	n.helperDied(&n.ill.uplink, "uplink", n.ill.why)
	n.ill.why = ""
}

// tell notifies the sessions.
func (n *network) tell(text string) { n.c.notify(text) }
