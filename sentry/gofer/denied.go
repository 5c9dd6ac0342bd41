package gofer

import (
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/route"
)

// denials writes down what the sandbox was refused, so that people can tell policy from breakage. The sandbox decides how
// often it asks: each operation on each path is written once as long as it is remembered, at most maxDenials bytes in all.
type denials struct {
	fd int // -1 if nothing is written

	mu   sync.Mutex
	left int // bytes
	seen map[denial]bool
}

type denial struct {
	op   route.Op
	path string
}

const maxSeenDenials = 512

func newDenials(fd int) *denials {
	return &denials{fd: fd, left: sentry.MaxDenials, seen: make(map[denial]bool)}
}

func (l *denials) add(op route.Op, path string, err error) {
	if l == nil || l.fd < 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	d := denial{op, path}
	if l.left <= 0 || l.seen[d] {
		return
	}
	if len(l.seen) >= maxSeenDenials {
		clear(l.seen)
	}
	l.seen[d] = true
	errno, _ := err.(unix.Errno)
	b := time.Now().UTC().AppendFormat(nil, sentry.DenialTime)
	b = append(b, ' ')
	b = append(b, op.String()...)
	b = append(b, ' ')
	b = append(b, unix.ErrnoName(errno)...)
	b = append(b, ' ')
	b = strconv.AppendQuoteToASCII(b, path)
	b = append(b, '\n')
	if l.left -= len(b); l.left < 0 {
		b = []byte(sentry.DenialsCut + "\n")
	}
	_ = writeAll(l.fd, b) // a full disk is not the sandbox's business
}

// denied writes down a refusal of op on name in d, and returns err, which may be nil.
func (d *dir) denied(op route.Op, name string, err error) error {
	if err == unix.EPERM || err == unix.EBUSY {
		d.t.denials.add(op, joinRel(d.rel(), name), err)
	}
	return err
}
