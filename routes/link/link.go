// Package link names the two links of a Domain's network: which address, hardware address and
// interface is on which side.
//
//	agent namespace       sidecar namespace             uplink namespace   host
//	eth0 === veth === ag0  (routes decide)  up0 === veth === upx --packet socket--> uplink process
//	Agent          Sidecar            SidecarUp         Uplink
//
// All Domains use the same addresses: no namespace of one is joined to one of another, and the
// range is denied as a destination. Neighbours are permanent on every side, so nothing can be
// learned from, or taken over by, a forged ARP or neighbour discovery message.
package link

import (
	"net"
	"net/netip"
)

// Interface names.
const (
	AgentDev     = "eth0" // in the agent namespace
	SidecarDev   = "ag0"  // in the sidecar namespace, towards the agent
	SidecarUpDev = "up0"  // in the sidecar namespace, towards the uplink
	UplinkDev    = "upx"  // in the uplink namespace
)

// MTU of both links in bytes. TCP is terminated at the uplink, and 64 KiB frames are passed whole,
// so this is not the path MTU of anything outside.
const MTU = 65520

// Addresses; the zone 4 or 6 is the IP version.
var (
	Agent4     = netip.MustParsePrefix("198.18.0.2/30")
	Sidecar4   = netip.MustParsePrefix("198.18.0.1/30")
	SidecarUp4 = netip.MustParsePrefix("198.19.0.2/30")
	Uplink4    = netip.MustParsePrefix("198.19.0.1/30")

	Agent6     = netip.MustParsePrefix("fd6c:617a:6172:1::2/126")
	Sidecar6   = netip.MustParsePrefix("fd6c:617a:6172:1::1/126")
	SidecarUp6 = netip.MustParsePrefix("fd6c:617a:6172:2::2/126")
	Uplink6    = netip.MustParsePrefix("fd6c:617a:6172:2::1/126")
)

// Hardware addresses, locally administered.
var (
	AgentMAC     = net.HardwareAddr{0x02, 'l', 'z', 0, 0, 2}
	SidecarMAC   = net.HardwareAddr{0x02, 'l', 'z', 0, 0, 1}
	SidecarUpMAC = net.HardwareAddr{0x02, 'l', 'z', 0, 1, 2}
	UplinkMAC    = net.HardwareAddr{0x02, 'l', 'z', 0, 1, 1}
)

// DNSPort is the port of the resolver on the sidecar's address.
const DNSPort = 53

// Mark is the packet mark with which the packet filter asks the routing table about a packet of
// the agent before it is routed.
const Mark = 0x6c7a
