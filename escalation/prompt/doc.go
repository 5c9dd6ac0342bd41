// Package prompt asks the developer about one Host Escalation, on a terminal that a hostile sandbox has just written to.
//
// What is shown is byte for byte what would run. Text of the sandbox is drawn from a small set of characters of known
// width; everything else (control characters, C1, bidi, zero-width, combining and look-alike widths, bytes that are no
// UTF-8) appears as an escape that [Split] would read back. It stands behind a label or a margin, never at the edge of
// the screen where our own words are. Long requests scroll, the choices do not; nothing can be approved before its end
// has been on the screen. No colours are needed, and 40 columns by 10 lines are enough (SR-8, DX-4).
//
// A key counts as an answer if it comes alone, after a pause: what was typed ahead for the agent is thrown away, before
// and after the prompt. The terminal is put into a known state first, whatever the sandbox left half-written, and given
// back in the state that it was in (DX-5).
//
// The layers are [Quote] and [Split] (text), [Screen] (pure: a request, a size and keys to lines and a decision), and
// [Ask] (two descriptors). To wire it, the session's client, when the coordinator sends a request:
//
//  1. holds back the sandbox's output (bounded; the PTY's buffer is enough) and stops reading the terminal itself;
//  2. calls [Ask] with the terminal's descriptors, the [Modes] that it fed with all output so far, and a context that ends
//     when the coordinator closes the prompt;
//  3. on return, makes a sandbox program on the alternate screen draw itself again (a change of size and back), goes on
//     with reading and writing, and sends the answer.
package prompt
