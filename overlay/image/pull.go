package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrNoPodman means that Podman is not installed; local layouts and archives do not need it.
	ErrNoPodman = errors.New("podman is not installed")
	// ErrNetwork means that the registry could not be reached.
	ErrNetwork = errors.New("registry cannot be reached")
	// ErrUnauthorized means that the registry wants a login.
	ErrUnauthorized = errors.New("registry refused access")
	// ErrPolicy means that Podman's own configuration forbids or cannot judge the image.
	ErrPolicy = errors.New("podman's signature or registry configuration refused the image")
)

// PullOptions says how to pull. The zero value uses Podman from PATH and shows nothing.
type PullOptions struct {
	Podman   string    // program; empty: "podman" from PATH
	Progress io.Writer // one line per step, printable characters only; may be nil
	Environ  []string  // the developer's environment: proxies, PATH, HOME and registry login are taken from it
	MaxBytes int64     // unpacked size accepted by the own importer; 0: DefaultMaxBytes
	Own      bool      // use the own importer for layouts and archives although Podman is there
	Now      time.Time // recorded time of the pull
}

// Pull fetches the image that reference means now and records it, replacing an earlier record.
// Ending ctx cancels it; what was complete stays for the next pull.
// changed tells whether reference meant another image, or none, before.
func (s *Store) Pull(ctx context.Context, reference string, opt PullOptions) (rec Record, changed bool, err error) {
	ref, err := ParseReference(reference)
	if err != nil {
		return Record{}, false, err
	}
	g, err := s.Share(ctx) // gc must not take the image before it is recorded
	if err != nil {
		return Record{}, false, fmt.Errorf("pull image %q: %w", reference, err)
	}
	defer g.Release()
	out := &lineWriter{w: opt.Progress}
	defer out.flush()
	id, err := s.fetch(ctx, ref, opt, out)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return Record{}, false, fmt.Errorf("pull image %q: %w", reference, err)
	}
	img, err := s.Image(id)
	if err != nil && !errors.Is(err, ErrForeign) {
		// An earlier pull was killed between the image's record and its documents.
		if err = s.DeleteImage(id); err == nil {
			_, err = s.fetch(ctx, ref, opt, out)
		}
		if err == nil {
			img, err = s.Image(id)
		}
	}
	if err != nil {
		return Record{}, false, fmt.Errorf("pull image %q: %w", reference, err)
	}
	rec = Record{Reference: reference, ImageID: img.ID, DiffIDs: img.DiffIDs, Pulled: opt.Now.UTC()}
	err = s.editRecords(ctx, func(m map[string]Record) {
		changed = m[reference].ImageID != rec.ImageID
		m[reference] = rec
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("record image %q: %w", reference, err)
	}
	return rec, changed, nil
}

func (s *Store) fetch(ctx context.Context, ref Reference, opt PullOptions, out *lineWriter) (string, error) {
	own := func() (string, error) {
		return s.importImage(ctx, ref, opt.MaxBytes, func(f string, a ...any) { fmt.Fprintf(out, f+"\n", a...) })
	}
	if ref.importable() && (opt.Own || !ref.podmanCanName()) {
		return own()
	}
	id, err := s.podman(ctx, ref, opt, out)
	if errors.Is(err, ErrNoPodman) && ref.importable() {
		return own()
	}
	return id, err
}

// podman runs `podman pull` on the private graph root, in this namespace.
func (s *Store) podman(ctx context.Context, ref Reference, opt PullOptions, out *lineWriter) (string, error) {
	program := opt.Podman
	if program == "" {
		program = "podman"
	}
	path, err := lookPath(program, opt.Environ)
	if err != nil {
		return "", fmt.Errorf("%w (%w)", ErrNoPodman, err)
	}
	// One Podman at a time: see forgetPodmanState.
	g, err := flock(ctx, filepath.Join(s.cfg.Root, "podman.lock"), unix.LOCK_EX)
	if err != nil {
		return "", err
	}
	defer g.Release()
	if err := s.forgetPodmanState(); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path,
		"--root", s.cfg.graph(), "--runroot", s.cfg.runroot(), "--tmpdir", s.cfg.tmpdir(),
		"--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
		"pull", "--", ref.String())
	cmd.Dir = "/"
	cmd.Env = podmanEnviron(s.cfg, opt.Environ)
	var stdout limitedBuffer
	tail := &tailBuffer{}
	cmd.Stdout = &stdout
	cmd.Stderr = io.MultiWriter(out, tail)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	err = cmd.Run()
	if cmd.Process != nil {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // whatever it started and left
	}
	if err != nil {
		return "", explainPodman(err, tail.String())
	}
	return lastID(stdout.String())
}

