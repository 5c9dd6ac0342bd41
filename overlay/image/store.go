// Package image keeps base images: pulled or imported once, pinned to a content address, unpacked
// in a private store whose layers compose merges.
//
// What is kept true, for compose and the developer:
//   - A reference means the image recorded for it ([Record]) until `lazaret image update`; lookups
//     never use the network and never guess.
//   - Image identity is the config digest; base identity is the digest over the diff ids
//     ([BaseKey]), which transports and label-only rebuilds do not change.
//   - A layer is in the store only if its diff id was verified; an interrupted pull or import
//     leaves complete layers, which the next one uses, and nothing else that is believed.
//   - An image with a [Pin] is not removed, neither by [Store.Remove] nor by gc.
//
// Where it runs: uid 0 of a user namespace with the Domain's id map, in a mount namespace of its
// own (the library bind-mounts its directory), /proc mounted. main must have called
// storage/pkg/reexec.Init first: layers are unpacked in a re-executed, chrooted child.
// unshare.MaybeReexecUsingUserNamespace must never be called: without cgo it loops.
//
// `lazaret image pull` and `lazaret image update` are both [Store.Pull]; the superseded image stays
// for the Domains that run on it, until gc. A start is Share, Resolve, Image, Pin, Release of the Guard.
//
// Podman's own commands do not see this store unless told to; told to, they may be used beside it.
package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/storage"
	"golang.org/x/sys/unix"
)

var (
	// ErrNotPulled means that no image is recorded for a reference, or its layers are gone.
	ErrNotPulled = errors.New("image is not pulled")
	// ErrInUse means that a Domain runs on the image.
	ErrInUse = errors.New("image is in use")
	// ErrBusy means that the store's lock is held by another command.
	ErrBusy = errors.New("image store is busy")
	// ErrForeign means that the store was written in a way that overlay mounts cannot use.
	ErrForeign = errors.New("image store has a foreign layout")
)

// Config says where a store is. All directories are Lazaret's own.
type Config struct {
	Root    string // below the Storage Root; holds the graph root, records and locks
	Run     string // transient, below the runtime directory; short, Podman limits its length
	HostUID int    // the developer's ids outside the namespace
	HostGID int
}

func (c Config) graph() string   { return filepath.Join(c.Root, "graph") }
func (c Config) runroot() string { return filepath.Join(c.Run, "r") }
func (c Config) tmpdir() string  { return filepath.Join(c.Run, "t") }
func (c Config) pins() string    { return filepath.Join(c.Root, "pins") }

func (c Config) validate() error {
	for _, p := range []string{c.Root, c.Run} {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.ContainsAny(p, ":,\n\x00") {
			return fmt.Errorf("image store path %q: must be absolute, without ':' and ','", p)
		}
	}
	return nil
}

// Store is one open image store; its methods may be called from any goroutine.
type Store struct {
	cfg   Config
	store storage.Store
}

