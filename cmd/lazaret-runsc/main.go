// Command lazaret-runsc is gVisor's runsc at Lazaret's pin, with the workspace server registered. One program serves
// create, sandbox and gofer, since runsc executes itself again for each (design.md, section 1).
package main

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/runsc/cli/maincli"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/sentry/gofer"
)

func main() {
	if err := nsenter.AnswerStamp(); err != nil {
		fmt.Fprintln(os.Stderr, "lazaret-runsc: error:", err)
		os.Exit(1)
	}
	gofer.Register(os.Args)
	maincli.Main()
}
