package fs

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
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

// TestSpinMutexStepsBack: a reader that stays keeps a writer waiting, and neither
// keeps the other readers; when it goes, the writer has its turn.
func TestSpinMutexStepsBack(t *testing.T) {
	var m spinMutex
	m.RLock()
	var writers sync.WaitGroup
	for range 3 {
		writers.Go(func() {
			m.Lock()
			defer m.Unlock()
		})
	}
	for m.state.Load()&closed == 0 {
		time.Sleep(time.Millisecond)
	}
	for range 100 { // of which the first waits until the writer steps back
		var readers sync.WaitGroup
		for range 4 {
			readers.Go(func() {
				m.RLock()
				time.Sleep(time.Millisecond)
				m.RUnlock()
			})
		}
		readers.Wait()
	}
	if m.TryLock() {
		t.Error("a writer is with a reader")
	}
	m.RUnlock()
	writers.Wait()
	if s := m.state.Load(); s != 0 {
		t.Errorf("state %#x when nobody has it", s)
	}
}

// TestSpinMutexSlow: writers have their turns among readers that follow each other
// without a gap, some of them for longer than writers wait in one go; and still
// nobody is with a writer.
func TestSpinMutexSlow(t *testing.T) {
	var m spinMutex
	var writing atomic.Bool
	var done atomic.Bool
	var reads, inside atomic.Int64
	var readers, writers sync.WaitGroup
	for i := range 8 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(i)))
			for !done.Load() {
				m.RLock()
				inside.Add(1)
				for range 1 + r.IntN(5) {
					if writing.Load() {
						t.Error("a reader is with a writer")
					}
					time.Sleep(time.Millisecond)
				}
				if r.IntN(50) == 0 {
					time.Sleep(graceTime + 10*time.Millisecond)
				}
				inside.Add(-1)
				m.RUnlock()
				reads.Add(1)
			}
		})
	}
	for range 2 {
		writers.Go(func() {
			for range 10 {
				m.Lock()
				if writing.Swap(true) || inside.Load() != 0 {
					t.Error("a writer is not alone")
				}
				time.Sleep(time.Millisecond)
				writing.Store(false)
				m.Unlock()
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	if s := m.state.Load(); s != 0 || reads.Load() == 0 {
		t.Errorf("state %#x when nobody has it, after %d reads", s, reads.Load())
	}
}

// TestSpinMutexLongWriter: who waits for a writer that stays is let in by it alone,
// whoever else waits to write.
func TestSpinMutexLongWriter(t *testing.T) {
	var m spinMutex
	var over atomic.Bool
	m.Lock()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			m.RLock()
			defer m.RUnlock()
			if !over.Load() {
				t.Error("a reader is with a writer")
			}
		})
		all.Go(func() {
			m.Lock()
			defer m.Unlock()
			if !over.Load() {
				t.Error("a writer is with another")
			}
		})
	}
	time.Sleep(2 * (1 + stepBack) * graceTime) // they step back, and come again
	over.Store(true)
	m.Unlock()
	all.Wait()
}

// A writer that gives up leaves the lock to the others, readers and writers.
func TestSpinGivesUp(t *testing.T) {
	var m spinMutex
	m.RLock()
	var waits sync.WaitGroup
	for range 4 {
		waits.Go(func() {
			for range 5 {
				if m.LockWithin(3 * time.Millisecond) {
					t.Error("a writer has it beside a reader")
				}
			}
		})
	}
	waits.Wait()
	m.RLock() // nobody keeps readers out
	m.RUnlock()
	got := make(chan bool)
	go func() { got <- m.LockWithin(time.Minute) }()
	m.RUnlock()
	if !<-got {
		t.Fatal("a writer has given up although there is no reader")
	}
	m.Unlock()
	m.Lock()
	m.Unlock()
}

// Who gives up after a time has a place in the line until then: writers that come again
// and again don't pass it by.
func TestSpinMutexInLine(t *testing.T) {
	var m spinMutex
	var turns atomic.Int64
	var others sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				m.Lock()
				turns.Add(1)
				time.Sleep(time.Millisecond)
				m.Unlock()
			}
		})
	}
	var waited []int64
	for range 9 {
		before := turns.Load()
		for last := before; before < last+8; before = turns.Load() {
			time.Sleep(time.Millisecond) // they are in line
		}
		if !m.LockWithin(time.Minute) {
			t.Fatal("a writer has given up although each one has its turn soon")
		}
		waited = append(waited, turns.Load()-before)
		m.Unlock()
	}
	close(stop)
	others.Wait()
	if slices.Sort(waited); waited[len(waited)/2] > 100 {
		t.Errorf("others had %v turns before it, of four in line", waited)
	}
}
