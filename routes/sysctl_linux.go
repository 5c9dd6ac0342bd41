package routes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// A sysctl is one file below /proc/sys/net with its value. Which namespace it belongs to is that
// of the thread that opens the file.
type sysctl struct{ name, value string }

func (s sysctl) path() string { return "/proc/sys/net/" + s.name }

// quietEverywhere are set in all namespaces before there is an interface. A new namespace inherits
// IPv4 settings from the host, where forwarding is often on, for instance for containers.
var quietEverywhere = []sysctl{
	{"ipv4/ip_forward", "0"},
	{"ipv4/conf/all/forwarding", "0"},
	{"ipv4/conf/default/forwarding", "0"},
	{"ipv4/conf/all/accept_local", "0"},
	{"ipv4/conf/default/accept_local", "0"},
	{"ipv4/conf/all/route_localnet", "0"},
	{"ipv4/conf/default/route_localnet", "0"},
	{"ipv4/conf/all/proxy_arp", "0"},
	{"ipv4/conf/default/proxy_arp", "0"},
	{"ipv4/conf/all/accept_redirects", "0"},
	{"ipv4/conf/default/accept_redirects", "0"},
	{"ipv4/conf/all/send_redirects", "0"},
	{"ipv4/conf/default/send_redirects", "0"},
	{"ipv4/conf/all/accept_source_route", "0"},
	{"ipv4/conf/default/accept_source_route", "0"},
}

// sidecarOnly makes the sidecar's namespace a strict router that answers only for itself.
var sidecarOnly = []sysctl{
	{"ipv4/conf/all/rp_filter", "1"},
	{"ipv4/conf/default/rp_filter", "1"},
	{"ipv4/conf/all/src_valid_mark", "0"},
	{"ipv4/conf/default/src_valid_mark", "0"},
	{"ipv4/conf/all/arp_ignore", "2"},
	{"ipv4/conf/default/arp_ignore", "2"},
	{"ipv4/icmp_ratelimit", "0"},
}

// ipv6Off keeps IPv6 away from every interface to come.
var ipv6Off = []sysctl{
	{"ipv6/conf/all/disable_ipv6", "1"},
	{"ipv6/conf/default/disable_ipv6", "1"},
}

// ipv6On lets interfaces have exactly the addresses that we give them.
var ipv6On = []sysctl{
	{"ipv6/conf/all/disable_ipv6", "0"},
	{"ipv6/conf/default/disable_ipv6", "0"},
	{"ipv6/conf/all/forwarding", "0"},
	{"ipv6/conf/default/forwarding", "0"},
	{"ipv6/conf/default/accept_ra", "0"},
	{"ipv6/conf/default/autoconf", "0"},
	{"ipv6/conf/default/accept_dad", "0"},
	{"ipv6/conf/default/dad_transmits", "0"},
	{"ipv6/conf/default/addr_gen_mode", "1"}, // no link-local address
	{"ipv6/conf/default/accept_redirects", "0"},
	{"ipv6/conf/default/accept_source_route", "0"},
	{"ipv6/conf/all/accept_redirects", "0"},
	{"ipv6/icmp/ratelimit", "0"},
}

// write sets values and reads them back. A kernel without IPv6 has nothing to switch off.
func write(settings []sysctl) error {
	for _, s := range settings {
		err := os.WriteFile(s.path(), []byte(s.value), 0)
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(s.name, "ipv6/") && s.value != "0" {
			continue
		}
		if err != nil {
			return fmt.Errorf("set %s: %w", s.name, err)
		}
		if got, err := os.ReadFile(s.path()); err != nil || strings.TrimSpace(string(got)) != s.value {
			return fmt.Errorf("set %s to %s: it reads %q (%v)", s.name, s.value, strings.TrimSpace(string(got)), err)
		}
	}
	return nil
}

func forwarding(on, ipv6 bool) error {
	value := "0"
	if on {
		value = "1"
	}
	settings := []sysctl{{"ipv4/ip_forward", value}}
	if ipv6 {
		settings = append(settings, sysctl{"ipv6/conf/all/forwarding", value})
	}
	return write(settings)
}
