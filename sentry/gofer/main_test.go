package gofer

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	switch os.Getenv("LAZARET_TEST_ROLE") {
	case "map":
		os.Exit(roleMap())
	case "domain":
		os.Exit(roleDomain())
	}
	os.Exit(m.Run())
}

// needs skips a test for want of what, or fails where everything is required.
func needs(t testing.TB, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("LAZARET_TEST_REQUIRE") != "":
		t.Fatalf("%s is required here: %v", what, err)
	default:
		t.Skipf("%s: %v", what, err)
	}
}
