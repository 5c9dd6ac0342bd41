package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"lazaret.dev/lazaret/overlay/nstest"
)

// mapSource serves documents from memory.
type mapSource map[string][]byte

func (m mapSource) close() error { return nil }

func (m mapSource) open(name string) (io.ReadCloser, int64, error) {
	b, ok := m[name]
	if !ok {
		return nil, 0, os.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(b)), int64(len(b)), nil
}

// wellFormed is what both parsers promise about an image that they accept.
func wellFormed(t *testing.T, p *parsed) {
	t.Helper()
	if len(p.layers) == 0 || len(p.layers) > maxLayers || len(p.layers) != len(p.image.RootFS.DiffIDs) {
		t.Fatalf("%d layers, %d diff ids", len(p.layers), len(p.image.RootFS.DiffIDs))
	}
	for _, l := range p.layers {
		if err := l.diffID.Validate(); err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzParseOCI(f *testing.F) {
	d := digest.FromString("x")
	cfg := fmt.Appendf(nil, `{"architecture":%q,"os":"linux","rootfs":{"diff_ids":[%q]}}`, runtime.GOARCH, d)
	man := fmt.Appendf(nil, `{"schemaVersion":2,"config":{"digest":%q},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":%q}]}`, digest.FromBytes(cfg), d)
	f.Add(man, cfg, "application/vnd.oci.image.manifest.v1+json")
	f.Add(man, cfg, "application/vnd.oci.image.index.v1+json")
	f.Add([]byte(`{"layers":[{}]}`), cfg, "")
	f.Fuzz(func(t *testing.T, man, cfg []byte, mediaType string) {
		blob := func(b []byte) string { return "blobs/sha256/" + digest.FromBytes(b).Encoded() }
		index, err := json.Marshal(map[string]any{"manifests": []any{map[string]any{"mediaType": mediaType, "digest": digest.FromBytes(man)}}})
		if err != nil {
			t.Skip()
		}
		src := mapSource{"index.json": index, blob(man): man, blob(cfg): cfg}
		if p, err := parseOCI(src, ""); err == nil {
			wellFormed(t, p)
		}
	})
}

func FuzzParseDocker(f *testing.F) {
	cfg := fmt.Appendf(nil, `{"architecture":%q,"os":"linux","rootfs":{"diff_ids":[%q]}}`, runtime.GOARCH, digest.FromString("x"))
	f.Add([]byte(`[{"Config":"c","RepoTags":["a:b"],"Layers":["l"]}]`), cfg, "a:b")
	f.Add([]byte(`[]`), cfg, "")
	f.Fuzz(func(t *testing.T, man, cfg []byte, tag string) {
		p, err := parseDocker(mapSource{"manifest.json": man, "c": cfg, "l": nil}, tag)
		if err != nil {
			return
		}
		wellFormed(t, p)
		again, err := parseManifest(mapSource{"blobs/sha256/" + digest.FromBytes(p.config).Encoded(): p.config}, p.mediaType, p.manifest)
		if err != nil {
			t.Fatalf("the manifest made for the archive is not valid: %v", err)
		}
		wellFormed(t, again)
	})
}

func FuzzResolveUser(f *testing.F) {
	f.Add([]byte("root:x:0:0::/root:/bin/sh\n"), []byte("staff:x:50:root"), "root:staff")
	f.Fuzz(func(t *testing.T, passwd, groups []byte, spec string) {
		who, group, has := strings.Cut(spec, ":")
		u, err := resolveUser(passwd, groups, who, group, has)
		if err == nil && (u.UID > 65535 || u.GID > 65535 || len(u.Groups) > 256) {
			t.Fatalf("%+v", u)
		}
	})
}

// BenchmarkPull compares the own importer with Podman on an image of 256 MB in three layers.
func BenchmarkPull(b *testing.B) {
	dir := lowerDir(b)
	img := nstest.Image{Gzip: true}
	for l := range 3 {
		var files []nstest.File
		for i := range 1300 {
			var body strings.Builder
			for n := range 1024 {
				fmt.Fprintf(&body, "%d layer, %d file, %d line of some length that compresses a little\n", l, i, n*i)
			}
			files = append(files, nstest.File{Name: fmt.Sprintf("l%d-f%d", l, i), Body: body.String()})
		}
		img.Layers = append(img.Layers, nstest.Layer(b, files...))
	}
	img.WriteOCI(b, dir, "")
	for _, own := range []bool{true, false} {
		b.Run(fmt.Sprintf("own=%v", own), func(b *testing.B) {
			for b.Loop() {
				s := newStore(b)
				_, _, err := s.Pull(bg, "oci:"+dir, PullOptions{Own: own, Environ: os.Environ()})
				must(b, err)
			}
		})
	}
}
