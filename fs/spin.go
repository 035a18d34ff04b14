package fs

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A spinMutex is an RWMutex for short waits. Who waits for it is mostly a thread
// that is tied to its core, and whom it waits for runs on another one: to sleep
// and be woken takes longer than most of what is done with it.
type spinMutex struct {
	sync.RWMutex
	spinning atomic.Int32 // who tries without sleeping
}

// spinTime is how long it is tried without sleeping: several times as long as to
// sleep and be woken takes, for in a line of sleepers each that is woken is late for
// all behind him.
const spinTime = 100 * time.Microsecond

func (m *spinMutex) Lock() {
	if !m.TryLock() && !m.spin(m.TryLock) {
		m.RWMutex.Lock()
	}
}

func (m *spinMutex) RLock() {
	if !m.TryRLock() && !m.spin(m.TryRLock) {
		m.RWMutex.RLock()
	}
}

// spin reports whether try has succeeded in time. Of a crowd no more do so than
// leave a core to whom they wait for: else it is in vain.
func (m *spinMutex) spin(try func() bool) bool {
	defer m.spinning.Add(-1)
	if int(m.spinning.Add(1)) >= runtime.NumCPU() {
		return false
	}
	for began := time.Now(); time.Since(began) < spinTime; {
		for range 16 {
			if try() {
				return true
			}
		}
	}
	return false
}
