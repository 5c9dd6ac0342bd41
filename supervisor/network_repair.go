package supervisor

import (
	"errors"
	"fmt"
	"os"
	"time"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/routes"
	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/policy"
)

// illness is what is broken of a Domain's network.
type illness struct {
	uplink, sidecar bool      // dead, and not yet replaced
	shut            bool      // there is no policy for the host as it is: nothing is replaced
	why             string    // what the uplink or we said before its end
	retry           time.Time // when to replace; zero: nothing to do
	pace            pace
}

// pace spaces repairs, so that a helper that dies at once does not keep the machine busy. The zero value is ready.
type pace struct {
	recent int       // deaths and failed repairs without a quiet time between them
	last   time.Time // of them
}

const (
	paceFree  = 3                // repairs at once
	paceQuiet = time.Minute      // after that long without, the count starts anew
	paceMax   = 30 * time.Second // longest wait
)

// failed notes a death or a failed repair at now and tells how long to wait before the next repair.
func (p *pace) failed(now time.Time) time.Duration {
	if now.Sub(p.last) > paceQuiet {
		p.recent = 0
	}
	p.recent++
	p.last = now
	if p.recent <= paceFree {
		return 0
	}
	return min(time.Second<<min(p.recent-paceFree-1, 10), paceMax)
}

// helperDied tells the sessions, and plans the repair. Nothing passes by now: the kernel took the link with the uplink, and
// the domain process switched forwarding off after the sidecar.
func (n *network) helperDied(dead *bool, name, why string) {
	*dead = true
	wait := n.ill.pace.failed(time.Now())
	n.ill.retry = time.Now().Add(wait)
	text := fmt.Sprintf("network: its %s ended", name)
	if why != "" {
		text += ": " + why
	}
	n.journal.write("network.down", map[string]any{"helper": name, "why": why, "recent": n.ill.pace.recent, "sidecar": n.sideID})
	text += "; nothing passes until it is replaced"
	if wait > 0 {
		text += fmt.Sprintf(" in %v, as that is number %d within a minute; 'lazaret network show' has the state", wait, n.ill.pace.recent)
	}
	n.tell(text)
}

// repair replaces what is dead under the present policy: the uplink first, as the routes that a new sidecar needs lead to its
// link. Without a sidecar nothing is forwarded to the new uplink.
func (n *network) repair() {
	n.ill.retry = time.Time{}
	if n.ill.shut {
		return // enforce comes back to it
	}
	err := n.ctl.Replace(n.replaceUplink)
	if err == nil {
		err = n.ctl.Replace(n.replaceSidecar)
	}
	switch {
	case n.ctx.Err() != nil:
		return
	case err != nil:
		wait := max(n.ill.pace.failed(time.Now()), time.Second)
		n.ill.retry = time.Now().Add(wait)
		n.journal.write("network.repair_failed", err.Error())
		n.tell(fmt.Sprintf("network: it could not be repaired: %v; next attempt in %v", err, wait))
		return
	}
	n.journal.write("network.up", map[string]any{"sidecar": n.sideID, "uplink_pid": n.up.PID()})
	n.tell(fmt.Sprintf("network: it works again, under the same policy; connections from before were cut (sidecar %s)", n.sideID))
	n.refresh() // what could not be applied meanwhile
}

func (n *network) replaceSidecar(t policy.Table) (*control.Client, *routes.Uplink, error) {
	if !n.ill.sidecar {
		return nil, nil, nil
	}
	_ = n.side.Close()
	id := newSidecarID()
	f, err := n.ask(networkReplace{Table: t, SidecarID: id})
	if err != nil {
		return nil, nil, err
	}
	side, err := routes.NewSidecar(f)
	if err != nil {
		return nil, nil, err
	}
	n.side, n.sideID, n.ill.sidecar = side, id, false
	return side, nil, nil
}

func (n *network) replaceUplink(t policy.Table) (*control.Client, *routes.Uplink, error) {
	if !n.ill.uplink {
		return nil, nil, nil
	}
	packet, err := n.ask(networkReplace{Table: t})
	if err != nil {
		return nil, nil, err
	}
	up, err := n.startUplink(packet, n.uplinkConfig(t))
	if err != nil {
		return nil, nil, err
	}
	n.up, n.ill.uplink = up, false
	return nil, up, nil
}

// ask sends a request to the domain process and returns the descriptor that it answers with.
func (n *network) ask(r networkReplace) (*os.File, error) {
	n.seq++
	r.Seq = n.seq
	if err := n.dom.Send(domainRequest{Network: &r}); err != nil {
		return nil, err
	}
	limit := time.After(helperTimeout)
	for {
		select {
		case a := <-n.answers:
			switch {
			case a.ready.Seq != r.Seq: // of a request that we no longer wait for
				nsenter.CloseAll(a.files)
			case a.ready.Err != "":
				nsenter.CloseAll(a.files)
				return nil, errors.New(a.ready.Err)
			case len(a.files) != 1:
				nsenter.CloseAll(a.files)
				return nil, errors.New("unexpected descriptors of the domain process")
			default:
				return a.files[0], nil
			}
		case <-limit:
			return nil, errors.New("the domain process does not answer")
		case <-n.ctx.Done():
			return nil, n.ctx.Err()
		}
	}
}

// answer hands run an answer of the domain process. It owns files.
func (n *network) answer(ready networkReady, files []*os.File) {
	go func() { // the reader of the domain process waits for nobody
		select {
		case n.answers <- domainAnswer{ready, files}:
		case <-n.ctx.Done():
			nsenter.CloseAll(files)
		}
	}()
}
