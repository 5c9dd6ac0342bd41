package broker

// Phase is where an accepted request stands. The names are those of Lazaret.tla.
type Phase uint8

const (
	Idle      Phase = iota // not accepted
	Checking               // being resolved and matched against the rules
	Queued                 // waits for the session's terminal, or an answer from elsewhere
	Prompted               // on the session's terminal
	Approved               // consent given, command being prepared
	Running                // command started
	Killing                // command being killed; the outcome is fixed
	Decided                // outcome fixed, nothing runs, result under way
	Delivered              // terminal: the client has its result
	Dropped                // terminal: the client was gone
)

var phaseNames = [...]string{"idle", "checking", "queued", "prompted", "approved", "running", "killing", "decided", "delivered", "dropped"}

func (p Phase) String() string { return phaseNames[p] }

// Outcome is the kind of an Escalation Result.
type Outcome uint8

const (
	None      Outcome = iota
	Completed         // approved, ran, and ended by itself: there is an exit status
	Denied            // by a rule or by the developer
	TimedOut          // no answer in time, or the command ran too long
	Cancelled         // by the client, the developer or the end of the session
	Failed            // could not be resolved, verified or started, or broke a limit
)

var outcomeNames = [...]string{"none", "completed", "denied", "timed-out", "cancelled", "failed"}

func (o Outcome) String() string { return outcomeNames[o] }
