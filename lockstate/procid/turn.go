//go:build linux

package procid

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// turns are what looks that ask the kernel wait for, as goroutines: few have their
// turn, and a thread, at a time. One that the kernel keeps is set apart, and another
// has its turn instead.
//
// A look that has its turn makes system calls, and nothing else: it waits for no
// lock, and no other turn. So whoever waits for a turn gets it, whatever he holds.
type turns struct {
	state func(tid int) byte // of a thread, as in proc(5)
	limit int                // of active
	most  int                // of apart, but for those who must ask
	wake  chan struct{}      // has room for one; ends the guard's pause

	mu      sync.Mutex         // nothing is waited for with it
	active  int                // looks that have their turn, but for those apart; guarded by mu
	apart   int                // guarded by mu
	watched map[*turn]struct{} // all of these, but for the late; guarded by mu
	waiting []*turn            // in order; guarded by mu
	guarded bool               // guard runs; guarded by mu
}

// A turn is that of one look.
type turn struct {
	must bool          // it is never refused
	got  chan bool     // has room for one: it has its turn, or is refused
	late chan struct{} // closed when it is known to take long
	tid  atomic.Int32  // of the thread that asks; 0: none yet

	// Guarded by turns.mu.
	began time.Time // when it got its turn
	seen  time.Time // when it was looked at last
	stuck time.Time // since when it is seen to wait where only a kill ends that; zero: it does not
	apart bool
}

const (
	// apartTime is how long a look that the kernel keeps stands in the way of
	// others.
	apartTime = 2 * time.Millisecond
	// slowTime is that for one which is asleep otherwise: it may wait for
	// a processor.
	slowTime = 500 * time.Millisecond
)

func newTurns() turns {
	return turns{
		state:   threadState,
		most:    maxStuck,
		wake:    make(chan struct{}, 1),
		limit:   max(4, 2*runtime.GOMAXPROCS(0)),
		watched: make(map[*turn]struct{}),
	}
}

func newTurn(must bool) *turn {
	return &turn{must: must, got: make(chan bool, 1), late: make(chan struct{})}
}

// take waits for a turn, or reports that it is refused: too many looks are apart.
func (s *turns) take(t *turn) bool {
	s.mu.Lock()
	first := len(s.waiting) == 0
	s.waiting = append(s.waiting, t)
	s.callLocked()
	if !s.guarded && len(s.watched) > 0 {
		s.guarded = true
		go s.guard()
	}
	wake := first && len(s.waiting) > 0
	s.mu.Unlock()
	if wake {
		select {
		case s.wake <- struct{}{}:
		default: // it looks soon
		}
	}
	return <-t.got
}

// give ends a turn.
func (s *turns) give(t *turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.apart {
		s.apart--
	} else {
		s.active--
	}
	delete(s.watched, t)
	s.callLocked()
}

// callLocked gives turns to those who wait.
func (s *turns) callLocked() {
	for len(s.waiting) > 0 && s.active < s.limit {
		t := s.waiting[0]
		s.waiting[0], s.waiting = nil, s.waiting[1:]
		if s.apart >= s.most && !t.must {
			t.got <- false
			continue
		}
		t.began = time.Now()
		s.active++
		s.watched[t] = struct{}{}
		t.got <- true
	}
}

// ask runs a look that has its turn, which ends with it.
func (s *turns) ask(t *turn, look func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer s.give(t) // before the thread is another's
	t.tid.Store(int32(unix.Gettid()))
	look()
}

// guard sets apart those that the kernel keeps. It goes on as long as one may turn
// out to be such.
func (s *turns) guard() {
	for pause := lookTime; ; {
		select {
		case <-s.wake:
		case <-time.After(pause):
		}
		looks := s.due()
		states := make([]byte, len(looks))
		for i, t := range looks {
			states[i] = 'R'
			if tid := t.tid.Load(); tid != 0 {
				states[i] = s.state(int(tid))
			}
		}
		s.mu.Lock()
		for i, t := range looks {
			s.judgeLocked(t, states[i])
		}
		s.callLocked()
		if len(s.watched) == 0 {
			s.guarded = false
			s.mu.Unlock()
			return
		}
		if pause = lookTime; len(s.waiting) > 0 {
			pause = apartTime
		}
		s.mu.Unlock()
	}
}

// due returns the looks that have to be looked at.
func (s *turns) due() (due []*turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for t := range s.watched {
		wait := apartTime
		if t.apart {
			wait = lookTime
		}
		if now.Sub(t.began) >= wait && now.Sub(t.seen) >= wait {
			t.seen = now
			due = append(due, t)
		}
	}
	return due
}

// judgeLocked says what becomes of a look whose thread had that state.
func (s *turns) judgeLocked(t *turn, state byte) {
	if _, ok := s.watched[t]; !ok {
		return // over meanwhile
	}
	if state != 'D' {
		t.stuck = time.Time{}
	} else if t.stuck.IsZero() {
		t.stuck = t.seen
	}
	stuck, took := !t.stuck.IsZero(), t.seen.Sub(t.began)
	if !t.apart && (stuck || took > slowTime && state != 'R' || took > lookPatience) {
		t.apart = true
		s.active--
		s.apart++
	}
	if stuck && t.seen.Sub(t.stuck) >= lookTime || took > lookPatience {
		delete(s.watched, t)
		close(t.late)
	}
}

// threadState returns the state of a thread of this process: D where only a kill
// ends its wait, as for who looks at a process in execve(2).
func threadState(tid int) byte {
	st, err := readStatus(tid)
	if err != nil {
		return 0
	}
	return st.state
}
