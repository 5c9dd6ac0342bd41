package gitindex

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// merge puts a split index together: the shared file's entries, less the deleted ones, with some
// replaced, and the remaining entries of this file added.
func (f *file) merge(name string, base []byte, o Options) ([]record, error) {
	if o.Shared == nil {
		return nil, damaged("split index is not expected here")
	}
	data, err := o.Shared(name)
	if err != nil {
		return nil, fmt.Errorf("read shared index %q: %w", name, err)
	}
	shared, err := readFile(data, o.Hash)
	if err != nil {
		return nil, fmt.Errorf("shared index %q: %w", name, err)
	}
	if shared.link != nil {
		return nil, damaged("shared index %q is split itself", name)
	}
	if !bytes.Equal(shared.sum, base) {
		return nil, damaged("shared index %q has another checksum", name)
	}
	kept := shared.entries
	own := f.entries
	if maps := f.link[len(base):]; len(maps) > 0 {
		deleted, rest, err := readEWAH(maps, len(kept))
		if err != nil {
			return nil, err
		}
		replaced, rest, err := readEWAH(rest, len(kept))
		if err != nil {
			return nil, err
		}
		if len(rest) > 0 {
			return nil, damaged("split index link has %d bytes too many", len(rest))
		}
		left := kept[:0] // never ahead of what is read
		for i, e := range kept {
			if replaced.has(i) {
				if len(own) == 0 || len(own[0].name) > 0 {
					return nil, damaged("split index does not fit its shared index")
				}
				own[0].name = e.name
				e, own = own[0], own[1:]
			}
			if !deleted.has(i) {
				left = append(left, e)
			}
		}
		kept = left
	}
	return interleave(kept, own), nil
}

// interleave merges two sorted lists. An added entry takes the place of an equal one, a merged one that
// of all stages.
func interleave(kept, added []record) []record {
	all := make([]record, 0, len(kept)+len(added))
	for len(kept) > 0 && len(added) > 0 {
		order := bytes.Compare(kept[0].name, added[0].name)
		if order == 0 && added[0].stage != 0 {
			order = int(kept[0].stage) - int(added[0].stage)
		}
		switch {
		case order < 0:
			all, kept = append(all, kept[0]), kept[1:]
		case order == 0:
			kept = kept[1:]
		default:
			all, added = append(all, added[0]), added[1:]
		}
	}
	return append(append(all, kept...), added...)
}

// bitmap has one bit per entry of the shared index.
type bitmap []uint64

func (b bitmap) has(i int) bool { return b[i/64]&(1<<(i%64)) != 0 }

// readEWAH reads a compressed bitmap for at most bits entries and returns what follows it. The layout:
// number of bits, number of words, the words (64 bits each), position of the last marker. A marker word
// holds a repeated bit, how many words repeat it (32 bits), and how many literal words follow (31 bits).
func readEWAH(b []byte, bits int) (bitmap, []byte, error) {
	if len(b) < 8 {
		return nil, nil, damaged("bitmap is cut off")
	}
	count := uint64(binary.BigEndian.Uint32(b[4:]))
	b = b[8:]
	if count*8+4 > uint64(len(b)) {
		return nil, nil, damaged("bitmap of %d words is cut off", count)
	}
	words, rest := b[:count*8], b[count*8+4:]
	out := make(bitmap, bits/64+1)
	at := uint64(0) // word of out; grows by less than 2^33 a step, so it cannot wrap
	put := func(w, n uint64) error {
		if w != 0 && (n > uint64(len(out)) || at > uint64(len(out))-n) {
			return damaged("bitmap is longer than the shared index")
		}
		for i := at; w != 0 && i < at+n; i++ {
			out[i] = w
		}
		at += n
		return nil
	}
	for len(words) > 0 {
		marker := binary.BigEndian.Uint64(words)
		words = words[8:]
		run, literals := marker>>1&0xffffffff, marker>>33
		if literals*8 > uint64(len(words)) {
			return nil, nil, damaged("bitmap literals are cut off")
		}
		if err := put(-(marker & 1), run); err != nil {
			return nil, nil, err
		}
		for range literals {
			if err := put(binary.BigEndian.Uint64(words), 1); err != nil {
				return nil, nil, err
			}
			words = words[8:]
		}
	}
	if tail := out[bits/64] >> (bits % 64); tail != 0 {
		return nil, nil, damaged("bitmap is longer than the shared index")
	}
	return out, rest, nil
}
