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
	Raced                                                                               int // granted in another order, as the kernel may
}

// A desc is an open file description.
type desc struct{ handle uint64 }

// A world is the processes' view of the file, and the table's.
type world struct {
	*kernel
	table *advisory.Table
	rng   *rand.Rand
	fds   []map[int]*desc // by process and slot
	refs  map[*desc]int
	next  uint64
	waits map[int]*wait // by call
	sum   *tally
	mixed bool // owners' order may differ: some were granted together
	log   []string
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
		kernel: newKernel(t, procs), table: advisory.New(), rng: rand.New(rand.NewPCG(seed, 0)),
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
		got, want := held(w.table), w.held()
		for end := time.Now().Add(5 * time.Second); !slices.Equal(got, want) && time.Now().Before(end); {
			// The list may have moved between two reads: other
			// programs' locks are in it.
			time.Sleep(time.Millisecond)
			want = w.held()
		}
		if !slices.Equal(got, want) {
			w.failf("held:\n%q, want\n%q", got, want)
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
		w.close(p, slot)
		return w.compare(nil)
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
// the last one.
func (w *world) close(p, slot int) {
	d := w.fds[p][slot]
	delete(w.fds[p], slot)
	w.table.Flush(key, owner(w.procs[p].pid))
	if w.refs[d]--; w.refs[d] == 0 {
		w.table.Release(key, d.handle)
	}
}

func owner(pid int) uint64 { return 1<<40 | uint64(pid) }

// converting reports whether somebody waits for a flock lock through the
// description. Its next attempt drops what others set through it meanwhile, and
// when that is made is up to the kernel.
func (w *world) converting(d *desc) bool {
	for _, x := range w.waits {
		if x.lock.Flock && x.lock.Handle == d.handle {
			return true
		}
	}
	return false
}

// kill ends a process that perhaps waits and holds, and starts another one.
func (w *world) kill(p int) bool {
	w.log = append(w.log, fmt.Sprintf("kill p%d", p))
	w.sum.Killed++
	w.procs[p].kill()
	for id, x := range w.waits {
		if x.p == p {
			x.w.Cancel()
			if err := <-x.w.Done(); !errors.Is(err, advisory.ErrCancelled) {
				w.failf("cancel: %v", err)
			}
			delete(w.waits, id)
		}
	}
	for slot := range slots {
		if w.fds[p][slot] != nil {
			w.close(p, slot)
		}
	}
	w.procs[p] = startProc(w.t, w.path, nil)
	return w.compare(nil)
}

func (w *world) request(p int, d *desc, op string) (command, advisory.Lock) {
	c := command{Op: op, Type: []int16{unix.F_RDLCK, unix.F_WRLCK}[w.rng.IntN(2)]}
	l := advisory.Lock{Owner: owner(w.procs[p].pid), Handle: d.handle, Pid: uint32(w.procs[p].pid), Write: c.Type == unix.F_WRLCK}
	switch op {
	case "flock":
		l.Flock = true
		l.Owner = d.handle
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
	find := w.table.Get
	if op == "getofd" && w.rng.IntN(4) == 0 {
		c.Type, find = unix.F_UNLCK, w.table.GetOwn
	}
	w.logf(op, p, slot, fmt.Sprintf("%+v", l))
	r := w.call(w.procs[p], c)
	if c.Type == unix.F_UNLCK && r.Errno == syscall.EINVAL {
		return true // before Linux 6.6
	}
	w.sum.Gets++
	got := unix.Flock_t{Type: unix.F_UNLCK}
	if lock, ok := find(key, l); ok {
		w.sum.Found++
		got = unix.Flock_t{Type: unix.F_RDLCK, Start: int64(lock.Start), Len: int64(lock.End - lock.Start + 1), Pid: int32(lock.Pid)}
		if lock.Write {
			got.Type = unix.F_WRLCK
		}
		if lock.End == advisory.MaxEnd {
			got.Len = 0
		}
		if lock.Owner < 1<<40 {
			got.Pid = -1 // Linux's word for OFD locks
		}
	}
	want := unix.Flock_t{Type: r.Lock.Type, Start: r.Lock.Start, Len: r.Lock.Len, Pid: r.Lock.Pid}
	if want.Type == unix.F_UNLCK {
		want = unix.Flock_t{Type: unix.F_UNLCK}
	}
	if got != want && w.mixed && w.present(want) {
		w.sum.Raced++
		return true
	}
	if got != want {
		w.failf("get %+v = %+v, want %+v", l, got, want)
		return false
	}
	return true
}

// present reports whether there is such a lock, though not the first one.
func (w *world) present(f unix.Flock_t) bool {
	mode, end := "READ", "EOF"
	if f.Type == unix.F_WRLCK {
		mode = "WRITE"
	}
	if f.Len != 0 {
		end = fmt.Sprint(f.Start + f.Len - 1)
	}
	for _, l := range held(w.table) {
		if _, rest, _ := strings.Cut(l, " "); rest == fmt.Sprintf("%s %d %d %s", mode, f.Pid, f.Start, end) {
			return true
		}
	}
	return false
}

func (w *world) lock(p, slot int, d *desc) bool {
	op := []string{"posix", "posix", "ofd", "flock"}[w.rng.IntN(4)]
	c, l := w.request(p, d, op)
	c.Slot = slot
	if op == "flock" && w.converting(d) {
		return true
	}
	switch {
	case w.rng.IntN(4) == 0:
		c.Type = unix.F_UNLCK
		w.logf(op, p, slot, fmt.Sprintf("unlock %d-%d", l.Start, l.End))
		w.call(w.procs[p], c)
		w.table.Unlock(key, l)
		return w.compare(nil)
	case w.rng.IntN(3) == 0 && op != "ofd" && len(w.waits) < 6 && (w.rng.IntN(8) == 0 || !w.waiting(p)):
		// An OFD lock that waits is known to differ: see the package
		// comment.
		c.Wait = true
		w.sum.Waits++
		w.logf(op, p, slot, fmt.Sprintf("wait %v %d-%d", l.Write, l.Start, l.End))
		id := w.send(w.procs[p], c)
		w.waits[id] = &wait{p, slot, l, w.table.Start(key, l)}
		return w.compare(w.waits[id])
	}
	r := w.call(w.procs[p], c)
	err := w.table.Try(key, l)
	w.logf(op, p, slot, fmt.Sprintf("try %v %d-%d: %v", l.Write, l.Start, l.End, r.Errno))
	if errno(err) != r.Errno {
		w.failf("try %+v = %v, want %v", l, err, r.Errno)
		return false
	}
	if err == nil {
		w.sum.Granted++
	} else {
		w.sum.Refused++
	}
	return w.compare(nil)
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

// compare checks that the same waits are over, with the same results.
func (w *world) compare(fresh *wait) bool {
	if len(w.waits) == 0 {
		return true
	}
	calls := make(map[int]*proc)
	got := make(map[int]syscall.Errno)
	for id, x := range w.waits {
		calls[id] = w.procs[x.p]
		select {
		case err := <-x.w.Done():
			got[id] = errno(err)
		default:
		}
	}
	want := make(map[int]syscall.Errno)
	for late := time.Now().Add(200 * time.Millisecond); ; {
		for id, r := range w.settled(calls) {
			want[id] = r.Errno
			delete(calls, id)
		}
		// One that was woken just now may have looked asleep.
		if len(want) >= len(got) || time.Now().After(late) {
			break
		}
	}
	if !maps.Equal(got, want) {
		if fresh == nil && w.raced(got, want) || w.ambiguous(got, want) {
			w.sum.Raced++
			return false
		}
		for id := range w.waits {
			w.log = append(w.log, fmt.Sprintf("call %d: %+v", id, w.waits[id].lock))
		}
		w.failf("waits that ended: %v, want %v", got, want)
		return false
	}
	w.mixed = w.mixed || len(got) > 1
	if w.tangled(got) {
		w.sum.Raced++
		return false
	}
	for id, e := range got {
		if e == syscall.EDEADLK {
			w.sum.Deadlocks++
		} else {
			w.sum.WaitGranted++
		}
		w.log = append(w.log, fmt.Sprintf("  p%d's wait %v %d-%d ended: %v", w.waits[id].p, w.waits[id].lock.Write, w.waits[id].lock.Start, w.waits[id].lock.End, e))
		delete(w.waits, id)
	}
	return true
}

// tangled reports whether two waits of one owner, in two threads, ended
// together: what the owner has now depends on which ran first.
func (w *world) tangled(ended map[int]syscall.Errno) bool {
	for a := range ended {
		for b := range ended {
			x, y := w.waits[a], w.waits[b]
			if a != b && x.p == y.p && !x.lock.Flock && !y.lock.Flock {
				return true
			}
		}
	}
	return false
}

// ambiguous reports whether the difference is about a deadlock, and either
// several threads of one process wait, of which Linux follows one, or a circle
// was closed by waiters who were woken together: the last one to run hears of
// it.
func (w *world) ambiguous(got, want map[int]syscall.Errno) bool {
	waits := make(map[int]int)
	for _, x := range w.waits {
		if !x.lock.Flock {
			waits[x.p]++
		}
	}
	dead := func(m map[int]syscall.Errno) bool {
		return slices.Contains(slices.Collect(maps.Values(m)), syscall.EDEADLK)
	}
	if dead(got) && dead(want) {
		return true
	}
	for id := range w.waits {
		if got[id] != want[id] && (got[id] == syscall.EDEADLK || want[id] == syscall.EDEADLK) {
			for _, n := range waits {
				if n > 1 {
					return true
				}
			}
		}
	}
	return false
}

// raced reports whether the difference may come from the kernel's waiters
// having been woken together and having run in another order: each one that
// the table granted and the kernel did not lost to one that conflicts with it.
func (w *world) raced(got, want map[int]syscall.Errno) bool {
	lost := func(a, b map[int]syscall.Errno) bool {
		for id := range a {
			if _, ok := b[id]; ok {
				continue
			}
			beaten := false
			for other := range b {
				x, y := w.waits[id].lock, w.waits[other].lock
				beaten = beaten || x.Flock == y.Flock && (x.Write || y.Write) && x.Start <= y.End && y.Start <= x.End
			}
			if !beaten {
				return false
			}
		}
		return true
	}
	return len(got) > 0 && len(want) > 0 && lost(got, want) && lost(want, got)
}
