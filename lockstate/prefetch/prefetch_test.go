package prefetch

import (
	"slices"
	"sync/atomic"
	"testing"
)

// TestBatches: batches come complete and in their order, the last one too, and are
// used again.
func TestBatches(t *testing.T) {
	for _, want := range []int{1, 2, depth, 10 * depth} {
		var got []int
		seen := make(map[*[]int]bool)
		n := 0
		for batch := range Batches(func(b *[]int) bool {
			*b = append((*b)[:0], n, n+1)
			n += 2
			return n < 2*want
		}) {
			got = append(got, *batch...)
			seen[batch] = true
		}
		if len(got) != 2*want || !slices.IsSorted(got) || got[len(got)-1] != 2*want-1 {
			t.Errorf("of %d batches came %v", want, got)
		}
		if len(seen) > depth {
			t.Errorf("%d batches were made for %d", len(seen), want)
		}
	}
}

// TestBatchesBrokenOff: who leaves the loop finds nobody filling any more.
func TestBatchesBrokenOff(t *testing.T) {
	var over, late atomic.Bool
	for after := range 2 * depth {
		over.Store(false)
		i := 0
		for range Batches(func(*int) bool {
			late.Store(late.Load() || over.Load())
			return true
		}) {
			if i++; i > after {
				break
			}
		}
		over.Store(true)
	}
	if late.Load() {
		t.Error("a batch was filled after the loop")
	}
}
