package escalation

import (
	"context"
	"errors"
	"net"
	"time"

	"lazaret.dev/lazaret/escalation/broker"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/escalation/rules"
	"lazaret.dev/lazaret/escalation/runner"
	"lazaret.dev/lazaret/escalation/trust"
)

// Prompter shows requests on the terminals of sessions.
type Prompter interface {
	// Prompt asks on the terminal of session and returns when that terminal is the sandbox's again: after an answer,
	// or soon after ctx has ended. An error counts as a refusal. edit checks an edited argument vector and returns what to
	// show instead; the shown form is bound by its digest. Prompt is called once at a time for a session.
	Prompt(ctx context.Context, session string, q prompt.Request, edit func(argv []string) (prompt.Request, error)) (prompt.Answer, error)
}

// Config configures a [Server]. All fields without a default are required.
type Config struct {
	Domain    string
	Profile   string
	Listener  net.Listener // owned by the server
	Anchor    *trust.Anchor
	Rules     *rules.Set
	Resolver  rules.Resolver
	Workspace runner.Workspace // stays the caller's
	Host      *runner.Host     // stays the caller's
	Environ   []string         // the developer's environment, of which rules pick names
	Prompter  Prompter

	// Remember writes a rule that the developer chose to keep. nil: nothing can be remembered.
	Remember func(session string, r rules.Rule) error
	// Journal gets an entry for each decision. It must not block. nil: none.
	Journal func(Entry)

	Limits broker.Limits
	Grace  time.Duration // from SIGTERM to SIGKILL of a command; default 2 s
	Now    func() time.Time

	// Deadlines for silent peers; the defaults are for people, tests shorten them.
	Handshake time.Duration // of TLS and of the request; default 5 s
	Silence   time.Duration // between two messages of a client; default wire.Silence
	Delivery  time.Duration // until a result is confirmed; default 10 s
}

// Entry is one line of the journal. The texts of the sandbox in it are raw bytes.
type Entry struct {
	Time    time.Time
	Session string
	Request string // hexadecimal; empty for a connection that was refused before it made a request
	Event   string // "refused", "accepted", "auto-approved", "queued", "approved", "denied", "edited", "started", "finished", "peer"
	Argv    []string
	Program string
	Dir     string
	Outcome string // of "finished"
	Detail  string // for the developer, not for the sandbox
}

func (c *Config) complete() error {
	switch {
	case c.Listener == nil:
		return errors.New("escalation: no listener")
	case c.Anchor == nil || c.Rules == nil || c.Host == nil || c.Prompter == nil || c.Workspace.Root == nil:
		return errors.New("escalation: incomplete configuration")
	}
	if c.Journal == nil {
		c.Journal = func(Entry) {}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&c.Grace, 2*time.Second)
	def(&c.Handshake, 5*time.Second)
	def(&c.Delivery, 10*time.Second)
	return nil
}
