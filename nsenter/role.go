package nsenter

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	rolePrefix = "lazaret ["
	fdControl  = 3 // the role's control connection; always there
	fdFiles    = 4 // first of Child.Files
)

// Main enters a role when this process was started by [Child.Start], and never returns then. It must be the first call
// of main: the environment is empty and no flag means anything.
//
// Helpers are roles that a leaf package starts by itself, with descriptors that it knows.
//
// In every other process it only marks inherited descriptors close-on-exec, so that none of the caller's reaches a child.
func Main(roles map[string]func(Self) int, helpers map[string]func() int) {
	name, ok := strings.CutPrefix(os.Args[0], rolePrefix)
	if !ok {
		_ = unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
		return
	}
	name, _ = strings.CutSuffix(name, "]")
	if help := helpers[name]; help != nil {
		os.Exit(help())
	}
	run := roles[name]
	if name == holdRole {
		run = hold
	}
	if run == nil {
		fmt.Fprintf(os.Stderr, "lazaret: error: there is no role %q\n", name)
		os.Exit(2)
	}
	self, err := newSelf(name)
	if err != nil {
		fmt.Fprintf(os.Stderr, "lazaret [%s]: error: %v\n", name, err)
		os.Exit(1)
	}
	os.Exit(run(self))
}

// RoleName is the argv[0] by which [Main] knows a role or a helper.
func RoleName(name string) string { return rolePrefix + name + "]" }

// hold waits for its parent.
func hold(self Self) int {
	_, _ = self.Control.Recv(new(string))
	return 0
}

// Self is what a role is started with.
type Self struct {
	Control *Conn      // to the parent; the role ends when it reads end of file
	Files   []*os.File // Child.Files, in order
}

func newSelf(name string) (Self, error) {
	var s Self
	var id, nfiles int
	if len(os.Args) != 2 {
		return s, fmt.Errorf("role %q is started by lazaret only", name)
	}
	if _, err := fmt.Sscanf(os.Args[1], "%d,%d", &id, &nfiles); err != nil {
		return s, fmt.Errorf("role %q is started by lazaret only", name)
	}
	os.Clearenv()
	unix.Umask(0o022) // the caller's is not ours
	// Child.Start passes on nothing else. Closing what has a higher number would take the run-time's own descriptors from it.
	if err := unix.CloseRange(uint(fdFiles+nfiles), ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return s, fmt.Errorf("keep descriptors from children: %w", err)
	}
	for i := range nfiles {
		unix.CloseOnExec(fdFiles + i)
		s.Files = append(s.Files, os.NewFile(uintptr(fdFiles+i), fmt.Sprintf("file %d", i)))
	}
	unix.CloseOnExec(fdControl)
	var err error
	if s.Control, err = NewConn(os.NewFile(fdControl, "control")); err != nil {
		return s, err
	}
	if id != 0 {
		return s, becomeRoot(s.Control, MapKind(id-1))
	}
	return s, nil
}
