//go:build linux

package advisory_test

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/advisory"
	"golang.org/x/sys/unix"
)

var (
	tortureTime = flag.Duration("torture", 4*time.Second, "how long to compare with the kernel")
	tortureSeed = flag.Uint64("seed", 1, "first seed of the comparison; 0: random")
)

// TestTorture runs the same random calls by several processes against a real
// file and against the table, and compares every answer (M2).
func TestTorture(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	seed := *tortureSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	var sum tally
	for end := time.Now().Add(*tortureTime); time.Now().Before(end) && !t.Failed(); seed++ {
		torture(t, seed, end, &sum)
	}
	t.Logf("%+v", sum)
}

// tally counts what was compared.
type tally struct {
	Rounds, Calls, Granted, Refused, Waits, WaitGranted, Deadlocks, Killed, Gets, Found int

	Raced  int // the table took another of the ways that the kernel may go
	Lost   int // the kernel may go too many ways
	States int // most in which the kernel might have been
}

// A desc is an open file description.
type desc struct{ handle uint64 }

// A world is the processes' view of the file, and the table's.
type world struct {
	*kernel
	table  *advisory.Table
	states [2]states // in which the kernel may be, and the table
	rng    *rand.Rand
	fds    []map[int]*desc // by process and slot
	refs   map[*desc]int
	next   uint64
	waits  map[int]*wait // by call
	sum    *tally
	log    []string
}

type wait struct {
	p    int
	slot int
	lock advisory.Lock
	w    *advisory.Waiter
}

const (
	slots = 4
	span  = 12 // bytes
)

func torture(t *testing.T, seed uint64, end time.Time, sum *tally) {
	const procs = 4
	w := &world{
		kernel: newKernel(t, procs), table: advisory.New(), states: [2]states{newLinux(false), newLinux(true)}, rng: rand.New(rand.NewPCG(seed, 0)),
		refs: make(map[*desc]int), waits: make(map[int]*wait), sum: sum,
	}
	defer func() {
		for _, p := range w.procs {
			p.kill()
		}
		if t.Failed() {
			t.Logf("seed %d\n%s", seed, strings.Join(w.log, "\n"))
		}
	}()
	sum.Rounds++
	shared := make([]*desc, inherited)
	for i := range shared {
		shared[i] = w.newDesc()
		w.refs[shared[i]] = procs
	}
	for range procs {
		fds := make(map[int]*desc)
		for i, d := range shared {
			fds[i] = d
		}
		w.fds = append(w.fds, fds)
	}
	for i := 0; i < 600 && time.Now().Before(end); i++ {
		if !w.step() {
			return
		}
		if err := w.table.Check(); err != nil {
			w.failf("%v", err)
			return
		}
	}
}

func (w *world) failf(format string, args ...any) {
	w.t.Helper()
	w.t.Errorf(format, args...)
}

func (w *world) newDesc() *desc {
	w.next++
	return &desc{w.next}
}

// step does one call. It reports whether to go on.
func (w *world) step() bool {
	p := w.rng.IntN(len(w.procs))
	slot := w.rng.IntN(slots)
	busy := slices.ContainsFunc(slices.Collect(maps.Values(w.waits)), func(x *wait) bool { return x.p == p && x.slot == slot })
	d := w.fds[p][slot]
	w.sum.Calls++
	n := w.rng.IntN(100)
	switch {
	case n == 0 && w.rng.IntN(4) == 0:
		return w.kill(p)
	case d == nil:
		w.logf("open", p, slot, "")
		if r := w.call(w.procs[p], command{Op: "open", Slot: slot}); r.Errno != 0 {
			w.failf("open: %v", r.Errno)
			return false
		}
		d = w.newDesc()
		w.fds[p][slot], w.refs[d] = d, 1
		return true
	case n < 6:
		to := w.rng.IntN(slots)
		if w.fds[p][to] != nil {
			return true
		}
		w.logf("dup", p, slot, fmt.Sprint(to))
		w.call(w.procs[p], command{Op: "dup", Slot: slot, To: to})
		w.fds[p][to] = d
		w.refs[d]++
		return true
	case n < 12:
		if busy {
			return true
		}
		w.logf("close", p, slot, "")
		w.call(w.procs[p], command{Op: "close", Slot: slot})
		last := w.close(p, slot)
		return w.compare(func(s *linux) {
			s.close(owner(w.procs[p].pid), last...)
		}, 0, 0)
	case n < 30:
		return w.get(p, slot, d)
	default:
		return w.lock(p, slot, d)
	}
}

func (w *world) logf(op string, p, slot int, rest string) {
	d := w.fds[p][slot]
	h := uint64(0)
	if d != nil {
		h = d.handle
	}
	w.log = append(w.log, fmt.Sprintf("%s p%d slot %d (h%d) %s", op, p, slot, h, rest))
}

