// Package wire is the language between lazaret-escalate and the coordinator, inside TLS.
//
// The peer of the coordinator is hostile. Every decoder checks each length against a limit before it uses it, never
// panics, and accepts exactly one encoding of a value: appending a parsed message gives the bytes that were consumed.
// A message that is not understood ends the connection; there is no resynchronisation.
//
//	client                         coordinator
//	   ---- Submit ---->              one per connection
//	   <--- Accepted ---              or Refused, then the connection is closed
//	   ---- Ping, Cancel --->         any time; Ping at least every PingEvery
//	   ---- Stdin, StdinEnd ->        if announced; one Stdin, then one more after each More
//	   <--- More -------
//	   <--- Stdout, Stderr ---
//	   <--- Result -----              after all output
//	   ---- Received -->              the result is delivered; both close
//
// A frame is one byte of type, four bytes of body length (big endian), and the body.
package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// Kind is a frame's type.
type Kind byte

const (
	KindSubmit Kind = iota + 1
	KindStdin
	KindStdinEnd
	KindPing
	KindCancel
	KindReceived
)

const (
	KindAccepted Kind = iota + 65
	KindRefused
	KindMore // the last Stdin was taken, another may follow
	KindStdout
	KindStderr
	KindResult
)

// Limits of the protocol. Sizes are in bytes.
const (
	HeaderLen = 5
	MaxChunk  = 64 << 10  // body of Stdin, Stdout, Stderr
	MaxSubmit = 256 << 10 // body of Submit
	MaxArgs   = 4096
	MaxDir    = 4096 // PATH_MAX
	MaxReason = 4096
	MaxDetail = 1024

	PingEvery = 10 * time.Second
	Silence   = 35 * time.Second // a client that sends nothing for so long is cut off
)

// limit returns the largest body of a kind; ok is false for an unknown kind.
func (k Kind) limit() (n uint32, ok bool) {
	switch k {
	case KindSubmit:
		return MaxSubmit, true
	case KindStdin, KindStdout, KindStderr:
		return MaxChunk, true
	case KindStdinEnd, KindPing, KindCancel, KindReceived, KindAccepted, KindMore:
		return 0, true
	case KindRefused:
		return 1, true
	case KindResult:
		return 1 + 1 + 4 + 8 + 4 + MaxDetail, true
	}
	return 0, false
}

// ErrMalformed is wrapped by every error about bytes that are not a message.
var ErrMalformed = errors.New("malformed message")

func malformed(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, a...))
}

// AppendFrame appends a frame. The body must be within the kind's limit.
func AppendFrame(b []byte, k Kind, body []byte) []byte {
	b = append(b, byte(k))
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	return append(b, body...)
}

// ParseFrame parses the frame at the start of b and returns its length. The body aliases b. It returns
// io.ErrUnexpectedEOF if b ends too early.
func ParseFrame(b []byte) (k Kind, body []byte, n int, err error) {
	if len(b) < HeaderLen {
		return 0, nil, 0, io.ErrUnexpectedEOF
	}
	k, size, err := parseHeader(b[:HeaderLen])
	if err != nil {
		return 0, nil, 0, err
	}
	n = HeaderLen + int(size)
	if len(b) < n {
		return 0, nil, 0, io.ErrUnexpectedEOF
	}
	return k, b[HeaderLen:n], n, nil
}

func parseHeader(h []byte) (Kind, uint32, error) {
	k, size := Kind(h[0]), binary.BigEndian.Uint32(h[1:])
	limit, ok := k.limit()
	if !ok {
		return 0, 0, malformed("frame of unknown kind %d", k)
	}
	if size > limit {
		return 0, 0, malformed("frame of kind %d with %d bytes, over the limit of %d", k, size, limit)
	}
	return k, size, nil
}

// Reader reads frames. It holds one buffer, no larger than the largest body it was sent.
type Reader struct {
	R   io.Reader
	buf []byte
}

