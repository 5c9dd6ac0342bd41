package gofer

import (
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/lisafs"

	"lazaret.dev/lazaret/sentry/route"
)

// site is where a new name will be made.
type site struct {
	fd      int  // directory to make it in
	private bool // the twin's
	kind    route.Kind
	zone    route.Zone // of a directory of that name
	admit   bool       // on the host though the snapshot ignores it: newly tracked, and nothing there
}

// place decides where name is made, and refuses what may not be. lisafs holds the directory for writing, so nothing else
// is created in it meanwhile: asking and making are one step.
func (d *dir) place(name string, op route.Op) (s site, err error) {
	var r *rules
	if d.Zone() == route.Work {
		r = d.current(true)
	}
	var e entry
	switch err := d.lookup(name, &e); err {
	case nil:
		if op != route.RenameTo && op != route.LinkTo || e.kind != route.W && e.kind != route.P && e.kind != route.G && e.kind != route.Head {
			if cerr := e.kind.Check(op); cerr != nil && op == route.RenameTo {
				return s, cerr
			}
			if op != route.RenameTo {
				return s, unix.EEXIST
			}
		}
	case unix.ENOENT:
	default:
		return s, err
	}
	s.kind, s.zone, s.private = e.kind, e.zone, e.private
	directory := op == route.Mkdir
	if r != nil && s.kind == route.W && !s.private || r != nil && s.kind == route.P && err == nil {
		s.kind, s.private = d.workSide(r, name, directory, &e, &s)
	}
	if s.kind == route.No && (name == markSkeleton || name == markTree) {
		return s, unix.EPERM
	}
	if err := s.kind.Check(op); err != nil {
		return s, err
	}
	if s.kind.Private() {
		s.private = true
		if s.zone != route.Private {
			s.zone = route.Private
		}
		p, err := d.ensureTwin()
		if err != nil {
			return s, err
		}
		if err := d.clearWhiteout(p, name); err != nil {
			return s, err
		}
		s.fd = p
		return s, nil
	}
	if d.completes(name, op) {
		return s, unix.EPERM
	}
	s.fd = d.host
	return s, nil
}
