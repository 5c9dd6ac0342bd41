package supervisor

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"lazaret.dev/lazaret/sentry/route"
)

//go:embed default.toml
var defaultProfile []byte

// DefaultProfile is the name of the profile that is built in.
const DefaultProfile = "default"

// Profile is an Agent Profile: trusted configuration of the host, profiles/NAME.toml in the configuration directory.
type Profile struct {
	Name string `toml:"-"`

	// Image is the base of the sandbox's root file system: "host" is the host's own /usr, read-only; else the reference of an
	// image that was pulled.
	Image string `toml:"image"`
	// Persist are the paths whose State Anchors keep what the agent writes there (FR-4).
	Persist []string `toml:"persist"`
	// Volumes are further host paths.
	Volumes []Volume `toml:"volume"`
	// Command is what a session runs when the command line names nothing; empty is the agent's shell.
	Command []string `toml:"command"`
	// PassEnv names the variables of the caller's environment that a session gets; a trailing * matches any ending.
	PassEnv []string `toml:"pass_env"`
	// Env are further variables of every session.
	Env map[string]string `toml:"env"`
	// IsolateIgnored redirects paths that Git ignores to Ignored Workspace State (SR-13, FR-9).
	IsolateIgnored bool `toml:"isolate_ignored"`
	// Hold and Unhold add and remove names of integration files whose changes wait for the developer's consent.
	Hold   []string `toml:"hold"`
	Unhold []string `toml:"unhold"`
	// AllowGitConfig names keys of repository configuration that keep their value inside, although they may hold a secret.
	AllowGitConfig []string `toml:"allow_git_config"`
	// EphemeralSize bounds what may be written outside of workspace and persistent paths; it is thrown away at the end.
	EphemeralSize Size `toml:"ephemeral_size"`
	// PersistSize and IgnoredSize are watched: the developer is told, the agent is not stopped. 0 is no limit.
	PersistSize Size `toml:"persist_size"`
	IgnoredSize Size `toml:"ignored_size"`
	// TmpSize bounds /tmp and /dev/shm, which are memory.
	TmpSize Size `toml:"tmp_size"`
	// Processes and OpenFiles bound the agent (RLIMIT_NPROC, RLIMIT_NOFILE).
	Processes uint64 `toml:"processes"`
	OpenFiles uint64 `toml:"open_files"`
	// Linger is how long the Domain stays after its last session.
	Linger Duration `toml:"linger"`
	// Network is the Domain's egress policy, its resolvers and its proxy.
	Network Network `toml:"network"`
	// Escalation is what the sandbox may ask to have run on the host.
	Escalation Escalation `toml:"escalation"`
}

// Size is a number of bytes, written like "4g".
type Size uint64

// UnmarshalText reads a number with an optional suffix k, m, g or t (powers of 1024).
func (s *Size) UnmarshalText(b []byte) error {
	text, shift := strings.ToLower(string(b)), 0
	for i, suffix := range []string{"k", "m", "g", "t"} {
		if t, ok := strings.CutSuffix(text, suffix); ok {
			text, shift = t, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n > (1<<63)>>shift {
		return fmt.Errorf("%q is no size; write a number with k, m, g or t, for example \"4g\"", b)
	}
	*s = Size(n << shift)
	return nil
}

// MarshalText is the reverse of UnmarshalText.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// String writes s with the largest suffix that loses nothing.
func (s Size) String() string {
	n, i := uint64(s), 0
	for suffixes := "kmgt"; i < len(suffixes) && n != 0 && n%1024 == 0; i++ {
		n /= 1024
	}
	return strconv.FormatUint(n, 10) + "kmgt"[max(0, i-1):i]
}

// Duration is a time.Duration, written like "10m".
type Duration time.Duration

// UnmarshalText reads the form of time.ParseDuration.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil || v < 0 {
		return fmt.Errorf("%q is no duration; write for example \"90s\" or \"10m\"", b)
	}
	*d = Duration(v)
	return nil
}

// MarshalText is the reverse of UnmarshalText.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

func (d Duration) String() string { return time.Duration(d).String() }

var profileName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)

// LoadProfile reads and validates a profile. The built-in default stands when the developer has none of that name.
func LoadProfile(dirs Dirs, name string) (Profile, error) {
	if !profileName.MatchString(name) {
		return Profile{}, refusal(fmt.Sprintf("profile %q: a name has lower-case letters, digits, - and _", name),
			"lazaret enter [PROFILE] -- COMMAND…; the command goes after --")
	}
	p, err := parseProfile(defaultProfile, "built-in default", Profile{})
	if err != nil {
		return p, err // our own file; a test reads it
	}
	file := filepath.Join(dirs.Config, "profiles", name+".toml")
	b, err := readConfig(file)
	switch {
	case err == nil:
		if p, err = parseProfile(b, file, p); err != nil {
			return p, err
		}
	case !errors.Is(err, os.ErrNotExist):
		return p, err
	case name != DefaultProfile:
		return p, refusal(fmt.Sprintf("profile %q: there is no %s", name, file),
			"write that file, or use the built-in profile: lazaret enter")
	}
	p.Name = name
	return p, nil
}

