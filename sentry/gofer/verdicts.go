package gofer

import (
	"hash/maphash"
	"sync"
)

// verdictCache remembers what rules said about names, in fixed memory: the sandbox chooses how many directories it visits
// and how many names it asks for. A slot that two names want belongs to the last one.
type verdictCache struct {
	seed   maphash.Seed
	shards [64]struct {
		mu    sync.Mutex
		slots [1024]slot
	}
}

type slot struct {
	rules uint64 // id; 0 is an empty slot
	name  string
	hide  hide
}

func newVerdictCache() *verdictCache { return &verdictCache{seed: maphash.MakeSeed()} }

func (c *verdictCache) at(rules uint64, name string) (shard, index uint64) {
	h := maphash.String(c.seed, name) ^ rules*0x9e3779b97f4a7c15
	h ^= h >> 29
	return h % 64, h / 64 % 1024
}

func (c *verdictCache) get(rules uint64, name string) (hide, bool) {
	i, j := c.at(rules, name)
	s := &c.shards[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	e := &s.slots[j]
	return e.hide, e.rules == rules && e.name == name
}

func (c *verdictCache) put(rules uint64, name string, h hide) {
	i, j := c.at(rules, name)
	s := &c.shards[i]
	s.mu.Lock()
	s.slots[j] = slot{rules, name, h}
	s.mu.Unlock()
}
