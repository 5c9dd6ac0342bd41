package volume

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var rules = Rules{
	Protected: []string{"/home/u/.config/lazaret", "/home/u/.local/share/lazaret", "/tmp/rt/lazaret"},
	Taken:     []string{"/home/u/src/app", "/home/agent"},
}

func TestSR5VolumeRules(t *testing.T) {
	for _, c := range []struct {
		host, target, want string
	}{
		{"/srv/data", "/data", ""},
		{"/home/u/src/lib", "/home/u/src/lib", ""},
		{"/home/u/.config/lazaret-x", "/x", ""},
		{"/home/u/file", "/home/agent/file", ""}, // inside an anchor
		{"relative", "/x", "host path"},
		{"/a/../b", "/x", "host path"},
		{"/a\x1b[0m", "/x", "host path"},
		{"/a", "x", "target"},
		{"/a", "/x/", "target"},
		{"/", "/x", "whole"},
		{"/a", "/", "root"},
		{"/home/u", "/x", "own"},
		{"/home", "/x", "own"},
		{"/home/u/.config", "/x", "own"},
		{"/home/u/.config/lazaret", "/x", "own"},
		{"/home/u/.config/lazaret/profiles/a.toml", "/x", "own"},
		{"/home/u/.local/share/lazaret/domains/x/anchors", "/x", "own"},
		{"/tmp/rt/lazaret/d/coordinator.sock", "/x", "own"},
		{"/proc", "/x", "plain"},
		{"/run/user/1000", "/x", "plain"},
		{"/dev/shm", "/x", "plain"},
		{"/a", "/proc/x", "reserved"},
		{"/a", "/run", "reserved"},
		{"/a", "/home/u/src/app", "hide"},
		{"/a", "/home/u/src", "hide"},
		{"/a", "/home", "hide"},
	} {
		err := Check(Volume{Host: c.host, Target: c.target}, rules)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%+v: %v", c, err)
		case c.want != "" && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: got %v", c, err)
		}
	}
}

func TestCheckAll(t *testing.T) {
	for name, c := range map[string]struct {
		vs []Volume
		ok bool
	}{
		"two":               {[]Volume{{"/a", "/x", false}, {"/b", "/y", true}}, true},
		"same host, both r": {[]Volume{{"/a", "/x", false}, {"/a", "/y", false}}, true},
		"same target":       {[]Volume{{"/a", "/x", false}, {"/b", "/x", false}}, false},
		"nested target":     {[]Volume{{"/a", "/x", false}, {"/b", "/x/y", false}}, false},
		"ro inside rw":      {[]Volume{{"/a", "/x", true}, {"/a/b", "/y", false}}, false},
		"rw inside ro":      {[]Volume{{"/a/b", "/x", true}, {"/a", "/y", false}}, false},
		"one is refused":    {[]Volume{{"/a", "/x", true}, {"/", "/y", false}}, false},
	} {
		if err := CheckAll(c.vs, rules); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s := Sorted([]Volume{{Target: "/b"}, {Target: "/a/c"}, {Target: "/a"}}); s[0].Target != "/a" || s[2].Target != "/b" {
		t.Error(s)
	}
}

func FuzzCheck(f *testing.F) {
	f.Add("/home/u/x", "/x")
	f.Add("/home/u/.config", "/x")
	f.Fuzz(func(t *testing.T, host, target string) {
		if Check(Volume{Host: host, Target: target}, rules) != nil {
			return
		}
		for _, p := range rules.Protected {
			if strings.HasPrefix(p+"/", host+"/") || strings.HasPrefix(host+"/", p+"/") {
				t.Fatalf("%q was accepted beside %q", host, p)
			}
		}
		if strings.Contains(host+target, "/..") || strings.Contains(host+target, "//") {
			t.Fatalf("unclean %q %q", host, target)
		}
	})
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/real", 0o755), os.Symlink("real", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600), os.WriteFile(dir+"/x (deleted)", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", dir+"/sock")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, name, err := Open(dir + "/link")
	if err != nil || name != dir+"/real" {
		t.Fatalf("%q %v", name, err)
	}
	f.Close()
	if f, name, err = Open(dir + "/x (deleted)"); err != nil || name != dir+"/x (deleted)" {
		t.Fatalf("%q %v", name, err)
	}
	f.Close()
	for _, bad := range []string{dir + "/fifo", dir + "/sock", "/dev/null", dir + "/none", "real"} {
		if f, _, err := Open(bad); err == nil {
			f.Close()
			t.Errorf("%q was opened", bad)
		}
	}
}