// close does what the kernel makes of close(2): FLUSH, and RELEASE if it was
// the last one, which it returns then.
func (w *world) close(p, slot int) (last []uint64) {
	d := w.fds[p][slot]
	delete(w.fds[p], slot)
	w.table.Flush(key, owner(w.procs[p].pid))
	if w.refs[d]--; w.refs[d] == 0 {
		w.table.Release(key, d.handle)
		return []uint64{d.handle}
	}
	return nil
}

func owner(pid int) uint64 { return 1<<40 | uint64(pid) }

// kill ends a process that perhaps waits and holds, and starts another one.
func (w *world) kill(p int) bool {
	w.log = append(w.log, fmt.Sprintf("kill p%d", p))
	w.sum.Killed++
	w.procs[p].kill()
	var waits []int
	for _, id := range slices.Sorted(maps.Keys(w.waits)) {
		if x := w.waits[id]; x.p == p {
			waits = append(waits, id)
			x.w.Cancel()
			if err := <-x.w.Done(); err != nil && !errors.Is(err, advisory.ErrCancelled) && !errors.Is(err, advisory.ErrDeadlock) {
				w.failf("cancel: %v", err)
			}
			delete(w.waits, id)
		}
	}
	var last []uint64
	for slot := range slots {
		if w.fds[p][slot] != nil {
			last = append(last, w.close(p, slot)...)
		}
	}
	dead := owner(w.procs[p].pid)
	w.procs[p] = startProc(w.t, w.path, nil)
	return w.compare(func(s *linux) {
		s.kill(waits...)
		s.close(dead, last...)
	}, 0, 0)
}

func (w *world) request(p int, d *desc, op string) (command, advisory.Lock) {
	c := command{Op: op, Type: []int16{unix.F_RDLCK, unix.F_WRLCK}[w.rng.IntN(2)]}
	l := advisory.Lock{Owner: owner(w.procs[p].pid), Handle: d.handle, Pid: uint32(w.procs[p].pid), Write: c.Type == unix.F_WRLCK}
	switch op {
	case "flock":
		l.Flock = true
		l.Owner, l.End = d.handle, advisory.MaxEnd
		return c, l
	case "ofd", "getofd":
		l.Owner = d.handle
	}
	c.Start = w.rng.Int64N(span)
	c.Len = w.rng.Int64N(span / 2)
	l.Start, l.End = uint64(c.Start), uint64(c.Start+c.Len-1)
	if c.Len == 0 {
		l.End = advisory.MaxEnd
	}
	return c, l
}

func (w *world) get(p, slot int, d *desc) bool {
	op := []string{"get", "getofd"}[w.rng.IntN(2)]
	c, l := w.request(p, d, op)
	c.Slot = slot
	own := op == "getofd" && w.rng.IntN(4) == 0
	find := w.table.Get
	if own {
		c.Type, find = unix.F_UNLCK, w.table.GetOwn
	}
	w.logf(op, p, slot, fmt.Sprintf("%+v", l))
	r := w.call(w.procs[p], c)
	if own && r.Errno == syscall.EINVAL {
		return true // before Linux 6.6
	}
	w.sum.Gets++
	answer := func(lock advisory.Lock, ok bool) unix.Flock_t {
		if !ok {
			return unix.Flock_t{Type: unix.F_UNLCK}
		}
		f := unix.Flock_t{Type: unix.F_RDLCK, Start: int64(lock.Start), Len: int64(lock.End - lock.Start + 1), Pid: int32(lock.Pid)}
		if lock.Write {
			f.Type = unix.F_WRLCK
		}
		if lock.End == advisory.MaxEnd {
			f.Len = 0
		}
		if lock.Owner < 1<<40 {
			f.Pid = -1 // Linux's word for OFD locks
		}
		return f
	}
	got := answer(find(key, l))
	want := unix.Flock_t{Type: r.Lock.Type, Start: r.Lock.Start, Len: r.Lock.Len, Pid: r.Lock.Pid}
	if want.Type == unix.F_UNLCK {
		want = unix.Flock_t{Type: unix.F_UNLCK}
	} else {
		w.sum.Found++
	}
	for i, f := range []unix.Flock_t{want, got} {
		var can []unix.Flock_t
		w.states[i] = slices.DeleteFunc(w.states[i], func(s *linux) bool {
			can = append(can, answer(s.get(l, own)))
			return can[len(can)-1] != f
		})
		if len(w.states[i]) == 0 {
			w.failf("get %+v: the table says %+v, the kernel %+v, the rules %+v", l, got, want, can)
			return false
		}
	}
	if got != want {
		w.sum.Raced++
		return false
	}
	return true
}

