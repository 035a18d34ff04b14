package transport

import (
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A gathering decides on which cores the threads run that read /dev/fuse. To
// wake a thread on another core that has gone idle takes several times as long as
// all the rest of a request (25 µs against 9 in a virtual machine), and the kernel
// wakes whichever thread has waited longest. So as long as one process calls after
// another, all threads wait on the core where it runs, and follow it; if many
// call at a time, there is one on each core.
//
// The kernel does not say where a caller runs. That the next request is late by
// what it takes to wake an idle core is the sign to look.
type gathering struct {
	least int   // how many wait for requests
	cores []int // that may be used; nil: threads run where the kernel puts them

	spread atomic.Bool             // a thread on each core
	core   atomic.Int32            // else all are on this one; -1: not known yet
	stray  atomic.Pointer[sitting] // who is elsewhere yet

	mu   sync.Mutex
	seat []*sitting

	answered atomic.Int64 // when the last caller got its answer, since epoch
	wait     atomic.Int32 // so many signs are passed over
	vain     atomic.Int32 // looks that found the caller here, at most maxVain
	lately   lately
}

// A sitting is one thread's place.
type sitting struct {
	tid, seat, core int
}

// lately is who has called.
type lately struct {
	last    atomic.Uint32
	seen    atomic.Uint32
	changes atomic.Uint32 // how often it was another one than before
	calm    atomic.Uint32 // windows in a row that had few changes
}

const (
	lateMin = 15 * time.Microsecond
	lateMax = 250 * time.Microsecond // by then it is the caller that takes its time
	maxVain = 3

	window    = 64 // requests
	manyCalls = window / 4
	fewCalls  = window / 16
	calmFor   = 8 // windows
)

var epoch = time.Now()

func now() int64 { return int64(time.Since(epoch)) }

// newGathering leaves threads alone where that is better: a single core, or
// without root's priority, where a thread must be free to go to where nobody
// else computes.
func newGathering() *gathering {
	g := &gathering{least: 2}
	g.core.Store(-1)
	var all unix.CPUSet
	if unix.Geteuid() != 0 || unix.SchedGetaffinity(0, &all) != nil || all.Count() < 2 {
		return g
	}
	for core := range len(all) * 64 {
		if all.IsSet(core) {
			g.cores = append(g.cores, core)
		}
	}
	return g
}

// threads is how many are to wait for requests.
func (g *gathering) threads() int {
	if g.spread.Load() {
		return max(g.least, len(g.cores))
	}
	return g.least
}

// sit is called by a thread that begins, stand when it ends.
func (g *gathering) sit(tid int) *sitting {
	s := &sitting{tid: tid, core: -1}
	if g.cores == nil {
		return s
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	taken := make([]int, len(g.cores))
	for _, other := range g.seat {
		taken[other.seat]++
	}
	s.seat = slices.Index(taken, slices.Min(taken))
	g.seat = append(g.seat, s)
	g.tieLocked(s)
	return s
}

func (g *gathering) stand(s *sitting) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seat = slices.DeleteFunc(g.seat, func(other *sitting) bool { return other == s })
	g.stray.CompareAndSwap(s, nil)
}

// tieLocked ties a thread to its core. It costs little unless the thread runs.
func (g *gathering) tieLocked(s *sitting) {
	core := int(g.core.Load())
	if g.spread.Load() {
		core = g.cores[s.seat]
	}
	if core < 0 || core == s.core {
		return
	}
	var one unix.CPUSet
	one.Set(core)
	if unix.SchedSetaffinity(s.tid, &one) == nil { // else it stays where it is
		s.core = core
	}
}

// rearrange ties all threads but the calling one, which whoever takes the next
// request ties while it waits.
func (g *gathering) rearrange(own *sitting) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.seat {
		if s != own {
			g.tieLocked(s)
		}
	}
	g.stray.Store(own)
}

// gave notes an answer.
func (g *gathering) gave(op uint32) {
	if g.cores != nil && !nobodys(op) {
		g.answered.Store(now())
	}
}

// took notes a request that a thread has just taken, and reports whether the
// threads are to be more now.
func (g *gathering) took(own *sitting, op, tid uint32) (more bool) {
	if g.cores == nil || !fromOutside(op) {
		return false
	}
	if s := g.stray.Load(); s != nil && s != own && g.stray.CompareAndSwap(s, nil) {
		g.mu.Lock()
		if slices.Contains(g.seat, s) {
			g.tieLocked(s)
		}
		g.mu.Unlock()
	}
	if many, decided := g.lately.note(tid); decided && many != g.spread.Load() {
		g.spread.Store(many)
		g.rearrange(own)
		return many
	}
	if late := time.Duration(now() - g.answered.Load()); !g.spread.Load() && late > lateMin && late < lateMax {
		g.follow(own, tid)
	}
	return false
}

// follow looks where a caller runs, which waits for its answer meanwhile. The
// more often in vain, the more rarely.
func (g *gathering) follow(own *sitting, tid uint32) {
	if g.wait.Load() > 0 {
		g.wait.Add(-1)
		return
	}
	core := coreOf(tid)
	if core == int(g.core.Load()) || !slices.Contains(g.cores, core) {
		g.wait.Store(1 << g.vain.Load())
		g.vain.Store(min(g.vain.Load()+1, maxVain))
		return
	}
	g.vain.Store(0)
	g.core.Store(int32(core))
	g.rearrange(own)
}

// note counts a request. A caller whose id is not known is another one each time.
func (l *lately) note(tid uint32) (many, decided bool) {
	if tid == 0 || l.last.Load() != tid {
		l.last.Store(tid)
		l.changes.Add(1)
	}
	if l.seen.Add(1)%window != 0 {
		return false, false
	}
	changes := l.changes.Swap(0)
	if changes > fewCalls {
		l.calm.Store(0)
		return true, changes >= manyCalls
	}
	return false, l.calm.Add(1) >= calmFor
}

// nobodys reports whether a request comes, or may come, when it suits the kernel.
func nobodys(op uint32) bool {
	switch op {
	case OpForget, OpBatchForget, OpRead, OpWrite, OpRelease, OpReleaseDir, OpInterrupt, OpNotifyReply:
		return true
	}
	return false
}

// fromOutside reports whether a request comes from no execve(2) that has replaced
// its process already: that makes FLUSH, GETATTR and GETXATTR, and until they are
// answered whoever reads its stat file waits.
func fromOutside(op uint32) bool {
	switch op {
	case OpLookup, OpSetAttr, OpSymlink, OpMknod, OpMkdir, OpUnlink, OpRmdir, OpRename, OpLink, OpOpen,
		OpOpenDir, OpReadDir, OpCreate, OpReadDirPlus, OpRename2:
		return true
	}
	return false
}

// coreOf returns the core that a thread has run on last; -1: not known.
func coreOf(tid uint32) int {
	fd, err := unix.Open("/proc/"+strconv.FormatUint(uint64(tid), 10)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	defer unix.Close(fd)
	var buf [1024]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return -1
	}
	return statCore(buf[:n])
}

// statCore finds it in the file's text.
func statCore(stat []byte) int {
	const processor = 39 // see proc_pid_stat(5)
	core, err := strconv.Atoi(procid.StatField(stat, processor))
	if err != nil {
		return -1
	}
	return core
}
