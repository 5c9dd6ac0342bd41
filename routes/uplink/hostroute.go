package uplink

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// errHostLocal refuses a destination that the host's kernel would deliver to the host itself, or
// to many.
var errHostLocal = errors.New("the destination is local to the host")

// hostRoutes asks the host's routing table. SO_BINDTODEVICE would not do: the kernel delivers to
// its own addresses all the same.
type hostRoutes struct {
	mu sync.Mutex
	h  *netlink.Handle
}

func newHostRoutes() (*hostRoutes, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &hostRoutes{h: h}, nil
}

// check returns nil only for a destination that leaves the host. Everything else is refused,
// also when the kernel gives no answer.
func (r *hostRoutes) check(dst netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	routes, err := r.h.RouteGet(dst.AsSlice())
	if err != nil {
		return err
	}
	if len(routes) == 0 {
		return unix.ENETUNREACH
	}
	for _, route := range routes {
		if route.Type != unix.RTN_UNICAST || route.LinkIndex == loopbackIndex {
			return errHostLocal
		}
	}
	return nil
}

// loopbackIndex is the index of lo in every network namespace.
const loopbackIndex = 1
