package fs

import (
	"runtime"
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
					for range 500_000 { // longer than spinTime
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
	if n := m.spinning.Load(); n != 0 {
		t.Errorf("%d spin that are done", n)
	}
}

// TestSpinMutexCrowd: of many that wait only as many spin as leave a core to whom
// they wait for.
func TestSpinMutexCrowd(t *testing.T) {
	var m spinMutex
	tried := 0
	var spin func() bool
	spin = func() bool { // while it spins itself
		tried++
		m.spin(spin)
		return true
	}
	m.spin(spin)
	if want := runtime.NumCPU() - 1; tried != want {
		t.Errorf("%d spin at a time, want %d", tried, want)
	}
}
