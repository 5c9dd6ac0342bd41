package uplink

import (
	"runtime"
	"runtime/metrics"
	"time"
)

// Buffers grow with what an agent leaves unread, and flows are many. A soft limit of the heap alone
// would end in a process that only collects garbage, so flows are given up instead: above half of
// the limit no new ones are made, above the limit half of them are reset.
const (
	memoryLook  = 50 * time.Millisecond
	collectEach = 250 * time.Millisecond
)

func (u *uplink) watchMemory(limit int64) {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	read := func() int64 {
		metrics.Read(sample)
		return int64(sample[0].Value.Uint64())
	}
	var collected time.Time
	for now := range time.Tick(memoryLook) {
		used := read()
		// The figure has garbage in it, and without new flows nobody would collect it.
		if used > limit/2 && now.Sub(collected) > collectEach {
			runtime.GC()
			collected, used = now, read()
		}
		u.gate.full.Store(used > limit/2)
		if used > limit {
			if n := u.tcp.shed(); n > 0 {
				u.event(EventShed, Reset{TCP: n})
			}
		}
	}
}

// shed resets half of the flows and tells how many.
func (t *tcpRelay) shed() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for f := range t.flows {
		if n*2 >= len(t.flows) {
			break
		}
		if !f.reset {
			t.resetLocked(f)
			n++
		}
	}
	return n
}
