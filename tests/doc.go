// Package tests drives the built lazaret as a developer would: real programs, real namespaces, real runsc.
//
// Its tests run as the user who calls them, ordinary or root, each with a home and XDG directories of its own ([newBox]).
// The test process is the reaper of all that a command leaves behind (PR_SET_CHILD_SUBREAPER), so that what a Domain
// starts can always be found below it; every test ends with the check that nothing is left (OR-1).
//
// LAZARET_BIN names the directory of the programs, ../bin by default. Where LAZARET_TEST_REQUIRE is set, a test that lacks
// something fails; elsewhere it is skipped.
package tests
