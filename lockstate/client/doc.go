//go:build linux

// Package client takes locks on directories of a stagefs mount, and keeps them.
//
// It uses nothing but files: it finds the mount by walking up from the
// directory, and speaks with the daemon through the mount's control directory.
// So it works wherever the mount can be seen, in containers too, and needs no
// other part of stagefs.
//
// # Terms
//
// A lock belongs to this process, with all its goroutines and descendants,
// unless [Options] name a client: then it is a lease, which belongs to whoever
// carries the client's ID, and ends at its deadline unless it is renewed. A
// [Lock] that is a lease renews itself. The token of a lock grows with every
// acquisition of any directory and never goes back, so that a store elsewhere
// can tell a late writer from the present one.
//
// # Guarantees
//
//   - From [Acquire] until the lock ends, nobody else changes anything in the
//     directory; the file system refuses it.
//   - When a lock ends before it is released, [Lock.Lost] is closed at once,
//     and at the latest at the lease's deadline, also if the daemon does not
//     answer any more. The deadline is counted from before the renewal was
//     sent, on a clock that no one sets and that goes on while the machine
//     sleeps; so it is never later here than in the daemon.
//   - A renewal that fails is tried again until the deadline.
//   - A daemon that is stopped keeps no call waiting for more than some seconds after its
//     context is done. [Lock.Release] has none: it waits, unless the lock was lost.
//   - A signal to this process costs who waits no place in the line, unless it stops
//     the process. But to change the user or group meanwhile, as by setuid(2), does.
//
// # What is not guaranteed
//
// A process that was stopped, or a machine that was suspended, learns late that
// its lease is over. What it writes then is refused all the same.
//
// A mount that is detached while the lock lasts, by stagefs umount --lazy or as its
// daemon is ended, still has that lock, and Lock.Lost is not closed. But the
// directory's path leads past it, to where nothing is refused.
//
// A directory in a bind mount of a part of the static directory, where the root
// of the stagefs mount can't be seen, can't be locked by this package.
package client
