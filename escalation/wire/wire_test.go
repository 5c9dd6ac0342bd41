package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func sample() Submit {
	return Submit{ID: [16]byte{1, 2, 3}, Argv: []string{"git", "push", "\xff\x1b[2J"}, Dir: "/w", Reason: "ünï", Wait: 1500 * time.Millisecond, Stdin: true}
}

func TestSubmitRoundTrip(t *testing.T) {
	got, err := ParseSubmit(sample().Append(nil))
	if err != nil || !reflect.DeepEqual(got, sample()) {
		t.Fatalf("got %+v, %v", got, err)
	}
}

func TestResultRoundTrip(t *testing.T) {
	for _, r := range []Result{
		{Outcome: Completed, Started: true, Status: 255, Duration: 3 * time.Second},
		{Outcome: Completed, Started: true, Status: -1, Signal: 9},
		{Outcome: Denied, Detail: "denied by a rule"},
	} {
		got, err := ParseResult(r.Append(nil))
		if err != nil || got != r {
			t.Errorf("got %+v, %v, want %+v", got, err, r)
		}
	}
}

func TestSR8SubmitRefusals(t *testing.T) {
	for name, change := range map[string]func(*Submit){
		"no arguments":       func(s *Submit) { s.Argv = nil },
		"empty program":      func(s *Submit) { s.Argv = []string{""} },
		"zero byte":          func(s *Submit) { s.Argv = []string{"a", "b\x00c"} },
		"zero byte in dir":   func(s *Submit) { s.Dir = "/a\x00" },
		"relative directory": func(s *Submit) { s.Dir = "a" },
		"no directory":       func(s *Submit) { s.Dir = "" },
		"long directory":     func(s *Submit) { s.Dir = "/" + strings.Repeat("a", MaxDir) },
		"long reason":        func(s *Submit) { s.Reason = strings.Repeat("a", MaxReason+1) },
		"too many arguments": func(s *Submit) { s.Argv = make([]string, MaxArgs+1); s.Argv[0] = "x" },
		"64 MB of arguments": func(s *Submit) { s.Argv = []string{"x", strings.Repeat("a", 64<<20)} },
		"wait over a day":    func(s *Submit) { s.Wait = 25 * time.Hour },
	} {
		s := sample()
		change(&s)
		if err := s.Check(); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// A peer that claims much costs what it sends, not what it claims.
func TestSR8ClaimedSizes(t *testing.T) {
	huge := binary.BigEndian.AppendUint32([]byte{byte(KindSubmit)}, 64<<20)
	if _, _, err := (&Reader{R: bytes.NewReader(huge)}).Next(); !errors.Is(err, ErrMalformed) {
		t.Errorf("64 MB claimed: got %v", err)
	}
	r := &Reader{R: bytes.NewReader(binary.BigEndian.AppendUint32([]byte{byte(KindSubmit)}, MaxSubmit))}
	if _, _, err := r.Next(); !errors.Is(err, io.ErrUnexpectedEOF) || cap(r.buf) > 128<<10 {
		t.Errorf("got %v with %d bytes held", err, cap(r.buf))
	}
}

func TestReaderInSmallPieces(t *testing.T) {
	var b []byte
	b = AppendFrame(b, KindSubmit, sample().Append(nil))
	b = AppendFrame(b, KindPing, nil)
	r := &Reader{R: iotest.OneByteReader(bytes.NewReader(b))}
	if k, body, err := r.Next(); k != KindSubmit || len(body) == 0 || err != nil {
		t.Fatal(k, err)
	}
	if k, _, err := r.Next(); k != KindPing || err != nil {
		t.Fatal(k, err)
	}
	if _, _, err := r.Next(); err != io.EOF {
		t.Fatal(err)
	}
}

func FuzzSR8Frame(f *testing.F) {
	f.Add(AppendFrame(nil, KindSubmit, sample().Append(nil)))
	f.Add(AppendFrame(nil, KindResult, Result{Outcome: Completed}.Append(nil)))
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		k, body, n, err := ParseFrame(b)
		if err != nil {
			return
		}
		if got := AppendFrame(nil, k, body); !bytes.Equal(got, b[:n]) {
			t.Fatalf("%x became %x", b[:n], got)
		}
		rk, rbody, err := (&Reader{R: bytes.NewReader(b)}).Next()
		if err != nil || rk != k || !bytes.Equal(rbody, body) {
			t.Fatalf("the reader differs: %v %x %v", rk, rbody, err)
		}
	})
}

func FuzzSR8Submit(f *testing.F) {
	f.Add(sample().Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSubmit(b)
		if err != nil {
			return
		}
		if got := s.Append(nil); !bytes.Equal(got, b) {
			t.Fatalf("%x became %x", b, got)
		}
	})
}

func FuzzSR8Result(f *testing.F) {
	f.Add(Result{Outcome: Completed, Status: -1, Signal: 15, Detail: "x"}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseResult(b)
		if err != nil {
			return
		}
		if got := r.Append(nil); !bytes.Equal(got, b) {
			t.Fatalf("%x became %x", b, got)
		}
	})
}
