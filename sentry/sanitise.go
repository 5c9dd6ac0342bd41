package sentry

import "lazaret.dev/lazaret/sentry/gitconfig"

// SanitiseConfig makes the private copy of a repository's configuration: no credentials, no programs that are the host's.
// An error means that the file has no valid syntax, and nothing of it is used.
func (w *Workspace) SanitiseConfig(host []byte) ([]byte, error) {
	f, err := gitconfig.Parse(host)
	if err != nil {
		return nil, err
	}
	return gitconfig.Sanitise(f, gitconfig.SanitiseOptions{
		Allow:        w.AllowConfigKeys,
		Visible:      func(path string) bool { return Within(path, w.Mount) },
		ExcludesFile: w.ExcludesInside,
	}).File.Bytes(), nil
}
