package broker

import "time"

// SessionID names a Client Session. It comes from a verified certificate, never from a message.
type SessionID string

// RequestID is an Escalation Request ID: 16 bytes from crypto/rand, made by the client.
type RequestID [16]byte

// ConnID numbers a connection; the driver never reuses one. A connection carries one request.
type ConnID uint64

// Digest identifies what was shown to the developer: program, arguments, directory, environment and limits.
type Digest [32]byte

// Event is something that happened; each type is the action of the same name in Lazaret.tla.
type Event interface{ event() }

type (
	// Join registers a session. HasTerminal says whether it can show a prompt.
	Join struct {
		Session     SessionID
		HasTerminal bool
	}
	// Leave ends a session: its requests are cancelled, its connections cut, its certificate worthless.
	Leave struct{ Session SessionID }
	// Authenticate reports a connection whose certificate names a session of this Domain.
	Authenticate struct {
		Conn    ConnID
		Session SessionID
	}
	// Submit is a request read from an authenticated connection. Wait bounds the time until an answer.
	Submit struct {
		Conn ConnID
		ID   RequestID
		Wait time.Duration
	}
	// AutoApprove, Enqueue and RuleDeny are the three verdicts of the rules.
	AutoApprove struct {
		ID     RequestID
		Digest Digest
		Run    time.Duration // time limit of the command
	}
	Enqueue struct {
		ID     RequestID
		Digest Digest
		Run    time.Duration
	}
	RuleDeny struct{ ID RequestID }
	// Prompt gives the session's terminal to the oldest queued request. [Machine.Due] makes it.
	Prompt struct{ Session SessionID }
	// Edit replaces what would run by the developer's edited and newly resolved form. It must be shown before it runs.
	Edit struct {
		ID     RequestID
		Digest Digest
		Run    time.Duration
	}
	// Show reports that the edited form is on the screen.
	Show struct{ ID RequestID }
	// Approve is the developer's consent to the form with this digest, from the prompt or from another terminal.
	Approve struct {
		ID     RequestID
		Digest Digest
	}
	// Deny is the developer's refusal.
	Deny struct{ ID RequestID }
	// TimeOut reports a passed deadline. [Machine.Due] makes it.
	TimeOut struct{ ID RequestID }
	// Cancel is the client's or the developer's wish to stop.
	Cancel struct{ ID RequestID }
	// Exceed reports that the running command broke a limit other than time (output).
	Exceed struct{ ID RequestID }
	// Execute reports a command that is prepared, verified and waits for the word to start.
	Execute struct{ ID RequestID }
	// Exit reports that the command ended by itself and nothing of it is left.
	Exit struct{ ID RequestID }
	// Kill reports that a command that was to be killed is dead, as a whole.
	Kill struct{ ID RequestID }
	// Fail reports that a request could not be checked, prepared or supervised. Nothing of it is running.
	Fail struct{ ID RequestID }
	// Deliver reports that the client has confirmed its result.
	Deliver struct{ ID RequestID }
	// Disconnect reports a connection that is gone or was cut.
	Disconnect struct{ Conn ConnID }
	// Return reports that the session's terminal is the sandbox's again.
	Return struct{ Session SessionID }
)

func (Join) event()         {}
func (Leave) event()        {}
func (Authenticate) event() {}
func (Submit) event()       {}
func (AutoApprove) event()  {}
func (Enqueue) event()      {}
func (RuleDeny) event()     {}
func (Prompt) event()       {}
func (Edit) event()         {}
func (Show) event()         {}
func (Approve) event()      {}
func (Deny) event()         {}
func (TimeOut) event()      {}
func (Cancel) event()       {}
func (Exceed) event()       {}
func (Execute) event()      {}
func (Exit) event()         {}
func (Kill) event()         {}
func (Fail) event()         {}
func (Deliver) event()      {}
func (Disconnect) event()   {}
func (Return) event()       {}
