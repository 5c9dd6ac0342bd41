package image

import (
	"bytes"
	"compress/bzip2"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/storage"
	"golang.org/x/sys/unix"
)

var (
	// ErrDigest means that a blob or layer is not what its digest says.
	ErrDigest = errors.New("digest does not match")
	// ErrTooLarge means that an image is over the importer's bounds.
	ErrTooLarge = errors.New("image is too large")
	// ErrNoImage means that a layout, archive or registry has no image of that name or platform.
	ErrNoImage = errors.New("no such image")
	// ErrDiskFull means that unpacking filled the disk or a quota.
	ErrDiskFull = errors.New("disk is full")
)

const (
	maxDocument = 8 << 20 // bytes of an index, a manifest or a config
	maxLayers   = 400     // the kernel's bound on an overlay, less our own
	// DefaultMaxBytes bounds an image's unpacked tar streams.
	DefaultMaxBytes = 64 << 30
)

// parsed is an image found in a source, its documents verified.
type parsed struct {
	config    []byte
	image     v1.Image
	manifest  []byte
	mediaType string
	layers    []parsedLayer // bottom first
}

type parsedLayer struct {
	name   string        // in the source
	blob   digest.Digest // of the stored, maybe compressed bytes; empty: same as diffID
	diffID digest.Digest
	size   int64
}

// importer unpacks a source; it is used for one image.
type importer struct {
	ctx      context.Context
	store    storage.Store
	left     int64 // unpacked bytes still allowed
	progress func(format string, args ...any)
}

// Import reads an image without Podman and returns its ID. Layers that the store has are not
// read again, so an interrupted import goes on where it was.
func (s *Store) importImage(ctx context.Context, ref Reference, maxBytes int64, progress func(string, ...any)) (string, error) {
	var src source
	var err error
	if ref.Transport == "oci" {
		var root *os.Root
		if root, err = os.OpenRoot(ref.Path); err == nil {
			src = dirSource{root}
		}
	} else {
		src, err = openTar(ref.Path)
	}
	if err != nil {
		return "", err
	}
	defer src.close()
	var p *parsed
	if ref.Transport == "docker-archive" {
		p, err = parseDocker(src, ref.Tag)
	} else {
		p, err = parseOCI(src, ref.Tag)
	}
	if err != nil {
		return "", err
	}
	if maxBytes <= 0 {
		maxBytes = DefaultMaxBytes
	}
	im := importer{ctx, s.store, maxBytes, progress}
	return im.run(src, p)
}

func document(src source, name string) ([]byte, error) {
	f, size, err := src.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > maxDocument {
		return nil, fmt.Errorf("%q: %w", name, ErrTooLarge)
	}
	return io.ReadAll(io.LimitReader(f, maxDocument))
}

func blobName(d digest.Digest) (string, error) {
	if err := d.Validate(); err != nil {
		return "", fmt.Errorf("digest %q: %w", string(d), err)
	}
	if d.Algorithm() != digest.SHA256 {
		return "", fmt.Errorf("digest %q: only sha256 is supported", d)
	}
	return "blobs/sha256/" + d.Encoded(), nil
}

func blobDocument(src source, d digest.Digest) ([]byte, error) {
	name, err := blobName(d)
	if err != nil {
		return nil, err
	}
	data, err := document(src, name)
	if err == nil && digest.FromBytes(data) != d {
		err = fmt.Errorf("blob %s: %w", d, ErrDigest)
	}
	return data, err
}

// parseOCI reads an OCI layout; tag selects by the ref.name annotation, empty needs one image.
func parseOCI(src source, tag string) (*parsed, error) {
	data, err := document(src, v1.ImageIndexFile)
	if err != nil {
		return nil, err
	}
	var index v1.Index
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("parse index.json: %w", err)
	}
	candidates := index.Manifests
	if tag != "" {
		candidates = slices.DeleteFunc(slices.Clone(candidates), func(d v1.Descriptor) bool {
			return d.Annotations[v1.AnnotationRefName] != tag
		})
	}
	desc, err := pickPlatform(candidates)
	if err != nil {
		return nil, err
	}
	for range 4 { // an index may name an index
		data, err = blobDocument(src, desc.Digest)
		if err != nil {
			return nil, err
		}
		if !isIndex(desc.MediaType) {
			return parseManifest(src, desc.MediaType, data)
		}
		var nested v1.Index
		if err := json.Unmarshal(data, &nested); err != nil {
			return nil, fmt.Errorf("parse image index: %w", err)
		}
		if desc, err = pickPlatform(nested.Manifests); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("image indexes are nested too deeply")
}

