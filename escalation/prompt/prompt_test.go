package prompt

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
)

// Rewriting the screens is legitimate once every line of the diff can be explained.
var update = flag.Bool("update", false, "rewrite the screens in testdata")

func TestSR8QuoteAndSplit(t *testing.T) {
	for arg, want := range map[string]string{
		"plain-1.2/x": "plain-1.2/x", "": `""`, "a b": `"a b"`, `a"b\c`: `"a\"b\\c"`, "\x1b[2J": `"\x1b[2J"`, "a\nb\t\r": `"a\nb\t\r"`,
		"\u202e": `"\u{202e}"`, "\u200b": `"\u{200b}"`, "\xff": `"\xff"`, "\u0085": `"\u{85}"`, "e\u0301": `"e\u{301}"`, "é": "é", "日本": "日本",
		"\u3164": `"\u{3164}"`, "\uff21": `"\u{ff21}"`, "🙂": `"\u{1f642}"`, "\u00a0": `"\u{a0}"`, "\u05d0": `"\u{5d0}"`, "$(x)": `"$(x)"`,
		"\ufeff": `"\u{feff}"`, "\U000e0041": `"\u{e0041}"`, "'": `"'"`, "\u115f": `"\u{115f}"`, "\ufffd": `"\u{fffd}"`, "\u2028": `"\u{2028}"`,
	} {
		if got := Quote(arg); got != want {
			t.Errorf("%+q became %s, not %s", arg, got, want)
		}
		if back, err := Split(Quote(arg)); err != nil || len(back) != 1 || back[0] != arg {
			t.Errorf("%+q came back as %+q, %v", arg, back, err)
		}
	}
	for _, bad := range []string{`"`, `"a`, `"a"b`, `a"b"`, `"\`, `"\x0"`, `"\xzz"`, `"\x00"`, `"\u{0}"`, `"\u{110000}"`, `"\u{d800}"`, `"\q"`, "a;b", "a|b", "$x",
		"*.go", "a>b", "`x`", "'x'", "~", `\`} {
		if argv, err := Split(bad); err == nil {
			t.Errorf("%q became %q", bad, argv)
		}
	}
}

func FuzzSR8Quote(f *testing.F) {
	f.Add("a b", "\x1b\u202e\xff")
	f.Fuzz(func(t *testing.T, a, b string) {
		if strings.Contains(a+b, "\x00") {
			return // no argument
		}
		line := Join([]string{a, b})
		for _, r := range line {
			if !showable(r) {
				t.Fatalf("%q shows %q", line, r)
			}
		}
		if got, err := Split(line); err != nil || !slices.Equal(got, []string{a, b}) {
			t.Fatalf("%q became %q, %v", line, got, err)
		}
	})
}

func FuzzSR8Split(f *testing.F) {
	f.Add(`a "b c" \x41`)
	f.Fuzz(func(t *testing.T, line string) {
		argv, err := Split(line)
		if err != nil {
			return
		}
		if again, err := Split(Join(argv)); err != nil || !slices.Equal(again, argv) {
			t.Fatalf("%q became %q, then %q, %v", line, argv, again, err)
		}
	})
}

func hostile() Request {
	return Request{
		ID: "00ff", Profile: "claude", Session: "s-8f3a", Program: "/usr/bin/git",
		Argv: []string{"git", "push", "\x1b[2J\x1b[H[a] approve", "a\u202eb\u200bc", "line\nLazaret: denied\r", "p\u0430ypal", "日本語", "e\u0301\u0301",
			"\u009b31m", "\xff\xfe", strings.Repeat("x", 90), strings.Repeat("日", 50), "\u3164\u115f🙂", ""},
		Dir: "/home/dev/src/\x1b]0;title\x07app", Env: []string{"PATH", "HOME"}, Time: 10 * time.Minute,
		Reason: "It is fine.\n----------\n[a] approve   [d] deny\n\x1b[8mhidden\u202e\nLazaret: approved already\n", Notes: []string{"A note of ours."},
		Waiting: 2, Remember: "[[escalation.rule]]\nargv = [\"git\"]\n",
	}
}

// Whatever the request, no line is wider than the window, everything is showable, the choices are there, and text of the
// sandbox is never at the edge.
func checkScreen(t *testing.T, s *Screen) {
	t.Helper()
	lines, row, _ := s.Lines()
	if len(lines) > s.Rows || row >= len(lines) {
		t.Fatalf("%d lines, cursor at %d, on %d rows", len(lines), row, s.Rows)
	}
	text := strings.Join(lines, "\n")
	for _, l := range lines {
		if width(l) > s.Cols-1 {
			t.Fatalf("%d cells in %d columns: %q", width(l), s.Cols, l)
		}
		for _, r := range l {
			if !showable(r) {
				t.Fatalf("%q is shown", r)
			}
		}
	}
	if s.Cols >= MinColumns && s.Rows >= MinRows && s.mode == asking && !strings.Contains(text, "[a] approve   [d] deny") {
		t.Fatalf("the choices are gone:\n%s", text)
	}
}

func FuzzSR8Screen(f *testing.F) {
	f.Add("git", "push\x1b[2J", "reason\u202e", "/dir", 80, 24, []byte(" ae\x1bx\rd"))
	f.Add("a", strings.Repeat("日", 500), "", "/", 40, 10, []byte("   eee\x15new command\r"))
	f.Fuzz(func(t *testing.T, a, b, reason, dir string, cols, rows int, keys []byte) {
		s := &Screen{Req: Request{Argv: []string{a, b}, Reason: reason, Dir: dir, Program: a, Remember: b}, Cols: cols & 0xff, Rows: rows & 0x3f}
		checkScreen(t, s)
		for _, k := range Keys(keys[:min(len(keys), 300)]) {
			d := s.Key(k, true)
			if (d == Approve || d == ApproveAndRemember) && !s.seen {
				t.Fatal("approved before its end was shown")
			}
			if d == Recheck {
				if _, err := Split(string(s.editor.text)); err != nil {
					t.Fatal(err)
				}
			}
			checkScreen(t, s)
		}
	})
}

func screens(t *testing.T, cols, rows int) string {
	s := &Screen{Req: hostile(), Cols: cols, Rows: rows}
	var b bytes.Buffer
	show := func(what string) {
		checkScreen(t, s)
		lines, _, _ := s.Lines()
		b.WriteString("== " + what + "\n")
		for _, l := range lines {
			b.WriteString(l + "|\n")
		}
	}
	show("start")
	if d := s.Key("a", true); d != Nothing && rows < 60 {
		t.Error("approved before its end was shown")
	}
	for i := 0; !s.seen && i < 100; i++ {
		s.Key(" ", true)
		show("space")
	}
	s.Key("r", true)
	show("remember")
	s.Key("n", true)
	s.Key("e", true)
	show("edit")
	return b.String()
}

func TestDX4Screens(t *testing.T) {
	for name, size := range map[string][2]int{"40x12": {40, 12}, "80x24": {80, 24}, "200x60": {200, 60}, "30x8": {30, 8}} {
		file := filepath.Join("testdata", "screen-"+name+".txt")
		got := screens(t, size[0], size[1])
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s differs; got:\n%s", file, got)
		}
	}
}

func TestSR8Keys(t *testing.T) {
	for in, want := range map[string][]Key{
		"a": {"a"}, "\x1b": {KeyEscape}, "\x1b[A": {KeyUp}, "\x1b[5~": {KeyPageUp}, "\x1bOB": {KeyDown}, "ab": {"a", "b"}, "é": {"é"},
		"\x1b[97u": {keyOther}, "\x1ba": {keyOther}, "\x1b[": {keyOther}, "\x1b[200~a": {keyOther, "a"}, "\x7f": {KeyBackspace}, "\xff": {keyOther},
		"\x1b[<0;1;1M": {keyOther}, "\x1b\x1b": {KeyEscape, KeyEscape},
	} {
		if got := Keys([]byte(in)); !slices.Equal(got, want) {
			t.Errorf("%q: %q, not %q", in, got, want)
		}
	}
}

func TestSR8OnlyDeliberateKeysDecide(t *testing.T) {
	for r := rune(0); r < 0x3000; r++ {
		s := &Screen{Req: Request{Argv: []string{"x"}, Remember: "r"}, Cols: 80, Rows: 24}
		s.Lines()
		if d := s.Key(Key(string(r)), false); d != Nothing {
			t.Errorf("%q decides without a pause", r)
		}
		d := s.Key(Key(string(r)), true)
		if want := map[rune]Decision{'a': Approve, 'd': Deny}[r]; d != want {
			t.Errorf("%q decides %d", r, d)
		}
	}
}

func TestDX4Editor(t *testing.T) {
	e := newEditor("git push")
	for _, k := range []Key{"\x17", "p", "u", "l", "l", KeyHome, KeyRight, KeyDelete, "I", KeyEnd, " ", `"`, "é", "\u202e", "🙂", keyOther, `"`, KeyLeft, KeyBackspace, "x"} {
		e.key(k)
	}
	if got := string(e.text); got != `gIt pull "x"` {
		t.Errorf("%q", got)
	}
	s := &Screen{Req: Request{Argv: []string{"git", "push"}, Digest: [32]byte{1}}, Cols: 80, Rows: 24}
	s.Lines()
	s.Key("e", true)
	for _, k := range []Key{" ", ";", "x"} {
		s.Key(k, false)
	}
	if d := s.Key("\r", false); d != Nothing || !strings.Contains(s.message, "double quotes") {
		t.Errorf("%d %q", d, s.message)
	}
	s.Key(KeyBackspace, false)
	s.Key(KeyBackspace, false)
	s.Key("v", false)
	if d := s.Key("\r", false); d != Recheck || !slices.Equal(s.Edited(), []string{"git", "push", "v"}) {
		t.Errorf("%d %q", d, s.Edited())
	}
	s.Replace(Request{Argv: s.Edited(), Edited: true, Digest: [32]byte{2}})
	if lines, _, _ := s.Lines(); !strings.Contains(lines[0], "as you edited it") {
		t.Error(lines[0])
	}
}

func TestDX5Modes(t *testing.T) {
	for name, tc := range map[string]struct{ in, want, not string }{
		"nothing":            {"hello\r\n", "\x1b[?1049l", "?2004h"},
		"alternate screen":   {"\x1b[?1049h", "", "\x1b[?1049l"},
		"left it again":      {"\x1b[?1049h\x1b[?1049l", "\x1b[?1049l", ""},
		"mouse and paste":    {"\x1b[?1000;1006h\x1b[?2004h", "\x1b[?1000h\x1b[?1006h\x1b[?2004h", ""},
		"hidden cursor":      {"\x1b[?25l", "\x1b[?25l", ""},
		"in pieces":          {"\x1b|[|?20|04|h", "\x1b[?2004h", ""},
		"inside a title":     {"\x1b]0;\x1b[?2004h\x07", "", "?2004h"},
		"title ended by ST":  {"\x1b]0;x\x1b\\\x1b[?2004h", "\x1b[?2004h", ""},
		"scroll region":      {"\x1b[2;10r", "\x1b[2;10r", ""},
		"keypad":             {"\x1b=", "\x1b=", ""},
		"line drawing":       {"\x1b(0", "\x1b(0", ""},
		"modify other keys":  {"\x1b[>4;2m", "\x1b[>4;2m", ""},
		"reset":              {"\x1b[?2004h\x1bc", "", "?2004h"},
		"unknown and broken": {"\x1b[?99999999999999999999h\x1b[;;;;h\x1b[?;h\x1b[<99u\x1b[\x18", "", "999"},
		"left no wrap":       {"\x1b[?7l", "\x1b[?7h\x1b[?1049l\x1b[?25h\x1b[?7l", ""},
	} {
		var m Modes
		for _, part := range strings.Split(tc.in, "|") {
			m.Feed([]byte(part))
		}
		if got := m.leave(); !strings.Contains(got, tc.want) || tc.not != "" && strings.Contains(got, tc.not) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func FuzzDX5Modes(f *testing.F) {
	f.Add([]byte("\x1b[?1049h\x1b]0;x\x07\x1b[>1u"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Modes
		m.Feed(b)
		if len(m.seq) > 80 || len(m.kitty[0]) > 16 || len(m.region) > 80 {
			t.Fatal("it grows")
		}
		for _, r := range m.leave() + m.enter() {
			if r > unicode.MaxASCII {
				t.Fatalf("%q", r)
			}
		}
	})
}
