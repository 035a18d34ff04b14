package fs

import (
	"encoding/binary"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// An expiry ends leases at their deadline (L1). The table counts none that is
// past it, so a late end keeps nobody waiting who asks; but nobody asks on
// behalf of who waits, or of who is to learn that a lock is lost.
type expiry struct {
	fs    *FS
	timer *os.File // a timerfd on CLOCK_BOOTTIME, which no step of the wall clock moves (L4)
	fd    int
	done  chan struct{}
	mu    sync.Mutex // one deadline is set at a time, and not when fd is closed
	over  bool
}

func (e *expiry) start(fs *FS) error {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("timerfd_create", err)
	}
	e.fs, e.fd, e.timer, e.done = fs, fd, os.NewFile(uintptr(fd), "timerfd"), make(chan struct{})
	go e.run()
	e.set()
	return nil
}

// run ends when the timer is closed.
func (e *expiry) run() {
	defer close(e.done)
	var b [8]byte
	for {
		if _, err := e.timer.Read(b[:]); err != nil || binary.NativeEndian.Uint64(b[:]) == 0 {
			return
		}
		log := newBurst(e.fs.log)
		for _, l := range e.fs.table.Expired() {
			e.fs.reapLease(l, log)
		}
		log.done()
		e.wind(laterTime)
	}
}

// laterTime is how soon a lease is looked at again that could not be ended at its deadline.
const laterTime = 10 * time.Millisecond

// set winds the timer for the next deadline.
func (e *expiry) set() { e.wind(0) }

// wind is set; for a deadline that has passed it winds the timer for later.
func (e *expiry) wind(later time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over || e.timer == nil {
		return
	}
	var at unix.ItimerSpec // zero: no lease, no timer
	if next, ok := e.fs.table.NextDeadline(); ok {
		if now := e.fs.table.Clock(); next <= now {
			next = now + later
		}
		at.Value = unix.NsecToTimespec(max(int64(next), 1))
	}
	// It fails for bad arguments only.
	if err := unix.TimerfdSettime(e.fd, unix.TFD_TIMER_ABSTIME, &at, nil); err != nil {
		e.fs.log.Error("cannot set the timer of the leases", "err", err)
	}
}

func (e *expiry) close() {
	if e.timer == nil {
		return
	}
	e.mu.Lock()
	e.over = true
	e.timer.Close()
	e.mu.Unlock()
	<-e.done
}

// lives reports whether a lock still has its owner: a process that lives, or a
// client whose deadline lies ahead, or begins to run when it has the lock. Where nobody
// can end it now, it passes for alive.
func (fs *FS) lives(l lockstate.Lock) bool {
	if fs.isToClear(l.Token) {
		return true
	}
	if l.Client != "" {
		return l.Pending || fs.table.Clock() < l.Deadline
	}
	if _, busy := fs.unrepresented.tokens.Load(l.Token); busy {
		return true // its scope does
	}
	return fs.procs.Alive(l.Owner)
}

// reapLock carries out the end of a lock whose owner is no more, without
// waiting for the news of it. It reports false as reap does.
func (fs *FS) reapLock(l lockstate.Lock) bool {
	if l.Client == "" {
		return fs.reap(l.Owner)
	}
	return fs.reapUnlessFrozen(func() {
		log := newBurst(fs.log)
		defer log.done()
		fs.reapLeaseLocked(l, log)
	})
}

// reapIfDead does so if that is the case. It reports whether it was, and is done.
func (fs *FS) reapIfDead(l lockstate.Lock) bool { return !fs.lives(l) && fs.reapLock(l) }

// reapLease is reapLock that waits.
func (fs *FS) reapLease(l lockstate.Lock, log *burst) {
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	fs.reapLeaseLocked(l, log)
}

func (fs *FS) reapLeaseLocked(l lockstate.Lock, log *burst) {
	l, ok := fs.table.Lock(l.Token)
	if !ok || l.Sealed || fs.lives(l) {
		return // ended already, or renewed in time
	}
	fs.endKeys(l)
	how := lockstate.Ending{Reason: lockstate.Expired}
	if fs.clearUp(l, fs.table.Policy(l), how, log) {
		return
	}
	if err := fs.table.EndAs(l.Token, how); err == nil {
		log.tell(slog.LevelInfo, "lease expired", "dir", l.Path, "client", l.Client, "token", l.Token)
	}
}

// touched renews the lease whose lock file a holder has touched or written to
// (L2).
func (fs *FS) touched(r *request, n *node) {
	if !fs.table.Leased() || n.candidate().private() {
		return
	}
	for _, at := range n.lockNames() {
		fs.table.Touch(at.parent.dir, r.process())
	}
}
