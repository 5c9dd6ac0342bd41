// Package rules decides from trusted host configuration what happens to a command that the sandbox asks for.
//
// A [Rule] matches a complete argument vector: the program after it was resolved to an absolute host path, and every
// argument byte for byte. Arguments beyond the rule's own are an explicit property of it. No shell, no globs, no
// normalisation: two parsers that differ are how others were escaped. Deny rules win, then the first matching rule
// counts, then the set's default. A rule's approval never widens by doubt: text that is not plain printable UTF-8 in a
// free argument, a program that is a shell, an interpreter, a wrapper around other commands, a container engine, Lazaret
// itself, or one that lies where the sandbox can write is asked about even if a rule says "auto" (see never.go).
//
// What a rule cannot do: judge a program by arguments alone. "git -C x push" is not "git push" to a deny rule, and
// build tools (make, npm, cargo …) run code from the workspace, which the agent writes; [Compile] warns about those.
//
// Rules are plain data; decoding them from TOML is the supervisor's. [Compile] validates all of them and reports each
// fault with the rule's index and field. A [Set] is immutable and safe for concurrent use.
package rules
