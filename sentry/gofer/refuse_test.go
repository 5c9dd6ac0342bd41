package gofer

import (
	"os"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"lazaret.dev/lazaret/sentry"
)

// TestSR4RefusesWithoutProof starts sandboxes whose bundle or plan does not prove that the workspace is served by this
// server alone. None may start.
func TestSR4RefusesWithoutProof(t *testing.T) {
	drop := func(suffix string) func(*specs.Spec) {
		return func(s *specs.Spec) {
			for k := range s.Annotations {
				if strings.HasSuffix(k, suffix) {
					delete(s.Annotations, k)
				}
			}
		}
	}
	set := func(suffix, value string) func(*specs.Spec) {
		return func(s *specs.Spec) {
			for k := range s.Annotations {
				if strings.HasSuffix(k, suffix) {
					s.Annotations[k] = value
				}
			}
		}
	}
	for _, c := range []struct {
		name  string
		alter func(*specs.Spec)
	}{
		{name: "no annotation for the share", alter: drop(".share")},
		{name: "no annotation for the source", alter: drop(".source")},
		{name: "no annotation for directfs", alter: drop(".directfs")},
		{name: "directfs by default", alter: set(".directfs", "default")},
		{name: "not shared", alter: set(".share", "container")},
		{name: "more workspaces than planned", alter: set(sentry.RequiredAnnotation, "2")},
		{name: "no workspace asked for", alter: drop(sentry.RequiredAnnotation)},
		{name: "another destination", alter: func(s *specs.Spec) { s.Mounts[len(s.Mounts)-1].Destination += "2" }},
		{name: "another source", alter: func(s *specs.Spec) { s.Mounts[len(s.Mounts)-1].Source = os.TempDir() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := shortTemp(t)
			ws := dir + "/ws"
			project(t, ws)
			b := newBox(t, dir, ws, func(b *box) {
				b.may, b.alter = true, c.alter
			})
			if b.refused == "" {
				t.Error("the sandbox started")
			}
			t.Log(b.refused)
		})
	}
}
