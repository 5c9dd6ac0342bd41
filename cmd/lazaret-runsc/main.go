// Command lazaret-runsc is gVisor's runsc at Lazaret's pin, with the workspace gofer registered (design.md, section 1).
package main

import (
	"os"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"

	"lazaret.dev/lazaret/sentry/gofer"
)

func main() {
	_ = version.Version
	gofer.Register(os.Args)
	maincli.Main()
}
