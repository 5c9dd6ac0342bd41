package sentry

import (
	"strings"
	"testing"
)

func TestSR4DenialsAreReadWithoutTrust(t *testing.T) {
	const text = "2026-11-29T19:20:00Z symlink EPERM \"a\\n\\x1b[2J\"\nnonsense\n2026-11-29T19:20:01Z mkdir EBUSY \".git\"\nmore\n2026-11-29T19:20:02Z mkd"
	list, cut, err := ParseDenials(strings.NewReader(text))
	if err != nil || !cut || len(list) != 2 || list[0].Path != "a\n\x1b[2J" || list[1].Op != "mkdir" || list[1].Errno != "EBUSY" {
		t.Errorf("%+v, cut %v, %v", list, cut, err)
	}
	if list, _, err := ParseDenials(strings.NewReader(strings.Repeat("x", 8*MaxDenials))); err != nil || len(list) != 0 {
		t.Errorf("a long line: %d entries, %v", len(list), err)
	}
}
