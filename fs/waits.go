package fs

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A waiting is a request that waits for a directory. Who waits for the same one
// stands in line (A8): only who is at the front, or shares with all before it,
// has its turn and is woken by what ends.
type waiting struct {
	dir   *lockstate.Dir
	node  uint64 // the lock file's that it waits by, if any
	name  string // likewise
	proc  *procid.Process
	since time.Time
	write bool
	keeps func() bool // tells whether it has a lock by the same descriptor already; nil: no

	// For the search for deadlocks; see [FS.deadlocked].
	hears   bool                                 // it takes part, and is told
	blocker func() (id procid.ID, soon, ok bool) // tells who has what it waits for; see [FS.blockerOf]
	dead    chan struct{}                        // closed when it is told; waitList.searching

	// Protected by waitList.mu; turn is set by the request itself alone.
	number uint64        // of its arrival
	turn   chan struct{} // closed when it has its turn
	called bool          // it has its turn, but others stand before it: see callHolders
}

// waitList holds the lines.
type waitList struct {
	mu    sync.Mutex
	joins uint64 // so far
	// paused: nobody gets his turn any more, as all are about to leave, and to
	// come again in the same order.
	paused bool
	lines  map[*lockstate.Dir][]*waiting
	byProc map[procid.ID][]*waiting // in order of arrival

	searching sync.Mutex // one search for a deadlock at a time; before mu
}

// join puts x at the end of its line. ahead gives it its turn in the same step: whoever
// looks for a deadlock must not find it to wait for those before it.
func (w *waitList) join(x *waiting, ahead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lines == nil {
		w.lines = make(map[*lockstate.Dir][]*waiting)
		w.byProc = make(map[procid.ID][]*waiting)
	}
	w.joins++
	x.number = w.joins
	w.byProc[x.proc.ID()] = append(w.byProc[x.proc.ID()], x)
	w.lines[x.dir] = append(w.lines[x.dir], x)
	if ahead && !w.paused {
		x.called = true
		close(x.turn)
	}
	w.callLocked(x.dir)
}

// pauseLines begins or ends a time in which nobody gets anything by waiting.
func (fs *FS) pauseLines(paused bool) {
	fs.waits.mu.Lock()
	fs.waits.paused = paused
	for dir := range fs.waits.lines {
		fs.waits.callLocked(dir)
	}
	fs.waits.mu.Unlock()
	if paused {
		fs.advisory.Pause()
	} else {
		fs.advisory.Resume()
		fs.callHolders()
		fs.table.Ring()
	}
}

// inLine counts the requests that have begun to wait for a lock.
func (fs *FS) inLine() uint64 {
	fs.waits.mu.Lock()
	defer fs.waits.mu.Unlock()
	return fs.waits.joins + fs.advisory.Waits()
}

// leaveLine takes x out of its line.
func (fs *FS) leaveLine(x *waiting) {
	if fs.waits.leave(x) {
		fs.table.Ring()
	}
}

// leave is leaveLine, but for the bell: it reports whether that is to be rung.
func (w *waitList) leave(x *waiting) (ring bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	id := x.proc.ID()
	own := w.byProc[id]
	if i := slices.Index(own, x); i >= 0 {
		own = slices.Delete(own, i, i+1)
	}
	if w.byProc[id] = own; len(own) == 0 {
		delete(w.byProc, id)
	}
	line := w.lines[x.dir]
	if len(line) > 0 && line[0] == x { // as those do who had their turn
		line[0], line = nil, line[1:]
	} else if i := slices.Index(line, x); i > 0 {
		line = slices.Delete(line, i, i+1)
	}
	if len(line) == 0 {
		delete(w.lines, x.dir)
		return false
	}
	w.lines[x.dir] = line
	ring = slices.ContainsFunc(line, func(y *waiting) bool { return y.called })
	w.callLocked(x.dir)
	return ring
}

// callLocked gives their turn to those at the front of a line.
func (w *waitList) callLocked(dir *lockstate.Dir) {
	if w.paused {
		return
	}
	for i, x := range w.lines[dir] {
		if i > 0 && x.write {
			return
		}
		x.called = false
		if !x.hasTurn() {
			close(x.turn)
		}
		if x.write {
			return
		}
	}
}

// callHolders gives their turn to those in line who have come to hold what they wait
// for: the others wait for them to end.
func (fs *FS) callHolders() {
	for _, x := range fs.waits.behind() {
		fs.callHolder(x)
	}
}

func (fs *FS) callHolder(x *waiting) {
	if fs.table.Has(x.proc, x.dir) || fs.hasAlready(x) {
		fs.waits.call(x)
	}
}

// behind returns who has not had his turn yet.
func (w *waitList) behind() (all []*waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.lines {
		for _, x := range line {
			if !x.hasTurn() {
				all = append(all, x)
			}
		}
	}
	return all
}

// call gives its turn to one who stands in line.
func (w *waitList) call(x *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !x.hasTurn() && !w.paused && slices.Contains(w.lines[x.dir], x) {
		x.called = true
		close(x.turn)
	}
}

// mayTry reports whether x, which has its turn, is to try now. Who was called while
// others stand before it tries as long as it holds what it waits for, and after those
// who do so, too, and want the same: unless they wait for what it has itself. lost: it
// does not hold that any more.
func (fs *FS) mayTry(x *waiting) (may, lost bool) {
	switch turn, called, _ := fs.waits.place(x); {
	case !turn: // it stood back, and was woken to look what was lost
		return false, true
	case !called || fs.hasAlready(x):
		return true, false
	}
	if holds, unsure := fs.table.HoldsOrShares(x.proc, x.dir); !holds {
		return false, unsure == nil
	}
	for y := fs.waits.rival(x, 0); y != nil; y = fs.waits.rival(x, y.number) {
		if fs.holds(y.proc, y.dir) {
			return false, false
		}
	}
	return true, false
}