func (w *world) lock(p, slot int, d *desc) bool {
	op := []string{"posix", "posix", "ofd", "flock"}[w.rng.IntN(4)]
	c, l := w.request(p, d, op)
	c.Slot = slot
	switch {
	case w.rng.IntN(4) == 0:
		c.Type = unix.F_UNLCK
		w.logf(op, p, slot, fmt.Sprintf("unlock %d-%d", l.Start, l.End))
		w.call(w.procs[p], c)
		w.table.Unlock(key, l)
		return w.compare(func(s *linux) {
			s.unlock(l)
		}, 0, 0)
	case w.rng.IntN(3) == 0 && op != "ofd" && len(w.waits) < 6 && (w.rng.IntN(8) == 0 || !w.waiting(p)):
		// An OFD lock that waits is known to differ: see the package
		// comment.
		c.Wait = true
		w.sum.Waits++
		w.logf(op, p, slot, fmt.Sprintf("wait %v %d-%d", l.Write, l.Start, l.End))
		id := w.send(w.procs[p], c)
		w.waits[id] = &wait{p, slot, l, w.table.Start(key, l)}
		return w.compare(func(s *linux) {
			s.wait(id, l)
		}, 0, 0)
	}
	r := w.call(w.procs[p], c)
	err := w.table.Try(key, l)
	w.logf(op, p, slot, fmt.Sprintf("try %v %d-%d: %v", l.Write, l.Start, l.End, r.Errno))
	if err == nil {
		w.sum.Granted++
	} else {
		w.sum.Refused++
	}
	return w.compare(func(s *linux) { s.try(l) }, errno(err), r.Errno)
}

// waiting reports whether the process waits for a record lock.
func (w *world) waiting(p int) bool {
	for _, x := range w.waits {
		if x.p == p && !x.lock.Flock {
			return true
		}
	}
	return false
}

func errno(err error) syscall.Errno {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, advisory.ErrConflict):
		return syscall.EAGAIN
	case errors.Is(err, advisory.ErrDeadlock):
		return syscall.EDEADLK
	}
	return syscall.ENOTRECOVERABLE
}

// An outcome is what can be seen after a call: its answer, the waits that are over
// and their results, and what is held.
func outcome(answer syscall.Errno, ended map[int]syscall.Errno, held []string) string {
	return fmt.Sprintf("%d, ended %d, held %q", answer, ended, held) // fmt sorts maps
}

// states are those in which the kernel may be.
type states []*linux

// after returns the outcomes of a call, nil if there are too many.
func (all states) after(call func(*linux)) map[string]states {
	var begun []*linux
	for _, s := range all {
		s = s.begin()
		call(s)
		begun = append(begun, s)
	}
	begun = settle(begun)
	if begun == nil {
		return nil
	}
	can := make(map[string]states)
	for _, s := range begun {
		o := outcome(s.answer, s.ended, listed(s.held()))
		can[o] = append(can[o], s)
	}
	return can
}

// compare makes a call in all states in which the kernel, and the table, may be.
// What each of them did must be one of the outcomes. It reports whether both did
// the same.
func (w *world) compare(call func(*linux), answer, kernelAnswer syscall.Errno) bool {
	may, mayTable := w.states[0].after(call), w.states[1].after(call)
	if may == nil || mayTable == nil {
		w.sum.Lost++
		return false
	}
	calls := make(map[int]*proc)
	ended := make(map[int]syscall.Errno)
	for id, x := range w.waits {
		calls[id] = w.procs[x.p]
		select {
		case err := <-x.w.Done():
			ended[id] = errno(err)
		default:
		}
	}
	got := outcome(answer, ended, listed(w.table.Locks(key)))
	var want string
	kernelEnded := make(map[int]syscall.Errno)
	for late := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		for id, r := range w.settled(calls) {
			kernelEnded[id] = r.Errno
			delete(calls, id)
		}
		// The list may have moved while it was read: other programs' locks
		// are in it.
		want = outcome(kernelAnswer, kernelEnded, w.held())
		if may[want] != nil || time.Now().After(late) {
			break
		}
	}
	w.states = [2]states{may[want], mayTable[got]}
	w.sum.States = max(w.sum.States, len(w.states[0]))
	if w.states[0] == nil || w.states[1] == nil {
		for id, x := range w.waits {
			w.log = append(w.log, fmt.Sprintf("call %d: p%d %+v", id, x.p, x.lock))
		}
		w.failf("the table: %s\nthe kernel: %s\nthe rules of the kernel:\n%s\nand of the table:\n%s", got, want,
			strings.Join(slices.Sorted(maps.Keys(may)), "\n"), strings.Join(slices.Sorted(maps.Keys(mayTable)), "\n"))
		return false
	}
	if got != want {
		w.sum.Raced++
		return false
	}
	for id, e := range ended {
		if e == syscall.EDEADLK {
			w.sum.Deadlocks++
		} else {
			w.sum.WaitGranted++
		}
		x := w.waits[id]
		w.log = append(w.log, fmt.Sprintf("  p%d's wait %v %d-%d ended: %v", x.p, x.lock.Write, x.lock.Start, x.lock.End, e))
		delete(w.waits, id)
	}
	return true
}
