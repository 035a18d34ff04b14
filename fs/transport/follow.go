package transport

import (
	"bytes"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A follow keeps the threads that read /dev/fuse on the core that the requests
// come from, while they come from one. The kernel wakes the thread that waits
// longest, wherever that ran last: if it was another core, which sleeps, waking
// that takes several times as long as all the rest of a request.
type follow struct {
	core atomic.Int32 // where the threads should run; anyCore: where they like
	left atomic.Int32 // requests until the next look

	mu    sync.Mutex
	votes [votes]int32
	next  int
	every int32 // requests from one look to the next

	all unix.CPUSet // where they may run
	off bool        // there is but one core, or nothing can be learnt of it
}

const (
	anyCore = -1
	// votes is how many samples decide. One that differs is a bystander, or a
	// process that was moved; if more differ, several cores ask.
	votes = 4
	// rareLook is how many requests one look at where they come from stands
	// for, if nothing changes: a look takes about 10 us. It is odd, so that of
	// two processes that take turns both are seen.
	rareLook = 63
)

func newFollow() *follow {
	f := new(follow)
	f.core.Store(anyCore)
	f.left.Store(1)
	f.every = 1
	for i := range f.votes {
		f.votes[i] = anyCore
	}
	f.off = unix.SchedGetaffinity(0, &f.all) != nil || f.all.Count() < 2
	return f
}

// vote counts a sample, and looks often for a while if it is a surprise.
func (f *follow) vote(core int32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.votes[f.next] = core
	f.next = (f.next + 1) % votes
	same := 0
	for _, v := range f.votes {
		if v == core {
			same++
		}
	}
	switch old := f.core.Load(); {
	case same == votes:
		f.core.Store(core)
	case same >= 2 && old != core:
		f.core.Store(anyCore)
	}
	if f.every = min(2*f.every+1, rareLook); same == 1 {
		f.every = 1
	}
	f.left.Store(f.every)
}

// A follower is what a thread knows of the core it is on. It is used by that
// thread alone.
type follower struct {
	*follow
	at  int32 // anyCore: wherever it likes
	buf [1024]byte
}

func (f *follow) follower() *follower { return &follower{follow: f, at: anyCore} }

// asked is called after a request of a thread of some process.
func (f *follower) asked(tid uint32) {
	if f.off || tid == 0 {
		return
	}
	if f.left.Add(-1) == 0 {
		if core, ok := f.coreOf(tid); ok {
			f.vote(core)
		} else {
			f.left.Store(1)
		}
	}
	if core := f.core.Load(); core != f.at {
		f.move(core)
	}
}

// move ties the calling thread to a core, or to none.
func (f *follower) move(core int32) {
	set := &f.all
	if core != anyCore {
		set = new(unix.CPUSet)
		set.Set(int(core))
	}
	// Where it is not let go, it stays.
	_ = unix.SchedSetaffinity(0, set)
	f.at = core
}

// coreOf returns where a thread ran last, as proc_pid_stat(5) tells.
func (f *follower) coreOf(tid uint32) (core int32, ok bool) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(int(tid))+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, f.buf[:])
	if err != nil || n <= 0 {
		return 0, false
	}
	return coreIn(f.buf[:n])
}

// coreIn finds the 39th field. The second one, in brackets, may hold anything.
func coreIn(stat []byte) (core int32, ok bool) {
	const field = 39
	rest := stat[bytes.LastIndexByte(stat, ')')+1:]
	for range field - 3 {
		rest = bytes.TrimLeft(rest, " ")
		i := bytes.IndexByte(rest, ' ')
		if i < 0 {
			return 0, false
		}
		rest = rest[i:]
	}
	word, _, _ := bytes.Cut(bytes.TrimLeft(rest, " "), []byte(" "))
	n, err := strconv.ParseInt(string(word), 10, 32)
	return int32(n), err == nil && n >= 0
}
