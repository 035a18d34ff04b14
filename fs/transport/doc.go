// Package transport carries the kernel's FUSE requests to a file system and
// its answers back. It knows the protocol and nothing of what is served.
//
// There are three ways, from the fastest to the most modest; [Start] takes the
// best one that can be had, or the one that is asked for:
//
//	uring    a queue a core, which the kernel fills through io_uring (Linux
//	         6.14, if enable_uring is set): one system call a request
//	threads  pinned threads that read /dev/fuse and answer in place: two
//	fuse     go-fuse's own server
//
// # Requests that take long
//
// A request keeps the thread that took it until it is answered: the reply
// needs no hand-over. So that none waits for another's thread, each source of
// requests (/dev/fuse, or one core's queue) has a crew that gets another thread
// as soon as all have been busy for a millisecond. Requests that may wait without
// end, by the thousand, are carried out by goroutines: those for locks, and reads
// and writes of some files ([Options].Apart).
//
// To wake a thread on another core costs more than a request. A ring's threads are
// on the core where their requests are made; the threads that read /dev/fuse
// follow whoever makes them, see gathering.
//
// A ring's thread owns a single place of its queue, which is all that a blocked
// request can hold up: what is in a ring's places, its own thread alone can take
// out. (libfuse's passthrough_hp has many in one ring. Next to a call that its
// backing kept waiting, another one on that core waited for as long.) Nor would a
// thread find several requests at a time. It comes before its callers, so that one
// is answered before the next is made; passthrough_hp, given the same priority,
// wakes for each request, too. At the usual priority, and with two callers on a core, it
// finds two at a time, and wakes 0.6 times for a chmod. A thread with a single place then
// gets the second one as it answers the first, which is just when the one that it has
// answered takes the processor from it: it was no faster for that.
//
// The kernel hands a request that found no free place to the next one that is
// answered, not to one that is added; so whoever adds one
// asks the kernel for an empty request of its own (a FUSE_NOTIFY_RETRIEVE of
// nothing) and answers it, which gets the line moving.
//
// A request that waits keeps its place, but not the thread: the thread takes
// another place, and the answer is delivered by the queue's keeper, one thread
// for all of them. What it has answered waits for a request again, and can't be
// given back to the kernel without the risk that one gets lost in it. So the
// keeper has an empty request put there and leaves it unanswered: such a place is
// spare, and costs a page of memory, until somebody needs one and answers the
// empty request. There are as many places in the end as requests were under way
// at a time. (The kernel counts the empty requests among those that wait, in
// /sys/fs/fuse/connections.)
//
// If even [maxThreads] threads of a queue are busy, or no more can be had, what comes
// next goes to places of the keeper, and is carried out by goroutines as well.
//
// # Limits
//
// So a crowd meets these first: 16384 waits for locks of a user and 32768 in all
// (ENOLCK), or half as many open files as RLIMIT_NOFILE allows the daemon
// (ENFILE). Its threads, and so what Go allows, and its mappings
// (vm.max_map_count), do not grow with what waits.
//
// # Stops
//
// [Transport.Stop] takes nothing any more, cancels what waits, and keeps the
// bytes of each request that was taken and not answered. It is carried out and
// answered by whoever goes on, this process or the next program in it
// ([Continue]): the kernel knows a request by its number, and a place of a ring
// by its queue and address, and does not mind who answers. So nothing has to be
// sent again. A ring itself dies with exec(2); a request in one of its places
// does not, and is answered through a new ring. What must not be is a place that
// waits for a request: one that came in that moment would be lost.
//
// # Ends
//
// When the kernel lets go of the connection (an unmount, an abort), each thread
// learns it from its next system call. Requests under way are cancelled, and
// [Transport.Serve] returns when the last thread is gone.
package transport