func isIndex(mediaType string) bool {
	return mediaType == v1.MediaTypeImageIndex || mediaType == "application/vnd.docker.distribution.manifest.list.v2+json"
}

// pickPlatform chooses the one image of this machine's platform. An entry without a platform fits.
func pickPlatform(all []v1.Descriptor) (v1.Descriptor, error) {
	var fit []v1.Descriptor
	for _, d := range all {
		if p := d.Platform; p == nil || p.OS == "linux" && p.Architecture == runtime.GOARCH {
			fit = append(fit, d)
		}
	}
	switch len(fit) {
	case 0:
		return v1.Descriptor{}, fmt.Errorf("%w for linux/%s", ErrNoImage, runtime.GOARCH)
	case 1:
		return fit[0], nil
	}
	var names []string
	for _, d := range fit {
		names = append(names, fmt.Sprintf("%q", d.Annotations[v1.AnnotationRefName]))
	}
	return v1.Descriptor{}, fmt.Errorf("%w: several match, name one of %s", ErrNoImage, strings.Join(names[:min(len(names), 10)], ", "))
}

func parseManifest(src source, mediaType string, data []byte) (*parsed, error) {
	var man v1.Manifest
	if err := json.Unmarshal(data, &man); err != nil {
		return nil, fmt.Errorf("parse manifest: %w", err)
	}
	cfg, err := blobDocument(src, man.Config.Digest)
	if err != nil {
		return nil, fmt.Errorf("image config: %w", err)
	}
	p := &parsed{config: cfg, manifest: data, mediaType: mediaType}
	if err := p.parseConfig(len(man.Layers)); err != nil {
		return nil, err
	}
	for i, l := range man.Layers {
		name, err := blobName(l.Digest)
		if err != nil {
			return nil, err
		}
		if !strings.Contains(l.MediaType, "tar") || strings.Contains(l.MediaType, "encrypted") {
			return nil, fmt.Errorf("layer of type %q is not supported", l.MediaType)
		}
		p.layers = append(p.layers, parsedLayer{name, l.Digest, p.image.RootFS.DiffIDs[i], l.Size})
	}
	return p, nil
}

func (p *parsed) parseConfig(layers int) error {
	if err := json.Unmarshal(p.config, &p.image); err != nil {
		return fmt.Errorf("parse image config: %w", err)
	}
	if os, arch := p.image.OS, p.image.Architecture; os != "" && os != "linux" || arch != "" && arch != runtime.GOARCH {
		return fmt.Errorf("%w for linux/%s: it is for %q/%q", ErrNoImage, runtime.GOARCH, os, arch)
	}
	ids := p.image.RootFS.DiffIDs
	if len(ids) != layers || layers == 0 {
		return fmt.Errorf("%d layers but %d diff ids", layers, len(ids))
	}
	if layers > maxLayers {
		return fmt.Errorf("%d layers: %w", layers, ErrTooLarge)
	}
	for _, d := range ids {
		if _, err := blobName(d); err != nil {
			return err
		}
	}
	return nil
}

