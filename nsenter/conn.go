package nsenter

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxMessage is the largest message of a [Conn], in bytes.
const MaxMessage = 160 << 10

// maxFiles is the largest number of descriptors that one message carries.
const maxFiles = 16

// Conn carries messages between Lazaret's own processes: one SOCK_SEQPACKET packet is one JSON value and its descriptors.
// Send may be called from any goroutine; Recv from one at a time.
type Conn struct {
	uc *net.UnixConn

	sendMu sync.Mutex // serialises packets and their descriptors
}

// Pair returns two connected ends. The second is meant for a child: pass it in [Child.Files] or [Child.Control].
func Pair() (*Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "control")
	ours, err := NewConn(os.NewFile(uintptr(fds[0]), "control"))
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// NewConn makes a Conn of a connected SOCK_SEQPACKET socket. It owns f from here on, even when it fails.
func NewConn(f *os.File) (*Conn, error) {
	defer f.Close() // net.FileConn works on a copy
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use %s as a connection: %w", f.Name(), err)
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("use %s as a connection: not a unix socket", f.Name())
	}
	return FromUnix(uc), nil
}

// FromUnix makes a Conn of an accepted or dialled "unixpacket" connection, which it owns from here on.
func FromUnix(uc *net.UnixConn) *Conn { return &Conn{uc: uc} }

// Send writes v and copies of files. The caller keeps its own copies.
func (c *Conn) Send(v any, files ...*os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if len(b) > MaxMessage {
		return fmt.Errorf("message of %d bytes is over the limit of %d", len(b), MaxMessage)
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	_, _, err = c.uc.WriteMsgUnix(b, oob, nil)
	return err
}

// Recv reads the next message into v and returns the descriptors that came with it, which the caller owns.
// It returns io.EOF when the other end is gone.
func (c *Conn) Recv(v any) ([]*os.File, error) {
	buf := make([]byte, MaxMessage+1)
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := c.uc.ReadMsgUnix(buf, oob)
	if errors.Is(err, unix.ECONNRESET) {
		// The peer closed without reading all of ours. The kernel tells that once, before what the peer has sent.
		n, oobn, flags, _, err = c.uc.ReadMsgUnix(buf, oob)
	}
	if err != nil {
		return nil, err
	}
	files, err := rights(oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("message is over the limit")
	}
	if err == nil && n == 0 {
		err = io.EOF // an empty packet is never sent
	}
	if err == nil {
		err = json.Unmarshal(buf[:n], v)
	}
	if err != nil {
		CloseAll(files)
		return nil, err
	}
	return files, nil
}

// rights returns every descriptor in the control messages, so that none that a peer adds is leaked.
func rights(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // no descriptors in this one
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

// PeerUID is the user of the process that made the connection, in our user namespace (SO_PEERCRED, unix(7)).
func (c *Conn) PeerUID() (uid uint32, err error) {
	raw, err := c.uc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(cerr, err); err != nil {
		return 0, fmt.Errorf("ask for the peer's credentials: %w", err)
	}
	return cred.Uid, nil
}

// Close ends the connection; a Recv that waits returns.
func (c *Conn) Close() error { return c.uc.Close() }

// CloseAll closes files, for error paths that own several.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
