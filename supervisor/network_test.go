package supervisor

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestPaceOfRepairs(t *testing.T) {
	var p pace
	now := time.Unix(1000, 0)
	var waits []time.Duration
	for range 12 {
		waits = append(waits, p.failed(now))
		now = now.Add(waits[len(waits)-1])
	}
	want := []time.Duration{0, 0, 0, 1, 2, 4, 8, 16, 30, 30, 30, 30}
	for i := range want {
		want[i] *= time.Second
	}
	if !reflect.DeepEqual(waits, want) {
		t.Errorf("waits %v, want %v", waits, want)
	}
	if w := p.failed(now.Add(paceQuiet + 1)); w != 0 {
		t.Errorf("after a quiet time: %v", w)
	}
	for range 100 {
		if w := p.failed(now); w > paceMax || w < 0 {
			t.Fatalf("waits %v", w)
		}
	}
}

func TestPlacesOfEntries(t *testing.T) {
	for _, tt := range []struct {
		text string
		want map[string]int
	}{
		{"", map[string]int{}},
		{"image = 'host'\n\n[network]\nipv6 = \"on\" # yes\nallow = ['a', \"b\",\n # c\n '''d''',]\n[env]\nallow = 'no'\n",
			map[string]int{"ipv6": 4, "allow": 5, "allow[0]": 5, "allow[1]": 5, "allow[2]": 7}},
		{"network.deny = [\n'x']\nnetwork.default = 'deny'", map[string]int{"deny": 1, "deny[0]": 2, "default": 3}},
		{"network = { allow = ['x', 'y'], ipv6 = 'on' }", map[string]int{"allow": 1, "allow[0]": 1, "allow[1]": 1, "ipv6": 1}},
		{"[\"network\"]\n'dns' = ['1.1.1.1']", map[string]int{"dns": 2, "dns[0]": 2}},
	} {
		if got := findPlaces("f", []byte(tt.text)).Lines; !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%q: %v, want %v", tt.text, got, tt.want)
		}
	}
	p := Places{File: "f.toml", Lines: map[string]int{"allow[1]": 7}}
	if a, b := p.locate("allow", 1), p.locate("ipv6", -1); a != "f.toml:7: allow[1]" || b != "network.ipv6" {
		t.Errorf("%q, %q", a, b)
	}
}

func TestNetworkSection(t *testing.T) {
	base, err := parseProfile(defaultProfile, "built-in", Profile{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := parseProfile([]byte("[network]\ndns = ['10.0.0.53', '[fd00::53]:5353']\nproxy = 'socks5://u:secret@proxy.test'\n"), "f.toml", base)
	if err != nil {
		t.Fatal(err)
	}
	if p.Network.Default != "allow" || p.Network.IPv6 != "off" {
		t.Errorf("the defaults are lost: %v", p.Network)
	}
	n := network{cfg: p.Network}
	if got := n.wantUpstream().Servers; !reflect.DeepEqual(got, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.53:53"), netip.MustParseAddrPort("[fd00::53]:5353")}) {
		t.Errorf("resolvers %v", got)
	}
	diff := base.difference(p)
	if !strings.HasPrefix(diff, "network is ") || strings.Contains(diff, "secret") {
		t.Errorf("the difference reads %q", diff)
	}
	// Where an entry stands is no setting.
	moved, err := parseProfile([]byte("\n\n[network]\ndns = ['10.0.0.53', '[fd00::53]:5353']\nproxy = 'socks5://u:secret@proxy.test'\n"), "g.toml", base)
	if err != nil || p.difference(moved) != "" {
		t.Errorf("%v, %q", err, p.difference(moved))
	}
	for env, want := range map[string]string{"": "is not set", "http://h:3128": "", "ftp://x:secret@h": "neither", "secret": "neither", "http://": "no host", "http://h/x": "path"} {
		got, err := Network{ProxyEnv: "P"}.proxyOf(func(string) string { return env })
		if want == "" && (err != nil || got != env) || want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("proxy %q: %q, %v", env, got, err)
		}
	}
	for in, want := range map[string]string{"http://h": "h:80", "socks5://h": "h:1080", "http://u:p@[::1]:3128/": "[::1]:3128"} {
		if u, err := parseProxy(in); err != nil || u.Host != want {
			t.Errorf("%s: %v, %v", in, u, err)
		}
	}
}

func TestResolvConfOfTheSandbox(t *testing.T) {
	a := netip.MustParseAddr("198.18.0.1")
	if got := string(resolvConf(a, nil)); got != "nameserver 198.18.0.1\n" {
		t.Errorf("%q", got)
	}
	if got := string(resolvConf(a, []string{"a.test", "b.test"})); got != "search a.test b.test\nnameserver 198.18.0.1\n" {
		t.Errorf("%q", got)
	}
}

// TestSR8JournalIsBounded fills the journal: it and its predecessor keep the last entries.
func TestSR8JournalIsBounded(t *testing.T) {
	dir := t.TempDir()
	j, err := openJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 1<<20)
	for i := range 50 {
		j.write("test", fmt.Sprint(i, long))
	}
	j.close()
	j.write("test", "after the end")
	var total int64
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		st, err := e.Info()
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", st, err)
		}
		total += st.Size()
	}
	if len(entries) != 2 || total > 2*journalLimit+4<<20 {
		t.Errorf("%d files of %d bytes", len(entries), total)
	}
	text, err := os.ReadFile(filepath.Join(dir, "journal.jsonl"))
	if err != nil || !strings.Contains(string(text), `"fields":"49x`) {
		t.Errorf("the last entry is lost: %v", err)
	}
	if err := os.Remove(j.path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/null", j.path); err != nil {
		t.Fatal(err)
	}
	if _, err := openJournal(dir); err == nil {
		t.Error("a symlink was followed")
	}
}