// parseDocker reads a docker archive and makes the manifest that it lacks.
func parseDocker(src source, tag string) (*parsed, error) {
	data, err := document(src, "manifest.json")
	if err != nil {
		return nil, err
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("parse manifest.json: %w", err)
	}
	at := 0
	if tag != "" {
		at = slices.IndexFunc(list, func(e struct {
			Config   string
			RepoTags []string
			Layers   []string
		}) bool {
			return slices.Contains(e.RepoTags, tag)
		})
	}
	if at < 0 || len(list) == 0 || tag == "" && len(list) > 1 {
		return nil, fmt.Errorf("%w: archive of %d images, tag %q", ErrNoImage, len(list), tag)
	}
	entry := list[at]
	cfg, err := document(src, entry.Config)
	if err != nil {
		return nil, fmt.Errorf("image config: %w", err)
	}
	p := &parsed{config: cfg, mediaType: v1.MediaTypeImageManifest}
	if err := p.parseConfig(len(entry.Layers)); err != nil {
		return nil, err
	}
	man := v1.Manifest{
		MediaType: v1.MediaTypeImageManifest,
		Config:    v1.Descriptor{MediaType: v1.MediaTypeImageConfig, Digest: digest.FromBytes(cfg), Size: int64(len(cfg))},
	}
	man.SchemaVersion = 2
	for i, name := range entry.Layers {
		f, size, err := src.open(name)
		if err != nil {
			return nil, err
		}
		f.Close()
		id := p.image.RootFS.DiffIDs[i]
		p.layers = append(p.layers, parsedLayer{name: name, diffID: id, size: size})
		man.Layers = append(man.Layers, v1.Descriptor{MediaType: v1.MediaTypeImageLayer, Digest: id, Size: size})
	}
	p.manifest, err = json.Marshal(man)
	return p, err
}

func (im *importer) run(src source, p *parsed) (string, error) {
	id := digest.FromBytes(p.config).Encoded()
	parent := ""
	for i, l := range p.layers {
		layer, err := im.layer(src, l, parent, i+1, len(p.layers))
		if err != nil {
			return "", explainDisk(fmt.Errorf("layer %d of %d: %w", i+1, len(p.layers), err))
		}
		parent = layer
	}
	man := digest.FromBytes(p.manifest)
	opts := &storage.ImageOptions{
		Digest: man,
		BigData: []storage.ImageBigDataOption{
			{Key: storage.ImageDigestBigDataKey, Data: p.manifest, Digest: man},
			{Key: storage.ImageDigestManifestBigDataNamePrefix + "-" + man.String(), Data: p.manifest, Digest: man},
			{Key: "sha256:" + id, Data: p.config, Digest: digest.FromBytes(p.config)},
		},
	}
	if t := p.image.Created; t != nil {
		opts.CreationDate = *t
	}
	_, err := im.store.CreateImage(id, nil, parent, "", opts)
	if errors.Is(err, storage.ErrDuplicateID) {
		// The library records an image before its documents: one killed in between has none.
		err = nil
		for _, d := range opts.BigData {
			if _, missing := im.store.ImageBigData(id, d.Key); missing != nil {
				err = errors.Join(err, im.store.SetImageBigData(id, d.Key, d.Data, func(b []byte) (digest.Digest, error) { return digest.FromBytes(b), nil }))
			}
		}
	}
	if err != nil {
		return "", explainDisk(fmt.Errorf("record image: %w", err))
	}
	return id, nil
}

// layerID is the name under which Podman looks for a layer on top of parent.
func layerID(parent string, diffID digest.Digest) string {
	if parent == "" {
		return diffID.Encoded()
	}
	return digest.FromString(parent + "+" + diffID.Encoded()).Encoded()
}

