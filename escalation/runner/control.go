package runner

import (
	"encoding/binary"
	"encoding/json"
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
	Argv    [][]byte // bytes, as JSON changes strings that are not UTF-8
	Env     [][]byte
	DirPath []byte
	DirID   Identity
	// WorkspacePath is empty if the directory was fixed by a rule; otherwise the root's descriptor is sent too.
	WorkspacePath []byte
	ProgramPath   []byte
	ProgramID     Identity
	ProgramSum    [32]byte
	Script, Ours  bool
	Files         []fileOrder
	ByPath        bool
	Cgroup        bool // a cgroup's descriptor is sent last
}

type fileOrder struct {
	Arg  int
	Path []byte
	Sum  [32]byte
}

// newOrder puts a plan into an order.
func newOrder(p *Plan) order {
	o := order{Argv: toBytes(p.Argv), Env: toBytes(p.Env), DirPath: []byte(p.Dir.Path), DirID: p.Dir.ID, ByPath: p.ByPath,
		ProgramPath: []byte(p.Program.Path), ProgramID: p.Program.ID, ProgramSum: p.Program.Sum, Script: p.Program.Script, Ours: p.Program.Ours}
	if p.Dir.in != nil {
		o.WorkspacePath = []byte(p.Dir.in.Path)
	}
	for _, f := range p.Files {
		o.Files = append(o.Files, fileOrder{f.Arg, []byte(f.Path), f.Sum})
	}
	return o
}

// plan is the inverse, with the descriptors that came beside the order.
func (o order) plan(files []*os.File) *Plan {
	d := &Dir{Path: string(o.DirPath), File: files[3], ID: o.DirID}
	if len(o.WorkspacePath) > 0 {
		d.in = &Workspace{Root: files[5], Path: string(o.WorkspacePath)}
	}
	p := &Plan{Argv: toStrings(o.Argv), Env: toStrings(o.Env), Dir: d, ByPath: o.ByPath, Program: &Program{Path: string(o.ProgramPath),
		File: files[4], ID: o.ProgramID, Sum: o.ProgramSum, Script: o.Script, Ours: o.Ours}}
	for _, f := range o.Files {
		p.Files = append(p.Files, File{f.Arg, string(f.Path), f.Sum})
	}
	return p
}

func toBytes(ss []string) [][]byte {
	bs := make([][]byte, len(ss))
	for i, s := range ss {
		bs[i] = []byte(s)
	}
	return bs
}

func toStrings(bs [][]byte) []string {
	ss := make([]string, len(bs))
	for i, b := range bs {
		ss[i] = string(b)
	}
	return ss
}

// message is what the two say to each other afterwards.
type message struct {
	Go      bool          `json:",omitempty"` // to the runner
	Kill    bool          `json:",omitempty"` // to the runner
	Grace   time.Duration `json:",omitempty"` // of Kill
	Ready   bool          `json:",omitempty"`
	Failed  string        `json:",omitempty"`
	Changed bool          `json:",omitempty"` // Failed is because of ErrChanged
	Ended   *Exit         `json:",omitempty"`
}

const maxOrder = 8 << 20 // bytes; the wire's limit is far below

// sendOrder writes the order with its descriptors, which stay the caller's.
func sendOrder(c *net.UnixConn, o order, files []*os.File) error {
	body, err := json.Marshal(o)
	if err != nil {
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
	head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	if _, _, err := c.WriteMsgUnix(head, unix.UnixRights(fds...), nil); err != nil {
		return fmt.Errorf("send order: %w", err)
	}
	if _, err := c.Write(body); err != nil {
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
	if err := json.Unmarshal(body, &o); err != nil {
		return o, files, fmt.Errorf("decode order: %w", err)
	}
	want := 5
	if len(o.WorkspacePath) > 0 {
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
