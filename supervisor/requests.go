package supervisor

import (
	"errors"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/escalation/prompt"
	"lazaret.dev/lazaret/nsenter"
)

// requestsCall is what a client asks a coordinator about open Host Escalations.
type requestsCall struct {
	Op     string // "list", "answer"
	ID     string
	Answer prompt.Answer
}

// serveRequests answers one requestsCall.
func (c *coordinator) serveRequests(conn *nsenter.Conn, call requestsCall) {
	<-c.started
	if c.startup != nil {
		_ = conn.Send(event{Failed: asFailure(c.startup)})
		return
	}
	switch call.Op {
	case "list":
		f, err := pack(c.desk.server.Pending())
		if err != nil {
			_ = conn.Send(event{Failed: asFailure(err)})
			return
		}
		_ = conn.Send(event{Requests: true}, f)
		f.Close()
	case "answer":
		err := c.desk.server.Answer(call.ID, call.Answer)
		if errors.Is(err, escalation.ErrNotPending) {
			err = hint(err, "it was answered, has ended, or is not what you saw; see: lazaret requests")
		}
		_ = conn.Send(event{Requests: err == nil, Failed: asFailure(err)})
	default:
		_ = conn.Send(event{Failed: &Failure{What: "this coordinator has no such operation on requests"}})
	}
}
