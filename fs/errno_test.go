package fs

import (
	"errors"
	"fmt"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// W2: EBUSY throughout, but where the backing refused by itself.
func TestStatusOf(t *testing.T) {
	for _, c := range []struct {
		err    error
		want   fuse.Status
		denial bool
	}{
		{nil, fuse.OK, false},
		{unix.ENOSPC, fuse.Status(unix.ENOSPC), false},
		{fmt.Errorf("open: %w", unix.EROFS), fuse.EROFS, false},
		{unix.Errno(511), fuse.Status(511), false},
		{unix.Errno(512), fuse.EIO, false},
		{&lockstate.HeldError{Err: lockstate.ErrHeld}, fuse.EBUSY, true},
		{&lockstate.HeldError{Err: lockstate.ErrOpen}, fuse.EBUSY, true},
		{&lockstate.HeldError{Err: lockstate.ErrUnlocked}, fuse.EBUSY, true},
		{lockstate.ErrRevoked, fuse.EBUSY, true},
		{lockstate.ErrRoot, fuse.EBUSY, false},
		{lockstate.ErrNobody, fuse.EBUSY, true},
		{lockstate.ErrFrozen, fuse.EBUSY, true},
		{lockstate.ErrEnded, fuse.EBUSY, true},
		{fmt.Errorf("%w: by a reader", errMayMap), fuse.EBUSY, true},
		{lockstate.ErrCancelled, fuse.EINTR, false},
		{lockstate.ErrGone, fuse.ENOENT, false},
		{lockstate.ErrNoLock, fuse.ENOENT, false},
		{lockstate.ErrTokens, fuse.Status(unix.ENOLCK), false},
		{lockstate.ErrAlone, fuse.EBUSY, false},
		{errors.New("anything else"), fuse.EIO, false},
	} {
		if got := statusOf(c.err); got != c.want {
			t.Errorf("statusOf(%v) = %v, want %v", c.err, got, c.want)
		}
		if got := refused(c.err); got != c.denial {
			t.Errorf("refused(%v) = %t, want %t", c.err, got, c.denial)
		}
	}
}

// No error of the table is without an errno of its own.
func TestErrnosAreComplete(t *testing.T) {
	for _, err := range []error{
		lockstate.ErrHeld, lockstate.ErrOpen, lockstate.ErrUnlocked, lockstate.ErrRoot, lockstate.ErrNobody,
		lockstate.ErrFrozen, lockstate.ErrEnded, lockstate.ErrCancelled, lockstate.ErrGone, lockstate.ErrNoLock, lockstate.ErrRevoked,
	} {
		n := 0
		for _, e := range errnos {
			if e.err == err {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%v is in the table %d times, want once", err, n)
		}
	}
}
