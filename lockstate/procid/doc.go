//go:build linux

// Package procid says who a process is: which process a thread id from a FUSE
// request belongs to, whom it descends from, whether it still lives, and how
// it ended.
//
// # Terms
//
// A process is a thread group. Its [ID] is the pair of its pid and its start
// time: the number alone is given to another process later (H1). A caller is
// named by the id of one of its threads, because that is what the kernel puts
// into a FUSE request. An ancestor is a process that was on the way from pid 1
// down to another when that one was first seen, or, once [Resolver.FollowBirths] was
// called, when it was made.
//
// # Guaranteed
//
//   - [Resolver.Lookup] never answers with a process that had the thread id
//     earlier. Every answer out of the cache was checked against a descriptor
//     that refers to the thread itself, not to its number, and no thread was made
//     since it was (see numbers).
//   - Two threads of a process give the same *[Process] while it is cached.
//   - Descent is recorded when a process is first seen, and a process only ever
//     loses ancestors later. So one that its parent left behind keeps those it
//     was seen with, and hands them on to the children it has from then on (H2).
//   - Who was left behind before it was first seen has those for ancestors, too, from
//     whom it was when it was made after FollowBirths, however many of them are dead by
//     then: the kernel writes down each birth before the child may run. What is not
//     certain is not used: a process never has an ancestor that did not make it, nor
//     one of those from whom it descends.
//   - A process lives until its last thread is gone. A zombie is dead; a process
//     whose first thread ended before the others is not. One of which there are
//     zombies alone is dead, too, although a debugger has not waited for them, and
//     so its parent and its pidfd tell nothing (see husks).
//   - A watch that has begun fires once, well within the 10 ms of R4, and no
//     callback and no search for an exit status delays another watch.
//   - What a [Shelf] has outlives this process, if another one has it open: then the next
//     one learns how those have ended that are watched now, or have ended just before.
//   - Nothing is left open after [Resolver.Close]; every descriptor is
//     close-on-exec.
//
// # Not guaranteed
//
//   - A process that was pushed out of the cache (see maxThreads; the dead go
//     first) and re-parented before it is seen again has lost its old
//     ancestors. A watched process is not pushed out.
//   - A watch fires up to 2 s late, or 2 ms for each that is watched, for one that
//     is dead while a debugger, which traces it, does not wait for it; 5 ms at most if
//     somebody asks whether it lives, where the connector is open, or where
//     [Resolver.Suspect] was called.
//   - A shelf has the latest 512 at most, or as many as an ordinary user's socket buffer
//     takes; and none before Linux 6.15.
//   - Births are not known of from before FollowBirths, from while the kernel's
//     buffers were full (see ringMost), and where perf_event_open(2) for all processes
//     takes rights that the daemon does not have. A processor that is switched on, and
//     off again before the next process is looked at that was left behind, is not
//     noticed: what was born there is unknown then, and one of several with the
//     same pid could be taken for another.
//   - Of who was made by a process that was never seen, before the daemon was replaced,
//     and itself left one behind after it, that one's descent is unknown.
//   - [Exit.Known] can be false: the status of a process that was reaped before
//     it could be read is kept by the kernel only since Linux 6.15. Before, the
//     process events connector tells it to root in the initial namespaces, of
//     all that are in the cache from the first watch on. [Resolver.KnowsExits]
//     says whether there is either. An ordinary user's daemon is not shown another
//     user's status before it is reaped.
//   - The connector tells how threads end, and the status of a process is taken
//     from its last one. A program that ends its threads one by one, without the
//     C library, with different statuses, may be taken for another end. Events
//     that come too fast (for 8 MiB of them to be read) are lost: the status is
//     unknown then, as it is where the first thread of several ended unheard.
//     (Some kernels of about Linux 6.7 tell nothing more once an event has found
//     no taker: then statuses are unknown, whatever KnowsExits says.)
//   - Two processes with the same pid that started in the same tick of the clock
//     (10 ms) have different IDs only while the last one before is cached, watched or
//     pinned, or among some thousand that were so briefly.
//     Once an ID is written down, or carried to the next daemon, it means both. Pids
//     come round that fast only when somebody with the right to do so sets the next one,
//     or leaves few to be had (pid_max).
//   - Subreapers cannot be recognised by the flag that makes them one: the
//     kernel does not show it. They are known by name, by cgroup, as the init
//     of a pid namespace and, after FollowBirths, by having adopted who was left behind
//     before it was first seen: for which a child is taken that somebody who is dead by
//     then made with CLONE_PARENT.
//   - A process that has entered a pid namespace from outside (nsenter(1)), and
//     loses its parent before it is seen, is taken for a descendant of that
//     namespace's init, which adopts it, where births are not known of. So it is
//     if it comes from outside of the daemon's own pid namespace.
//   - Nothing is known of a process, but that it lives, while it or an ancestor
//     is in execve(2) and was not seen before.
//
// # Invariants
//
//   - I1: every thread in Resolver.threads points to a group in Resolver.groups
//     or to one that a later process with the same ID displaced.
//   - I2: a group's descriptor is open while a thread, a watch or a pin refers to
//     the group, and closed with the last of them.
//   - I3: a descriptor is used under Resolver.mu (either side) or under a pin, so
//     that its number cannot come to mean another file meanwhile.
//
// # What waits
//
// The kernel (6.18.44) shows stat, environ, maps and the links of a process only
// while it is not in execve(2), until that has closed what is close-on-exec: it may
// wait for any file system, ours included, without end. It always shows status,
// comm, cgroup, the lists of threads and descriptors, and PIDFD_GET_INFO. cmdline, environ
// and maps are shown only while no thread of that process changes what is mapped, which
// may wait for any file system as well; Cmdline waits for a moment at most.
// So no other look is made for a FLUSH or GETXATTR, which may come from there, nor
// one that may take long with locks that these need. Lookup waits for an ancestor, and for the
// process itself if it is not the caller. Seen waits for no ancestor, Known and
// Watch for nobody; ByPid, Glance, Alive and ExitOf for a moment (see Soon).
//
// Thousands may ask at a time. A look has a thread only while it asks the kernel, and
// few do so at a time, for they need processors, not threads (see turns); one that the
// kernel keeps does not count. All that waits for something else, such as the answer
// to a look at a parent, does so as a goroutine. A look that asks waits for nothing
// but the kernel: so none ever waits for another's turn with its own.
//
// # Lock order
//
//	connector.mu, births.mu
//	    Resolver.mu
//
// looks.mu, lines.mu and turns.mu are each taken with nothing else, and nothing waits with
// them.
// Resolver.mu is held over poll(2) with no timeout, PIDFD_GET_INFO, epoll_ctl(2)
// and close(2) of process descriptors, and a read of the list of processors, none of
// which waits, and never over /proc or a callback. connector.mu is held over what is done to the connector's socket,
// which never waits either, so that events are taken in in their order; births.mu
// likewise over the buffers of births.
package procid
