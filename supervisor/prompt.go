package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/nsenter"
)

// A prompt is a conversation of coordinator and client, numbered by Seq:
//
//	coordinator              client
//	   ---- open ------------->  takes the terminal from the sandbox, shows the request
//	   <--- edit --------------  any number of times
//	   ---- edited | refused ->
//	   ---- close ------------>  at any time; the client then answers Unanswered
//	   <--- answer | failed ---  last: the terminal is the sandbox's again
const (
	promptOpen    = "open"
	promptEdited  = "edited"
	promptRefused = "refused"
	promptClose   = "close"
	replyEdit     = "edit"
	replyAnswer   = "answer"
	replyFailed   = "failed"
)

// promptEvent goes to the client. With open and edited, a payload comes along.
type promptEvent struct {
	Seq  int
	Op   string
	Text string // of refused

	request prompt.Request // the payload
}

// promptReply goes to the coordinator. With edit, a payload comes along.
type promptReply struct {
	Seq    int
	Op     string
	Answer prompt.Answer
	Text   string // of failed

	argv []string // the payload
}

// maxPayload bounds a payload, in bytes: a request of 256 KiB of the sandbox's bytes, or a list of a thousand short ones.
const maxPayload = 32 << 20

// pack puts a value that may be too large for a message into a file without a name.
func pack(v any) (*os.File, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode payload: %w", err)
	}
	fd, err := unix.MemfdCreate("lazaret", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make payload: %w", err)
	}
	f := os.NewFile(uintptr(fd), "payload")
	if _, err := f.Write(b); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// unpack reads what pack wrote. It owns files.
func unpack(files []*os.File, v any) error {
	defer nsenter.CloseAll(files)
	if len(files) != 1 {
		return fmt.Errorf("message with %d payloads in place of 1", len(files))
	}
	b, err := io.ReadAll(io.NewSectionReader(files[0], 0, maxPayload)) // the offset is the sender's
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

func sendPrompt(conn *nsenter.Conn, ev promptEvent, q prompt.Request) error {
	f, err := pack(q)
	if err != nil {
		return err
	}
	defer f.Close()
	return conn.Send(event{Prompt: &ev}, f)
}

// asBytes carries strings that JSON would change.
func asBytes(argv []string) (out [][]byte) {
	for _, a := range argv {
		out = append(out, []byte(a))
	}
	return out
}

func asStrings(argv [][]byte) (out []string) {
	for _, a := range argv {
		out = append(out, string(a))
	}
	return out
}

// prompter shows prompts on a client's terminal, one after the other.
type prompter struct {
	conn   *nsenter.Conn
	cancel context.CancelFunc // closes the prompt that is up
	seq    int
	edited chan promptEvent // for the prompt that is up
	wg     sync.WaitGroup
}

// take acts on an event of the coordinator; it does not block. show runs a prompt and gives the terminal back.
func (p *prompter) take(conn *nsenter.Conn, ev promptEvent, show func(context.Context, prompt.Request, prompt.Edit) (prompt.Answer, error)) {
	switch {
	case ev.Op == promptOpen:
		p.close() // the coordinator opens one at a time
		ctx, cancel := context.WithCancel(context.Background())
		edited := make(chan promptEvent, 1)
		p.conn, p.cancel, p.seq, p.edited = conn, cancel, ev.Seq, edited
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			a, err := show(ctx, ev.request, func(ctx context.Context, argv []string) (prompt.Request, error) {
				return p.edit(ctx, conn, ev.Seq, argv, edited)
			})
			r := promptReply{Seq: ev.Seq, Op: replyAnswer, Answer: a}
			if err != nil {
				r.Op, r.Text = replyFailed, err.Error()
			}
			_ = conn.Send(clientMessage{Prompt: &r}) // without a coordinator, the session ends anyway
		}()
	case ev.Seq != p.seq:
	case ev.Op == promptClose:
		p.cancel()
	default:
		select {
		case p.edited <- ev:
		default: // never asked for
		}
	}
}

// edit has an edited argument vector checked.
func (p *prompter) edit(ctx context.Context, conn *nsenter.Conn, seq int, argv []string, edited <-chan promptEvent) (prompt.Request, error) {
	f, err := pack(asBytes(argv))
	if err != nil {
		return prompt.Request{}, err
	}
	err = conn.Send(clientMessage{Prompt: &promptReply{Seq: seq, Op: replyEdit}}, f)
	f.Close()
	if err != nil {
		return prompt.Request{}, err
	}
	select {
	case <-ctx.Done():
		return prompt.Request{}, ctx.Err()
	case ev := <-edited:
		if ev.Op == promptRefused {
			return prompt.Request{}, errors.New(ev.Text)
		}
		return ev.request, nil
	}
}

// close ends the prompt that is up, if any, and returns when the terminal is given back.
func (p *prompter) close() {
	if p.cancel != nil {
		p.cancel()
	}
	p.wg.Wait()
}

// redrawPause lets a program see two changes of size, not one that leads nowhere.
const redrawPause = 60 * time.Millisecond

// ask shows a request. Meanwhile the sandbox's output stays in its pseudo-terminal, whose buffer is bounded, and nothing that
// is typed gets to it.
func (t *terminal) ask(ctx context.Context, q prompt.Request, edit prompt.Edit) (prompt.Answer, error) {
	t.tty.Lock()
	a, err := prompt.Ask(ctx, prompt.Terminal{In: t.term.In, Out: t.term.Out, Modes: &t.modes}, q, edit)
	full := t.modes.Alternate()
	t.tty.Unlock()
	if full {
		t.redraw()
	}
	return a, err
}

// redraw makes a program that has drawn on the whole screen do so again, by a change of size and back.
func (t *terminal) redraw() {
	ws, err := pty.GetsizeFull(t.term.In)
	if err != nil || ws.Rows < 2 {
		return
	}
	less := *ws
	less.Rows--
	t.mu.Lock()
	_ = pty.Setsize(t.master, &less)
	t.mu.Unlock()
	time.Sleep(redrawPause)
	t.resize()
}

// typed passes on what the developer types, when the terminal is the sandbox's.
func (t *terminal) typed() {
	buf := make([]byte, 4096)
	in := []unix.PollFd{{Fd: int32(t.term.In.Fd()), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(in, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		n, err := t.read(in, buf)
		if err != nil {
			return
		}
		if _, err := t.master.Write(buf[:n]); err != nil {
			return
		}
	}
}

// read reads what is there; a prompt may have taken it.
func (t *terminal) read(in []unix.PollFd, buf []byte) (int, error) {
	t.tty.Lock()
	defer t.tty.Unlock()
	if t.over {
		return 0, io.EOF
	}
	if n, err := unix.Poll(in, 0); n == 0 || err != nil {
		return 0, nil
	}
	n, err := unix.Read(int(in[0].Fd), buf)
	switch {
	case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		return 0, nil
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
