package prompt

import "time"

// Request is what the developer is asked about: plain data, made by the coordinator. Fields marked with (!) hold bytes
// that the sandbox chose; nothing else does.
type Request struct {
	ID      string // Escalation Request ID, hexadecimal
	Profile string
	Session string
	Program string   // absolute path of the file that would run
	Argv    []string // (!)
	Dir     string   // (!) absolute
	Env     []string // names of the environment
	Reason  string   // (!) the agent's words
	Notes   []string // ours: what is special about this command
	Waiting int      // further requests of this session
	Expires time.Time
	Time    time.Duration // limit of the run

	Digest [32]byte // ties an approval to exactly this
	Edited bool     // the developer changed it

	// Remember is the narrow rule that would approve exactly this command in future, as it would be written; empty if that
	// is not possible.
	Remember string
}

// Kind is what the developer decided.
type Kind uint8

const (
	Unanswered Kind = iota // the prompt was closed, or the terminal is gone
	Approved
	Denied
)

// Answer is the developer's decision.
type Answer struct {
	Kind     Kind
	Digest   [32]byte // of the request that was on the screen
	Remember bool     // write the rule that Request.Remember showed
}