// Open opens the store, creating it when missing. It sets the environment variables by which the
// storage library learns that it is inside a user namespace already.
func Open(cfg Config) (*Store, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	for k, v := range nsEnviron(cfg) {
		if err := os.Setenv(k, v); err != nil {
			return nil, err
		}
	}
	for _, d := range []string{cfg.Root, cfg.graph(), cfg.pins(), cfg.Run, cfg.runroot(), cfg.tmpdir()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	// Written by fuse-overlayfs: its whiteouts differ from the kernel's.
	if b, err := os.ReadFile(filepath.Join(cfg.graph(), "overlay", ".has-mount-program")); err == nil && strings.TrimSpace(string(b)) == "true" {
		return nil, fmt.Errorf("open image store %q: %w (fuse-overlayfs)", cfg.graph(), ErrForeign)
	}
	st, err := storage.GetStore(storage.StoreOptions{
		GraphRoot:       cfg.graph(),
		RunRoot:         cfg.runroot(),
		GraphDriverName: "overlay", // never guessed: a guess writes into a store of another driver
	})
	if err != nil {
		return nil, fmt.Errorf("open image store %q: %w", cfg.graph(), err)
	}
	return &Store{cfg: cfg, store: st}, nil
}

func nsEnviron(cfg Config) map[string]string {
	return map[string]string{
		"_CONTAINERS_USERNS_CONFIGURED": "done",
		"_CONTAINERS_ROOTLESS_UID":      strconv.Itoa(cfg.HostUID),
		"_CONTAINERS_ROOTLESS_GID":      strconv.Itoa(cfg.HostGID),
	}
}

// Close releases the store's mount. Layers found through it stay usable.
func (s *Store) Close() error {
	_, err := s.store.Shutdown(false)
	return err
}

// Guard is a hold on the store's lock.
type Guard struct{ f *os.File }

// Release ends the hold.
func (g *Guard) Release() { g.f.Close() }

// Share takes the lock that keeps gc and Remove away, for the time from a lookup to its pin, or
// of a pull. It waits for an exclusive holder until ctx ends.
func (s *Store) Share(ctx context.Context) (*Guard, error) { return s.guard(ctx, unix.LOCK_SH) }

// Exclude takes the lock exclusively and does not wait: ErrBusy.
func (s *Store) Exclude() (*Guard, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return s.guard(ctx, unix.LOCK_EX)
}

func (s *Store) guard(ctx context.Context, how int) (*Guard, error) {
	return flock(ctx, filepath.Join(s.cfg.Root, "lock"), how)
}

// flock takes a lock on a file, trying until ctx ends.
func flock(ctx context.Context, path string, how int) (*Guard, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return &Guard{f}, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			f.Close()
			return nil, fmt.Errorf("lock %q: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ErrBusy
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Image is one unpacked image.
type Image struct {
	ID      string          // config digest, hex
	DiffIDs []digest.Digest // bottom first, from the verified config
	Layers  []string        // unpacked directories, topmost first
	Config  v1.Image        // the image's own text: quote it
	Size    int64           // bytes of all layers, as unpacked tar streams
}

// BaseKey identifies the content of a base by its layers.
func BaseKey(diffIDs []digest.Digest) string {
	var b strings.Builder
	for _, d := range diffIDs {
		b.WriteString(d.String())
		b.WriteByte('\n')
	}
	return digest.FromString(b.String()).String()
}

// Image looks up an image by its ID.
func (s *Store) Image(id string) (*Image, error) {
	img, err := s.image(id)
	if errors.Is(err, storage.ErrImageUnknown) || errors.Is(err, storage.ErrLayerUnknown) {
		err = fmt.Errorf("%w: %w", ErrNotPulled, err)
	}
	if err != nil {
		return nil, fmt.Errorf("image %.12s: %w", id, err)
	}
	return img, nil
}

func (s *Store) image(id string) (*Image, error) {
	rec, err := s.store.Image(id)
	if err != nil {
		return nil, err
	}
	cfg, err := s.config(rec.ID)
	if err != nil {
		return nil, err
	}
	img := &Image{ID: rec.ID, DiffIDs: cfg.RootFS.DiffIDs, Config: cfg}
	driver, err := s.store.GraphDriver()
	if err != nil {
		return nil, err
	}
	for layer := rec.TopLayer; layer != ""; {
		l, err := s.store.Layer(layer)
		if err != nil {
			return nil, err
		}
		meta, err := driver.Metadata(l.ID)
		if err != nil {
			return nil, err
		}
		dir := meta["UpperDir"]
		if st, err := os.Lstat(dir); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("layer %.12s: %w", l.ID, ErrForeign)
		}
		if _, err := os.Lstat(filepath.Join(filepath.Dir(dir), "composefs-data")); err == nil {
			return nil, fmt.Errorf("layer %.12s is a composefs layer: %w", l.ID, ErrForeign)
		}
		img.Layers = append(img.Layers, dir)
		img.Size += max(0, l.UncompressedSize)
		layer = l.Parent
	}
	if len(img.Layers) == 0 {
		return nil, errors.New("the image has no layers")
	}
	if len(img.Layers) != len(img.DiffIDs) {
		return nil, fmt.Errorf("%d layers but %d diff ids", len(img.Layers), len(img.DiffIDs))
	}
	return img, nil
}

// config reads and verifies an image's configuration.
func (s *Store) config(id string) (v1.Image, error) {
	var cfg v1.Image
	data, err := s.store.ImageBigData(id, storage.ImageDigestBigDataKey)
	if err != nil {
		return cfg, fmt.Errorf("read manifest: %w", err)
	}
	var man v1.Manifest
	if err := json.Unmarshal(data, &man); err != nil {
		return cfg, fmt.Errorf("parse manifest: %w", err)
	}
	want := man.Config.Digest
	if err := want.Validate(); err != nil || want.Encoded() != id {
		return cfg, fmt.Errorf("manifest names the config %q, not the image's own", want)
	}
	raw, err := s.store.ImageBigData(id, want.String())
	if err != nil {
		return cfg, fmt.Errorf("read config: %w", err)
	}
	if digest.FromBytes(raw) != want {
		return cfg, errors.New("config does not match its digest")
	}
	if err := json.Unmarshal(raw, &cfg); err != nil {
		return cfg, fmt.Errorf("parse config: %w", err)
	}
	return cfg, nil
}

// IDs lists the stored images.
func (s *Store) IDs() ([]string, error) {
	images, err := s.store.Images()
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, i := range images {
		ids = append(ids, i.ID)
	}
	slices.Sort(ids)
	return ids, nil
}

// Orphans lists layers that belong to no image and no pin, children before parents: an
// interrupted pull left them. Precondition: the caller holds the lock exclusively.
func (s *Store) Orphans() ([]string, error) {
	layers, err := s.store.Layers()
	if err != nil {
		return nil, err
	}
	parent := map[string]string{}
	for _, l := range layers {
		parent[l.ID] = l.Parent
	}
	used := map[string]bool{}
	mark := func(id string) {
		for ; id != "" && !used[id]; id = parent[id] {
			used[id] = true
		}
	}
	images, err := s.store.Images()
	if err != nil {
		return nil, err
	}
	for _, i := range images {
		mark(i.TopLayer)
		for _, l := range i.MappedTopLayers {
			mark(l)
		}
	}
	containers, err := s.store.Containers()
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		mark(c.LayerID)
	}
	depth := func(id string) (n int) {
		for ; id != ""; id = parent[id] {
			n++
		}
		return n
	}
	var out []string
	for id := range parent {
		if !used[id] {
			out = append(out, id)
		}
	}
	slices.SortFunc(out, func(a, b string) int {
		if d := depth(b) - depth(a); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return out, nil
}

// DeleteLayer removes an orphan; a missing one is not an error.
func (s *Store) DeleteLayer(id string) error {
	err := s.store.DeleteLayer(id)
	if err != nil && !errors.Is(err, storage.ErrLayerUnknown) {
		return fmt.Errorf("delete layer %.12s: %w", id, err)
	}
	return nil
}

// DeleteImage removes an image by ID with the layers that no other image uses; a missing one is
// not an error, a pinned one is ErrInUse.
func (s *Store) DeleteImage(id string) error {
	_, err := s.store.DeleteImage(id, true)
	switch {
	case err == nil, errors.Is(err, storage.ErrImageUnknown), errors.Is(err, storage.ErrNotAnImage):
		return nil
	case errors.Is(err, storage.ErrImageUsedByContainer):
		return fmt.Errorf("delete image %.12s: %w", id, ErrInUse)
	}
	return fmt.Errorf("delete image %.12s: %w", id, err)
}
