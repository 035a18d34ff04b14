package fs

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A waiting is a request that waits for a directory.
type waiting struct {
	dir   *lockstate.Dir
	proc  *procid.Process
	since time.Time
}

// waitList holds all that wait, for listings.
type waitList struct {
	mu  sync.Mutex
	all map[*waiting]struct{}
}

func (w *waitList) add(x *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = make(map[*waiting]struct{})
	}
	w.all[x] = struct{}{}
}

func (w *waitList) remove(x *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, x)
}

// list returns who waits, in order of arrival. Who has the lock within a
// moment does not count.
func (w *waitList) list(fs *FS) []lockstate.Waiter {
	w.mu.Lock()
	all := make([]*waiting, 0, len(w.all))
	for x := range w.all {
		all = append(all, x)
	}
	w.mu.Unlock()
	slices.SortFunc(all, func(a, b *waiting) int { return cmp.Compare(a.since.UnixNano(), b.since.UnixNano()) })
	rows := make([]lockstate.Waiter, 0, len(all))
	for _, x := range all {
		row := lockstate.Waiter{Since: x.since}
		row.Dir, _ = text(fs.table.Path(x.dir))
		if x.proc != nil {
			id := x.proc.ID()
			row.Pid, row.Start, row.Cmd = id.Pid, id.Start, fs.procs.Cmdline(id)
		}
		rows = append(rows, row)
	}
	return rows
}
