package supervisor

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"lazaret.dev/lazaret/nsenter"
	"lazaret.dev/lazaret/overlay"
	"lazaret.dev/lazaret/overlay/anchor"
	"lazaret.dev/lazaret/overlay/compose"
	"lazaret.dev/lazaret/overlay/image"
	"lazaret.dev/lazaret/overlay/tree"
	"lazaret.dev/lazaret/overlay/volume"
)

// hostImage is the profile's image that means the host base.
const hostImage = "host"

// Volume is a further host path that a profile shows in the sandbox.
type Volume struct {
	Host   string `toml:"host"`   // absolute
	Target string `toml:"target"` // where it appears; empty: at the same path
	Mode   string `toml:"mode"`   // "ro", which is the default, or "rw"
}

// pinnedVolume is a volume as it was checked.
type pinnedVolume struct {
	Host, Target string // Host is canonical
	Writable     bool
	Dev, Ino     uint64
}

// validateStorage checks what a profile says about the root file system; what lies on the host is checked by findVolumes.
func (p Profile) validateStorage() error {
	if p.Image != hostImage {
		if _, err := image.ParseReference(p.Image); err != nil {
			return err
		}
	}
	reserved := append([]string{"/proc", "/sys", "/dev", "/run", "/var/run"}, sandboxTmpfs...)
	for i, path := range p.Persist {
		if _, err := anchor.Escape(path); err != nil {
			return err
		}
		for _, r := range reserved {
			if within(path, r) {
				return fmt.Errorf("persist: %q lies in %s, which is made anew at every start", path, r)
			}
		}
		for _, r := range []string{"/etc", "/usr", "/bin", "/lib"} {
			if path == r {
				return fmt.Errorf("persist: %q would hold back every update of the base; name what you install below it, such as \"/usr/local\"", path)
			}
		}
		for _, other := range p.Persist[:i] {
			if within(path, other) || within(other, path) {
				return fmt.Errorf("persist: %q and %q overlap; one of them is enough", other, path)
			}
		}
	}
	for _, v := range p.Volumes {
		switch {
		case !filepath.IsAbs(v.Host):
			return fmt.Errorf("volume: host = %q is not absolute", v.Host)
		case v.Target != "" && !filepath.IsAbs(v.Target):
			return fmt.Errorf("volume: target = %q is not absolute", v.Target)
		case v.Mode != "" && v.Mode != "ro" && v.Mode != "rw":
			return fmt.Errorf("volume: mode = %q: write \"ro\" or \"rw\"", v.Mode)
		}
	}
	return nil
}

// checkImage refuses an image that the id map cannot hold.
func (p Profile) checkImage(ids nsenter.IDMap) error {
	if p.Image != hostImage && ids.Kind == nsenter.MapSingle {
		return refusal(fmt.Sprintf("profile %q: image %s: an image has files of many owners, and only your own id is mapped (%s)", p.Name, p.Image, ids.Why),
			"get subordinate ids (see 'lazaret doctor'), or use image = \"host\"")
	}
	return nil
}

func (p Profile) limits() tree.Limits {
	return tree.Limits{Anchors: int64(p.PersistSize), Ignored: int64(p.IgnoredSize)}
}

// measure adds up what a Domain keeps.
func measure(domainRoot string) (tree.State, error) {
	var s tree.State
	a, err := tree.MeasurePath(filepath.Join(domainRoot, "anchors"))
	if err != nil {
		return s, err
	}
	i, err := tree.MeasurePath(filepath.Join(domainRoot, "ignored"))
	if err != nil {
		return s, err
	}
	free, err := tree.Free(domainRoot)
	return tree.State{Anchors: a.Bytes, Ignored: i.Bytes, Free: free}, err
}

