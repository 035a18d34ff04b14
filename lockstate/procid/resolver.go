//go:build linux

package procid

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Options say how a [Resolver] works.
type Options struct {
	// Compat restricts the resolver to what Linux 5.10 offers. Without it, it
	// uses what it finds.
	Compat bool
	// Threads bounds how many threads are kept, and with them the
	// descriptors: at most two a thread, watched processes not counted.
	// 0: 1024.
	Threads int
}

// A Resolver tells which process a thread belongs to and watches processes for
// their end. It is safe for use by several goroutines.
type Resolver struct {
	kernel kernel
	limit  int            // Options.Threads
	epfd   int            // epoll(7) of the watched pidfds
	wakefd int            // eventfd(2) in epfd that ends the watcher
	wg     sync.WaitGroup // the watcher and what it started
	clock  atomic.Uint64  // counts uses, for the LRU order

	connector connector
	births    births
	looks     looks
	husks     husks
	turns     turns
	lines     lines
	numbers   numbers

	mu      sync.RWMutex
	closed  bool                    // guarded by mu
	threads map[uint32]*thread      // by thread id; guarded by mu
	groups  map[ID]*group           // guarded by mu
	pids    map[int]*group          // the latest of each pid in groups; guarded by mu
	brief   briefs                  // guarded by mu
	watched map[uint64]*group       // by group.serial; guarded by mu
	late    map[ID][]func(ID, Exit) // watches that are about to begin; guarded by mu
	serial  uint64                  // last group.serial given; guarded by mu
	shelf   *Shelf                  // guarded by mu; nil: there is none
	shelved int                     // how many are on it; guarded by mu
}

// NewResolver returns a resolver for the processes of the caller's pid
// namespace. It fails where the kernel (before Linux 5.10), a seccomp filter or
// a missing /proc leaves no way to know a process.
func NewResolver(o Options) (*Resolver, error) {
	k, err := probe(o.Compat)
	if err != nil {
		return nil, err
	}
	r := &Resolver{
		kernel:    k,
		limit:     cmp.Or(o.Threads, maxThreads),
		epfd:      -1,
		wakefd:    -1,
		connector: connector{fd: -1},
		husks:     husks{wake: make(chan struct{}, 1), stop: make(chan struct{})},
		turns:     newTurns(),
		numbers:   numbers{began: time.Now()},
		threads:   make(map[uint32]*thread),
		groups:    make(map[ID]*group),
		pids:      make(map[int]*group),
		watched:   make(map[uint64]*group),
		late:      make(map[ID][]func(ID, Exit)),
	}
	if err := r.startWatcher(); err != nil {
		return nil, err
	}
	return r, nil
}

// Close drops all watches without calling them, closes all descriptors and
// waits for callbacks that are under way. It must not be called by one.
func (r *Resolver) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return os.ErrClosed
	}
	r.closed = true
	clear(r.late)
	for _, g := range r.watched {
		r.unwatchLocked(g)
	}
	for tid, t := range r.threads {
		r.dropLocked(tid, t)
	}
	r.mu.Unlock()
	return r.stopWatcher()
}

// Lookup returns the process that the thread tid belongs to. The caller of a
// FUSE request cannot end before it is answered, so a handler that calls Lookup
// gets that very caller. The error is an [ErrUnknown] for 0 and a thread of
// another pid namespace (H4). For a thread that is gone it is so, too, or the process
// is that which the thread belonged to.
//
// It waits for an ancestor that is in execve(2), until stop is closed; nil: for as long
// as that takes.
func (r *Resolver) Lookup(tid uint32, stop <-chan struct{}) (*Process, error) {
	if tid == 0 {
		return nil, fmt.Errorf("%w: thread 0", ErrUnknown)
	}
	if p := r.caller(tid); p != nil {
		return p, nil
	}
	return r.learn(tid, nil, stop)
}

