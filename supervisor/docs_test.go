package supervisor

import (
	"flag"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md from the built-in profile")

const configurationDoc = "../docs/configuration.md"

// TestConfigurationDoc keeps the reference equal to the built-in profile, which holds every key with its comment.
func TestConfigurationDoc(t *testing.T) {
	const begin, end = "<!-- built-in profile -->\n", "<!-- end of built-in profile -->\n"
	b, err := os.ReadFile(configurationDoc)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	i, j := strings.Index(doc, begin), strings.Index(doc, end)
	if i < 0 || j < i {
		t.Fatalf("%s has no section between %q and %q", configurationDoc, begin, end)
	}
	want := doc[:i+len(begin)] + "```toml\n" + string(defaultProfile) + "```\n" + doc[j:]
	if *update {
		if err := os.WriteFile(configurationDoc, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if doc != want {
		t.Errorf("%s is not the built-in profile; run: go test ./supervisor -run TestConfigurationDoc -update", configurationDoc)
	}
}

// TestEveryKeyIsInTheBuiltInProfile: a key that is not there has neither default nor documentation.
func TestEveryKeyIsInTheBuiltInProfile(t *testing.T) {
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("toml"), ",")
			if key == "-" || key == "" {
				continue
			}
			if !strings.Contains(string(defaultProfile), key) {
				t.Errorf("key %q is not in default.toml", key)
			}
			if ft := f.Type; ft.Kind() == reflect.Struct && ft.NumField() > 0 && ft.Field(0).Tag.Get("toml") != "" {
				walk(ft)
			}
		}
	}
	walk(reflect.TypeFor[Profile]())
}
