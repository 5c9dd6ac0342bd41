package nsenter

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPlanIDs(t *testing.T) {
	full := Subordinate{SubUID: []byte("other:1:70000\ndev:100000:65536\n"), SubGID: []byte("1001:200000:65536\n"), Helpers: true}
	m := PlanIDs(1001, 1002, "dev", full)
	wantU := []Range{{0, 100000, 1000}, {1000, 1001, 1}, {1001, 101000, 64535}}
	wantG := []Range{{0, 200000, 1000}, {1000, 1002, 1}, {1001, 201000, 64535}}
	if m.Kind != MapSubordinate || m.Agent != AgentID || !slices.Equal(m.UID, wantU) || !slices.Equal(m.GID, wantG) {
		t.Errorf("full map: %+v", m)
	}
	split := full
	split.SubUID = []byte("dev:100000:500\ndev:300000:600\ndev:500000:65536\n")
	if m := PlanIDs(1001, 1001, "dev", split); !slices.Equal(m.UID, []Range{{0, 100000, 500}, {500, 300000, 500}, {1000, 1001, 1}, {1001, 300500, 100}, {1101, 500000, 64435}}) {
		t.Errorf("split ranges: %+v", m.UID)
	}
	for name, c := range map[string]struct {
		sub Subordinate
		why string
	}{
		"none":       {Subordinate{Helpers: true}, "/etc/subuid"},
		"no gids":    {Subordinate{SubUID: full.SubUID, Helpers: true}, "/etc/subgid"},
		"no helpers": {Subordinate{SubUID: full.SubUID, SubGID: full.SubGID}, "newuidmap"},
		"too few":    {Subordinate{SubUID: []byte("dev:100000:1000\n"), SubGID: full.SubGID, Helpers: true}, "1000 subordinate ids"},
		"own id":     {Subordinate{SubUID: []byte("dev:1000:70000\n"), SubGID: full.SubGID, Helpers: true}, "0 subordinate ids"},
		"overflow":   {Subordinate{SubUID: []byte("dev:4294967295:65536\n"), SubGID: full.SubGID, Helpers: true}, "0 subordinate ids"},
		"malformed":  {Subordinate{SubUID: []byte("dev:x:65536\ndev:1\n:::\n\ndev:-1:65536"), SubGID: full.SubGID, Helpers: true}, "0 subordinate ids"},
	} {
		m := PlanIDs(1001, 1002, "dev", c.sub)
		if m.Kind != MapSingle || m.Agent != 0 || !strings.Contains(m.Why, c.why) || !slices.Equal(m.UID, []Range{{0, 1001, 1}}) || !slices.Equal(m.GID, []Range{{0, 1002, 1}}) {
			t.Errorf("%s: %+v", name, m)
		}
	}
	if m := PlanIDs(0, 0, "root", Subordinate{}); m.Kind != MapRoot || m.UID[0] != (Range{0, rootBase, 1000}) || m.UID[1] != (Range{1000, 0, 1}) || !Maps(m.UID, 0) {
		t.Errorf("root without grants: %+v", m)
	}
}

// FuzzPlanIDs: whatever the file holds, the map has each inside id once, the developer exactly at the agent, and no id of
// the developer elsewhere.
func FuzzPlanIDs(f *testing.F) {
	f.Add([]byte("dev:100000:65536\n"), uint32(1001))
	f.Add([]byte("dev:1:400\ndev:900:1\n1001:2000000:99999\n"), uint32(1001))
	f.Fuzz(func(t *testing.T, file []byte, uid uint32) {
		m := PlanIDs(uid, uid, "dev", Subordinate{SubUID: file, SubGID: file, Helpers: true})
		next := uint64(0)
		for _, r := range m.UID {
			if uint64(r.Inside) != next || r.Count == 0 || uint64(r.Outside)+uint64(r.Count) > math.MaxUint32+1 {
				t.Fatalf("%v in %v", r, m.UID)
			}
			if own := r.Outside <= uid && uint64(uid) < uint64(r.Outside)+uint64(r.Count); own != (r.Inside == m.Agent && r.Count == 1) {
				t.Fatalf("the developer %d in %v", uid, m.UID)
			}
			next += uint64(r.Count)
		}
		if m.Kind != MapSingle && next != mappedIDs {
			t.Fatalf("%d ids are mapped: %v", next, m.UID)
		}
	})
}

