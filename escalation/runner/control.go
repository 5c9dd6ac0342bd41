package runner

import (
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptor numbers of the runner at its start. All others come with the order.
const fdControl = 3

// order is the plan as it is sent to the runner; its descriptors travel beside it, in the order of orderFiles.
type order struct {
	Argv    []string
	Env     []string
	DirPath string
	DirID   Identity
	// WorkspacePath is empty if the directory was fixed by a rule; otherwise the root's descriptor is sent too.
	WorkspacePath string
	ProgramPath   string
	ProgramID     Identity
	ProgramSum    [32]byte
	Script, Ours  bool
	Files         []File
	ByPath        bool
	Cgroup        bool // a cgroup's descriptor is sent last
}

// message is what the two say to each other afterwards.
type message struct {
	Go      bool          `json:",omitempty"` // to the runner
	Kill    bool          `json:",omitempty"` // to the runner
	Grace   time.Duration `json:",omitempty"` // of Kill
	Ready   bool          `json:",omitempty"`
	Started bool          `json:",omitempty"`
	Failed  string        `json:",omitempty"`
	Changed bool          `json:",omitempty"` // Failed is because of ErrChanged
	Ended   *Exit         `json:",omitempty"`
}

const maxOrder = 8 << 20 // bytes; the wire's limit is far below

// sendOrder writes the order with its descriptors, which stay the caller's.
func sendOrder(c *net.UnixConn, o order, files []*os.File) error {
	var body bytes.Buffer // gob and not JSON, which would change bytes that are not UTF-8
	if err := gob.NewEncoder(&body).Encode(o); err != nil {
		return fmt.Errorf("encode order: %w", err)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	for _, fd := range fds[:3] { // the command expects ordinary standard descriptors
		if err := unix.SetNonblock(fd, false); err != nil {
			return fmt.Errorf("send order: %w", err)
		}
	}
	head := binary.BigEndian.AppendUint32(nil, uint32(body.Len()))
	if _, _, err := c.WriteMsgUnix(head, unix.UnixRights(fds...), nil); err != nil {
		return fmt.Errorf("send order: %w", err)
	}
	if _, err := c.Write(body.Bytes()); err != nil {
		return fmt.Errorf("send order: %w", err)
	}
	return nil
}

// receiveOrder reads what sendOrder wrote; the descriptors are the caller's.
func receiveOrder(c *net.UnixConn) (o order, files []*os.File, err error) {
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(16*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return o, nil, err
	}
	if n == 0 {
		return o, nil, io.EOF
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return o, nil, errors.New("receive order: no descriptors")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		return o, nil, fmt.Errorf("receive order: %w", err)
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return o, files, fmt.Errorf("receive order: %w", err)
	}
	size := binary.BigEndian.Uint32(head)
	if size > maxOrder {
		return o, files, errors.New("receive order: too long")
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c, body); err != nil {
		return o, files, fmt.Errorf("receive order: %w", err)
	}
	if err := gob.NewDecoder(bytes.NewReader(body)).Decode(&o); err != nil {
		return o, files, fmt.Errorf("decode order: %w", err)
	}
	want := 5
	if o.WorkspacePath != "" {
		want++
	}
	if o.Cgroup {
		want++
	}
	if len(files) != want {
		return o, files, fmt.Errorf("receive order: %d descriptors, not %d", len(files), want)
	}
	return o, files, nil
}
