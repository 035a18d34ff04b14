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
// deadline, and its holders carry the ID, or joined (§8). A lock of a scope
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
//	I2  each row is indexed under its owner and its token, and nowhere else
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
package lockstate
