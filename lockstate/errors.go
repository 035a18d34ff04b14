package lockstate

import (
	"errors"
	"fmt"
	"strconv"
)

// Refusals. A [*HeldError] unwraps to one of the first three.
var (
	// ErrHeld: a lock of another process covers the path, or stands above
	// or beneath a directory that was to be acquired (C3a to C3c).
	ErrHeld = errors.New("held by another process")
	// ErrOpen: another process has a write handle beneath the directory
	// (C3d).
	ErrOpen = errors.New("open for writing by another process")
	// ErrUnlocked: nobody holds the path and writing needs a lock (W4).
	ErrUnlocked = errors.New("writing here needs a lock")
)

// ErrRevoked: the lock that the handle was opened under was taken from its
// holder (L3).
var ErrRevoked = errors.New("the lock that this was opened under has ended")

// Other failures of an acquisition.
var (
	// ErrRoot: the root of the mount is never locked (C4).
	ErrRoot = errors.New("the root cannot be locked")
	// ErrNobody: the request comes from no process that can be known (H4).
	ErrNobody = errors.New("the caller cannot be identified")
	// ErrFrozen: the table grants nothing any more (M4).
	ErrFrozen = errors.New("no new locks: shutting down")
	// ErrEnded: the lock was ended, by a break or another thread of its owner, before
	// who asked for it had it.
	ErrEnded = errors.New("the lock was ended just as it was taken")
	// ErrCancelled: the request was interrupted while it waited.
	ErrCancelled = errors.New("interrupted")
	// ErrGone: the directory was removed.
	ErrGone = errors.New("directory was removed")
	// ErrNotYours: it is a lease of another user's client (L2).
	ErrNotYours = errors.New("the lease is another user's")
	// ErrAlone: a client is to share what it has a lease on for itself.
	ErrAlone = errors.New("the client has a lease on it, for itself alone, and must release that first")
	// ErrCrowd: too many live processes joined a lease.
	ErrCrowd = errors.New("too many processes joined the lease")
	// ErrTokens: there is no higher token.
	ErrTokens = errors.New("tokens are used up")
	// ErrNoLock: there is no such lock.
	ErrNoLock = errors.New("no such lock")
)

// A HeldError says what stood in the way of a change or an acquisition.
type HeldError struct {
	Err      error         // ErrHeld, ErrOpen or ErrUnlocked
	Lock     Lock          // the lock in the way; zero for ErrOpen and ErrUnlocked
	Handles  []HandleState // the write handles in the way, for ErrOpen
	Settling bool          // the lock may still be narrowed to a directory further down (A12)
	Unsure   error         // why it could not be said what the process carries, or who has something open, and so holds a lock by; nil: it could
}

func (e *HeldError) Error() string {
	switch {
	case e.Err == ErrOpen && len(e.Handles) > 0:
		h, by := e.Handles[0], "which one is not known"
		if h.Owner.Pid != 0 {
			by = fmt.Sprintf("pid %d", h.Owner.Pid)
		}
		return fmt.Sprintf("%s is %v (%s)", strconv.Quote(h.Path), e.Err, by)
	case e.Lock.Token != 0:
		by, has := fmt.Sprintf("pid %d", e.Lock.Owner.Pid), ErrHeld.Error()
		if e.Lock.Client != "" { // whatever became of the process that took it
			by, has = "client "+strconv.Quote(e.Lock.Client), "held by a client's lease"
		}
		if e.Lock.Kind == Shared { // it may be the caller's own
			has = "held by a shared lock: nobody writes while it lasts"
		}
		return fmt.Sprintf("%s is %s (%s, token %d)", strconv.Quote(e.Lock.Path), has, by, e.Lock.Token)
	}
	return e.Err.Error()
}

// Unwrap returns the sentinel.
func (e *HeldError) Unwrap() error { return e.Err }
