package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"lazaret.dev/lazaret/overlay/tree"
)

// Record pins a reference to an image.
type Record struct {
	Reference string          `json:"reference"`
	ImageID   string          `json:"image_id"` // config digest, hex
	DiffIDs   []digest.Digest `json:"diff_ids"`
	Pulled    time.Time       `json:"pulled"`
}

// BaseKey is the key of the recorded image's content.
func (r Record) BaseKey() string { return BaseKey(r.DiffIDs) }

type recordFile struct {
	Version int               `json:"version"`
	Images  map[string]Record `json:"images"`
}

func (s *Store) recordPath() string { return filepath.Join(s.cfg.Root, "images.json") }

func (s *Store) readRecords() (map[string]Record, error) {
	data, err := os.ReadFile(s.recordPath())
	if os.IsNotExist(err) {
		return map[string]Record{}, nil
	}
	if err != nil {
		return nil, err
	}
	var f recordFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("image records %q: %w", s.recordPath(), err)
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("image records %q: version %d is not known", s.recordPath(), f.Version)
	}
	if f.Images == nil {
		f.Images = map[string]Record{}
	}
	return f.Images, nil
}

// editRecords applies edit and replaces the file atomically.
func (s *Store) editRecords(ctx context.Context, edit func(map[string]Record)) error {
	g, err := flock(ctx, filepath.Join(s.cfg.Root, "images.lock"), unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer g.Release()
	recs, err := s.readRecords()
	if err != nil {
		return err
	}
	edit(recs)
	data, err := json.MarshalIndent(recordFile{1, recs}, "", "  ")
	if err != nil {
		return err
	}
	tmp := s.recordPath() + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.recordPath()); err != nil {
		return err
	}
	return tree.SyncDir(s.cfg.Root)
}

// Records lists the recorded references, sorted.
func (s *Store) Records() ([]Record, error) {
	recs, err := s.readRecords()
	if err != nil {
		return nil, err
	}
	var out []Record
	for _, ref := range slices.Sorted(maps.Keys(recs)) {
		out = append(out, recs[ref])
	}
	return out, nil
}

// Resolve finds what a reference is pinned to: ErrNotPulled when nothing is recorded.
func (s *Store) Resolve(reference string) (Record, error) {
	recs, err := s.readRecords()
	if err != nil {
		return Record{}, err
	}
	r, ok := recs[reference]
	if !ok {
		return Record{}, fmt.Errorf("image %q: %w", reference, ErrNotPulled)
	}
	return r, nil
}

// Listed is a line of `lazaret image ls`.
type Listed struct {
	Record
	Size    int64 `json:"size"`    // bytes, unpacked, layers shared with others included
	Missing bool  `json:"missing"` // recorded, but its layers are gone
	Pins    int   `json:"pins"`    // live Domains on it
}

// List describes the recorded images.
func (s *Store) List() ([]Listed, error) {
	recs, err := s.Records()
	if err != nil {
		return nil, err
	}
	pins, err := s.Pins()
	if err != nil {
		return nil, err
	}
	var out []Listed
	for _, r := range recs {
		l := Listed{Record: r}
		img, err := s.Image(r.ImageID)
		switch {
		case err == nil:
			l.Size = img.Size
		case errors.Is(err, ErrNotPulled):
			l.Missing = true
		default:
			return nil, err
		}
		for _, p := range pins {
			if p.ImageID == r.ImageID && p.Live {
				l.Pins++
			}
		}
		out = append(out, l)
	}
	return out, nil
}

// Remove forgets a reference and deletes its image unless another reference means the same one.
// ErrInUse: a Domain runs on it. Killed between the two steps, gc deletes the image.
func (s *Store) Remove(ctx context.Context, reference string) error {
	g, err := s.guard(ctx, unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("remove image %q: %w", reference, err)
	}
	defer g.Release()
	rec, err := s.Resolve(reference)
	if err != nil {
		return err
	}
	recs, err := s.Records()
	if err != nil {
		return err
	}
	shared := slices.ContainsFunc(recs, func(r Record) bool {
		return r.ImageID == rec.ImageID && r.Reference != reference
	})
	if !shared {
		pins, err := s.Pins()
		if err != nil {
			return err
		}
		for _, p := range pins {
			if p.ImageID != rec.ImageID {
				continue
			}
			if p.Live {
				return fmt.Errorf("remove image %q: %w by %s", reference, ErrInUse, p.Owner)
			}
			if err := s.DropDeadPin(p.ID); err != nil {
				return err
			}
		}
	}
	if err := s.editRecords(ctx, func(m map[string]Record) { delete(m, reference) }); err != nil {
		return fmt.Errorf("remove image %q: %w", reference, err)
	}
	if shared {
		return nil
	}
	return s.DeleteImage(rec.ImageID)
}
