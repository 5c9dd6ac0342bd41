// Package host watches what the host knows about its own network: addresses, neighbours' prefixes
// and resolvers. What is denied, and who is asked for names, follows it live.
package host

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/policy"
)

// Facts are sorted, so that equal hosts have equal facts.
type Facts struct {
	policy.Host
	Resolvers []netip.AddrPort        // nameservers of /etc/resolv.conf, in its order
	Search    []string                // search domains, for the sandbox's resolv.conf if wanted
	Hosts     map[string][]netip.Addr // of /etc/hosts, lower case; loopback entries left out
}

// Files are what is read; the zero value means the usual places.
type Files struct{ ResolvConf, Hosts string }

func (f Files) orUsual() Files {
	if f.ResolvConf == "" {
		f.ResolvConf = "/etc/resolv.conf"
	}
	if f.Hosts == "" {
		f.Hosts = "/etc/hosts"
	}
	return f
}

// Read gives the present facts of the calling process's network namespace.
func Read(files Files) (Facts, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Facts{}, fmt.Errorf("read the host's network: %w", err)
	}
	defer h.Close()
	return read(h, files.orUsual())
}

// dumps is how often the kernel's tables are read until none changes meanwhile.
const dumps = 10

func read(h *netlink.Handle, files Files) (f Facts, err error) {
	for range dumps {
		if f, err = readOnce(h, files); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return f, err
}

func readOnce(h *netlink.Handle, files Files) (Facts, error) {
	var f Facts
	if err := readAddrs(h, &f.Host); err != nil {
		return Facts{}, fmt.Errorf("read the host's addresses: %w", err)
	}
	if err := readOnLink(h, &f.Host); err != nil {
		return Facts{}, fmt.Errorf("read the host's routes: %w", err)
	}
	slices.SortFunc(f.Addrs, netip.Addr.Compare)
	f.Addrs = slices.Compact(f.Addrs)
	slices.SortFunc(f.OnLink, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	f.OnLink = slices.Compact(f.OnLink)
	// A host without resolvers is offline, not broken: questions fail until there is one.
	text, err := os.ReadFile(files.ResolvConf)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Facts{}, err
	}
	f.Resolvers, f.Search = parseResolvConf(text)
	if text, err = os.ReadFile(files.Hosts); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Facts{}, err
	}
	f.Hosts = parseHosts(text)
	return f, nil
}

// minOnLink4 and minOnLink6 are the shortest prefixes taken for a neighbourhood: a VPN that routes everything, or
// half of everything, into its interface does not make the internet our neighbour.
const (
	minOnLink4 = 7
	minOnLink6 = 16
)

func onLink(n *net.IPNet) (netip.Prefix, bool) {
	p, ok := prefix(n)
	if !ok || p.Addr().IsLoopback() || p.Addr().IsMulticast() || p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
		return p, false
	}
	least := minOnLink4
	if p.Addr().Is6() {
		least = minOnLink6
	}
	return p, p.Bits() >= least
}

func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	addr = addr.Unmap()
	if !ok || size != addr.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(addr, bits).Masked(), true
}

func readAddrs(h *netlink.Handle, f *policy.Host) error {
	addrs, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && !addr.Unmap().IsLoopback() {
			f.Addrs = append(f.Addrs, addr.Unmap())
		}
		for _, n := range []*net.IPNet{a.IPNet, a.Peer} {
			if p, ok := onLink(n); ok && p.Bits() < p.Addr().BitLen() {
				f.OnLink = append(f.OnLink, p)
			}
		}
	}
	return nil
}

// readOnLink adds the destinations that the main table reaches without a gateway.
func readOnLink(h *netlink.Handle, f *policy.Host) error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		if err != nil {
			if errors.Is(err, unix.EAFNOSUPPORT) {
				continue
			}
			return err
		}
		for _, r := range routes {
			if r.Gw != nil || r.Via != nil || len(r.MultiPath) > 0 {
				continue
			}
			if p, ok := onLink(r.Dst); ok {
				f.OnLink = append(f.OnLink, p)
			}
		}
	}
	return nil
}

// maxResolvers is how many nameservers are used; the C library stops at three.
const maxResolvers = 4

