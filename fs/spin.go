package fs

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A spinMutex is a readers-writer lock, as [sync.RWMutex] is, but for two things.
//
// It is for short waits: who waits is mostly a thread that is tied to its core, and
// whom it waits for runs on another one, so that to sleep and be woken takes longer
// than most of what is done with the lock.
//
// And a writer that waits steps back: a reader may be stuck in the backing for as
// long as a disk is frozen or a server does not answer, and is not to stop the other
// readers because a writer has come. By turns the writer keeps new readers out, for
// a moment, and lets them pass.
type spinMutex struct {
	state    atomic.Int64 // how many readers are in, and the flags below
	spinning atomic.Int32 // who tries without sleeping

	make    sync.Once     // of these two
	writers chan struct{} // has a place for the writer that is waited for, in the order in which they came
	drained chan struct{} // tells that writer that no reader is in

	mu     sync.Mutex
	queued int64         // readers that sleep; protected by mu
	gate   chan struct{} // closed when they are let in, or nil; protected by mu
}

// The flags of a spinMutex's state.
const (
	alone   = 1 << (40 + iota) // a writer has it; cleared with mu held
	closed                     // new readers wait
	pending                    // a writer sleeps until no reader is in
	readers = alone - 1        // what counts the readers
)

const (
	// spinTime is how long it is tried without sleeping: several times as long as
	// to sleep and be woken takes, for in a line of sleepers each that is woken is
	// late for all behind him.
	spinTime = 100 * time.Microsecond
	// graceTime is for how long a writer keeps new readers out at first, which is
	// longer than nearly every call takes; and graceMost at last, so that it has
	// its turn among calls that all take long.
	graceTime = 50 * time.Millisecond
	graceMost = time.Second
	// stepBack is how many times as long it lets them pass then.
	stepBack = 5
)

func (m *spinMutex) TryLock() bool { return m.state.CompareAndSwap(0, alone) }

func (m *spinMutex) Lock() { m.lock(nil) }

// LockWithin is Lock that gives up after a time.
func (m *spinMutex) LockWithin(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	return m.lock(t.C)
}

func (m *spinMutex) lock(over <-chan time.Time) bool {
	if m.TryLock() || m.spin(m.TryLock) {
		return true
	}
	m.make.Do(func() { m.writers, m.drained = make(chan struct{}, 1), make(chan struct{}, 1) })
	select {
	case m.writers <- struct{}{}:
	case <-over:
		return false
	}
	defer func() { <-m.writers }()
	m.state.Or(pending | closed)
	began, grace := time.Now(), graceTime
	turn := time.NewTimer(grace)
	defer turn.Stop()
	for out := true; !m.tryTake(); {
		select {
		case <-m.drained:
			continue
		case <-over:
			m.state.And(^int64(pending))
			if out {
				m.admit(closed)
			}
			return false
		case <-turn.C:
		}
		if out = !out; out {
			m.state.Or(closed)
			grace = min(max(graceTime, time.Since(began)/10), graceMost)
			turn.Reset(grace)
		} else {
			m.admit(closed)
			turn.Reset(stepBack * grace)
		}
	}
	return true
}

// tryTake is TryLock for the writer that is waited for.
func (m *spinMutex) tryTake() bool {
	for {
		s := m.state.Load()
		if s&(alone|readers) != 0 {
			return false
		}
		if m.state.CompareAndSwap(s, alone) {
			return true
		}
	}
}

func (m *spinMutex) Unlock() { m.admit(alone) }

// admit clears a flag, and lets those readers in that slept because of it: all
// before the next writer.
func (m *spinMutex) admit(flag int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if flag != alone && m.state.Load()&alone != 0 {
		m.state.And(^flag) // they sleep because of another writer, too
		return
	}
	if m.state.Load()&flag == 0 {
		panic("unlock of what is not locked")
	}
	s := m.state.Add(m.queued - flag)
	if m.gate != nil {
		close(m.gate)
	}
	m.queued, m.gate = 0, nil
	m.tell(s)
}

// tell wakes the writer that is waited for, if s says that it can go on.
func (m *spinMutex) tell(s int64) {
	if s&pending != 0 && s&(alone|readers) == 0 {
		select {
		case m.drained <- struct{}{}:
		default: // it has been told
		}
	}
}

func (m *spinMutex) TryRLock() bool {
	for {
		s := m.state.Load()
		if s&(alone|closed) != 0 {
			return false
		}
		if m.state.CompareAndSwap(s, s+1) {
			return true
		}
	}
}

func (m *spinMutex) RLock() {
	if m.TryRLock() || m.spin(m.TryRLock) {
		return
	}
	m.mu.Lock()
	if m.TryRLock() {
		m.mu.Unlock()
		return
	}
	if m.gate == nil {
		m.gate = make(chan struct{})
	}
	m.queued++
	gate := m.gate
	m.mu.Unlock()
	<-gate // who opens it has counted this reader
}

func (m *spinMutex) RUnlock() {
	s := m.state.Add(-1)
	if s&readers == readers {
		panic("unlock of what is not locked")
	}
	m.tell(s)
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
