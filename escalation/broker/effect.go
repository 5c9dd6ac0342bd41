package broker

// Effect is something the driver must do, without blocking the machine.
type Effect interface{ effect() }

// Refusal says why a connection's request was not accepted.
type Refusal uint8

const (
	RefusedSession   Refusal = iota + 1 // the session is not registered (any more)
	RefusedDuplicate                    // the ID is in use or was used
	RefusedBusy                         // the session or the Domain has too many open requests
	RefusedProtocol                     // a second request on one connection
)

// String returns the stable word used on the wire, in logs and in test histories.
func (r Refusal) String() string {
	switch r {
	case RefusedSession:
		return "session"
	case RefusedDuplicate:
		return "duplicate"
	case RefusedBusy:
		return "busy"
	case RefusedProtocol:
		return "protocol"
	}
	return "unknown"
}

type (
	// RefuseConn answers a request that was not accepted, then cuts the connection.
	RefuseConn struct {
		Conn ConnID
		Why  Refusal
	}
	// Check resolves the request and evaluates the rules; it ends in AutoApprove, Enqueue, RuleDeny or Fail.
	Check struct{ ID RequestID }
	// OpenPrompt shows the request on the session's terminal; it ends in Return, after an answer or none.
	OpenPrompt struct {
		Session SessionID
		ID      RequestID
	}
	// ClosePrompt takes the prompt down; Return follows.
	ClosePrompt struct {
		Session SessionID
		ID      RequestID
	}
	// Prepare readies the command and verifies what was pinned; it ends in Execute or Fail.
	Prepare struct{ ID RequestID }
	// Start lets the prepared command run. It is the only effect that runs anything.
	Start struct{ ID RequestID }
	// Stop ends what Check, Prepare or Start began; after Start it must end in Kill.
	Stop struct {
		ID      RequestID
		Running bool
	}
	// Reply sends the result; it ends in Deliver, or in Disconnect if the client does not take it in time.
	Reply struct {
		ID      RequestID
		Outcome Outcome
	}
	// CloseConn cuts a connection whose session has left.
	CloseConn struct{ Conn ConnID }
	// Finish reports a terminal request: delivered, or dropped because its client is gone. The driver forgets it.
	Finish struct {
		ID        RequestID
		Outcome   Outcome
		Delivered bool
	}
)

func (RefuseConn) effect()  {}
func (Check) effect()       {}
func (OpenPrompt) effect()  {}
func (ClosePrompt) effect() {}
func (Prepare) effect()     {}
func (Start) effect()       {}
func (Stop) effect()        {}
func (Reply) effect()       {}
func (CloseConn) effect()   {}
func (Finish) effect()      {}