func parseResolvConf(text []byte) (servers []netip.AddrPort, search []string) {
	for line := range lines(text) {
		switch {
		case len(line) < 2:
		case line[0] == "nameserver" && len(servers) < maxResolvers:
			// Resolvers with a zone are link-local; they are dialled as written.
			if a, err := netip.ParseAddr(line[1]); err == nil {
				servers = append(servers, netip.AddrPortFrom(a.Unmap(), 53))
			}
		case line[0] == "search", line[0] == "domain":
			search = slices.Clone(line[1:])
		}
	}
	return servers, search
}

const maxHosts = 1024

func parseHosts(text []byte) map[string][]netip.Addr {
	hosts := make(map[string][]netip.Addr)
	for line := range lines(text) {
		addr, err := netip.ParseAddr(line[0])
		if err != nil || addr.Unmap().IsLoopback() || addr.IsUnspecified() || addr.Zone() != "" {
			continue
		}
		for _, name := range line[1:] {
			name = strings.ToLower(strings.TrimSuffix(name, "."))
			if _, known := hosts[name]; known || len(hosts) < maxHosts {
				hosts[name] = append(hosts[name], addr.Unmap())
			}
		}
	}
	return hosts
}

// lines yields the words of each line that has any, without comments.
func lines(text []byte) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		sc := bufio.NewScanner(bytes.NewReader(text))
		for sc.Scan() {
			line, _, _ := strings.Cut(sc.Text(), "#")
			line, _, _ = strings.Cut(line, ";")
			if words := strings.Fields(line); len(words) > 0 && !yield(words) {
				return
			}
		}
	}
}

const (
	settle     = 20 * time.Millisecond // changes come in bursts
	pollFiles  = 2 * time.Second       // resolv.conf is replaced by rename in many ways; a look is cheap
	resyncEach = time.Minute           // in case a message of the kernel was lost
)

// Watch sends the present facts, and again each time they differ. The channel is closed when ctx
// ends, or when the kernel's messages can no longer be read: then nothing is known any more, and
// the caller must take it as a failure.
func Watch(ctx context.Context, files Files) (<-chan Facts, error) {
	files = files.orUsual()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("watch the host's network: %w", err)
	}
	done := make(chan struct{})
	changed := make(chan struct{}, 1)
	broken := make(chan struct{})
	if err := subscribe(done, changed, broken); err != nil {
		close(done)
		h.Close()
		return nil, fmt.Errorf("watch the host's network: %w", err)
	}
	first, err := read(h, files)
	if err != nil {
		close(done)
		h.Close()
		return nil, err
	}
	out := make(chan Facts)
	go func() {
		defer close(out)
		defer h.Close()
		defer close(done)
		watch(ctx, h, files, first, changed, broken, out)
	}()
	return out, nil
}

func watch(ctx context.Context, h *netlink.Handle, files Files, facts Facts, changed, broken <-chan struct{}, out chan<- Facts) {
	poll := time.NewTicker(pollFiles)
	defer poll.Stop()
	var send chan<- Facts = out // nil when the reader has what is known
	stamp, lastFull := stampOf(files), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-broken:
			return
		case send <- facts:
			send = nil
			continue
		case <-changed:
			time.Sleep(settle)
			select {
			case <-changed:
			default:
			}
		case now := <-poll.C:
			s := stampOf(files)
			if s == stamp && now.Sub(lastFull) < resyncEach {
				continue
			}
			stamp, lastFull = s, now
		}
		now, err := read(h, files)
		if err != nil {
			return
		}
		if !reflect.DeepEqual(now, facts) {
			facts, send = now, out
		}
	}
}

// stampOf changes whenever one of the files does.
func stampOf(files Files) (s [2][3]int64) {
	for i, name := range []string{files.ResolvConf, files.Hosts} {
		if fi, err := os.Stat(name); err == nil {
			s[i] = [3]int64{fi.ModTime().UnixNano(), fi.Size()}
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				s[i][2] = int64(st.Ino)
			}
		}
	}
	return s
}

func subscribe(done <-chan struct{}, changed chan<- struct{}, broken chan struct{}) error {
	addrs := make(chan netlink.AddrUpdate, 64)
	routes := make(chan netlink.RouteUpdate, 64)
	failed := func(error) {}
	if err := netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{ErrorCallback: failed}); err != nil {
		return err
	}
	if err := netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{ErrorCallback: failed}); err != nil {
		return err
	}
	go func() {
		defer close(broken)
		for {
			var ok bool
			select {
			case _, ok = <-addrs:
			case _, ok = <-routes:
			}
			if !ok {
				return
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return nil
}
