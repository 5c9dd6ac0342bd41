// Package broker decides Host Escalations: which request is accepted, asked about, run, killed and answered.
//
// A [Machine] is a pure state machine. It does no I/O, reads no clock and starts no goroutine: the same events at the
// same times give the same effects. It follows protocol/Lazaret.tla action by action; an event type has the name of its
// action, one Step is one action, and the phases are the model's. The reachability test explores every state within the
// model's bounds, on the code and on a transliteration of the model, and compares the two.
//
// What is kept true, for the developer and against everything inside the sandbox:
//
//   - A request belongs to the session that the connection's certificate was verified for; nothing in a request names a
//     session (SR-9). A prompt is offered to that session's terminal only (FR-5), and a terminal has one owner.
//   - Nothing runs unless it was approved in exactly the form that was shown ([Approve] carries the digest), and nothing
//     runs twice, after its cancellation, or for a session that has left.
//   - An accepted request has one outcome; it is answered once, or dropped because its client is gone (OR-2).
//   - Memory is bounded: requests per session and per Domain are limited, finished ones are remembered in a ring.
//
// The driver (package escalation) owns a Machine under its lock:
//
//  1. Call Step with an event, and carry out the effects in order.
//  2. Then call [Machine.Due] and Step what it returns, until it returns nothing: prompts that a terminal is free
//     for, and deadlines that have passed.
//  3. Wait for the next outside event or until [Machine.NextDeadline].
//
// Events that come too late (an answer after the deadline, an exit after a kill) are ignored by the machine, so a driver
// needs no checks of its own. An unknown event type is a bug of ours and panics: peers cannot make events.
package broker
