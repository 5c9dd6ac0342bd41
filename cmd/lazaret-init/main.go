// Command lazaret-init is pid 1 of every Agent Sandbox: it reaps, and does nothing else. It is a program of its own, of
// little more than the Go runtime, since it is resident in each sandbox and on the way of each start.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	children := make(chan os.Signal, 1) // one is enough: each wake-up reaps all there are
	signal.Notify(children, syscall.SIGCHLD)
	for {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 && err != syscall.EINTR {
				break
			}
		}
		<-children
	}
}
