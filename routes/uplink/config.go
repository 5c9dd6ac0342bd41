package uplink

import (
	"lazaret.dev/lazaret/routes/dns"
	"lazaret.dev/lazaret/routes/policy"
)

// Descriptors of the process.
const (
	FDControl = 3 // SOCK_SEQPACKET, see package control
	FDPacket  = 4 // packet socket with virtio headers
	FDDNSUDP  = 5 // bound on the sidecar's address
	FDDNSTCP  = 6 // listening there
)

// Requests of the coordinator. The first is OpStart, once.
const (
	OpStart    = "start"    // Config; answered when packets are served
	OpPolicy   = "policy"   // policy.Table
	OpUpstream = "upstream" // dns.Upstream
)

// Events for the coordinator.
const (
	EventReset  = "reset"  // Reset: flows that a new policy forbids
	EventShed   = "shed"   // Reset: flows given up for want of memory
	EventQuery  = "query"  // dns.Query, when asked for
	EventFailed = "failed" // Failed: the process is about to end
)

// Config is the body of OpStart.
type Config struct {
	Table    policy.Table `json:"table"`
	Upstream dns.Upstream `json:"upstream"`
	Journal  bool         `json:"journal"` // report DNS questions as events
	Proxy    string       `json:"proxy"`   // "socks5://[user:password@]host:port" or "http://…" for all TCP; "" dials directly

	MaxTCP      int   `json:"max_tcp"`      // flows; 0 means 4096
	MaxDatagram int   `json:"max_datagram"` // UDP and echo flows; 0 means 2048
	Memory      int64 `json:"memory"`       // bytes in use above which flows are given up; 0 means 256 MiB
}

func (c Config) orDefaults() Config {
	if c.MaxTCP == 0 {
		c.MaxTCP = 4096
	}
	if c.MaxDatagram == 0 {
		c.MaxDatagram = 2048
	}
	if c.Memory == 0 {
		c.Memory = 256 << 20
	}
	return c
}

// Reset is the body of EventReset.
type Reset struct {
	TCP      int `json:"tcp"`
	Datagram int `json:"datagram"`
}

// Failed is the body of EventFailed.
type Failed struct {
	Error string `json:"error"`
}
