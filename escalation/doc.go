// Package escalation lets a command run on the host if, and only if, the developer or a rule says so.
//
// [Server] is the coordinator's side. It listens on the sidecar's address for mutually authenticated peers, and drives
// the pure machine of package broker: it carries out effects and reports events, and decides nothing itself. What is kept
// true is said in packages broker (decisions), trust (who is who), wire (hostile bytes), rules (what may run unasked),
// runner (what really runs) and prompt (what the developer sees).
//
// To wire it, in the coordinator:
//
//  1. main enters [RunnerMain] for argv[0] == runner.RoleArg, before flags are read.
//  2. trust.New makes the Domain's Trust Anchor; write Anchor.CA() and the endpoint ("address:port") to the files that
//     package client names, which are mounted read-only in the sandbox.
//     rules.Resolver.Writable must list every host directory that the sandbox can write: the workspace and all volumes.
//  3. [New] with a listener bound on the sidecar's address (its descriptor may come from another namespace), the
//     compiled rules, the opened workspace, a runner.Host and a [Prompter]; then run [Server.Serve].
//  4. [Server.Join] for each Client Session, before its process starts: put certificate and key into the session's
//     directory, mounted or written where LAZARET_SESSION_DIR points. [Server.Leave] when it ends.
//  5. The Prompter passes a request to the session's client, which holds back the sandbox's output and calls prompt.Ask;
//     its edits come back through the function that Prompt was given.
//  6. "lazaret requests" is [Server.Pending], [Server.Answer] and [Server.Cancel].
//  7. [Server.Close] at teardown; commands that still run are killed first.
//
// Locks: effects are carried out under Server.mu and never block; a connection's write lock, which may be held for as long
// as its peer does not read, is never taken under it.
package escalation

import (
	_ "embed"

	"lazaret.dev/lazaret/escalation/runner"
)

// EscalateMD is the text for agents that is shown inside the sandbox as ESCALATE.md.
//
//go:embed ESCALATE.md
var EscalateMD string

// RunnerMain is the role of a runner process; see package runner.
func RunnerMain() int { return runner.Main() }
