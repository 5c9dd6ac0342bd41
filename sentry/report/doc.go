// Package report finds what the developer should know about a repository when a session ends: locks left
// behind, references that make Git show other objects, names that are dangerous to print or to expand,
// links and special files where Git expects none, and hidden paths that are tracked all the same.
//
// It only reads, runs on the host as the developer, and starts no program. Everything in a repository
// directory may have been written by the sandbox while it is read: [Scan] goes down by descriptor, one
// name at a time, follows no symbolic link, opens nothing but directories and regular files, and stops at
// fixed limits, which it reports. No text of the repository reaches a terminal unquoted if it is printed
// by [Findings.Lines].
//
// To wire it: Scan each governed repository directory when the session starts and when it ends, and show
// end.Since(start). The flags that hide changes are in gitindex.Set.Hidden; [HiddenTracked] finds the
// paths that the consented snapshot hides although the index lists them: the developer's next "git commit
// -a" could commit the host's secret. Objects are not read; fan-out directories below objects/ are not
// entered.
package report
