package gofer

import (
	"lazaret.dev/lazaret/sentry"
	"lazaret.dev/lazaret/sentry/gitconfig"
)

// sanitise cleans a repository's configuration for the private copy: no credentials, no programs that are the host's.
func sanitise(b []byte, ws *sentry.Workspace) ([]byte, error) {
	f, err := gitconfig.Parse(b)
	if err != nil {
		return nil, err
	}
	return gitconfig.Sanitise(f, gitconfig.SanitiseOptions{
		Allow:        ws.AllowConfigKeys,
		Visible:      func(path string) bool { return ws.Host == ws.Mount && sentry.Within(path, ws.Host) },
		ExcludesFile: ws.ExcludesInside,
	}).File.Bytes(), nil
}
