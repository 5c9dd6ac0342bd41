package supervisor

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/escalation"
	"lazaret.dev/lazaret/overlay"
)

// What the sandbox has of Lazaret's, all of it read-only; see package escalation/client.
const (
	insideDir      = "/run/lazaret"
	insideBin      = insideDir + "/bin"
	insideSessions = insideDir + "/sessions"
	initPath       = insideDir + "/init"
)

// profileScript puts the Escalation Client on the PATH of login shells, whose start resets it.
const profileScript = `case ":$PATH:" in
*:` + insideBin + `:*) ;;
*) PATH=$PATH:` + insideBin + ` ;;
esac
`

// composeInside fills the directory that becomes /run/lazaret: the sandbox's init, the Escalation Client, the Domain's
// endpoint and Trust Anchor. Keys of sessions are added and taken away while the sandbox runs; what the sandbox has is a
// second mount of the directory, which nobody can write.
func (d *domain) composeInside() error {
	for _, name := range []string{"bin", "escalate", "sessions"} {
		if err := os.MkdirAll(d.path("inside", name), 0o755); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"escalate/endpoint":      d.plan.Escalation.Endpoint + "\n",
		"escalate/ca.pem":        string(d.plan.Escalation.CA),
		"ESCALATE.md":            escalation.EscalateMD,
		"init":                   "",
		"bin/" + escalateProgram: "",
	} {
		if err := os.WriteFile(d.path("inside", name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for name, program := range map[string]string{"init": d.plan.Init, "bin/" + escalateProgram: d.plan.Escalate} {
		if err := overlay.BindReadOnly(program, d.path("inside", name)); err != nil {
			return err
		}
	}
	if err := os.Mkdir(d.path("shown"), 0o755); err != nil {
		return err
	}
	if err := overlay.BindReadOnly(d.path("inside"), d.path("shown")); err != nil {
		return err
	}
	scripts := filepath.Join(d.base.dir, "etc/profile.d")
	if err := os.MkdirAll(scripts, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(scripts, "lazaret.sh"), []byte(profileScript), 0o644)
}

// keysInside is where a session finds its certificate and key.
func keysInside(session string) string { return filepath.Join(insideSessions, session) }

// giveKeys shows a session's certificate and key inside, readable by the agent alone.
func (d *domain) giveKeys(session string, keys sessionKeys) error {
	dir := d.path("inside/sessions", session)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for name, text := range map[string][]byte{"cert.pem": keys.Cert, "key.pem": keys.Key} {
		if err := d.giveFile(filepath.Join(dir, name), text, 0o400); err != nil {
			return err
		}
	}
	return d.give(dir, 0o500)
}

func (d *domain) giveFile(name string, text []byte, mode uint32) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	f.Close()
	if err != nil {
		return err
	}
	return d.give(name, mode)
}

// give makes the agent the owner of what nobody else writes.
func (d *domain) give(name string, mode uint32) error {
	id := int(d.plan.IDs.Agent)
	if err := os.Lchown(name, id, id); err != nil {
		return fmt.Errorf("give %s to the agent: %w", filepath.Base(name), err)
	}
	return unix.Chmod(name, mode)
}

// takeKeys removes what giveKeys made.
func (d *domain) takeKeys(session string) { _ = os.RemoveAll(d.path("inside/sessions", session)) }
