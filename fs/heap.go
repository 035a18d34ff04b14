package fs

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// A heapTuner keeps the memory of many nodes small, and gives it back when the
// kernel forgets them. Memory that is collected late costs nothing while the
// heap is small, but after a walk over a million files it would double it.
type heapTuner struct {
	locks   func() int
	percent int // what the collector was told; 0: nothing yet
	most    int // nodes at most since memory was given back
	resting bool
	want    atomic.Int32 // what the collector is to be told
	tuning  sync.Mutex
	wg      sync.WaitGroup
}

// heapStep is a number of nodes and the collector's percentage up to there.
type heapStep struct{ nodes, percent int }

var heapSteps = [...]heapStep{{50_000, 400}, {100_000, 100}, {300_000, 50}, {700_000, 25}, {1 << 62, 15}}

// releaseAbove is how many nodes make it worth while to give memory back.
const releaseAbove = 50_000

// lockNodes is how many nodes take as much memory as one lock, which is 1.5 KiB,
// about.
const lockNodes = 4

// sized takes note of how many nodes there are. The caller holds the table's
// mutex.
func (h *heapTuner) sized(nodes int) {
	if nodes&0xfff == 0 {
		h.tune(nodes)
	}
}

// tune is sized, now. The caller holds the table's mutex.
func (h *heapTuner) tune(nodes int) {
	if h.resting {
		return
	}
	nodes += lockNodes * h.locks()
	i := 0
	for nodes > heapSteps[i].nodes {
		i++
	}
	percent := heapSteps[i].percent
	h.most = max(h.most, nodes)
	free := h.most >= releaseAbove && nodes < h.most/4
	if free {
		h.most = nodes
	}
	if percent == h.percent && !free {
		return
	}
	h.percent = percent
	h.tell(percent, free)
}

// tell has the collector told, and memory given back if free.
func (h *heapTuner) tell(percent int, free bool) {
	h.want.Store(int32(percent))
	// Both wait for a collection that is under way.
	h.wg.Go(func() {
		h.tuning.Lock()
		defer h.tuning.Unlock()
		debug.SetGCPercent(int(h.want.Load())) // the last that was wanted
		if free {
			debug.FreeOSMemory()
		}
	})
}

// restLocks is how many locks are put back without a collection: while they are,
// 2 KiB are left lying for each, about.
const restLocks = 150_000

// rest has nothing collected until wake: everybody waits for the mount, and all but
// little of what is there stays. locks is how many will be put back. The caller holds
// the table's mutex.
func (h *heapTuner) rest(locks int) {
	if locks <= restLocks {
		h.resting = true
		h.tell(-1, false)
	}
}

// wake ends a rest. The caller holds the table's mutex.
func (h *heapTuner) wake(nodes int) {
	h.resting, h.percent = false, 0
	h.tune(nodes)
}

// close waits for what it started.
func (h *heapTuner) close() { h.wg.Wait() }
