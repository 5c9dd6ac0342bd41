package prompt

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Terminal is where a prompt is shown. Nobody else may read or write it meanwhile.
type Terminal struct {
	In, Out *os.File
	Modes   *Modes        // fed with the sandbox's output; nil: the terminal is taken to be in its first state
	Pause   time.Duration // that must lie before a key that decides; default 400 ms
}

// Edit checks an edited argument vector and returns the request to show instead.
type Edit func(ctx context.Context, argv []string) (Request, error)

// Ask shows q and returns the developer's answer, with the terminal as it was. When ctx ends it returns Unanswered, and
// the error is nil. An error means that the terminal could not be used; then nothing was answered.
func Ask(ctx context.Context, t Terminal, q Request, edit Edit) (a Answer, err error) {
	if t.Modes == nil {
		t.Modes = &Modes{}
	}
	if t.Pause <= 0 {
		t.Pause = 400 * time.Millisecond
	}
	was, err := unix.IoctlGetTermios(int(t.In.Fd()), unix.TCGETS)
	if err != nil {
		return a, fmt.Errorf("prompt: read terminal state: %w", err)
	}
	raw := *was
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON | unix.INPCK
	raw.Iflag |= unix.IGNPAR
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Oflag &^= unix.OPOST
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	// TCSETSF throws away what was typed for the sandbox, here, and at the end what was typed for us.
	if err := unix.IoctlSetTermios(int(t.In.Fd()), unix.TCSETSF, &raw); err != nil {
		return a, fmt.Errorf("prompt: set terminal state: %w", err)
	}
	defer func() {
		_, werr := t.Out.WriteString(t.Modes.leave())
		rerr := unix.IoctlSetTermios(int(t.In.Fd()), unix.TCSETSF, was)
		err = errors.Join(err, werr, rerr)
	}()
	wake, stop, err := waker(ctx)
	if err != nil {
		return a, err
	}
	defer stop()
	if _, err := t.Out.WriteString(t.Modes.enter()); err != nil {
		return a, fmt.Errorf("prompt: write terminal: %w", err)
	}
	p := asker{t: t, wake: wake, screen: Screen{Req: q}, last: time.Now()}
	return p.loop(ctx, edit)
}

// waker returns a descriptor that becomes readable when ctx ends.
func waker(ctx context.Context) (fd int, stop func(), err error) {
	fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, nil, fmt.Errorf("prompt: %w", err)
	}
	fired := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(fired)
		_, _ = unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	return fd, func() {
		if !cancel() {
			<-fired // the descriptor's number may be another file's after Close
		}
		unix.Close(fd)
	}, nil
}

type asker struct {
	t      Terminal
	wake   int
	screen Screen
	drawn  string
	last   time.Time // of the last key, or of the prompt's appearance
}

func (p *asker) loop(ctx context.Context, edit Edit) (Answer, error) {
	buf := make([]byte, 4096)
	for {
		if err := p.draw(); err != nil {
			return Answer{}, err
		}
		fds := []unix.PollFd{{Fd: int32(p.t.In.Fd()), Events: unix.POLLIN}, {Fd: int32(p.wake), Events: unix.POLLIN}}
		// The time-out is for changes of size and for the time that is left; the text is only written if it changed.
		if _, err := unix.Poll(fds, 250); err != nil && !errors.Is(err, unix.EINTR) {
			return Answer{}, fmt.Errorf("prompt: %w", err)
		}
		switch {
		case ctx.Err() != nil:
			return Answer{}, nil
		case fds[0].Revents&(unix.POLLIN|unix.POLLHUP|unix.POLLERR) == 0:
			continue
		}
		n, err := unix.Read(int(p.t.In.Fd()), buf)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil || n <= 0 {
			return Answer{}, fmt.Errorf("prompt: the terminal is gone (%w)", errors.Join(err, os.ErrClosed))
		}
		keys := Keys(buf[:n])
		now := time.Now()
		deliberate := len(keys) == 1 && now.Sub(p.last) >= p.t.Pause
		p.last = now
		if p.screen.mode != editing {
			keys = keys[:1] // each step of scrolling is drawn
		}
		for _, k := range keys {
			switch p.screen.Key(k, deliberate) {
			case Approve:
				return Answer{Kind: Approved, Digest: p.screen.Req.Digest}, nil
			case ApproveAndRemember:
				return Answer{Kind: Approved, Digest: p.screen.Req.Digest, Remember: true}, nil
			case Deny:
				return Answer{Kind: Denied, Digest: p.screen.Req.Digest}, nil
			case Recheck:
				q, err := edit(ctx, p.screen.Edited())
				if err != nil {
					p.screen.Reject(err)
					continue
				}
				p.screen.Replace(q)
				p.last = time.Now()
				keys = nil
			}
			if keys == nil {
				break
			}
		}
	}
}

// draw writes the screen if it differs from what was written last.
func (p *asker) draw() error {
	p.screen.Cols, p.screen.Rows = 80, 24
	if ws, err := unix.IoctlGetWinsize(int(p.t.Out.Fd()), unix.TIOCGWINSZ); err == nil && ws.Col > 0 && ws.Row > 0 {
		p.screen.Cols, p.screen.Rows = int(ws.Col), int(ws.Row)
	}
	p.screen.Now = time.Now()
	lines, row, at := p.screen.Lines()
	var b strings.Builder
	fmt.Fprintf(&b, "\x1b[?25l\x1b[H")
	for i, l := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if i == row && at <= len(l) {
			l = l[:at] + "\x1b7" + l[at:] // where the cursor is in cells, the terminal knows best
		}
		b.WriteString("\x1b[2K" + l)
	}
	b.WriteString("\x1b[J")
	if row >= 0 {
		b.WriteString("\x1b8\x1b[?25h")
	}
	text := fmt.Sprintf("%dx%d", p.screen.Cols, p.screen.Rows) + b.String()
	if text == p.drawn {
		return nil
	}
	p.drawn = text
	if _, err := p.t.Out.WriteString(b.String()); err != nil {
		return fmt.Errorf("prompt: write terminal: %w", err)
	}
	return nil
}
