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
// has its turn and is woken by what ends; and who is called, as it holds what the
// others wait for.
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
	early  bool          // it was called at some time
	got    bool          // it leaves with a lock
}

// A line is who waits for a directory. It is protected by waitList.mu.
type line struct {
	all    []*waiting // in order of arrival; never empty
	called int        // of them
	looked uint64     // lockstate.Table.Shifts when it was looked last who is to be called,
	again  bool       // and whether that is to be done again in any case
	denied bool       // somebody was not called since, for the sake of one who was
}

// waitList holds the lines.
type waitList struct {
	mu    sync.Mutex
	joins uint64 // so far
	// paused: nobody gets his turn any more, as all are about to leave, and to
	// come again in the same order.
	paused bool
	lines  map[*lockstate.Dir]*line
	byProc map[procid.ID][]*waiting // in order of arrival

	searching sync.Mutex // one search for a deadlock at a time; before mu
}

// join puts x at the end of its line. ahead calls it in the same step: whoever looks for
// a deadlock must not find it to wait for those before it. has: likewise, see call.
func (w *waitList) join(x *waiting, ahead, has bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lines == nil {
		w.lines = make(map[*lockstate.Dir]*line)
		w.byProc = make(map[procid.ID][]*waiting)
	}
	w.joins++
	x.number = w.joins
	w.byProc[x.proc.ID()] = append(w.byProc[x.proc.ID()], x)
	l := w.lines[x.dir]
	if l == nil {
		l = new(line)
		w.lines[x.dir] = l
	}
	l.all = append(l.all, x)
	if ahead {
		w.callAheadLocked(l, x, has)
	}
	w.callLocked(l)
}

