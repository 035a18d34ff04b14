// Package lockstate decides which process holds which directory.
//
// A [Table] is a tree of directories ([Dir]) with locks on some of them. It
// knows no file system and no command line: a caller tells it what is about to
// change and which process asks, and the table answers whether that may be.
//
// # Terms
//
// A lock is a row of the table: directory, owner, kind, token, since. The
// owner is the process that has it; a holder is the owner or a descendant of
// it (H1, H2). The governing lock of a directory is the one on the nearest
// directory at or above it; without one the directory is free.
//
// A lease is a lock whose owner is a client with an ID instead: it ends at its
// deadline, and its holders carry the ID, or joined (L1, L2). A lock of a scope
// belongs to all processes of a group, session or cgroup, one of which stands
// for it (H3). What a process carries is looked up through [Options.Claims].
//
// # Guarantees
//
// When [Table.Acquire] has returned a grant, no operation of a process that
// does not hold the directory is in flight beneath it, none will be admitted
// until the lock ends, and no such process has a write handle beneath it,
// except holders of a lock further up who delegated (C3, W3).
//
// Tokens grow with every acquisition and never go back (fencing tokens).
//
// # What is not guaranteed
//
// The table is told of exits, renames and removals; it discovers none of them.
// It sees write handles only of those who open them through
// [Table.OpenHandle].
//
// Who only holds a lock beneath, as a child of its owner, is refused (C3c): that
// owner would go on writing under the new lock (W3), or have to own it instead,
// and then the death of who took it would not end it (R4).
//
// # Invariants
//
// [Table.Check] verifies these:
//
//	I1  the counters of each directory equal what is at and below it
//	I2  each row is indexed under its owner, its line of heirs and its token, and
//	    nowhere else; a lease under its token alone. What memory it takes is counted
//	I3  tokens are unique, not zero and not above the last one given out
//	I4  a removed directory has no rows, no handles and no children
//	I5  a handle is listed in exactly the directories it names
//	I6  a grant waits only for operations at or beneath its directory, or that
//	    rename or remove what it is in
//	I7  the row beneath another one on the same directory has a lower token
//	I8  each lease in force has a deadline, and the next one is known; but for
//	    one that is sealed: what was made under it is being cleared away
//	I9  a lease is one client's, and that one has no second one on the directory
//	I10 a row that is acquired is found by each descriptor lock that keeps it
//
// # Lock order
//
//	Table.refillMu    reserving tokens; may block on a store
//	  Table.mu        the tree; never held over a system call
//
// # Rules
//
// The comments and tests of all packages name what they are about by these. D
// is a directory, and its owner is the owner of the lock on it. A lock file is an
// entry whose name is a --lock-name, and a candidate is the temporary file that a
// program makes to link(2) it to that name.
//
// The mount:
//
//	M1   The mount covers the directory that it serves, or shows it at another
//	     place. No two daemons serve one directory, or one inside of another.
//	M2   What no lock concerns works as on the file system below.
//	M3   Files are reached only from descriptors that were opened before
//	     mounting, so that nothing which is renamed or linked beneath leads the
//	     daemon out of the directory.
//	M4   A daemon never uses its own mount. When it is told to end, it gives out
//	     no more locks, unmounts, and keeps its state for the next one.
//	M5   When it starts, it warns of processes that can get past the mount
//	     already, or refuses to start (--strict).
//
// What a lock covers:
//
//	C1   The lock on D covers D, all that is beneath it, and its name: only a
//	     holder renames or removes D, or a directory that D is in.
//	C2   The nearest lock counts. The child of a holder of D may lock a directory
//	     beneath D, and has that to itself until it releases it.
//	C3   D is granted only if C3a to C3d hold.
//	C3a  Nobody else has a lock on D.
//	C3b  Who asks for D holds each lock on a directory above D.
//	C3c  Locks beneath D are those of who asks, or of its descendants.
//	C3d  What is open or mapped for writing beneath D is so by who asks, by its
//	     descendants, or by holders of a lock at or above D.
//	C4   Containers are not locked by mkdir: the root of the mount, and with
//	     --depth the directories near it. The root is not locked at all.
//	C5   Who only reads is never refused.
//
// How a lock is taken:
//
//	A1   mkdir gives an implicit lock on the directory that it makes.
//	A2   It gives none where its caller is a holder already.
//	A3   To make the lock file in D by a call that fails if it is there, or by a
//	     link or rename to its name, gives an explicit lock on D.
//	A4   An exclusive flock or fcntl lock on the lock file gives an explicit lock
//	     on D while it lasts. With flock, and an OFD lock, the owner is the
//	     process that opened the file.
//	A5   A shared one gives a shared lock on D: while there is one, nobody writes.
//	A6   A plain open that makes the lock file gives a lock on D like A3. When who
//	     made it locks the descriptor, it becomes one like A4.
//	A7   Commands and the Go client take explicit locks, or leases.
//	A8   Who is refused gets the answer that lockers expect: EEXIST for the lock
//	     file's name, EAGAIN for a try. Who waits does so in line, until a signal.
//	A9   A candidate may be made where somebody else holds D. Only its maker sees
//	     it, and the file system below does if it wins the lock.
//	A10  Everybody may open the lock file, to lock it, and changes nothing by that.
//	A11  The lock file of a lock that lives looks new to all but its holders.
//	A12  Who makes a path and then the lock file at its end is left with the lock
//	     on that end. Who stages beside it is held back until then, for a moment.
//	A13  An explicit lock replaces an implicit one of the same owner. That of a
//	     child stands in front of it, until the child's ends.
//
// How a lock ends:
//
//	R1   A holder removes the lock file, or gives it another name.
//	R2   The lock on the descriptor ends: by an unlock, by the last close, or
//	     with the process. The lock file stays.
//	R3   D is removed. A rename of D takes the lock along.
//	R4   The owner dies. The lock ends at once, and the lock files and candidates
//	     that the owner made are removed.
//	R5   The owner exits with status 0 and has changed nothing. Then the lock does
//	     not end but passes to its parent, unless that is an init or the like, or
//	     the owner watched the lock, as stagefs run and the Go client do. So does
//	     the candidate that its lock file was linked from.
//	R6   A holder releases the lock, an admin breaks it, or a lease runs out.
//	R7   If the owner crashed, what was made under the lock is kept, destroyed or
//	     put aside.
//	R8   Who still has a file open for writing after the end is in the way of the
//	     next owner (C3d), and is listed.
//
// Who holds a lock:
//
//	H1   The owner does, with all of its threads. It is known by its pid and the
//	     time of its start.
//	H2   The owner's descendants do, also those whose parents have died.
//	H3   A lock may belong to a process group, a session or a control group
//	     instead, and lasts until nobody is left in it.
//	H4   A caller whom the daemon can't identify holds nothing and gets nothing.
//	     root is no exception to any rule.
//
// What is refused:
//
//	W1   Who does not hold D changes nothing that the lock covers, by any call.
//	W2   The errno is EBUSY, but where A8 to A10 say otherwise, and where the file
//	     system below would refuse, too.
//	W3   There is no gap. When a lock has been granted, nothing that others began
//	     before has an effect any more. When it has ended, the next owner finds
//	     all that was done under it.
//	W4   What no lock covers may be changed, or may not (--unlocked=deny).
//	W5   Files with certain names may be made and changed by everybody
//	     (--shared-name).
//	W6   Each refusal is counted, and the last ones can be read.
//
// Leases:
//
//	L1   A lease belongs to a client with an ID. It ends at its deadline, which
//	     the client puts off by renewing it.
//	L2   Its holders are the processes that have the ID in their environment or
//	     have joined, and their descendants. Their touch of the lock file renews.
//	L3   After its end, nothing is written through what was opened under it.
//	L4   Its clock is not the wall clock, and runs while the machine sleeps.
//
// What outlives the daemon:
//
//	S1   Locks and tokens do. The next daemon finds them by the identity of the
//	     directory, and ends the locks of those who died meanwhile.
//	S2   State that is damaged is reported and put aside. The rest is used.
//	S3   A lock file that no lock belongs to is an orphan. It keeps out only those
//	     who have to make it; listings show it, and an admin can remove it.
package lockstate
