package broker

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestModelAndCodeShareNames keeps Lazaret.tla, its configuration, the transliteration and the events in step.
func TestModelAndCodeShareNames(t *testing.T) {
	spec := readFile(t, "../../protocol/Lazaret.tla")
	cfg := readFile(t, "../../protocol/Lazaret.cfg")
	defined := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^([A-Z]\w*)(\([a-z, ]*\))? ==`).FindAllStringSubmatch(spec, -1) {
		defined[m[1]] = true
	}

	// Every part of Next and of the properties is defined; what cfg names, too.
	for _, line := range regexp.MustCompile(`(?m)^ {4}(\w+)$`).FindAllStringSubmatch(cfg, -1) {
		if !defined[line[1]] {
			t.Errorf("Lazaret.cfg names %s, which Lazaret.tla does not define", line[1])
		}
	}
	inModel := map[string]bool{}
	for _, a := range actions() {
		inModel[a.name] = true
	}
	inSpec := map[string]bool{"Crash": true}
	for _, def := range []string{"SessionStep", "RequestStep"} {
		_, body, ok := strings.Cut(spec, "\n"+def)
		if !ok {
			t.Fatalf("%s is not defined", def)
		}
		body, _, _ = strings.Cut(body, "\n\n")
		for _, m := range regexp.MustCompile(`([A-Z]\w*)\(`).FindAllStringSubmatch(body, -1) {
			inSpec[m[1]] = true
		}
	}
	if got, want := slices.Sorted(maps.Keys(inModel)), slices.Sorted(maps.Keys(inSpec)); !slices.Equal(got, want) {
		t.Errorf("model_test.go has the actions %v, Lazaret.tla %v", got, want)
	}

	// Every action but those of a dead coordinator is an event.
	delete(inSpec, "Crash")
	delete(inSpec, "Reap")
	f, err := parser.ParseFile(token.NewFileSet(), "event.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	events := map[string]bool{}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Name.Name == "event" {
			events[fn.Recv.List[0].Type.(*ast.Ident).Name] = true
		}
	}
	if got, want := slices.Sorted(maps.Keys(events)), slices.Sorted(maps.Keys(inSpec)); !slices.Equal(got, want) {
		t.Errorf("event.go has the events %v, Lazaret.tla the actions %v", got, want)
	}

	// An action says of every variable what becomes of it.
	vars := strings.FieldsFunc(regexp.MustCompile(`(?m)^vars == <<(.*)>>`).FindStringSubmatch(spec)[1], func(r rune) bool { return r == ',' || r == ' ' })
	for name := range inModel {
		_, body, ok := strings.Cut(spec, "\n"+name)
		if !ok {
			t.Errorf("%s is not defined", name)
			continue
		}
		body, _, _ = strings.Cut(body, "\n\n")
		_, kept, _ := strings.Cut(body, "UNCHANGED <<")
		kept, _, _ = strings.Cut(kept, ">>")
		for _, v := range vars {
			changed := strings.Contains(body, v+"' =") || v == "queue" && strings.Contains(body, "Unqueue(") ||
				(v == "phase" || v == "outcome") && regexp.MustCompile(`\b(Settle|End)\(`).MatchString(body)
			unchanged := slices.Contains(strings.Split(kept, ", "), v)
			if changed == unchanged {
				t.Errorf("%s: %s is changed: %t, unchanged: %t", name, v, changed, unchanged)
			}
		}
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