// forgetPodmanState removes Podman's own database. It pins the paths of its first use (the
// runtime directory may move) and holds nothing for a store that Podman only pulls into.
func (s *Store) forgetPodmanState() error {
	for _, p := range []string{"libpod/bolt_state.db", "libpod/db.sql", "db.sql"} {
		if err := os.Remove(filepath.Join(s.cfg.graph(), p)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

var imageID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(sha256:)?([0-9a-f]{64})$`) })

// lastID finds the image ID, the last line that Podman prints.
func lastID(out string) (string, error) {
	for _, line := range slices.Backward(strings.Fields(out)) {
		if m := imageID().FindStringSubmatch(line); m != nil {
			return m[2], nil
		}
	}
	return "", fmt.Errorf("podman printed no image ID: %q", out)
}

// passed are the developer's variables that a pull may need.
var passed = []string{"PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "CONTAINERS_CONF", "CONTAINERS_REGISTRIES_CONF",
	"http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME"}

func podmanEnviron(cfg Config, environ []string) []string {
	vars := map[string]string{}
	var runtimeDir string
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if slices.Contains(passed, name) {
			vars[name] = value
		}
		if name == "XDG_RUNTIME_DIR" {
			runtimeDir = value
		}
	}
	// Podman wants a runtime directory of its own uid, which is ours; the login stays the developer's.
	if auth := filepath.Join(runtimeDir, "containers/auth.json"); runtimeDir != "" && vars["REGISTRY_AUTH_FILE"] == "" {
		if _, err := os.Stat(auth); err == nil {
			vars["REGISTRY_AUTH_FILE"] = auth
		}
	}
	vars["XDG_RUNTIME_DIR"] = cfg.Run
	maps.Copy(vars, nsEnviron(cfg))
	var out []string
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		out = append(out, k+"="+vars[k])
	}
	return out
}

func lookPath(program string, environ []string) (string, error) {
	if strings.ContainsRune(program, '/') {
		_, err := os.Stat(program)
		return program, err
	}
	list := os.Getenv("PATH")
	for _, kv := range environ {
		if p, ok := strings.CutPrefix(kv, "PATH="); ok {
			list = p
		}
	}
	for _, dir := range filepath.SplitList(list) {
		if !filepath.IsAbs(dir) {
			continue
		}
		p := filepath.Join(dir, program)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", exec.ErrNotFound
}

var reasons = []struct {
	err   error
	texts []string
}{
	{ErrDiskFull, []string{"no space left on device", "disk quota exceeded"}},
	{ErrUnauthorized, []string{"unauthorized", "authentication required", "access to the resource is denied", "denied:", "403 (forbidden)"}},
	{ErrPolicy, []string{"policy.json", "rejected by policy", "signature", "short-name", "did not resolve to an alias"}},
	{ErrNoImage, []string{"manifest unknown", "name unknown", "not found", "no such file or directory", "choosing an image from manifest list"}},
	{ErrNetwork, []string{"no such host", "dial tcp", "network is unreachable", "i/o timeout", "connection refused", "temporary failure in name resolution", "tls handshake", "server misbehaving", "pinging container registry"}},
}

// explainPodman turns what Podman wrote into an error that a decision can be made on.
func explainPodman(err error, stderr string) error {
	last := ""
	for line := range strings.Lines(stderr) {
		if strings.TrimSpace(line) != "" {
			last = strings.TrimSpace(line)
		}
	}
	low := strings.ToLower(stderr)
	for _, r := range reasons {
		if slices.ContainsFunc(r.texts, func(t string) bool { return strings.Contains(low, t) }) {
			return fmt.Errorf("%w: podman: %q", r.err, last)
		}
	}
	return fmt.Errorf("podman: %w: %q", err, last)
}

// Hint says what the developer can do about err; empty when there is nothing special to say.
func Hint(err error) string {
	for _, h := range []struct {
		err  error
		text string
	}{
		{ErrNoPodman, "install podman, or give the image as oci:DIR, oci-archive:FILE or docker-archive:FILE"},
		{ErrNetwork, "check the network and the proxy variables; a pulled image starts without a network"},
		{ErrUnauthorized, "run podman login for that registry, then pull again"},
		{ErrDiskFull, "free some space (lazaret gc shows what can go), then pull again: finished layers are kept"},
		{ErrPolicy, "write the full name with its registry, and check containers' policy.json and registries.conf"},
		{ErrNoImage, "check the name, the tag and the platform"},
		{ErrNotPulled, "run lazaret image pull for it"},
		{ErrInUse, "end the sessions that run on it first"},
		{ErrBusy, "another lazaret command uses the image store; try again"},
		{ErrDigest, "the image is damaged or was tampered with; get it again from a source that you trust"},
	} {
		if errors.Is(err, h.err) {
			return h.text
		}
	}
	return ""
}

// limitedBuffer keeps the first 64 KiB.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := 64<<10 - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// tailBuffer keeps the last 16 KiB.
type tailBuffer struct{ b []byte }

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if over := len(t.b) - 16<<10; over > 0 {
		t.b = append([]byte(nil), t.b[over:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string { return string(t.b) }

// lineWriter passes printable characters only: registries choose some of the text.
type lineWriter struct {
	w    io.Writer
	line []byte
}

func (l *lineWriter) Write(p []byte) (int, error) {
	for _, c := range p {
		switch {
		case c == '\n' || len(l.line) >= 4096:
			l.flush()
		case c == '\t' || c >= ' ' && c < 0x7f:
			l.line = append(l.line, c)
		case c != '\r':
			l.line = append(l.line, '?')
		}
	}
	return len(p), nil
}

func (l *lineWriter) flush() {
	if l.w != nil && len(l.line) > 0 {
		_, _ = l.w.Write(append(l.line, '\n'))
	}
	l.line = l.line[:0]
}
