package image

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.podman.io/storage"
	"golang.org/x/sys/unix"
)

// A Pin keeps an image while a Domain runs on it. It is a container record, which Podman and the
// library respect, and a locked file, whose lock ends with the process that holds it.
type Pin struct {
	id   string
	s    *Store
	lock *os.File
}

// PinInfo describes a pin found in the store.
type PinInfo struct {
	ID      string `json:"id"`
	ImageID string `json:"image_id"`
	Owner   string `json:"owner"` // Domain ID
	Live    bool   `json:"live"`  // its holder runs
}

func (s *Store) pinLock(id string) string { return filepath.Join(s.cfg.pins(), id) }

// Pin pins an image for owner. Call it while holding Share.
func (s *Store) Pin(imageID, owner string) (*Pin, error) {
	var b [32]byte
	_, _ = rand.Read(b[:])
	id := hex.EncodeToString(b[:])
	// The lock exists before the record: a record without a held lock is a dead one.
	f, err := os.OpenFile(s.pinLock(id), os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("pin image: %w", err)
	}
	p := &Pin{id: id, s: s, lock: f}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("pin image: flock: %w", err), p.Release())
	}
	_, err = s.store.CreateContainer(id, []string{"lazaret-" + id[:16]}, imageID, "", owner, &storage.ContainerOptions{})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pin image %.12s: %w", imageID, err), p.Release())
	}
	return p, nil
}

// Release removes the pin; later calls do nothing.
func (p *Pin) Release() error {
	if p.lock == nil {
		return nil
	}
	err := p.s.deletePin(p.id)
	p.lock.Close()
	p.lock = nil
	return err
}

func unknownContainer(err error) bool {
	return errors.Is(err, storage.ErrContainerUnknown) || errors.Is(err, storage.ErrNotAContainer)
}

func (s *Store) deletePin(id string) error {
	if err := s.store.DeleteContainer(id); err != nil && !unknownContainer(err) {
		return fmt.Errorf("release pin %.12s: %w", id, err)
	}
	if err := os.Remove(s.pinLock(id)); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("release pin %.12s: %w", id, err)
	}
	return nil
}

// Pins lists all pins, dead ones included.
func (s *Store) Pins() ([]PinInfo, error) {
	containers, err := s.store.Containers()
	if err != nil {
		return nil, err
	}
	var out []PinInfo
	for _, c := range containers {
		out = append(out, PinInfo{ID: c.ID, ImageID: c.ImageID, Owner: c.Metadata, Live: s.pinLive(c.ID)})
	}
	return out, nil
}

// pinLive tells whether a process holds the pin. A lock that cannot be examined counts as held.
func (s *Store) pinLive(id string) bool {
	f, err := os.OpenFile(s.pinLock(id), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return !os.IsNotExist(err)
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

// DropDeadPin removes a pin whose holder is gone. ErrInUse: it lives. A missing pin is not an
// error. Precondition: the caller holds the lock exclusively.
func (s *Store) DropDeadPin(id string) error {
	if s.pinLive(id) {
		return fmt.Errorf("pin %.12s: %w", id, ErrInUse)
	}
	return s.deletePin(id)
}

// StrayLocks lists pin files without a record, of holders that died before making one.
func (s *Store) StrayLocks() ([]string, error) {
	entries, err := os.ReadDir(s.cfg.pins())
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if _, err := s.store.Container(e.Name()); unknownContainer(err) && !s.pinLive(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}
