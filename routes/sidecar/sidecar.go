// Package sidecar is the process that owns a running Domain's routes.
//
// It lives in the sidecar's network namespace with an empty read-only root, no listener, a system
// call filter, and of all capabilities CAP_NET_ADMIN over that one namespace. It opens one netlink
// socket before it is confined and can open none afterwards. All it does is make a policy table
// true when the coordinator asks. It ends when the coordinator's socket does; the process that
// started it then switches forwarding off.
package sidecar

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/routes/confine"
	"lazaret.dev/lazaret/routes/control"
	"lazaret.dev/lazaret/routes/fib"
	"lazaret.dev/lazaret/routes/policy"
)

// Descriptors of the process.
const (
	FDControl = 3 // SOCK_SEQPACKET, see package control
	FDReady   = 4 // pipe: [Ready] once it serves, an error text otherwise, then closed
)

// Ready is what the ready pipe carries when all is well.
const Ready = "ready"

// OpApply makes the policy table in the body the routes of the namespace.
const OpApply = "apply"

// Main is the process. The caller is in the right network namespace and alone in its mount
// namespace.
func Main() int {
	ready := os.NewFile(FDReady, "ready")
	serve, err := setup()
	if err != nil {
		fmt.Fprint(ready, err)
		return 1
	}
	fmt.Fprint(ready, Ready)
	ready.Close()
	if err := serve(); err != nil {
		return 1
	}
	return 0
}

func setup() (serve func() error, err error) {
	unix.CloseOnExec(FDControl)
	conn, err := control.NewConn(os.NewFile(FDControl, "control"))
	if err != nil {
		return nil, err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if err := confine.EmptyRoot(); err != nil {
		return nil, err
	}
	if err := confine.KeepCapabilities(unix.CAP_NET_ADMIN); err != nil {
		return nil, err
	}
	if err := confine.Syscalls([]uintptr{
		unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_GETSOCKNAME,
	}, nil); err != nil {
		return nil, err
	}
	return func() error {
		return control.Serve(conn, func(m control.Message) error {
			if m.Op != OpApply {
				return fmt.Errorf("unknown request %q", m.Op)
			}
			var t policy.Table
			if err := json.Unmarshal(m.Body, &t); err != nil {
				return fmt.Errorf("policy table: %w", err)
			}
			return fib.Set(h, t)
		})
	}, nil
}