// pauseLines begins or ends a time in which nobody gets anything by waiting.
func (fs *FS) pauseLines(paused bool) {
	fs.waits.mu.Lock()
	fs.waits.paused = paused
	for _, l := range fs.waits.lines {
		l.again = true
		fs.waits.callLocked(l)
	}
	fs.waits.mu.Unlock()
	if paused {
		fs.advisory.Pause()
	} else {
		fs.advisory.Resume()
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
	l := w.lines[x.dir]
	at := l.place(x)
	if at < 0 {
		return false
	}
	if at == 0 { // as those do who had their turn
		l.all[0], l.all = nil, l.all[1:]
	} else {
		l.all = slices.Delete(l.all, at, at+1)
	}
	gaveUp := x.early && !x.got // who is behind it may hold what it held
	l.again = l.again || gaveUp
	l.uncall(x)
	ring = l.called > 0 || gaveUp
	if len(l.all) == 0 {
		delete(w.lines, x.dir)
		return false
	}
	w.callLocked(l)
	return ring
}

// place returns where x stands in l, which may be nil, or -1.
func (l *line) place(x *waiting) int {
	if l == nil {
		return -1
	}
	at, ok := slices.BinarySearchFunc(l.all, x.number, byNumber)
	if !ok {
		return -1
	}
	return at
}

func byNumber(x *waiting, number uint64) int { return cmp.Compare(x.number, number) }

// callLocked gives their turn to those at the front of a line.
func (w *waitList) callLocked(l *line) {
	if w.paused {
		return
	}
	for i, x := range l.all {
		if i > 0 && x.write {
			return
		}
		l.uncall(x)
		if !x.hasTurn() {
			close(x.turn)
		}
		if x.write {
			return
		}
	}
}

// callAheadLocked calls x, unless it is to wait for one like it that was called: a crowd
// would be woken for one of them. has: it is not to wait for any, see [FS.hasAlready].
func (w *waitList) callAheadLocked(l *line, x *waiting, has bool) {
	if w.paused || x.hasTurn() {
		return
	}
	if !has && l.called > 0 && slices.ContainsFunc(l.all, func(y *waiting) bool { return y.called && x.follows(y) }) {
		l.denied = true
		return
	}
	x.called, x.early = true, true
	l.called++
	close(x.turn)
}

// uncall notes that x is not called any more.
func (l *line) uncall(x *waiting) {
	if x.called {
		x.called = false
		l.called--
	}
}

// follows reports whether x wants the same lock file alone as y, who came before.
func (x *waiting) follows(y *waiting) bool {
	return x.number > y.number && x.name == y.name && x.write && y.write
}

// callHolders gives their turn to those behind x who have come to hold what x waits for
// at the front: it waits for them to end.
func (fs *FS) callHolders(x *waiting) {
	called, all := fs.waits.behind(x, fs.table.Shifts())
	called = slices.DeleteFunc(called, func(y *waiting) bool { return !fs.table.Has(y.proc, y.dir) && !fs.hasAlready(y) })
	for _, y := range all {
		if slices.ContainsFunc(called, y.follows) && !fs.hasAlready(y) {
			continue // as nearly all of a crowd
		}
		if fs.callHolder(y) {
			called = append(called, y)
		}
	}
}

func (fs *FS) callHolder(x *waiting) (called bool) {
	has := fs.hasAlready(x)
	return (has || fs.table.Has(x.proc, x.dir)) && fs.waits.call(x, has)
}

// behind returns who was called, and who has not had his turn yet, if x stands at the front
// of their line, and it was not looked since the given number of shifts who is to be called.
func (w *waitList) behind(x *waiting, shifts uint64) (called, all []*waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.lines[x.dir]
	if l == nil || x.called || !x.hasTurn() || w.paused || l.looked == shifts && !l.again {
		return nil, nil
	}
	l.looked, l.again, l.denied = shifts, false, false
	for _, y := range l.all {
		switch {
		case y.called:
			called = append(called, y)
		case !y.hasTurn():
			all = append(all, y)
		}
	}
	return called, all
}

// call gives its turn to one who stands in line, and reports whether he is called; see
// callAheadLocked.
func (w *waitList) call(x *waiting, has bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.lines[x.dir]; l.place(x) >= 0 {
		w.callAheadLocked(l, x, has)
	}
	return x.called
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
	return fs.before(x) == nil, false
}

// before returns who is to try before x, which holds what it waits for: nil if nobody is.
func (fs *FS) before(x *waiting) *waiting {
	for y := fs.waits.rival(x, 0); y != nil; y = fs.waits.rival(x, y.number) {
		if fs.holds(y.proc, y.dir) {
			return y
		}
	}
	return nil
}

// standBack has x, which was called, wait until it is called again, or stands at the front:
// a crowd whose parent had the lock for a moment would try at whatever ends from then on.
func (fs *FS) standBack(x *waiting) (turn <-chan struct{}) {
	if fs.waits.uncall(x) {
		fs.table.Ring()
	}
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
// It reports whether somebody else may have to be called instead.
func (w *waitList) uncall(x *waiting) (another bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.lines[x.dir]
	if !x.called || l == nil {
		return false
	}
	l.uncall(x)
	x.turn = make(chan struct{})
	l.again = l.again || l.denied
	return l.again
}

// rival returns the next behind a number who stands before x and wants the same lock file
// alone, as x does; nil: there is none. A list of them would take too much memory for each
// of a crowd.
func (w *waitList) rival(x *waiting, behind uint64) *waiting {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.lines[x.dir]
	if l == nil {
		return nil
	}
	i, _ := slices.BinarySearchFunc(l.all, behind+1, byNumber)
	for _, y := range l.all[i:] {
		if y == x {
			break
		}
		if x.follows(y) {
			return y
		}
	}
	return nil
}

// enqueue puts x at the end of its line, and tells so. ahead: it holds what the others
// there wait for.
func (fs *FS) enqueue(x *waiting, protocol string, ahead bool) {
	fs.waits.join(x, ahead, ahead && fs.hasAlready(x))
	if !ahead && fs.table.Has(x.proc, x.dir) { // it came to do so meanwhile
		fs.waits.call(x, false)
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
		fs.callHolders(x)
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
	return w.lines[dir] != nil
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
	for _, l := range w.lines {
		if slices.ContainsFunc(l.all, func(x *waiting) bool { return x.node != 0 && t.settledAs(x.node) == node }) {
			return true
		}
	}
	return false
}

// len counts the requests that wait.
func (w *waitList) len() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.lines {
		n += len(l.all)
	}
	return n
}

// list returns who waits, in order of arrival.
func (w *waitList) list(fs *FS) []lockstate.Waiter {
	w.mu.Lock()
	var all []*waiting
	for _, l := range w.lines {
		all = append(all, l.all...)
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