// Seen is Lookup for the caller of a request when nothing must be waited for: it
// is ErrBusy if the process is seen for the first time and its parent is not
// known.
func (r *Resolver) Seen(tid uint32) (*Process, error) {
	if tid == 0 {
		return nil, fmt.Errorf("%w: thread 0", ErrUnknown)
	}
	if p := r.caller(tid); p != nil {
		return p, nil
	}
	g, err := r.resolve(tid, impatient, nil, nil)
	if err != nil {
		return nil, err
	}
	return r.unpin(g), nil
}

// Known returns the process of a thread that is in the cache, or nil.
func (r *Resolver) Known(tid uint32) *Process { return r.cached(tid) }

// checkPid makes sure that a process has the pid that it was asked for.
func (r *Resolver) checkPid(pid int, p *Process) (*Process, error) {
	if pid <= 0 || pid > maxPid {
		return nil, fmt.Errorf("%w: pid %d", ErrUnknown, pid)
	}
	if p != nil && p.id.Pid != pid {
		return nil, fmt.Errorf("%w: %d is a thread of %d", ErrUnknown, pid, p.id.Pid)
	}
	return p, nil
}

// maxPid is PID_MAX_LIMIT, see /proc/sys/kernel/pid_max in proc(5).
const maxPid = 1 << 22

// Alive reports whether any thread of the process still lives. When the daemon
// is short of descriptors, or the process with that pid is in execve(2), it says
// yes to what it cannot look at: no lock ends by mistake.
func (r *Resolver) Alive(id ID) bool {
	alive, known := r.lives(id)
	return alive || !known
}

// Lives is Alive that says no to what cannot be looked at: nothing is granted by
// mistake.
func (r *Resolver) Lives(id ID) bool {
	alive, known := r.lives(id)
	return alive && known
}

func (r *Resolver) lives(id ID) (alive, known bool) {
	r.mu.RLock()
	g := r.groups[id]
	dead := g != nil && g.deadLocked()
	r.mu.RUnlock()
	if g != nil {
		return !dead && !r.isHuskLately(g), true
	}
	fd, err := r.openSoon(id)
	if err != nil {
		return false, isGone(err)
	}
	defer unix.Close(fd)
	return !isOver(fd, id.Pid), true
}

// openSoon is openExact, or ErrBusy.
func (r *Resolver) openSoon(id ID) (int, error) {
	return ask(r, id.Pid, brief, nil, func() (int, error) { return openExact(id) }, func(fd int) { unix.Close(fd) })
}

// ExitOf returns how a dead process ended. The answer is unknown, and no success
// where the kernel tells how processes end, for one that lives, and mostly for
// one that was reaped while it was neither cached nor watched.
func (r *Resolver) ExitOf(id ID) Exit {
	if g := r.pin(id); g != nil {
		defer r.unpin(g)
		r.mu.RLock()
		dead := g.deadLocked()
		r.mu.RUnlock()
		if !dead && !r.isHusk(g) {
			return r.unheard()
		}
		return r.exitStatus(id, g.fd, g)
	}
	fd, err := r.openSoon(id)
	if err != nil {
		return r.unheard()
	}
	defer unix.Close(fd)
	if !isOver(fd, id.Pid) {
		return r.unheard()
	}
	return r.exitStatus(id, fd, nil)
}

// openExact opens a pidfd of a process that is not reaped yet and has that
// start time. Where there is none the error is ESRCH.
func openExact(id ID) (int, error) {
	if id.Pid <= 0 {
		return -1, unix.ESRCH
	}
	fd, err := pidfdOpen(id.Pid, 0)
	if err == unix.EINVAL || err == unix.ENOENT { // a thread, not a process
		err = unix.ESRCH
	}
	if err != nil {
		return -1, err
	}
	st, err := readStat(id.Pid)
	if err == nil && st.start != id.Start {
		err = unix.ESRCH
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// isGone reports whether an error of resolve means that the process is no more,
// rather than that this process is short of something.
func isGone(err error) bool {
	return errors.Is(err, unix.ESRCH)
}