func conns(t testing.TB) (a, b *Conn) {
	t.Helper()
	a, f, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	if b, err = NewConn(f); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestConnCarriesMessagesAndFiles(t *testing.T) {
	a, b := conns(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Send("hello", w); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var got string
	files, err := b.Recv(&got)
	if err != nil || got != "hello" || len(files) != 1 {
		t.Fatalf("got %q, %d files, %v", got, len(files), err)
	}
	if flags, _ := unix.FcntlInt(files[0].Fd(), unix.F_GETFD, 0); flags&unix.FD_CLOEXEC == 0 {
		t.Error("SR-3: a received descriptor is inherited by children")
	}
	if _, err := files[0].WriteString("x"); err != nil {
		t.Error(err)
	}
	files[0].Close()
	if text, _ := io.ReadAll(r); string(text) != "x" {
		t.Errorf("through the passed pipe: %q", text)
	}
	if err := a.Send(strings.Repeat("x", MaxMessage)); err == nil {
		t.Error("SR-8: a message over the limit was sent")
	}
	if err := a.Send(strings.Repeat("x", MaxMessage-2)); err != nil {
		t.Errorf("the largest message: %v", err)
	}
	if _, err := b.Recv(&got); err != nil || len(got) != MaxMessage-2 {
		t.Errorf("the largest message: %d bytes, %v", len(got), err)
	}
	a.Close()
	if _, err := b.Recv(&got); !errors.Is(err, io.EOF) {
		t.Errorf("want io.EOF of a closed connection, got %v", err)
	}
}

// TestConnLastWordsArrive: a peer that closes without having read everything has still been heard.
func TestConnLastWordsArrive(t *testing.T) {
	a, b := conns(t)
	if err := errors.Join(a.Send("unread"), b.Send("last words")); err != nil {
		t.Fatal(err)
	}
	b.Close()
	var got string
	if _, err := a.Recv(&got); err != nil || got != "last words" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := a.Recv(&got); !errors.Is(err, io.EOF) {
		t.Errorf("want io.EOF then, got %v", err)
	}
}

// FuzzConnRecv gives Recv arbitrary packets: it must not panic, and must go on to the next.
func FuzzConnRecv(f *testing.F) {
	f.Add([]byte(`{"a":1}`))
	f.Add([]byte("\x00"))
	f.Add(bytes.Repeat([]byte("["), 20000))
	f.Fuzz(func(t *testing.T, packet []byte) {
		if len(packet) == 0 || len(packet) > MaxMessage {
			return
		}
		a, b := conns(t)
		if _, err := a.uc.Write(packet); err != nil {
			t.Fatal(err)
		}
		var v struct{ A *int }
		_, _ = b.Recv(&v)
		if err := a.Send("next"); err != nil {
			t.Fatal(err)
		}
		var s string
		if _, err := b.Recv(&s); err != nil || s != "next" {
			t.Fatalf("after %q: %q, %v", packet, s, err)
		}
	})
}

func TestFatalLine(t *testing.T) {
	for log, want := range map[string]string{
		"":                                      "",
		"I1129 18:18:38.1  1 main.go:1] fine\n": "",
		"W1129 18:18:38.123456   12 cli.go:208] FATAL ERROR: no such file\n":                       "no such file",
		"W1129 18:18:38.1 1 a.go:1] FATAL ERROR: first\nI1129 18:18:39.1 1 a.go:1] FATAL ERROR: x": "x",
		"panic: runtime error: index\n\ngoroutine 1 [running]:\nmain.main()\n":                     "panic: runtime error: index",
		"fatal error: out of memory\nmore\n":                                                       "fatal error: out of memory",
		"I1129 18:18:38.1 1 a.go:1] the word panic: in a line\n":                                   "",
	} {
		if got := fatalLine([]byte(log)); got != want {
			t.Errorf("%q: %q, want %q", log, got, want)
		}
	}
}
