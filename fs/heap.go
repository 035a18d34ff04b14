package fs

import (
	"runtime/debug"
	"sync"
)

// A heapTuner keeps the memory of many nodes small, and gives it back when the
// kernel forgets them. Memory that is collected late costs nothing while the
// heap is small, but after a walk over a million files it would double it.
type heapTuner struct {
	locks   func() int
	percent int // what the collector was told; 0: nothing yet
	most    int // nodes at most since memory was given back
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
	// Both wait for a collection that is under way.
	h.wg.Go(func() {
		h.tuning.Lock()
		defer h.tuning.Unlock()
		debug.SetGCPercent(percent)
		if free {
			debug.FreeOSMemory()
		}
	})
}

// close waits for what it started.
func (h *heapTuner) close() { h.wg.Wait() }
