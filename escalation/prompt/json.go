package prompt

import "encoding/json"

// onWire is a Request with bytes where the sandbox chose them: JSON would replace what is not UTF-8, and the developer would
// see something else than what runs.
type onWire struct {
	plain
	Program []byte
	Argv    [][]byte
	Dir     []byte
	Reason  []byte
}

type plain Request

// MarshalJSON implements json.Marshaler; no byte is lost.
func (q Request) MarshalJSON() ([]byte, error) {
	w := onWire{plain: plain(q), Program: []byte(q.Program), Dir: []byte(q.Dir), Reason: []byte(q.Reason)}
	for _, a := range q.Argv {
		w.Argv = append(w.Argv, []byte(a))
	}
	return json.Marshal(w)
}

// UnmarshalJSON implements json.Unmarshaler.
func (q *Request) UnmarshalJSON(b []byte) error {
	var w onWire
	if err := json.Unmarshal(b, &w); err != nil {
		return err
	}
	*q = Request(w.plain)
	q.Program, q.Dir, q.Reason = string(w.Program), string(w.Dir), string(w.Reason)
	q.Argv = nil
	for _, a := range w.Argv {
		q.Argv = append(q.Argv, string(a))
	}
	return nil
}