// standBack has x, which was called, wait until it is called again, or stands at the front:
// a crowd whose parent had the lock for a moment would try at whatever ends from then on.
func (fs *FS) standBack(x *waiting) (turn <-chan struct{}) {
	fs.waits.uncall(x)
	fs.callHolder(x) // it may have come to hold it again meanwhile
	return x.turn
}

// hasAlready reports whether x has a lock itself that whoever wants the same alone waits for.
func (fs *FS) hasAlready(x *waiting) bool {
	return x.keeps != nil && x.keeps() || fs.table.Shares(x.proc, x.dir)
}

// holds reports whether p holds d, by whatever protocol, or shares it: then those in
// line wait for p, which must not wait for them.
func (fs *FS) holds(p *procid.Process, d *lockstate.Dir) bool {
	holds, _ := fs.table.HoldsOrShares(p, d)
	return holds
}

// uncall takes back from x that it was called; but not its turn, if it stands at the front.
func (w *waitList) uncall(x *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x.called {
		x.called, x.turn = false, make(chan struct{})
	}
}

// rival returns the next behind a number who stands before x and wants the same lock file
// alone, as x does; nil: there is none. A list of them would take too much memory for each
// of a crowd.
func (w *waitList) rival(x *waiting, behind uint64) *waiting {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := w.lines[x.dir]
	i, _ := slices.BinarySearchFunc(line, behind+1, func(y *waiting, number uint64) int { return cmp.Compare(y.number, number) })
	for _, y := range line[i:] {
		if y == x {
			break
		}
		if y.name == x.name && y.write && x.write {
			return y
		}
	}
	return nil
}

// enqueue puts x at the end of its line, and tells so. ahead: it holds what the others
// there wait for.
func (fs *FS) enqueue(x *waiting, protocol string, ahead bool) {
	fs.waits.join(x, ahead)
	if !ahead && fs.table.Has(x.proc, x.dir) { // it came to do so meanwhile
		fs.waits.call(x)
	}
	if l, ok := fs.table.Governing(x.dir); ok && !x.hasTurn() {
		// R4: those before it have tried, and the owner may have died since with
		// nobody told. If it is seen to be dead its watch fires.
		fs.lives(l)
	}
	kind := lockstate.Shared
	if x.write {
		kind = lockstate.Explicit
	}
	fs.table.Tell(x.dir, lockstate.Event{
		Event: lockstate.EventWaiting, Pid: x.proc.ID().Pid, Kind: kind.String(), Protocol: protocol,
	})
}

// await tries when x has its turn, and again whenever something ends, until the
// try is done, the request is interrupted, or the time is over.
func (fs *FS) await(x *waiting, cancel <-chan struct{}, over <-chan time.Time, try func() (status fuse.Status, done bool)) fuse.Status {
	next := (<-chan struct{})(x.turn)
	var look <-chan time.Time
	if !x.hasTurn() && fs.deadlocked(x, cancel) {
		return fuse.Status(unix.EDEADLK)
	}
	for {
		select {
		case <-next:
		case <-look:
		case <-x.dead:
			return fuse.Status(unix.EDEADLK)
		case <-cancel:
			return fuse.EINTR
		case <-over:
			return fuse.Status(unix.ETIMEDOUT)
		}
		next = fs.table.Bell() // before the try, so that nothing is missed
		may, lost := fs.mayTry(x)
		if may {
			if status, done := try(); done {
				return status
			}
		}
		if lost {
			next = fs.standBack(x)
		}
		if fs.deadlocked(x, cancel) {
			return fuse.Status(unix.EDEADLK)
		}
		look = nil
		if fs.table.HasLost(x.dir) {
			look = time.After(lostTime)
		}
	}
}

// waited reports whether somebody stands in line for dir.
func (w *waitList) waited(dir *lockstate.Dir) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.lines[dir]) > 0
}

// any reports whether somebody waits for anything.
func (w *waitList) any() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.lines) > 0
}

// on reports whether somebody waits by a file.
func (w *waitList) on(t *nodeTable, node uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.lines {
		if slices.ContainsFunc(line, func(x *waiting) bool { return x.node != 0 && t.settledAs(x.node) == node }) {
			return true
		}
	}
	return false
}

// len counts the requests that wait.
func (w *waitList) len() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.lines {
		n += len(line)
	}
	return n
}

// list returns who waits, in order of arrival.
func (w *waitList) list(fs *FS) []lockstate.Waiter {
	w.mu.Lock()
	var all []*waiting
	for _, line := range w.lines {
		all = append(all, line...)
	}
	w.mu.Unlock()
	slices.SortFunc(all, func(a, b *waiting) int { return a.since.Compare(b.since) })
	rows := make([]lockstate.Waiter, 0, len(all))
	cmds := make(map[procid.ID]string) // a process may wait with many threads
	for _, x := range all {
		id := x.proc.ID()
		cmd, ok := cmds[id]
		if !ok {
			cmd = fs.procs.Cmdline(id)
			cmds[id] = cmd
		}
		row := lockstate.Waiter{Since: x.since, Pid: id.Pid, Start: id.Start, Cmd: cmd}
		row.Dir, row.DirBytes = text(fs.table.Path(x.dir))
		rows = append(rows, row)
	}
	return rows
}