func limitNotice(f tree.Finding) string {
	what, key := "the persistent paths hold", "persist_size"
	if f.What == "ignored" {
		what, key = "the paths that Git ignores hold", "ignored_size"
	}
	state := "nearly the limit"
	if f.Level == tree.Full {
		state = "over the limit"
	}
	return fmt.Sprintf("%s %s, %s of %s = \"%s\"; nothing is stopped, but the host's disk fills", what, HumanSize(f.Used), state, key, Size(f.Limit))
}

// HumanSize writes a number of bytes for people.
func HumanSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1023.95 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// findVolumes looks at the profile's volumes and refuses what must not be in a sandbox.
func findVolumes(p Profile, dirs Dirs, trees []served) ([]pinnedVolume, error) {
	rules := volume.Rules{Protected: []string{dirs.Config, dirs.Storage, dirs.Runtime}, Taken: slices.Concat(p.Persist, sandboxTmpfs)}
	for _, s := range trees {
		rules.Taken = append(rules.Taken, s.Path)
	}
	var out []pinnedVolume
	var all []volume.Volume
	for _, v := range p.Volumes {
		f, host, err := volume.Open(v.Host)
		if err != nil {
			return nil, hint(fmt.Errorf("profile %q: volume: %w", p.Name, err), "make the path, or take the volume out of the profile")
		}
		var st unix.Stat_t
		err = unix.Fstat(int(f.Fd()), &st)
		f.Close()
		if err != nil {
			return nil, &os.PathError{Op: "stat", Path: host, Err: err}
		}
		target := filepath.Clean(v.Target)
		if v.Target == "" {
			target = filepath.Clean(v.Host)
		}
		pv := pinnedVolume{Host: host, Target: target, Writable: v.Mode == "rw", Dev: st.Dev, Ino: st.Ino}
		if err := pv.check(dirs, trees); err != nil {
			return nil, err
		}
		out = append(out, pv)
		all = append(all, volume.Volume{Host: host, Target: target, Writable: pv.Writable})
	}
	if err := volume.CheckAll(all, rules); err != nil {
		return nil, hint(fmt.Errorf("profile %q: %w", p.Name, err), "correct the [[volume]] in the profile")
	}
	return out, nil
}

// check holds a volume against the rules for a workspace: not the home, nothing of Lazaret's, and nothing of the workspace,
// whose files are shown through the workspace server alone (SR-4, SR-13).
func (v pinnedVolume) check(dirs Dirs, trees []served) error {
	if within(dirs.Home, v.Host) {
		return refusal(fmt.Sprintf("volume %s: it holds your home directory, which a sandbox must not reach", v.Host), "name a directory below it")
	}
	for _, s := range trees {
		if within(v.Host, s.Path) || within(s.Path, v.Host) {
			return refusal(fmt.Sprintf("volume %s: it overlaps the workspace %s, whose rules it would pass by", v.Host, s.Path),
				"the workspace is in the sandbox already; take the volume out of the profile")
		}
		if within(v.Target, s.Path) {
			return refusal(fmt.Sprintf("volume %s: its target %s lies in the workspace", v.Host, v.Target), "choose a target outside of the workspace")
		}
	}
	return nil
}

// pin mounts the volume at the path to, which it makes.
func (v pinnedVolume) pin(to string) error {
	f, host, err := volume.Open(v.Host)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: host, Err: err}
	}
	if st.Dev != v.Dev || st.Ino != v.Ino || host != v.Host {
		return fmt.Errorf("volume %s: it is another object than before", v.Host)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		err = os.Mkdir(to, 0o700)
	} else {
		err = os.WriteFile(to, nil, 0o600)
	}
	if err != nil {
		return err
	}
	source := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	if !v.Writable {
		return overlay.BindReadOnly(source, to)
	}
	if err := unix.Mount(source, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind volume %s: %w", v.Host, err)
	}
	return nil
}

// domainRecord is domain.json in the Domain Root: what the Domain ID is a digest of.
type domainRecord struct {
	Version   int    `json:"version"`
	Profile   string `json:"profile"`
	Workspace string `json:"workspace"`
}