func (im *importer) layer(src source, l parsedLayer, parent string, n, of int) (string, error) {
	id := layerID(parent, l.diffID)
	switch have, err := im.store.Layer(id); {
	case err == nil && have.UncompressedDigest == l.diffID:
		im.progress("layer %d/%d: already there", n, of)
		return id, nil
	case err == nil:
		return "", fmt.Errorf("the store's layer %.12s: %w", id, ErrDigest)
	case !errors.Is(err, storage.ErrLayerUnknown):
		return "", err
	}
	f, size, err := src.open(l.name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	im.progress("layer %d/%d: unpacking %d kB", n, of, size/1024)
	v, err := newVerifier(im, f, l)
	if err != nil {
		return "", err
	}
	defer v.close()
	opts := &storage.LayerOptions{UncompressedDigest: l.diffID, OriginalDigest: l.blob, OriginalSize: &size}
	if l.blob == "" || l.blob == l.diffID {
		opts.OriginalDigest, opts.OriginalSize = "", nil
	}
	layer, _, err := im.store.PutLayer(id, parent, nil, "", false, opts, v)
	if v.failed != nil {
		err = v.failed // the library wraps it in what it was doing
	}
	if errors.Is(err, storage.ErrDuplicateID) {
		return id, nil // another import was faster, with the same check
	}
	if err == nil && !v.verified {
		err = errors.New("layer was not read to its end")
	}
	if err != nil {
		if layer != nil {
			err = errors.Join(err, im.store.DeleteLayer(layer.ID))
		}
		return "", err
	}
	return id, nil
}

// verifier is a layer's uncompressed tar stream. Its end is an error unless both digests match,
// so the store takes an unverified layer for one whose reading failed, also when we are killed.
type verifier struct {
	im       *importer
	blob     io.Reader // the stored bytes, hashed as they pass
	stream   io.Reader
	close    func()
	hashBlob hash.Hash
	hashDiff hash.Hash
	want     parsedLayer
	verified bool
	failed   error
}

func newVerifier(im *importer, f io.Reader, l parsedLayer) (*verifier, error) {
	v := &verifier{im: im, hashBlob: sha256.New(), hashDiff: sha256.New(), want: l}
	v.blob = io.TeeReader(f, v.hashBlob)
	var err error
	v.stream, v.close, err = decompress(v.blob)
	return v, err
}

func (v *verifier) Read(b []byte) (int, error) {
	if v.failed != nil {
		return 0, v.failed
	}
	n, err := v.read(b)
	if err != nil && err != io.EOF {
		v.failed = err
	}
	return n, err
}

func (v *verifier) read(b []byte) (int, error) {
	if err := v.im.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := v.stream.Read(b)
	v.hashDiff.Write(b[:n])
	if v.im.left -= int64(n); v.im.left < 0 {
		return 0, ErrTooLarge
	}
	if err != io.EOF {
		return n, err
	}
	if _, err := io.Copy(io.Discard, v.blob); err != nil { // what follows the compressed stream
		return 0, err
	}
	if got := digest.NewDigest(digest.SHA256, v.hashDiff); got != v.want.diffID {
		return 0, fmt.Errorf("unpacked layer is %s, want %s: %w", got, v.want.diffID, ErrDigest)
	}
	if got := digest.NewDigest(digest.SHA256, v.hashBlob); v.want.blob != "" && got != v.want.blob {
		return 0, fmt.Errorf("layer blob is %s, want %s: %w", got, v.want.blob, ErrDigest)
	}
	v.verified = true
	return n, io.EOF
}

// decompress detects gzip, zstd and bzip2; all else is taken as it is. A stream that is
// compressed twice is refused: the store would unpack it once more than was verified.
func decompress(r io.Reader) (io.Reader, func(), error) {
	head, r, err := peek(r)
	if err != nil {
		return nil, nil, err
	}
	done := func() {}
	switch magic(head) {
	case "gzip":
		r, err = gzip.NewReader(r)
	case "zstd":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(r, zstd.WithDecoderMaxMemory(512<<20), zstd.WithDecoderConcurrency(1)); err == nil {
			r, done = z, z.Close
		}
	case "bzip2":
		r = bzip2.NewReader(r)
	case "":
		return r, done, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("decompress layer: %w", err)
	}
	head, r, err = peek(r)
	if err == nil && magic(head) != "" {
		err = errors.New("layer is compressed twice")
	}
	if err != nil {
		done()
		return nil, nil, err
	}
	return r, done, nil
}

func peek(r io.Reader) ([]byte, io.Reader, error) {
	head := make([]byte, 6)
	n, err := io.ReadFull(r, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, nil, err
	}
	return head[:n], io.MultiReader(bytes.NewReader(head[:n]), r), nil
}

func magic(head []byte) string {
	for name, m := range map[string]string{"gzip": "\x1f\x8b\x08", "zstd": "\x28\xb5\x2f\xfd", "bzip2": "BZh", "xz": "\xfd7zXZ\x00"} {
		if bytes.HasPrefix(head, []byte(m)) {
			return name
		}
	}
	return ""
}

// explainDisk recognises a full disk also where a child process reported it as text.
func explainDisk(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || strings.Contains(err.Error(), "no space left on device") {
		return fmt.Errorf("%w: %w", ErrDiskFull, err)
	}
	return err
}
