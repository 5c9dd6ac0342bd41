package supervisor

import (
	"slices"
	"strings"
	"testing"
)

func TestProfileSizes(t *testing.T) {
	for text, want := range map[string]Size{"0": 0, "17": 17, "1k": 1 << 10, "64M": 64 << 20, "4g": 4 << 30, "2t": 2 << 40} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%q: %d, %v", text, s, err)
		}
		var again Size
		if err := again.UnmarshalText([]byte(s.String())); err != nil || again != s {
			t.Errorf("%q is written as %q and read as %d, %v", text, s, again, err)
		}
	}
	for _, text := range []string{"", "g", "-1", "1.5g", "1gk", "99999999t", "0x10"} {
		if err := new(Size).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken as a size", text)
		}
	}
}

// TestSR3EnvironmentPassesOnlyNamed gives a caller's environment to the built-in profile.
func TestSR3EnvironmentPassesOnlyNamed(t *testing.T) {
	p, err := parseProfile(defaultProfile, "default.toml", Profile{})
	if err != nil {
		t.Fatal(err)
	}
	p.Env = map[string]string{"EDITOR": "vi"}
	got := p.Environment([]string{"TERM=xterm", "LC_ALL=C", "LC=no", "TERMCAP=no", "XLC_ALL=no", "AWS_SECRET=no", "LANG", "=x", "LD_PRELOAD=no"})
	slices.Sort(got)
	if text := strings.Join(got, " "); text != "EDITOR=vi LANG LC_ALL=C TERM=xterm" {
		t.Errorf("passed: %s", text)
	}
}

func TestProfileFingerprint(t *testing.T) {
	p, err := parseProfile(defaultProfile, "default.toml", Profile{})
	if err != nil {
		t.Fatal(err)
	}
	same, err := parseProfile([]byte("# a comment\n"), "x.toml", p)
	if err != nil || same.Fingerprint() != p.Fingerprint() || p.difference(same) != "" {
		t.Errorf("a comment changes the fingerprint: %v", err)
	}
	other, err := parseProfile([]byte("linger = \"5s\"\n"), "x.toml", p)
	if err != nil || other.Fingerprint() == p.Fingerprint() || p.difference(other) != "linger is 0s, now 5s" {
		t.Errorf("difference: %q, %v", p.difference(other), err)
	}
}

func TestFR1DomainID(t *testing.T) {
	id := DomainID("default", "/src/app")
	if id != DomainID("default", "/src/app") || len(id) != 26 || strings.ToLower(id) != id {
		t.Errorf("Domain ID %q", id)
	}
	if id == DomainID("other", "/src/app") || id == DomainID("default", "/src/app2") || DomainID("a", "b/c") == DomainID("a\x00b", "/c") {
		t.Error("SR-11: two Domains have one ID")
	}
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		path, dir string
		want      bool
	}{{"/a/b", "/a", true}, {"/a", "/a", true}, {"/ab", "/a", false}, {"/a", "/a/b", false}, {"/x", "/", true}} {
		if got := within(c.path, c.dir); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.path, c.dir, got)
		}
	}
}