const domainRecordFile = "domain.json"

// keepDomainRecord writes the record when it is not there yet.
func keepDomainRecord(p Plan) error {
	b, err := json.Marshal(domainRecord{Version: 1, Profile: p.Profile.Name, Workspace: p.Workspace.Path})
	if err != nil {
		return err
	}
	name := filepath.Join(domainRoot(p), domainRecordFile)
	if have, err := readSmall(name); err == nil && bytes.Equal(have, b) {
		return nil
	}
	return writeAtomic(name, b)
}

// readDomainRecord reads the record of a Domain Root; without one, all is empty.
func readDomainRecord(root string) (r domainRecord) {
	if b, err := readHost(filepath.Join(root, domainRecordFile), 64<<10); err == nil && json.Unmarshal(b, &r) != nil {
		return domainRecord{}
	}
	return r
}

// hostBaseID names the host base by the release of the distribution: its packages change every day, and what was installed
// over them goes on to work; across a release it may not.
func hostBaseID() anchor.Base {
	b, _ := readHost("/etc/os-release", 64<<10)
	key := "host"
	for _, name := range []string{"ID", "VERSION_ID"} {
		if v := osRelease(b, name); v != "" {
			key += ":" + v
		}
	}
	return anchor.Base{Key: key + ":" + runtime.GOARCH, Image: strings.Replace(key, "host:", "host ", 1)}
}

// osRelease reads one variable of os-release(5).
func osRelease(file []byte, name string) string {
	for line := range strings.Lines(string(file)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), name+"="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}

// ChangedAnchor is a State Anchor that was written over another base than the profile's present one.
type ChangedAnchor struct {
	Path     string
	Old, New string
	Shadowed []string // of the new base's files: what the anchor replaces or hides, the first of them
	More     int      // how many others
}

// changedBase is the refusal to start over a changed base without a choice.
type changedBase struct {
	anchor ChangedAnchor
	*Failure
}

func (c *changedBase) Unwrap() error { return c.Failure }

// changedIn returns what the developer has to decide before a start, nil if err is another.
func changedIn(err error) *ChangedAnchor {
	var changed *compose.ChangedError
	var told *changedBase
	switch {
	case errors.As(err, &told):
		return &told.anchor
	case errors.As(err, &changed):
		return describeChange(changed)
	}
	return nil
}

// changedWith keeps what is to be decided beside the advice.
func changedWith(c *compose.ChangedError, err error, advice string, args ...any) error {
	return &changedBase{*describeChange(c), &Failure{What: err.Error(), Hint: fmt.Sprintf(advice, args...)}}
}

// shownShadows is how many shadowed files are named.
const shownShadows = 10

func describeChange(c *compose.ChangedError) *ChangedAnchor {
	name := func(b anchor.Base) string {
		if b.ImageID != "" {
			return fmt.Sprintf("%s (%.12s)", b.Image, b.ImageID)
		}
		return b.Image
	}
	out := &ChangedAnchor{Path: c.Path, Old: name(c.Old), New: name(c.New)}
	for _, change := range c.Report.Changes {
		switch {
		case change.Kind == anchor.Added:
		case len(out.Shadowed) < shownShadows:
			out.Shadowed = append(out.Shadowed, fmt.Sprintf("%s %q", change.Kind, change.Path))
		default:
			out.More++
		}
	}
	return out
}

