// Package fs serves a static directory through FUSE and enforces the locks on
// it.
//
// It stands on go-fuse's raw API. It knows inodes, names and errno values; who
// holds what is decided by package lockstate. [Mount] is the way in.
//
// # Terms
//
// The backing is the real content of the static directory. A node is an inode
// that the kernel knows, or the parent of one. A lock file is an entry whose
// name is one of Options.LockNames; a candidate is the temporary file of a
// link(2) protocol.
//
// Rules are named by a letter and a number, as in W1: the documentation of package
// lockstate lists them.
//
// # Guarantees
//
// Every operation that changes something passes the gate (gate.go) and is
// carried out only if the table admits it (W1); it stays registered until the
// backing has it, so that an acquisition returns only after all that was under
// way beneath it is over (W3). The backing is reached only relative to a
// descriptor that was opened before mounting, one name at a time and never
// through a symlink (M3). What is created belongs to the caller by the
// backing's own rules (M2).
//
// Where the kernel can, it reads and writes the files of the backing itself
// (iomode.go). What a file was opened for then outlives the daemon, and a
// writable mapping outlives its RELEASE; so does its entry in the lock table
// (linger.go, adopt.go).
//
// A daemon can be replaced by another program in the same process (carry.go):
// everything that a client has goes on. Whatever state is added here has to be
// carried over too, or refuse the replacement. HandoverFormat changes when the
// meaning of what is written down does. What matters for moments only, until a system
// call has returned (stale.go, underway.go), is not: the replacement takes longer.
//
// # What is not guaranteed
//
// The time of a command that waits so long begins anew when the daemon is
// replaced.
//
// Whoever reaches the backing past the mount is not seen: descriptors and
// working directories from before the mount, other mount namespaces, root.
// Changes made that way show up in the mount after at most an hour (see validity).
//
// # Invariants
//
//	I1  a node is in the table as long as the kernel has it, or a node
//	    beneath it, or the daemon has pinned it
//	I2  a node number is never used twice with the same generation
//	I3  a node has at least one name, or a descriptor that stands for it, or
//	    is private to one process; or it stands for another node, or reaches
//	    nothing any more
//	I4  every descriptor that may change content is registered with the lock
//	    table before it is opened and until after it is closed, and until
//	    nothing is mapped writable through it any more
//	I5  handles of one inode that are open at a time reach its data in ways
//	    that the kernel admits together; while a mapping lingers, none reads
//	    or fills the kernel's pages of it
//
// # Lock order
//
//	candidate.mu           never taken beneath FS.ns, but for a lock file's
//	  FS.reapMu            one death at a time
//	    FS.ns              names in the backing; exclusive: discard (beneath
//	                       FS.trashMu, too), and rename but for ordinary files.
//	                       Who waits to have it alone keeps out the others for
//	                       moments only (spin.go)
//	      FS.hiddenMu
//	      FS.watchMu
//	      nodeTable.changing  a file and its names; of two files by rename
//	                       only, by their numbers. An acquisition that waits for
//	                       what is under way has none
//	        FS.aliasMu     operations on files with several links
//	          FS.lockMu    the locks on a lock file, and what they keep
//	            advisory.Table
//	          file.cut     what is written by the kernel's size, and O_TRUNC
//	          file.mu      how an open file is reached; beneath file.cut, too
//	            handleTable.mu, shard.mu
//	          changesUnderWay.mu
//	          nodeTable.mu
//	            dirCache.mu, dirStreams.mu
//	            lockstate.Table
//	              eventLog.mu
//
// Others stand beside that tree, taken before what is named behind them:
//
//	openDir.mu             a listing of a directory: all that it takes
//	waitList.searching     waitList.mu, advisory.Table, lockstate.Table
//	waitList.mu            nodeTable.mu
//	candidates.mu          nodeTable.mu, lockstate.Table, the store's
//	lockLooks.mu           nodeTable.mu
//	expiry.mu              lockstate.Table
//	lostKeys.mu            lockstate.Table
//	openers.mu             handleTable.mu, nodeTable.mu, lockstate.Table
//	hotDirs.mu             the store's
//	denialLog.mu           lineLimit.mu
//	controlDir.mu          ctl.mu, and eventReader.mu before eventLog.mu
//	orphanList.mu          leftovers.mu, and that before candidates.mu
//
// Beneath all further ones nothing is taken.
//
// No lock is held while a request waits for somebody else's lock to end, or for
// more than a moment for a process in execve(2) (see.go). The caller of a FLUSH
// may be in one: nothing of it is looked at but its status.
package fs
