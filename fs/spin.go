package fs

import (
	"runtime"
	"sync"
	"time"
)

// A spinMutex is an RWMutex for short waits. Who waits for it is mostly a thread
// that is tied to its core, and whom it waits for runs on another one: to sleep
// and be woken takes longer than most of what is done with it.
type spinMutex struct{ sync.RWMutex }

// spinTime is how long it is tried without sleeping: about as long as to sleep
// and be woken takes.
const spinTime = 20 * time.Microsecond

func (m *spinMutex) Lock() {
	if !m.TryLock() && !spin(m.TryLock) {
		m.RWMutex.Lock()
	}
}

func (m *spinMutex) RLock() {
	if !m.TryRLock() && !spin(m.TryRLock) {
		m.RWMutex.RLock()
	}
}

// spin reports whether try has succeeded in time. Who alone runs waits in vain.
func spin(try func() bool) bool {
	for began := time.Now(); ; {
		for range 16 {
			if try() {
				return true
			}
		}
		if runtime.NumCPU() == 1 || time.Since(began) > spinTime {
			return false
		}
	}
}