// explainStorage adds what the developer can do.
func explainStorage(err error) error {
	var changed *compose.ChangedError
	switch {
	case errors.As(err, &changed):
		p := changed.Path
		return changedWith(changed, err, "lazaret anchor diff %s shows what it holds; then choose: lazaret anchor keep %s, lazaret anchor snapshot %s --keep, or lazaret anchor reset %s", p, p, p, p)
	case errors.Is(err, anchor.ErrBusy):
		return hint(err, "a sandbox or another lazaret command uses it; leave its sessions, or try again")
	case errors.Is(err, anchor.ErrDamaged):
		return hint(err, "lazaret anchor ls lists its snapshots; lazaret anchor restore or reset mends it")
	case errors.Is(err, compose.ErrObstructed), errors.Is(err, anchor.ErrBasePath):
		return hint(err, "name the real path in the profile, or remove what the agent put there: lazaret anchor reset")
	case image.Hint(err) != "":
		return hint(err, "%s", image.Hint(err))
	case errors.Is(err, unix.EINVAL) && strings.Contains(err.Error(), "overlay"):
		return hint(err, "the Storage Root's file system cannot carry an overlay: set XDG_DATA_HOME to a directory of an ordinary disk, or persist = [] in the profile")
	}
	return err
}

// choiceFor is what is done with a persistent path of another base: what the developer chose; without, the home is kept and
// for the rest the start is refused.
func choiceFor(p Plan, path string) compose.Choice {
	switch p.OnChange[path] {
	case "keep":
		return compose.Keep
	case "snapshot":
		return compose.Snapshot
	case "reset":
		return compose.Reset
	}
	if path == agentHome {
		return compose.Keep
	}
	return compose.Ask
}

func canAsk(t Terminal) bool {
	return term.IsTerminal(int(t.In.Fd())) && term.IsTerminal(int(t.Err.Fd()))
}

// askAboutBase lets the developer choose and puts the choice into the plan.
func askAboutBase(p *Plan, c ChangedAnchor, t Terminal) error {
	fmt.Fprintf(t.Err, "\nThe persistent path %s was written over %s; the sandbox now starts on %s.\n", c.Path, c.Old, c.New)
	if len(c.Shadowed) > 0 {
		fmt.Fprintf(t.Err, "Compared with the new base, it has:\n")
		for _, s := range c.Shadowed {
			fmt.Fprintf(t.Err, "  %s\n", s)
		}
		if c.More > 0 {
			fmt.Fprintf(t.Err, "  … and %d more\n", c.More)
		}
	} else {
		fmt.Fprintf(t.Err, "It hides nothing of the new base.\n")
	}
	// What was typed ahead was meant for something else.
	_ = unix.IoctlSetInt(int(t.In.Fd()), unix.TCFLSH, unix.TCIFLUSH)
	for range 3 {
		fmt.Fprintf(t.Err, "[k]eep it, take a [s]napshot and keep it, [r]eset it to the new base, or [a]bort? ")
		line, err := readLine(t.In)
		if err != nil {
			break
		}
		choices := map[string]string{"k": "keep", "s": "snapshot", "r": "reset"}
		for short, long := range choices {
			if line == short || line == long {
				p.OnChange[c.Path] = long
				return nil
			}
		}
		if line == "a" || line == "abort" {
			break
		}
	}
	return refusal(fmt.Sprintf("start sandbox: nothing was chosen for %s", c.Path), "enter again, or see lazaret anchor --help")
}

// readLine reads one line, and no byte beyond it: the rest is the session's.
func readLine(f *os.File) (string, error) {
	var line []byte
	r := bufio.NewReaderSize(byteReader{f}, 16)
	for len(line) < 256 {
		b, err := r.ReadByte()
		if err != nil {
			return "", err
		}
		if b == '\n' {
			return strings.ToLower(strings.TrimSpace(string(line))), nil
		}
		line = append(line, b)
	}
	return "", errors.New("the line is too long")
}

// byteReader reads single bytes.
type byteReader struct{ f *os.File }

func (r byteReader) Read(p []byte) (int, error) { return r.f.Read(p[:1]) }

// releaseBase lets the domain process give up the image before it ends; a dead pin would stay until the next gc.
func (c *coordinator) releaseBase() {
	if c.domain == nil || c.plan.Profile.Image == hostImage {
		return
	}
	if c.domain.Control.Send(domainRequest{Release: true}) != nil {
		return
	}
	select {
	case <-c.released:
	case <-time.After(2 * time.Second):
	}
}
