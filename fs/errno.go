package fs

import (
	"errors"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
)

// errnos says what a program hears of each refusal of the tables (W2). Where
// the protocol of a tool has an answer of its own (A8), the handler overrides
// it. It is the only place where the table's errors become numbers.
var errnos = []struct {
	err   error
	errno syscall.Errno
}{
	{lockstate.ErrHeld, syscall.EBUSY},
	{lockstate.ErrOpen, syscall.EBUSY},
	{lockstate.ErrUnlocked, syscall.EBUSY},
	{lockstate.ErrRevoked, syscall.EBUSY},
	{lockstate.ErrRoot, syscall.EBUSY},
	{lockstate.ErrNobody, syscall.EBUSY},
	{lockstate.ErrFrozen, syscall.EBUSY},
	{lockstate.ErrEnded, syscall.EBUSY},
	{lockstate.ErrCancelled, syscall.EINTR},
	{lockstate.ErrGone, syscall.ENOENT},
	{lockstate.ErrNoLock, syscall.ENOENT},
	{errMayMap, syscall.EBUSY},
	{lockstate.ErrNotYours, syscall.EPERM},
	{lockstate.ErrAlone, syscall.EBUSY},
	{lockstate.ErrCrowd, syscall.ENOLCK},
	{lockstate.ErrTokens, syscall.ENOLCK},
	{advisory.ErrConflict, syscall.EAGAIN},
	{advisory.ErrCancelled, syscall.EINTR},
	{advisory.ErrDeadlock, syscall.EDEADLK},
	{advisory.ErrRange, syscall.EINVAL},
	{advisory.ErrLimit, syscall.ENOLCK},
}

// maxErrno is the last number that the kernel takes for an answer. Greater ones are its own,
// but some file systems let them out: ENOTSUPP, 524. Whoever was answered so would wait for ever.
const maxErrno = 511

// statusOf returns what the kernel is told of err.
func statusOf(err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		switch {
		case errno == syscall.EMFILE:
			errno = syscall.ENFILE // the limit is the mount's, not the caller's
		case errno > maxErrno:
			errno = syscall.EIO
		}
		return fuse.Status(errno)
	}
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return fuse.Status(e.errno)
		}
	}
	return fuse.EIO
}

// errorOf is the way back.
func errorOf(status fuse.Status) error {
	if status == fuse.OK {
		return nil
	}
	return syscall.Errno(status)
}

// noLock reports whether err says that no lock can be had, whoever has the directory.
func noLock(err error) bool { return statusOf(err) == fuse.Status(syscall.ENOLCK) }

// refused reports whether err is a refusal that is counted and shown (W6).
func refused(err error) bool {
	return errors.Is(err, lockstate.ErrHeld) || errors.Is(err, lockstate.ErrOpen) ||
		errors.Is(err, lockstate.ErrUnlocked) || errors.Is(err, lockstate.ErrNobody) ||
		errors.Is(err, lockstate.ErrFrozen) || errors.Is(err, lockstate.ErrEnded) || errors.Is(err, lockstate.ErrRevoked) || errors.Is(err, errMayMap)
}
