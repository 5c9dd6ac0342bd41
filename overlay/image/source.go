package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// source is a set of named files: an image layout's directory, or the members of a tar archive.
type source interface {
	open(name string) (io.ReadCloser, int64, error)
	close() error
}

type dirSource struct{ root *os.Root }

func (d dirSource) close() error { return d.root.Close() }

func (d dirSource) open(name string) (io.ReadCloser, int64, error) {
	f, err := d.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		f.Close()
		return nil, 0, &os.PathError{Op: "open", Path: name, Err: errors.Join(err, errors.New("not a regular file"))}
	}
	return f, st.Size(), nil
}

// tarSource finds members by their offset, so nothing is unpacked twice. The archive itself is
// not compressed: both formats compress their layers at most.
type tarSource struct {
	f       *os.File
	members map[string]member
}

type member struct {
	offset, size int64
	link         string // of a link: the member it stands for
}

const maxMembers = 16384

func openTar(file string) (*tarSource, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	t := &tarSource{f: f, members: map[string]member{}}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err == nil {
		err = t.index()
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("read archive %q: %w", file, err)
	}
	return t, nil
}

func (t *tarSource) index() error {
	r := tar.NewReader(t.f) // skips contents by seeking
	for {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeReg:
			at, err := t.f.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			t.members[name] = member{offset: at, size: h.Size}
		case tar.TypeSymlink:
			t.members[name] = member{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			t.members[name] = member{link: path.Clean(h.Linkname)}
		}
		if len(t.members) > maxMembers {
			return fmt.Errorf("more than %d members", maxMembers)
		}
	}
}

func (t *tarSource) close() error { return t.f.Close() }

func (t *tarSource) open(name string) (io.ReadCloser, int64, error) {
	m, ok := t.members[path.Clean(name)]
	if ok && m.link != "" { // old docker archives link equal layers; a link to a link is not made
		m, ok = t.members[m.link]
	}
	if !ok || m.link != "" {
		return nil, 0, &os.PathError{Op: "open in archive", Path: name, Err: os.ErrNotExist}
	}
	return io.NopCloser(io.NewSectionReader(t.f, m.offset, m.size)), m.size, nil
}
