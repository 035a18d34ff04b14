package fs

import (
	"sync"
	"testing"
)

// TestSpinMutex: writers are alone, readers are not with one, and nobody who
// waits longer than it spins is forgotten.
func TestSpinMutex(t *testing.T) {
	const loops = 2000
	var m spinMutex
	var a, b int
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := range loops {
				m.Lock()
				a++
				if n%500 == i {
					for range 200_000 { // longer than spinTime
						b++
						b--
					}
				}
				b++
				m.Unlock()
			}
		})
		all.Go(func() {
			for range loops {
				m.RLock()
				if a != b {
					t.Errorf("a reader is with a writer: %d, %d", a, b)
				}
				m.RUnlock()
			}
		})
	}
	all.Wait()
	if a != 4*loops {
		t.Errorf("%d of %d counted", a, 4*loops)
	}
}
