------------------------------ MODULE Lazaret ------------------------------
(***************************************************************************)
(* Host Escalation: how a request from inside an Agent Sandbox is          *)
(* authenticated, asked about, run, killed and answered, and who owns the  *)
(* terminals meanwhile.                                                    *)
(*                                                                         *)
(* Every action below is one event of the same name in escalation/broker,  *)
(* and one case of Machine.Step. A request stands for its connection too,  *)
(* as a connection carries one request.                                    *)
(*                                                                         *)
(* To check, with TLC 1.8 (2 sessions x 2 requests):                       *)
(*     java -cp tla2tools.jar tlc2.TLC -workers auto -deadlock \           *)
(*         -config Lazaret.cfg Lazaret.tla                                 *)
(* -deadlock, as a finished history has no next step. The number of        *)
(* distinct states is printed by `go test -run Reachable -v` in            *)
(* escalation/broker too, for the same bounds; the two must be equal.      *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Sessions,       \* Client Sessions that may join
    Requests,       \* requests that may be made, each on its own connection
    HasTerminal     \* sessions that can show a prompt

ASSUME HasTerminal \subseteq Sessions

NoSession == "no session"
Sandbox   == "sandbox"      \* owner of a terminal that shows no prompt

VARIABLES
    up,         \* the coordinator lives
    session,    \* session -> "new", "live", "gone"
    conn,       \* request -> its connection: "none", "open", "closed"
    owner,      \* request -> session that its certificate was verified for
    phase,      \* request -> see Phases
    outcome,    \* request -> see Outcomes; fixed once
    edit,       \* request -> "no", "unseen" (edited, not yet on the screen), "seen"
    queue,      \* session -> its requests that wait for a prompt, oldest first
    term,       \* session -> who owns its terminal: Sandbox or a request
    alive,      \* request -> a host command of it exists
    consent,    \* request -> history: approved, in the form that is current
    runs,       \* request -> history: how often it was started
    results     \* request -> history: how often its client got a result

vars == <<up, session, conn, owner, phase, outcome, edit, queue, term, alive, consent, runs, results>>

Phases == {"idle", "checking", "queued", "prompted", "approved", "running",
           "killing", "decided", "delivered", "dropped", "lost"}
Terminal == {"delivered", "dropped", "lost"}
Outcomes == {"none", "completed", "denied", "timed-out", "cancelled", "failed"}
Timed == {"checking", "queued", "prompted", "approved", "running"}

TypeOK ==
    /\ up \in BOOLEAN
    /\ session \in [Sessions -> {"new", "live", "gone"}]
    /\ conn \in [Requests -> {"none", "open", "closed"}]
    /\ owner \in [Requests -> Sessions \cup {NoSession}]
    /\ phase \in [Requests -> Phases]
    /\ outcome \in [Requests -> Outcomes]
    /\ edit \in [Requests -> {"no", "unseen", "seen"}]
    /\ \A s \in Sessions : \A i \in 1..Len(queue[s]) : queue[s][i] \in Requests
    /\ term \in [Sessions -> Requests \cup {Sandbox}]
    /\ alive \in [Requests -> BOOLEAN]
    /\ consent \in [Requests -> BOOLEAN]
    /\ runs \in [Requests -> Nat]
    /\ results \in [Requests -> Nat]

Init ==
    /\ up = TRUE
    /\ session = [s \in Sessions |-> "new"]
    /\ conn = [r \in Requests |-> "none"]
    /\ owner = [r \in Requests |-> NoSession]
    /\ phase = [r \in Requests |-> "idle"]
    /\ outcome = [r \in Requests |-> "none"]
    /\ edit = [r \in Requests |-> "no"]
    /\ queue = [s \in Sessions |-> <<>>]
    /\ term = [s \in Sessions |-> Sandbox]
    /\ alive = [r \in Requests |-> FALSE]
    /\ consent = [r \in Requests |-> FALSE]
    /\ runs = [r \in Requests |-> 0]
    /\ results = [r \in Requests |-> 0]

-----------------------------------------------------------------------------
(* Helpers *)

Without(seq, r) == SelectSeq(seq, LAMBDA q : q # r)

Unqueue(r) == queue' = [s \in Sessions |-> Without(queue[s], r)]

(* r gets its outcome o and nothing of it runs: the result goes to its     *)
(* client, or is dropped if the client is gone.                            *)
Settle(r, o) ==
    /\ outcome' = [outcome EXCEPT ![r] = o]
    /\ phase' = [phase EXCEPT ![r] = IF conn[r] = "open" THEN "decided" ELSE "dropped"]

(* r is to end with outcome o; a running command has to die first.         *)
End(r, o) ==
    IF phase[r] = "running"
    THEN /\ outcome' = [outcome EXCEPT ![r] = o]
         /\ phase' = [phase EXCEPT ![r] = "killing"]
    ELSE Settle(r, o)

(* What the loss of r's client does to phase and outcome.                  *)
LostPhase(r) ==
    CASE phase[r] \in {"checking", "queued", "prompted", "approved", "decided"} -> "dropped"
      [] phase[r] = "running" -> "killing"
      [] OTHER -> phase[r]
LostOutcome(r) ==
    IF phase[r] \in Timed THEN "cancelled" ELSE outcome[r]

-----------------------------------------------------------------------------
(* Sessions and connections *)

Join(s) ==
    /\ up /\ session[s] = "new"
    /\ session' = [session EXCEPT ![s] = "live"]
    /\ UNCHANGED <<up, conn, owner, phase, outcome, edit, queue, term, alive, consent, runs, results>>

Leave(s) ==
    /\ up /\ session[s] = "live"
    /\ session' = [session EXCEPT ![s] = "gone"]
    /\ LET mine == {r \in Requests : owner[r] = s /\ conn[r] = "open"} IN
       /\ conn' = [r \in Requests |-> IF r \in mine THEN "closed" ELSE conn[r]]
       /\ phase' = [r \in Requests |-> IF r \in mine THEN LostPhase(r) ELSE phase[r]]
       /\ outcome' = [r \in Requests |-> IF r \in mine THEN LostOutcome(r) ELSE outcome[r]]
    /\ queue' = [queue EXCEPT ![s] = <<>>]
    /\ term' = [term EXCEPT ![s] = Sandbox]
    /\ UNCHANGED <<up, owner, edit, alive, consent, runs, results>>

(* A connection whose certificate names s and was issued by this Domain.   *)
(* There is no action for any other certificate: it gets nowhere.          *)
Authenticate(r, s) ==
    /\ up /\ session[s] = "live" /\ conn[r] = "none"
    /\ conn' = [conn EXCEPT ![r] = "open"]
    /\ owner' = [owner EXCEPT ![r] = s]
    /\ UNCHANGED <<up, session, phase, outcome, edit, queue, term, alive, consent, runs, results>>

Disconnect(r) ==
    /\ up /\ conn[r] = "open"
    /\ conn' = [conn EXCEPT ![r] = "closed"]
    /\ phase' = [phase EXCEPT ![r] = LostPhase(r)]
    /\ outcome' = [outcome EXCEPT ![r] = LostOutcome(r)]
    /\ Unqueue(r)
    /\ UNCHANGED <<up, session, owner, edit, term, alive, consent, runs, results>>

-----------------------------------------------------------------------------
(* Requests: the verdict of the rules *)

Submit(r) ==
    /\ up /\ conn[r] = "open" /\ phase[r] = "idle"
    /\ phase' = [phase EXCEPT ![r] = "checking"]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, queue, term, alive, consent, runs, results>>

AutoApprove(r) ==
    /\ up /\ phase[r] = "checking"
    /\ phase' = [phase EXCEPT ![r] = "approved"]
    /\ consent' = [consent EXCEPT ![r] = TRUE]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, queue, term, alive, runs, results>>

Enqueue(r) ==
    /\ up /\ phase[r] = "checking"
    /\ phase' = [phase EXCEPT ![r] = "queued"]
    /\ queue' = [queue EXCEPT ![owner[r]] = Append(@, r)]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, term, alive, consent, runs, results>>

RuleDeny(r) ==
    /\ up /\ phase[r] = "checking"
    /\ Settle(r, "denied")
    /\ UNCHANGED <<up, session, conn, owner, edit, queue, term, alive, consent, runs, results>>

-----------------------------------------------------------------------------
(* The prompt *)

Prompt(s) ==
    /\ up /\ session[s] = "live" /\ s \in HasTerminal
    /\ term[s] = Sandbox /\ queue[s] # <<>>
    /\ term' = [term EXCEPT ![s] = Head(queue[s])]
    /\ phase' = [phase EXCEPT ![Head(queue[s])] = "prompted"]
    /\ queue' = [queue EXCEPT ![s] = Tail(@)]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, alive, consent, runs, results>>

Edit(r) ==
    /\ up /\ phase[r] = "prompted" /\ edit[r] # "unseen"
    /\ edit' = [edit EXCEPT ![r] = "unseen"]
    /\ UNCHANGED <<up, session, conn, owner, phase, outcome, queue, term, alive, consent, runs, results>>

Show(r) ==
    /\ up /\ phase[r] = "prompted" /\ edit[r] = "unseen"
    /\ edit' = [edit EXCEPT ![r] = "seen"]
    /\ UNCHANGED <<up, session, conn, owner, phase, outcome, queue, term, alive, consent, runs, results>>

(* From the prompt, or from another terminal of the developer, which may   *)
(* answer a queued request too. Consent is to what was shown.              *)
Approve(r) ==
    /\ up /\ phase[r] \in {"queued", "prompted"} /\ edit[r] # "unseen"
    /\ phase' = [phase EXCEPT ![r] = "approved"]
    /\ consent' = [consent EXCEPT ![r] = TRUE]
    /\ Unqueue(r)
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, term, alive, runs, results>>

Deny(r) ==
    /\ up /\ phase[r] \in {"queued", "prompted"}
    /\ Settle(r, "denied")
    /\ Unqueue(r)
    /\ UNCHANGED <<up, session, conn, owner, edit, term, alive, consent, runs, results>>

(* The prompt on s's terminal is over, and the screen is restored.         *)
Return(s) ==
    /\ up /\ term[s] # Sandbox
    /\ phase[term[s]] # "prompted"
    /\ term' = [term EXCEPT ![s] = Sandbox]
    /\ UNCHANGED <<up, session, conn, owner, phase, outcome, edit, queue, alive, consent, runs, results>>

-----------------------------------------------------------------------------
(* The end of patience, and of commands *)

TimeOut(r) ==
    /\ up /\ phase[r] \in Timed
    /\ End(r, "timed-out")
    /\ Unqueue(r)
    /\ UNCHANGED <<up, session, conn, owner, edit, term, alive, consent, runs, results>>

Cancel(r) ==
    /\ up /\ phase[r] \in Timed
    /\ End(r, "cancelled")
    /\ Unqueue(r)
    /\ UNCHANGED <<up, session, conn, owner, edit, term, alive, consent, runs, results>>

Exceed(r) ==
    /\ up /\ phase[r] = "running"
    /\ End(r, "failed")
    /\ UNCHANGED <<up, session, conn, owner, edit, queue, term, alive, consent, runs, results>>

Execute(r) ==
    /\ up /\ phase[r] = "approved"
    /\ phase' = [phase EXCEPT ![r] = "running"]
    /\ alive' = [alive EXCEPT ![r] = TRUE]
    /\ runs' = [runs EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, queue, term, consent, results>>

Exit(r) ==
    /\ up /\ phase[r] = "running"
    /\ Settle(r, "completed")
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ UNCHANGED <<up, session, conn, owner, edit, queue, term, consent, runs, results>>

Kill(r) ==
    /\ up /\ phase[r] = "killing"
    /\ Settle(r, outcome[r])
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ UNCHANGED <<up, session, conn, owner, edit, queue, term, consent, runs, results>>

Fail(r) ==
    /\ up /\ phase[r] \in {"checking", "approved", "running"}
    /\ Settle(r, "failed")
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ UNCHANGED <<up, session, conn, owner, edit, queue, term, consent, runs, results>>

Deliver(r) ==
    /\ up /\ phase[r] = "decided"
    /\ phase' = [phase EXCEPT ![r] = "delivered"]
    /\ results' = [results EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<up, session, conn, owner, outcome, edit, queue, term, alive, consent, runs>>

-----------------------------------------------------------------------------
(* The coordinator dies: every session sees its socket close and restores  *)
(* its terminal, and each runner sees its control socket close and kills   *)
(* what it started (Reap).                                                 *)

Crash ==
    /\ up
    /\ up' = FALSE
    /\ session' = [s \in Sessions |-> "gone"]
    /\ conn' = [r \in Requests |-> "closed"]
    /\ phase' = [r \in Requests |-> IF phase[r] \in Terminal THEN phase[r] ELSE "lost"]
    /\ queue' = [s \in Sessions |-> <<>>]
    /\ term' = [s \in Sessions |-> Sandbox]
    /\ UNCHANGED <<owner, outcome, edit, alive, consent, runs, results>>

Reap(r) ==
    /\ ~up /\ alive[r]
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ UNCHANGED <<up, session, conn, owner, phase, outcome, edit, queue, term, consent, runs, results>>

-----------------------------------------------------------------------------

SessionStep(s) == Join(s) \/ Leave(s) \/ Prompt(s) \/ Return(s)

RequestStep(r) ==
    \/ \E s \in Sessions : Authenticate(r, s)
    \/ Disconnect(r) \/ Submit(r)
    \/ AutoApprove(r) \/ Enqueue(r) \/ RuleDeny(r)
    \/ Edit(r) \/ Show(r) \/ Approve(r) \/ Deny(r)
    \/ TimeOut(r) \/ Cancel(r) \/ Exceed(r)
    \/ Execute(r) \/ Exit(r) \/ Kill(r) \/ Fail(r)
    \/ Deliver(r) \/ Reap(r)

Next == Crash \/ (\E s \in Sessions : SessionStep(s)) \/ (\E r \in Requests : RequestStep(r))

(* What the code owes: deadlines fire, prepared commands start or fail,    *)
(* kills succeed, results are taken or their client is cut off, and a      *)
(* client that is told to closes its prompt.                               *)
Fairness ==
    /\ \A r \in Requests :
        /\ WF_vars(TimeOut(r))
        /\ WF_vars(Kill(r))
        /\ WF_vars(Deliver(r) \/ Disconnect(r))
        /\ WF_vars(Reap(r))
    /\ \A s \in Sessions : WF_vars(Return(s))

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------
(* Safety *)

OneResult ==
    \A r \in Requests :
        /\ results[r] <= 1
        /\ (results[r] = 1) <=> (phase[r] = "delivered")

NothingUnapproved == \A r \in Requests : runs[r] > 0 => consent[r]

NothingTwice == \A r \in Requests : runs[r] <= 1

(* Before it starts, and while it runs unhindered, a request has a         *)
(* registered session and a client.                                        *)
OnlyRegistered ==
    \A r \in Requests :
        phase[r] \in Timed =>
            /\ session[owner[r]] = "live"
            /\ conn[r] = "open"

AliveIsKnown ==
    \A r \in Requests :
        /\ (up /\ alive[r]) => phase[r] \in {"running", "killing"}
        /\ phase[r] \in {"running", "killing"} => alive[r]

PromptIsOwners ==
    \A s \in Sessions :
        term[s] # Sandbox =>
            /\ owner[term[s]] = s
            /\ s \in HasTerminal
            /\ session[s] = "live"

OneOwner ==
    /\ \A r \in Requests : phase[r] = "prompted" => (\E s \in Sessions : term[s] = r)
    /\ \A s, t \in Sessions : (term[s] = term[t] /\ term[s] # Sandbox) => s = t

QueuedOnce ==
    \A r \in Requests :
        Cardinality({<<s, i>> \in Sessions \X (1..Cardinality(Requests)) :
                        i <= Len(queue[s]) /\ queue[s][i] = r})
            = IF phase[r] = "queued" THEN 1 ELSE 0

OutcomeFits ==
    \A r \in Requests :
        /\ phase[r] \in {"killing", "decided", "delivered", "dropped"} => outcome[r] # "none"
        /\ outcome[r] = "completed" => runs[r] = 1
        /\ outcome[r] = "denied" => runs[r] = 0

TerminalIsTerminal ==
    [][\A r \in Requests : phase[r] \in Terminal => phase'[r] = phase[r]]_vars

OutcomeIsFixed ==
    [][\A r \in Requests : outcome[r] # "none" => outcome'[r] = outcome[r]]_vars

NothingAfterTheEnd ==
    [][\A r \in Requests :
        (phase[r] \in Terminal \/ outcome[r] # "none" \/ ~up) => runs'[r] = runs[r]]_vars

-----------------------------------------------------------------------------
(* Liveness *)

EveryRequestResolves ==
    \A r \in Requests : (phase[r] = "checking") ~> (phase[r] \in Terminal)

TheTerminalReturns ==
    \A s \in Sessions : (term[s] # Sandbox) ~> (term[s] = Sandbox)

NothingOutlivesTheCoordinator ==
    \A r \in Requests : (~up) ~> (~alive[r])

=============================================================================
