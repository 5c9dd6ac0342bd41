package gitindex

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
)

// Limits of what is believed.
const (
	MaxIndex = 64 << 20 // bytes of an index file
	MaxNames = 64 << 20 // bytes of all paths together, after decompression
	maxName  = 4096     // bytes of one path
)

// ErrDamaged is wrapped by every error about the content of an index.
var ErrDamaged = errors.New("index is damaged or of an unknown kind")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// A Hash is the object format of the repository (extensions.objectFormat).
type Hash uint8

const (
	SHA1 Hash = iota
	SHA256
)

func (h Hash) size() int {
	if h == SHA256 {
		return sha256.Size
	}
	return sha1.Size
}

func (h Hash) sum(b []byte) []byte {
	if h == SHA256 {
		sum := sha256.Sum256(b)
		return sum[:]
	}
	sum := sha1.Sum(b)
	return sum[:]
}

// Options of a parse.
type Options struct {
	Hash Hash
	// Shared returns the bytes of a shared index, a file ("sharedindex.<hex>") beside the index. nil
	// makes a split index an error.
	Shared func(name string) ([]byte, error)
}

// Parse reads an index file as a whole. Errors wrap [ErrDamaged] or the error of Options.Shared.
// It does not keep data.
func Parse(data []byte, o Options) (*Set, error) {
	f, err := readFile(data, o.Hash)
	if err != nil {
		return nil, err
	}
	entries := f.entries
	shared := ""
	if f.link != nil {
		if base := f.link[:o.Hash.size()]; !allZero(base) {
			shared = "sharedindex." + hex.EncodeToString(base)
			if entries, err = f.merge(shared, base, o); err != nil {
				return nil, err
			}
		}
	}
	s, err := newSet(entries, o.Hash.size())
	if err != nil {
		return nil, err
	}
	s.shared, s.version = shared, f.version
	return s, nil
}

// record is one entry as read; name and id alias the file.
type record struct {
	name  []byte
	id    []byte
	mode  uint32
	stage uint8
	flags Flags
}

// file is one index file, before a split index is put together.
type file struct {
	version int
	entries []record
	link    []byte // the "link" extension, nil if there is none; at least one object name long
	sparse  bool   // has "sdir"
	sum     []byte // trailing checksum
}

const (
	headerLen = 12
	statLen   = 40 // times, device, inode, mode, owner, size
)

func readFile(data []byte, h Hash) (*file, error) {
	if len(data) > MaxIndex {
		return nil, damaged("%d bytes, limit is %d", len(data), MaxIndex)
	}
	if len(data) < headerLen+h.size() || string(data[:4]) != "DIRC" {
		return nil, damaged("no index header")
	}
	body, sum := data[:len(data)-h.size()], data[len(data)-h.size():]
	// index.skipHash leaves the checksum zero.
	if !allZero(sum) && !bytes.Equal(sum, h.sum(body)) {
		return nil, damaged("checksum does not match")
	}
	f := &file{version: int(min(binary.BigEndian.Uint32(data[4:]), 99)), sum: sum}
	if f.version < 2 || f.version > 4 {
		return nil, damaged("version %d", f.version)
	}
	r := reader{f: f, body: body, at: headerLen, idLen: h.size()}
	if err := r.entries(binary.BigEndian.Uint32(data[8:])); err != nil {
		return nil, err
	}
	if err := r.extensions(); err != nil {
		return nil, err
	}
	return f, nil
}

func allZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

type reader struct {
	f     *file
	body  []byte
	at    int // next byte of body
	idLen int
	arena []byte // current block for version 4 names
	total int    // bytes of all names
}

func (r *reader) entries(count uint32) error {
	smallest := statLen + r.idLen + 2 + 1 // flags, at least one byte for the name
	if uint64(count)*uint64(smallest) > uint64(len(r.body)-r.at) {
		return damaged("%d entries in %d bytes", count, len(r.body))
	}
	r.f.entries = make([]record, 0, count)
	var prev []byte
	for range count {
		rec, err := r.entry(prev)
		if err != nil {
			return err
		}
		if r.total += len(rec.name); r.total > MaxNames {
			return damaged("names of more than %d bytes", MaxNames)
		}
		prev = rec.name
		r.f.entries = append(r.f.entries, rec)
	}
	return nil
}

func (r *reader) entry(prev []byte) (record, error) {
	start := r.at
	fixed := statLen + r.idLen + 2
	if len(r.body)-start < fixed {
		return record{}, damaged("entry is cut off")
	}
	b := r.body[start:]
	rec := record{mode: binary.BigEndian.Uint32(b[24:]), id: b[statLen : statLen+r.idLen]}
	flags := binary.BigEndian.Uint16(b[statLen+r.idLen:])
	rec.stage = uint8(flags >> 12 & 3)
	if flags&0x8000 != 0 {
		rec.flags |= AssumeUnchanged
	}
	r.at += fixed
	if flags&0x4000 != 0 {
		if r.f.version < 3 {
			return record{}, damaged("extended flags in version 2")
		}
		if len(r.body)-r.at < 2 {
			return record{}, damaged("entry is cut off")
		}
		more := binary.BigEndian.Uint16(r.body[r.at:])
		r.at += 2
		if more&^0x6000 != 0 {
			return record{}, damaged("unknown entry flags %#x", more)
		}
		if more&0x4000 != 0 {
			rec.flags |= SkipWorktree
		}
		if more&0x2000 != 0 {
			rec.flags |= IntentToAdd
		}
	}
	if rec.stage != 0 {
		rec.flags |= Unmerged
	}
	var err error
	if r.f.version == 4 {
		rec.name, err = r.compressedName(prev)
	} else {
		rec.name, err = r.paddedName(start)
	}
	if err != nil {
		return record{}, err
	}
	if length := int(flags & 0xfff); length != min(len(rec.name), 0xfff) {
		return record{}, damaged("entry name of %d bytes claims %d", len(rec.name), length)
	}
	return rec, nil
}

