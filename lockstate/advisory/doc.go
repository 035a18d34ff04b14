// Package advisory is the table of advisory file locks: flock(2), fcntl(2)
// record locks and open-file-description (OFD) locks. A file system in user
// space must keep one as soon as the kernel forwards lock requests to it.
//
// # Terms
//
// A record lock covers a range of bytes and belongs to an owner: a process's
// table of descriptors for POSIX locks, an open file description for OFD
// locks. A flock lock covers the file and belongs to an open file description,
// which the handle names. An obstacle is a held lock that conflicts with a
// request. Who waits, waits beneath its obstacle, or beneath an earlier waiter
// on the same obstacle with which it conflicts; the first in line is the one
// directly beneath.
//
// # Guarantees
//
// Answers are those of Linux on a local file system (fs/locks.c; measured by
// the tests, which run the same calls against a real file):
//
//   - flock and record locks don't see each other.
//   - A record lock replaces what its owner had on the range, of either type,
//     at once: what isn't granted changes nothing. Unlocking splits, neighbours
//     merge.
//   - A conversion of a flock lock is not atomic: the old lock ends first, and
//     a conversion that is refused, or interrupted, has lost it (flock(2)).
//   - [Table.Get] names the first obstacle: owners in the order in which each
//     came to have its first lock on the file, then by start.
//   - Conflicting waiters are granted in order of arrival, by the call that
//     makes way: the lock is handed over, nobody polls or tries again. A
//     newcomer that no held lock conflicts with is granted past those who wait.
//   - A wait that closes a circle of POSIX owners ends with [ErrDeadlock].
//
// # What is not guaranteed
//
// The kernel doesn't tell OFD locks from POSIX ones when it forwards them.
// Therefore a circle of OFD owners in different processes is answered with
// ErrDeadlock, where Linux lets them wait for ever, and Get names the process
// that set an OFD lock, where Linux says -1. A circle in which one process
// appears with two owners can't be a circle of POSIX owners, and waits.
// Linux follows up to eleven waits, and so finds circles of up to twelve owners;
// this table finds any.
//
// An owner's number may be used again for another open file description
// before the first one's release has arrived. A lock therefore belongs to the
// handle through which it was last set, too: [Table.Release] ends no more than
// that, and pieces of one owner set through several handles are kept apart. Get
// shows them joined, as Linux would have them; and those who wait for any of
// such a run wait beneath its first piece, as for one lock.
//
// Where more than 64 wait behind one who gives up, they move up together and are
// not tried again one by one. So the order in which conflicting waiters for parts
// of the file get them may then differ from Linux.
//
// # Invariants
//
// [Table.Check] verifies these:
//
//	I1  the record locks of an owner are sorted, don't overlap, and are joined
//	    where they touch and have the same type and handle
//	I2  no two held locks conflict; a handle has one flock lock at most
//	I3  a waiter conflicts with everything above it, and the way up ends at the
//	    first piece of a run
//	I4  a waiter has an obstacle
//	I5  waiters are in order of arrival, and indexed by owner just while they
//	    wait
//	I6  files without locks and waiters are forgotten; the count is right
//	I7  nobody who was woken is left to be tried again
//
// # Why no library
//
// Interval sets for Go know no owners, and the one package with the semantics
// of fcntl(2), gVisor's pkg/sentry/fsimpl/lock, wakes all waiters to try again
// in no order, detects no deadlock, and needs the sentry around it.
//
// # Lock order
//
//	Table.mu   everything; no call-backs and no system calls under it
package advisory
