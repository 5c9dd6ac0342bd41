package gofer

// sanitise cleans a repository's configuration for the private copy.
func sanitise(b []byte, allow []string) ([]byte, error) { return b, nil }