// untilNUL takes the bytes before the next NUL, and the NUL.
func (r *reader) untilNUL() ([]byte, error) {
	rest := r.body[r.at:]
	n := bytes.IndexByte(rest[:min(len(rest), maxName+1)], 0)
	if n < 0 {
		return nil, damaged("entry name without end")
	}
	r.at += n + 1
	return rest[:n:n], nil
}

// paddedName reads the name of version 2 and 3: NULs fill the entry, which began at start, up to a
// multiple of eight bytes.
func (r *reader) paddedName(start int) ([]byte, error) {
	name, err := r.untilNUL()
	if err != nil {
		return nil, err
	}
	end := start + (r.at-start+7)&^7
	if end > len(r.body) {
		return nil, damaged("entry is cut off")
	}
	if !allZero(r.body[r.at:end]) {
		return nil, damaged("padding is not zero")
	}
	r.at = end
	return name, nil
}

// compressedName reads the name of version 4: how much to take away from the end of the previous name,
// and what to put there.
func (r *reader) compressedName(prev []byte) ([]byte, error) {
	drop, err := r.varint()
	if err != nil {
		return nil, err
	}
	if drop > uint64(len(prev)) {
		return nil, damaged("entry name drops %d of %d bytes", drop, len(prev))
	}
	tail, err := r.untilNUL()
	if err != nil {
		return nil, err
	}
	keep := prev[:len(prev)-int(drop)]
	n := len(keep) + len(tail)
	if n > maxName {
		return nil, damaged("entry name of %d bytes", n)
	}
	if cap(r.arena)-len(r.arena) < n {
		r.arena = make([]byte, 0, 64<<10)
	}
	at := len(r.arena)
	r.arena = append(append(r.arena, keep...), tail...)
	return r.arena[at : at+n : at+n], nil
}

// varint reads a number in Git's offset encoding: seven bits a byte, highest first, and one is added
// at each continuation so that no number has two spellings.
func (r *reader) varint() (uint64, error) {
	var v uint64
	for i := range 5 {
		if r.at >= len(r.body) {
			break
		}
		c := r.body[r.at]
		r.at++
		if i > 0 {
			v++
		}
		v = v<<7 | uint64(c&0x7f)
		if c&0x80 == 0 {
			return v, nil
		}
	}
	return 0, damaged("number is cut off or too large")
}

func (r *reader) extensions() error {
	for r.at < len(r.body) {
		if len(r.body)-r.at < 8 {
			return damaged("%d bytes after the last extension", len(r.body)-r.at)
		}
		name := string(r.body[r.at : r.at+4])
		size := binary.BigEndian.Uint32(r.body[r.at+4:])
		r.at += 8
		if uint64(size) > uint64(len(r.body)-r.at) {
			return damaged("extension %q of %d bytes is cut off", name, size)
		}
		ext := r.body[r.at : r.at+int(size)]
		r.at += int(size)
		switch {
		case name == "link":
			if len(ext) < r.idLen || r.f.link != nil {
				return damaged("split index link")
			}
			r.f.link = ext
		case name == "sdir":
			r.f.sparse = true
		case name[0] < 'A' || name[0] > 'Z':
			return damaged("extension %q is mandatory and not known", name)
		}
	}
	for i := range r.f.entries {
		if e := &r.f.entries[i]; e.mode == ModeTree {
			if !r.f.sparse {
				return damaged("directory entry in an index that is not sparse")
			}
			e.flags |= SparseTree
		}
	}
	return nil
}

// newSet checks order and names and packs the entries.
func newSet(entries []record, idLen int) (*Set, error) {
	total := 0
	for i := range entries {
		if total += len(entries[i].name); total > MaxNames {
			return nil, damaged("names of more than %d bytes", MaxNames)
		}
	}
	names := make([]byte, 0, total)
	s := &Set{
		ends:  make([]uint32, 0, len(entries)),
		modes: make([]uint32, 0, len(entries)),
		flags: make([]Flags, 0, len(entries)),
		ids:   make([]byte, 0, idLen*len(entries)),
		idLen: idLen,
	}
	for i := range entries {
		e := &entries[i]
		if i > 0 {
			prev := &entries[i-1]
			switch order := bytes.Compare(prev.name, e.name); {
			case order > 0:
				return nil, damaged("entries are not in order")
			case order == 0 && (prev.stage == 0 || prev.stage >= e.stage):
				return nil, damaged("entry %q is there twice", e.name)
			case order == 0: // a further stage of an unmerged path
				s.flags[len(s.flags)-1] |= e.flags
				continue
			}
		}
		if e.flags&SparseTree != 0 && !bytes.HasSuffix(e.name, []byte("/")) {
			return nil, damaged("sparse directory %q without a slash", e.name)
		}
		names = append(names, e.name...)
		s.ends = append(s.ends, uint32(len(names)))
		s.modes = append(s.modes, e.mode)
		s.flags = append(s.flags, e.flags)
		s.ids = append(s.ids, e.id...)
	}
	s.names = string(names)
	for i, flags := range s.flags {
		path := s.name(i)
		if flags&SparseTree != 0 {
			path = path[:len(path)-1]
		}
		if !cleanPath(path) {
			return nil, damaged("entry name %q", path)
		}
	}
	return s, nil
}
