// Command lazaret-runsc is gVisor's runsc at Lazaret's pin, with the workspace gofer registered (design.md, section 1).
package main

import (
	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

func main() {
	_ = version.Version
	maincli.Main()
}
