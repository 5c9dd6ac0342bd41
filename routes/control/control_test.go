package control

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

func pair(t *testing.T) (*Client, *Conn) {
	t.Helper()
	ours, theirs, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(ours)
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c, s
}

func TestCallsAndEvents(t *testing.T) {
	c, s := pair(t)
	served := make(chan error, 1)
	go func() {
		served <- Serve(s, func(m Message) error {
			if m.Op == "bad" {
				return errors.New("no such thing")
			}
			return s.Send(Message{Op: "event", Body: m.Body})
		})
	}()
	if err := c.Call(t.Context(), "good", map[string]int{"n": 7}); err != nil {
		t.Fatal(err)
	}
	e := <-c.Events()
	var body map[string]int
	if err := json.Unmarshal(e.Body, &body); err != nil || e.Op != "event" || body["n"] != 7 {
		t.Errorf("event %+v, %v", e, err)
	}
	if err := c.Call(t.Context(), "bad", nil); err == nil || !strings.Contains(err.Error(), "bad: no such thing") {
		t.Errorf("got %v", err)
	}
	c.Close()
	if err := <-served; err != nil {
		t.Errorf("the end of the conversation: %v", err)
	}
	if err := c.Call(t.Context(), "late", nil); !errors.Is(err, ErrGone) {
		t.Errorf("got %v", err)
	}
}

func TestHelperDeathEndsCalls(t *testing.T) {
	c, s := pair(t)
	got := make(chan error, 1)
	go func() { got <- c.Call(context.Background(), "never", nil) }()
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	s.Close()
	select {
	case err := <-got:
		if !errors.Is(err, ErrGone) {
			t.Errorf("got %v", err)
		}
	case <-time.After(time.Second):
		t.Fatal("the call hangs")
	}
	if _, open := <-c.Events(); open {
		t.Error("events go on")
	}
}

func TestSR8HelperCannotHoldTheCoordinator(t *testing.T) {
	c, s := pair(t)
	for range 1000 { // nobody reads events
		if err := s.Send(Message{Op: "event"}); err != nil {
			t.Fatal(err)
		}
	}
	go func() { _ = Serve(s, func(Message) error { return nil }) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := c.Call(ctx, "still", nil); err != nil {
		t.Error(err)
	}
	if err := s.Send(Message{Op: strings.Repeat("x", maxMessage)}); err == nil {
		t.Error("a message over the limit was sent")
	}
	if _, err := s.c.Write([]byte("{broken")); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-time.After(time.Second):
		t.Error("a helper that breaks the protocol is kept")
	}
}
