package advisory

import (
	"errors"
	"fmt"
)

// Key names a file: its inode.
type Key = uint64

// MaxEnd is the last byte of a range without end (fcntl(2): l_len 0).
const MaxEnd uint64 = 1<<63 - 1

// Refusals.
var (
	// ErrConflict: another owner's lock is in the way. It comes as a
	// [*ConflictError].
	ErrConflict = errors.New("locked by another owner")
	// ErrDeadlock: owners would wait for each other in a circle.
	ErrDeadlock = errors.New("deadlock")
	// ErrLimit: the table is full.
	ErrLimit = errors.New("too many locks")
	// ErrRange: the range ends before it starts.
	ErrRange = errors.New("range ends before it starts")
)

// Ends of a wait.
var (
	// ErrCancelled: the wait was ended by the caller, or its handle was
	// released.
	ErrCancelled = errors.New("interrupted")
)

// A ConflictError says which lock refused a request.
type ConflictError struct {
	Lock Lock
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%v: pid %d has [%d, %d]", ErrConflict, e.Lock.Pid, e.Lock.Start, e.Lock.End)
}

// Unwrap returns ErrConflict.
func (e *ConflictError) Unwrap() error { return ErrConflict }

// A Lock is a lock that somebody has or wants.
type Lock struct {
	Owner  uint64 // who has it; for a flock lock it is Handle that counts
	Handle uint64 // the open file description through which it was set
	Pid    uint32 // thread group that set it, for F_GETLK and listings
	// Start and End are the first and the last byte. A flock lock has the
	// whole file, whatever they say.
	Start, End uint64
	Write      bool // exclusive
	Flock      bool // flock(2), not fcntl(2)
}

// normal returns l with the range that its kind implies.
func (l Lock) normal() (Lock, error) {
	if l.Flock {
		l.Start, l.End = 0, MaxEnd
	}
	l.End = min(l.End, MaxEnd)
	if l.Start > l.End {
		return l, ErrRange
	}
	return l, nil
}

func (l *Lock) sameOwner(o *Lock) bool {
	if l.Flock {
		return l.Handle == o.Handle
	}
	return l.Owner == o.Owner
}

func (l *Lock) overlaps(o *Lock) bool { return l.Start <= o.End && o.Start <= l.End }

// conflicts reports whether l and o can't be held together.
func (l *Lock) conflicts(o *Lock) bool {
	return l.Flock == o.Flock && (l.Write || o.Write) && l.overlaps(o) && !l.sameOwner(o)
}
