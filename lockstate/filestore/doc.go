// Package filestore keeps in files what must outlive the daemon: which process
// serves a backing directory, how far the fencing tokens have come, and the
// locks in force.
//
// # Files
//
// A state directory may serve many backings. Each has a key, which the caller
// makes from the identity of the backing, and these files:
//
//	KEY.lock       flock(2)ed by the daemon that serves the backing (M1); holds its pid
//	KEY.place      where the backing was then, see [Options], and how much of the
//	               last journal was on the disk
//	KEY.mount      by which mount the backing was served then
//	KEY.tokens     the mark: no token above it was ever given out
//	KEY.locks.N    the locks when generation N began
//	KEY.journal.N  what has changed since
//
// All are text; the lines of the last three have a checksum.
//
// # Guarantees
//
//   - One [Store] a key at a time, in all processes of the machine. The kernel
//     drops the flock when the process dies, however that happens.
//   - After any end of the daemon, kill -9 and power cut included, the mark is at
//     least as high as every value that [Store.Reserve] has accepted.
//   - After kill -9 of the daemon, all records are there that [Store.Flush] has
//     returned for; after a power cut, all that [Store.Sync] has returned for,
//     and others up to about a second before the cut.
//   - A record that is torn or damaged (S2) is left out and the file kept for
//     inspection; the rest is used. So is a journal that has become shorter than it
//     was a second before its daemon ended.
//   - What a newer version has written, and this one would lose, is refused with
//     [ErrNewer] and left as it is.
//   - Files of an open store that somebody removes, moves away or changes are made
//     anew within two seconds, and so is the state directory.
//   - A full disk stops neither tokens nor locks; the records of new locks are
//     written when there is room again.
//   - A mark that is torn, damaged or missing (S2) is replaced by one that is
//     higher than any before it, see [Store.Tokens]. So is that of a backing that was
//     served with another state since, as far as the caller can tell.
//
// # Not guaranteed
//
// Two daemons with different state directories do not see each other here: the
// caller must guard the backing itself. Whoever may write to the state directory
// can undo most of the above; it is therefore refused if others than its owner
// may.
package filestore
