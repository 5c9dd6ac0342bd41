package overlay

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// etcOf makes a source directory and copies the names from it.
func etcOf(t *testing.T, make func(dir string), names ...string) (to string, err error) {
	t.Helper()
	from, to := t.TempDir(), t.TempDir()
	make(from)
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	c := etcCopy{from: src, to: to, left: maxEtcTotal}
	for _, n := range names {
		if err := c.copyNamed(n); err != nil {
			return to, err
		}
	}
	return to, nil
}

func put(t *testing.T, dir, name, text string, mode os.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// TestSR3EtcCopyTakesOnlyWhatEverybodyReads copies a tree with files that are for some only.
func TestSR3EtcCopyTakesOnlyWhatEverybodyReads(t *testing.T) {
	to, err := etcOf(t, func(dir string) {
		put(t, dir, "d/open", "open", 0o644)
		put(t, dir, "d/tool", "tool", 0o755)
		put(t, dir, "d/secret", "secret", 0o640)
		put(t, dir, "d/closed/open", "secret", 0o644)
		put(t, dir, "private", "secret", 0o600)
		put(t, dir, "large", strings.Repeat("x", maxEtcFile+1), 0o644)
		if err := os.Chmod(filepath.Join(dir, "d/closed"), 0o750); err != nil {
			t.Fatal(err)
		}
		for name, target := range map[string]string{"d/link": "open", "d/out": "/etc/shadow", "up": "../secret"} {
			if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}, "d", "private", "large", "up", "absent", "d/open/below")
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	_ = filepath.WalkDir(to, func(p string, e os.DirEntry, err error) error {
		if rel, _ := filepath.Rel(to, p); rel != "." {
			have = append(have, rel)
		}
		return err
	})
	if got := strings.Join(have, " "); got != "d d/link d/open d/out d/tool up" {
		t.Errorf("copied: %s", got)
	}
	if target, _ := os.Readlink(filepath.Join(to, "d/out")); target != "/etc/shadow" {
		t.Errorf("a symlink is copied as such, it leads into the sandbox's own /etc: %q", target)
	}
	if st, err := os.Stat(filepath.Join(to, "d/tool")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("mode of d/tool: %v, %v", st, err)
	}
}

// TestSR8EtcCopyIsBounded makes the total too large.
func TestSR8EtcCopyIsBounded(t *testing.T) {
	_, err := etcOf(t, func(dir string) {
		for i := range 10 {
			put(t, dir, "d/"+strings.Repeat("f", i+1), strings.Repeat("x", maxEtcFile), 0o644)
		}
	}, "d")
	if err == nil || !strings.Contains(err.Error(), "over its limit") {
		t.Errorf("want the limit on the total, got %v", err)
	}
}