// readConfig reads a configuration file that only the developer can have written.
func readConfig(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !ownedByUs(st) || st.Mode().Perm()&0o022 != 0 {
		return nil, refusal(fmt.Sprintf("read %s: others can write it", file), "chown it to yourself and chmod go-w "+file)
	}
	if !st.Mode().IsRegular() || st.Size() > 1<<20 {
		return nil, refusal(fmt.Sprintf("read %s: it is not a file of at most 1 MiB", file), "put the profile in its place")
	}
	b := make([]byte, st.Size())
	n, err := f.ReadAt(b, 0)
	if int64(n) < st.Size() && err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return b[:n], nil
}

// parseProfile decodes a file over base, strictly.
func parseProfile(b []byte, file string, base Profile) (Profile, error) {
	p := base
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		var unknown *toml.StrictMissingError
		var bad *toml.DecodeError
		switch {
		case errors.As(err, &unknown) && len(unknown.Errors) > 0:
			line, _ := unknown.Errors[0].Position()
			return p, refusal(fmt.Sprintf("%s:%d: there is no key %q", file, line, strings.Join(unknown.Errors[0].Key(), ".")),
				"the keys of a profile are in docs/configuration.md")
		case errors.As(err, &bad):
			line, col := bad.Position()
			return p, refusal(fmt.Sprintf("%s:%d:%d: %s", file, line, col, strings.TrimPrefix(bad.Error(), "toml: ")),
				"correct that line")
		}
		return p, hint(fmt.Errorf("%s: %w", file, err), "correct the file")
	}
	p.Network.Places = findPlaces(file, b)
	if err := p.Network.check(); err != nil {
		return p, err
	}
	p.Escalation.Places = findRulePlaces(file, b)
	if err := p.Escalation.check(); err != nil {
		return p, err
	}
	if err := p.validate(); err != nil {
		return p, hint(fmt.Errorf("%s: %w", file, err), "correct the file; docs/configuration.md has the keys")
	}
	return p, nil
}

// validate checks what types cannot.
func (p Profile) validate() error {
	switch {
	case p.EphemeralSize < 16<<20:
		return fmt.Errorf("ephemeral_size: %d bytes are too few, give at least \"16m\"", p.EphemeralSize)
	case p.TmpSize < 1<<20:
		return fmt.Errorf("tmp_size: %d bytes are too few, give at least \"1m\"", p.TmpSize)
	case p.Processes < 16:
		return fmt.Errorf("processes = %d: give at least 16", p.Processes)
	case p.OpenFiles < 64 || p.OpenFiles > 1<<20:
		return fmt.Errorf("open_files = %d: give 64 to 1048576", p.OpenFiles)
	}
	if err := p.validateStorage(); err != nil {
		return err
	}
	if _, err := route.NewHeld(p.held(), nil); err != nil {
		return fmt.Errorf("hold: %w", err)
	}
	for _, name := range p.Unhold {
		if !slices.Contains(route.DefaultHeld, name) {
			return fmt.Errorf("unhold: %q is not a held name; they are %s", name, strings.Join(route.DefaultHeld, " "))
		}
	}
	for name := range p.Env {
		if !validEnvName(name) {
			return fmt.Errorf("env: %q is no name of a variable", name)
		}
	}
	for _, pattern := range p.PassEnv {
		if name := strings.TrimSuffix(pattern, "*"); name == "" || !validEnvName(name) {
			return fmt.Errorf("pass_env: %q names no variable; a lone * would pass every secret of the host", pattern)
		}
	}
	return nil
}

func validEnvName(s string) bool { return s != "" && !strings.ContainsAny(s, "=*\x00\n ") }

// Environment returns the variables of a session: those of the caller that the profile passes, then the profile's own.
func (p Profile) Environment(caller []string) []string {
	var out []string
	for _, kv := range caller {
		name, _, _ := strings.Cut(kv, "=")
		for _, pattern := range p.PassEnv {
			if prefix, any := strings.CutSuffix(pattern, "*"); name == pattern || any && strings.HasPrefix(name, prefix) {
				out = append(out, kv)
				break
			}
		}
	}
	for name, value := range p.Env {
		out = append(out, name+"="+value)
	}
	return out
}

// Fingerprint is the Configuration Fingerprint: a digest of the validated profile.
func (p Profile) Fingerprint() string {
	b, err := json.Marshal(p) // map keys are sorted
	if err != nil {
		panic(err) // plain data
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
