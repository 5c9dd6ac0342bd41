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

func TestDX5ModesAreUndone(t *testing.T) {
	for out, want := range map[string]string{
		"plain text\r\n":          "",
		"\x1b[?1049h\x1b[?25l":    "\x1b[?1049l\x1b[?25h",
		"\x1b[?1049h\x1b[?1049l":  "",
		"\x1b[?1000;1006h":        "\x1b[?1006l\x1b[?1000l",
		"\x1b[?7l\x1b[?12345h":    "\x1b[?7h",
		"\x1b[>1u\x1b[>5u\x1b[<u": "\x1b[<1u",
		"\x1b[31mred":             "\x1b[0m",
		"\x1b[31mred\x1b[m":       "",
		"\x1b=":                   "\x1b>",
		"\x1b[?2004h\x1bc":        "",
		"\x1b[?20":                "\x18",
		"\x1b[" + strings.Repeat("1", 1000) + "h\x1b[?25l": "\x1b[?25h",
	} {
		for cut := range min(len(out), 12) + 1 { // wherever a read ends
			var m modeTracker
			m.Write([]byte(out[:cut]))
			m.Write([]byte(out[cut:]))
			if got := m.Undo(); got != want {
				t.Errorf("%q cut at %d: undo %q, want %q", out, cut, got, want)
			}
		}
	}
}

// FuzzModes: no output makes the tracker panic or grow, and what it sends puts itself in order.
func FuzzModes(f *testing.F) {
	f.Add([]byte("\x1b[?1049h\x1b[?25l\x1b[>1u\x1b=\x1b[31m"))
	f.Fuzz(func(t *testing.T, out []byte) {
		var m modeTracker
		m.Write(out)
		if len(m.params) > maxTracked || len(m.on) > len(undoneModes) {
			t.Fatalf("%d parameters, %d modes are kept", len(m.params), len(m.on))
		}
		m.Write([]byte(m.Undo()))
		if m.kittySet = false; m.Undo() != "" {
			t.Fatalf("after %q and its undo there is still %q", out, m.Undo())
		}
	})
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
