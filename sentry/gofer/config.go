package gofer

import "lazaret.dev/lazaret/sentry"

// sanitise cleans a repository's configuration for the private copy.
func sanitise(b []byte, ws *sentry.Workspace) ([]byte, error) { return ws.SanitiseConfig(b) }
