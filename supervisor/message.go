package supervisor

import (
	"lazaret.dev/lazaret/nsenter"
)

// protocolVersion is that of the messages between client and coordinator. A client meets a coordinator of another
// version when Lazaret was updated while a Domain ran.
const protocolVersion = 2

// Plan is all that a coordinator is started with: validated, plain data.
type Plan struct {
	Version     string // of the build
	DomainID    string
	Profile     Profile
	Workspace   Workspace
	Served      []served // what the workspace server shows; the workspace is the first
	Dirs        Dirs
	IDs         nsenter.IDMap
	UID, GID    uint32 // the developer's
	Runsc, Init string // host paths of our programs
	Escalate    string // the same: the Escalation Client
	Shell       string // the agent's, inside
	Network     networkPlan
	Volumes     []pinnedVolume
	OnChange    map[string]string // by persistent path: what the developer chose for one of another base
	Escalation  escalationPlan
	// FailAt names a step of the start that fails, for tests of the undo.
	FailAt string
}

// request is what a client sends first.
type request struct {
	Proto int
	Op    string // "enter", "network", "requests"
	Enter *enterRequest

	Network  *networkCall
	Requests *requestsCall
}

// enterRequest asks for a Client Session. Without TTY, three descriptors come with it: the sandbox's ends of pipes for
// standard input, output and error.
type enterRequest struct {
	Profile    Profile  // what this client is configured with; its fingerprint must be the Domain's
	Argv       []string // empty: the profile's command
	Cwd        string
	Env        []string // what the profile passes of the caller's, and sets
	TTY        bool
	Rows, Cols uint16
}

// clientMessage is what a client sends during its session.
type clientMessage struct {
	Signal int          // without a terminal: signal the process
	Prompt *promptReply // with a terminal
}

// event is what a coordinator sends. The first one of a session is Entered or Failed.
type event struct {
	Entered  *entered
	Failed   *Failure // the session, or the start, failed
	Diagnose bool     // with Failed: it was the start, look for its cause on this machine
	Notice   string   // a line for the developer
	Report   []string // lines for the developer, once the session's output is complete
	Exit     *int     // the session's process ended with this status; nothing follows
	Busy     bool     // another coordinator has the Domain: ask that one

	Network  *networkState // the answer to a networkCall
	Requests bool          // the answer to a requestsCall; a list comes as a payload
	Prompt   *promptEvent

	Changed *ChangedAnchor // with Failed: the start waits for a choice
}

// entered tells that the session runs; for a terminal, the master side of its PTY comes with it.
type entered struct{ Session string }

// domainRequest is what a coordinator sends to the domain process, after the Plan.
type domainRequest struct {
	Exec    *execRequest // three descriptors come with it
	Signal  *execSignal
	Network *networkReplace
	Release bool // give up the image; the Domain ends
}

type execRequest struct {
	Session   string
	Argv, Env []string
	Cwd       string
	TTY       bool
	Keys      sessionKeys
}

type execSignal struct {
	Session string
	Signal  int
}

// domainEvent is what the domain process sends.
type domainEvent struct {
	Ready  bool
	Failed *Failure // the start failed
	// Network tells that the network stands, once before Ready, and answers each networkReplace.
	Network *networkReady
	Exit    *execExit
	Gone    string // the sandbox ended, and why
	// Base comes with Ready.
	Base     *baseReport
	Changed  *ChangedAnchor // with Failed
	Notice   string         // a line for the developer
	Released bool           // the answer to Release
}

type execExit struct {
	Session string
	Status  int
	Failed  *Failure // the process never ran
}
