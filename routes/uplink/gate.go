package uplink

import (
	"errors"
	"net/netip"
	"sync/atomic"

	"lazaret.dev/lazaret/routes/policy"
)

// A gate says whether a destination may be dialled: the policy, a second time after the routes of
// the sidecar, and the host's routing table. Before the first policy it denies everything.
type gate struct {
	routes  *hostRoutes
	proxied bool        // TCP goes to a proxy, so the host needs no route to the destination
	full    atomic.Bool // no memory for more flows
	policy  atomic.Pointer[policy.Index]
}

// checkTCP asks the host's routes about a connection.
func (g *gate) checkTCP(dst netip.Addr) error {
	err := g.routes.check(dst)
	if g.proxied && !errors.Is(err, errHostLocal) {
		return nil
	}
	return err
}

func (g *gate) index() *policy.Index { return g.policy.Load() }
