package nstest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// File is a member of a test layer. Type is a tar type flag; 0 is a regular file, and a Name that
// ends in "/" a directory.
type File struct {
	Name     string
	Mode     int64 // 0: 0755 for directories, else 0644
	UID, GID int
	Body     string
	Type     byte
	Link     string
	Xattrs   map[string]string
}

// Layer makes an uncompressed tar stream.
func Layer(t testing.TB, files ...File) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.Name, Mode: f.Mode, Uid: f.UID, Gid: f.GID, Typeflag: f.Type, Linkname: f.Link,
			Size: int64(len(f.Body)), ModTime: time.Unix(1700000000, 0), Format: tar.FormatPAX}
		if f.Type == 0 && strings.HasSuffix(f.Name, "/") {
			h.Typeflag = tar.TypeDir
		} else if f.Type == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		for k, v := range f.Xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(f.Body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// Busybox is a small root file system around the host's static busybox; extra members follow.
func Busybox(t testing.TB, extra ...File) []byte {
	t.Helper()
	bin, err := os.ReadFile("/bin/busybox")
	Needs(t, "static busybox in /bin/busybox", err)
	files := []File{
		{Name: "bin/"}, {Name: "etc/"}, {Name: "home/"}, {Name: "root/", Mode: 0o700}, {Name: "tmp/", Mode: 0o1777}, {Name: "usr/"}, {Name: "usr/local/"},
		{Name: "bin/busybox", Mode: 0o755, Body: string(bin)},
		{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"},
		{Name: "etc/group", Body: "root:x:0:\nstaff:x:50:agent,node\n"},
	}
	for _, a := range []string{"sh", "cat", "ls", "rm", "mv", "mkdir", "ln", "id", "stat", "echo", "touch", "chmod", "chown", "test", "find", "sleep", "sync", "rmdir", "dd", "cp", "grep", "true"} {
		files = append(files, File{Name: "bin/" + a, Type: tar.TypeSymlink, Link: "busybox"})
	}
	return Layer(t, append(files, extra...)...)
}

// Image is what the writers below write.
type Image struct {
	Layers [][]byte // uncompressed, bottom first
	Config v1.ImageConfig
	Gzip   bool
}

func (im Image) config() ([]byte, []digest.Digest) {
	c := v1.Image{Platform: v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, Config: im.Config}
	c.RootFS.Type = "layers"
	for _, l := range im.Layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digest.FromBytes(l))
	}
	data, _ := json.Marshal(c)
	return data, c.RootFS.DiffIDs
}

// ID is the image ID that every transport must give.
func (im Image) ID() string {
	c, _ := im.config()
	return digest.FromBytes(c).Encoded()
}

// WriteOCI writes an OCI layout.
func (im Image) WriteOCI(t testing.TB, dir, ref string) {
	t.Helper()
	blobs := filepath.Join(dir, "blobs/sha256")
	check(t, os.MkdirAll(blobs, 0o755))
	put := func(mediaType string, data []byte) v1.Descriptor {
		d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
		check(t, os.WriteFile(filepath.Join(blobs, d.Digest.Encoded()), data, 0o644))
		return d
	}
	cfg, _ := im.config()
	man := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest, Config: put(v1.MediaTypeImageConfig, cfg)}
	for _, l := range im.Layers {
		if im.Gzip {
			var z bytes.Buffer
			w := gzip.NewWriter(&z)
			_, _ = w.Write(l)
			check(t, w.Close())
			man.Layers = append(man.Layers, put(v1.MediaTypeImageLayerGzip, z.Bytes()))
		} else {
			man.Layers = append(man.Layers, put(v1.MediaTypeImageLayer, l))
		}
	}
	data, err := json.Marshal(man)
	check(t, err)
	desc := put(v1.MediaTypeImageManifest, data)
	if ref != "" {
		desc.Annotations = map[string]string{v1.AnnotationRefName: ref}
	}
	index := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, Manifests: []v1.Descriptor{desc}}
	data, err = json.Marshal(index)
	check(t, err, os.WriteFile(filepath.Join(dir, "index.json"), data, 0o644),
		os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
}

// WriteOCIArchive writes an OCI layout as a tar file.
func (im Image) WriteOCIArchive(t testing.TB, file, ref string) {
	t.Helper()
	dir := t.TempDir()
	im.WriteOCI(t, dir, ref)
	f, err := os.Create(file)
	check(t, err)
	w := tar.NewWriter(f)
	check(t, w.AddFS(os.DirFS(dir)), w.Close(), f.Close())
}

// WriteDockerArchive writes what `docker save` writes.
func (im Image) WriteDockerArchive(t testing.TB, file, tag string) {
	t.Helper()
	cfg, ids := im.config()
	name := digest.FromBytes(cfg).Encoded() + ".json"
	var layers []string
	files := []File{{Name: name, Body: string(cfg)}}
	for i, l := range im.Layers {
		layers = append(layers, ids[i].Encoded()+"/layer.tar")
		files = append(files, File{Name: layers[i], Body: string(l)})
	}
	man, err := json.Marshal([]map[string]any{{"Config": name, "RepoTags": []string{tag}, "Layers": layers}})
	check(t, err, os.WriteFile(file, Layer(t, append(files, File{Name: "manifest.json", Body: string(man)})...), fs.FileMode(0o644)))
}

func check(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