// Next reads one frame. The body is valid until the next call. io.EOF means a clean end between frames.
func (r *Reader) Next() (Kind, []byte, error) {
	var h [HeaderLen]byte
	if _, err := io.ReadFull(r.R, h[:]); err != nil {
		return 0, nil, err
	}
	k, size, err := parseHeader(h[:])
	if err != nil {
		return 0, nil, err
	}
	// Grown in steps of what has really come, so that a claimed size alone costs nothing.
	r.buf = r.buf[:0]
	for len(r.buf) < int(size) {
		step := min(int(size)-len(r.buf), 64<<10)
		start := len(r.buf)
		r.buf = append(r.buf, make([]byte, step)...)
		if _, err := io.ReadFull(r.R, r.buf[start:]); err != nil {
			return 0, nil, noEOF(err)
		}
	}
	return k, r.buf, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Submit is a request. Every text is arbitrary bytes from the sandbox.
type Submit struct {
	ID     [16]byte
	Argv   []string      // at least one, the first not empty, none with a zero byte
	Dir    string        // absolute working directory inside
	Reason string        // the agent's words
	Wait   time.Duration // for an answer, whole milliseconds; 0 leaves it to the coordinator
	Stdin  bool          // the client wants to send standard input
}

// Append appends the body of a Submit frame.
func (s Submit) Append(b []byte) []byte {
	b = append(b, s.ID[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(s.Wait/time.Millisecond))
	b = append(b, flag(s.Stdin))
	b = appendString(b, s.Dir)
	b = appendString(b, s.Reason)
	b = binary.BigEndian.AppendUint32(b, uint32(len(s.Argv)))
	for _, a := range s.Argv {
		b = appendString(b, a)
	}
	return b
}

// Check reports whether s can be sent, as a hint to a well-meaning client.
func (s Submit) Check() error {
	_, err := ParseSubmit(s.Append(nil))
	return err
}

// ParseSubmit parses the body of a Submit frame. Its strings do not alias b.
func ParseSubmit(b []byte) (Submit, error) {
	if len(b) > MaxSubmit {
		return Submit{}, malformed("request of %d bytes, over the limit of %d", len(b), MaxSubmit)
	}
	p := parser{b: b}
	var s Submit
	copy(s.ID[:], p.take(len(s.ID)))
	ms := p.uint64()
	s.Stdin = p.flag()
	s.Dir = p.string(MaxDir)
	s.Reason = p.string(MaxReason)
	n := p.uint32()
	if p.err == nil && (n < 1 || n > MaxArgs) {
		return Submit{}, malformed("%d arguments, not 1 to %d", n, MaxArgs)
	}
	if p.err == nil && ms > uint64(24*time.Hour/time.Millisecond) {
		return Submit{}, malformed("wait of %d ms is over a day", ms)
	}
	s.Wait = time.Duration(ms) * time.Millisecond
	for range n {
		if p.err != nil {
			break
		}
		s.Argv = append(s.Argv, p.string(MaxSubmit))
	}
	if err := p.end(); err != nil {
		return Submit{}, err
	}
	if s.Argv[0] == "" {
		return Submit{}, malformed("empty program name")
	}
	if len(s.Dir) == 0 || s.Dir[0] != '/' {
		return Submit{}, malformed("working directory is not absolute")
	}
	for _, a := range append(s.Argv[:len(s.Argv):len(s.Argv)], s.Dir) {
		if bytes.IndexByte([]byte(a), 0) >= 0 {
			return Submit{}, malformed("zero byte in an argument")
		}
	}
	return s, nil
}

// Outcome is the kind of a result, with the numbers of the wire.
type Outcome byte

const (
	Completed Outcome = iota + 1
	Denied
	TimedOut
	Cancelled
	Failed
)

// Result is an Escalation Result. Output went before it.
type Result struct {
	Outcome  Outcome
	Started  bool   // the command ran, at least in part
	Status   int32  // exit status if Completed; -1 if Signal is set
	Signal   uint32 // that ended the command; 0 for none
	Duration time.Duration
	Detail   string // one of a few fixed sentences of ours, for people
}

// Append appends the body of a Result frame.
func (r Result) Append(b []byte) []byte {
	b = append(b, byte(r.Outcome), flag(r.Started))
	b = binary.BigEndian.AppendUint32(b, uint32(r.Status)&0xffff|r.Signal<<16)
	b = binary.BigEndian.AppendUint64(b, uint64(r.Duration/time.Microsecond))
	return appendString(b, r.Detail)
}

// ParseResult parses the body of a Result frame.
func ParseResult(b []byte) (Result, error) {
	p := parser{b: b}
	var r Result
	if t := p.take(1); len(t) == 1 {
		r.Outcome = Outcome(t[0])
	}
	r.Started = p.flag()
	w := p.uint32()
	r.Status, r.Signal = int32(int16(w)), w>>16
	us := p.uint64()
	r.Detail = p.string(MaxDetail)
	if err := p.end(); err != nil {
		return Result{}, err
	}
	if r.Outcome < Completed || r.Outcome > Failed || us > uint64(time.Duration(1<<62)/time.Microsecond) {
		return Result{}, malformed("result out of range")
	}
	r.Duration = time.Duration(us) * time.Microsecond
	return r, nil
}

func flag(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
	return append(b, s...)
}

// parser takes fields off a body; after an error it returns zeros.
type parser struct {
	b   []byte
	err error
}

func (p *parser) take(n int) []byte {
	if p.err != nil {
		return nil
	}
	if len(p.b) < n {
		p.err = malformed("body ends early")
		return nil
	}
	t := p.b[:n]
	p.b = p.b[n:]
	return t
}

func (p *parser) uint32() uint32 {
	if t := p.take(4); t != nil {
		return binary.BigEndian.Uint32(t)
	}
	return 0
}

func (p *parser) uint64() uint64 {
	if t := p.take(8); t != nil {
		return binary.BigEndian.Uint64(t)
	}
	return 0
}

func (p *parser) flag() bool {
	t := p.take(1)
	if t != nil && t[0] > 1 {
		p.err = malformed("flag of value %d", t[0])
	}
	return t != nil && t[0] == 1
}

func (p *parser) string(limit int) string {
	n := p.uint32()
	if p.err == nil && uint64(n) > uint64(limit) {
		p.err = malformed("text of %d bytes, over the limit of %d", n, limit)
	}
	return string(p.take(int(min(n, uint32(limit)))))
}

func (p *parser) end() error {
	if p.err == nil && len(p.b) > 0 {
		p.err = malformed("%d bytes after the end", len(p.b))
	}
	return p.err
}
