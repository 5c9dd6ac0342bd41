package nsenter

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// AgentID is the user and group of the agent inside the sandbox, which map to the developer (design.md, section 2).
const AgentID = 1000

// mappedIDs is how many ids of the namespace are mapped when subordinate ids are there: 0 to 65535.
const mappedIDs = 65536

// rootBase is where real root's Domains take their subordinate ids when /etc/subuid grants root none. No distribution
// hands out ids this high (systemd's container range ends at 1879048191).
const rootBase = 2_000_000_000

// Range maps Count ids from Inside in the user namespace to Outside in the parent (user_namespaces(7)).
type Range struct{ Inside, Outside, Count uint32 }

// MapKind tells how an [IDMap] came to be.
type MapKind int

const (
	MapSubordinate MapKind = iota // subordinate ids of an ordinary user, written by newuidmap and newgidmap
	MapRoot                       // real root's own: the same shape, written directly
	MapSingle                     // no subordinate ids: the developer alone, as uid 0 of the namespace
)

// IDMap is the id map of a Domain's user namespace.
type IDMap struct {
	Kind     MapKind
	UID, GID []Range
	// Agent is the uid and gid, inside, that map to the developer: AgentID, or 0 for MapSingle.
	Agent uint32
	// Why says, for MapSingle, which prerequisite of the full map is missing.
	Why string
}

// Subordinate is what the system grants a user: the contents of subuid(5) and subgid(5), and whether the helpers exist.
type Subordinate struct {
	SubUID, SubGID []byte
	Helpers        bool // newuidmap and newgidmap can be run
}

// ReadSubordinate reads the grants of this system. A file that is not there grants nothing.
func ReadSubordinate() Subordinate {
	u, _ := os.ReadFile("/etc/subuid")
	g, _ := os.ReadFile("/etc/subgid")
	_, uerr := exec.LookPath(newuidmap())
	_, gerr := exec.LookPath(newgidmap())
	return Subordinate{SubUID: u, SubGID: g, Helpers: uerr == nil && gerr == nil}
}

// PlanIDs chooses the id map for a developer. It never fails: without subordinate ids it is the single-id map, and Why
// says what is missing.
func PlanIDs(uid, gid uint32, name string, sub Subordinate) IDMap {
	u, uerr := subRanges(sub.SubUID, name, uid)
	g, gerr := subRanges(sub.SubGID, name, uid)
	if uid == 0 {
		m := IDMap{Kind: MapRoot, Agent: AgentID}
		if uerr != nil || gerr != nil {
			u = []Range{{Outside: rootBase, Count: mappedIDs}}
			g = u
		}
		m.UID, m.GID = layout(u, uid), layout(g, gid)
		return m
	}
	single := IDMap{Kind: MapSingle, UID: []Range{{0, uid, 1}}, GID: []Range{{0, gid, 1}}}
	switch {
	case uerr != nil:
		single.Why = "/etc/subuid: " + uerr.Error()
	case gerr != nil:
		single.Why = "/etc/subgid: " + gerr.Error()
	case !sub.Helpers:
		single.Why = "newuidmap and newgidmap are not installed"
	default:
		return IDMap{Kind: MapSubordinate, UID: layout(u, uid), GID: layout(g, gid), Agent: AgentID}
	}
	return single
}

// subRanges returns the ranges granted to the user in a subuid(5) file, by name or number; at least mappedIDs-1 ids.
func subRanges(file []byte, name string, uid uint32) ([]Range, error) {
	var out []Range
	var total uint64
	sc := bufio.NewScanner(bytes.NewReader(file))
	for sc.Scan() {
		f := strings.Split(strings.TrimSpace(sc.Text()), ":")
		if len(f) != 3 || (f[0] != name && f[0] != strconv.FormatUint(uint64(uid), 10)) {
			continue
		}
		start, serr := strconv.ParseUint(f[1], 10, 32)
		count, cerr := strconv.ParseUint(f[2], 10, 32)
		if serr != nil || cerr != nil || count == 0 || start+count > 1<<32-1 || (start <= uint64(uid) && uint64(uid) < start+count) {
			continue // a grant that newuidmap would refuse, or that holds the developer's own id
		}
		out = append(out, Range{Outside: uint32(start), Count: uint32(count)})
		total += count
	}
	if total < mappedIDs-1 {
		return nil, fmt.Errorf("%s has %d subordinate ids, %d are needed", name, total, mappedIDs-1)
	}
	return out, nil
}

// layout spreads granted ids over 0..mappedIDs-1, leaving AgentID for own.
func layout(granted []Range, own uint32) []Range {
	var out []Range
	next, end := uint32(0), uint32(AgentID)
	for _, g := range granted {
		for g.Count > 0 && next < mappedIDs {
			n := min(g.Count, end-next)
			out = append(out, Range{next, g.Outside, n})
			g.Outside, g.Count, next = g.Outside+n, g.Count-n, next+n
			if next == AgentID {
				out = append(out, Range{AgentID, own, 1})
				next, end = AgentID+1, mappedIDs
			}
		}
	}
	return out
}

// Maps reports whether the id, as seen outside, has a counterpart inside.
func Maps(ranges []Range, outside uint32) bool {
	for _, r := range ranges {
		if r.Outside <= outside && outside-r.Outside < r.Count {
			return true
		}
	}
	return false
}

// write gives the map to the new user namespace of pid.
func (m IDMap) write(pid int) error {
	switch m.Kind {
	case MapSubordinate:
		if err := runMapHelper(newuidmap(), pid, m.UID); err != nil {
			return err
		}
		return runMapHelper(newgidmap(), pid, m.GID)
	case MapSingle:
		// Without privilege a gid map may be written only after setgroups(2) is given up (user_namespaces(7)).
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/setgroups", pid), []byte("deny"), 0); err != nil {
			return fmt.Errorf("deny setgroups: %w", err)
		}
	}
	if err := writeMap(pid, "uid_map", m.UID); err != nil {
		return err
	}
	return writeMap(pid, "gid_map", m.GID)
}

func writeMap(pid int, file string, ranges []Range) error {
	var b strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&b, "%d %d %d\n", r.Inside, r.Outside, r.Count)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", pid, file), []byte(b.String()), 0); err != nil {
		return fmt.Errorf("write id map: %w", err)
	}
	return nil
}

func runMapHelper(helper string, pid int, ranges []Range) error {
	args := []string{strconv.Itoa(pid)}
	for _, r := range ranges {
		for _, n := range []uint32{r.Inside, r.Outside, r.Count} {
			args = append(args, strconv.FormatUint(uint64(n), 10))
		}
	}
	cmd := exec.Command(helper, args...)
	cmd.Env = []string{"PATH=/usr/bin:/bin"}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", helper, err, bytes.TrimSpace(out))
	}
	return nil
}

// The helpers are looked up in fixed places: PATH is the developer's, and they are set-uid root.
func newuidmap() string { return systemTool("newuidmap") }
func newgidmap() string { return systemTool("newgidmap") }

func systemTool(name string) string {
	for _, dir := range []string{"/usr/bin/", "/bin/", "/usr/local/bin/", "/run/wrappers/bin/", "/usr/sbin/"} {
		if _, err := os.Stat(dir + name); err == nil {
			return dir + name
		}
	}
	return "/usr/bin/" + name
}
