package lockstate_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

const witnessFamilies = 4

// A witness stands at a directory and knows nothing of the table: it counts
// who is there.
type witness struct {
	owners  [witnessFamilies]atomic.Int64 // those who believe to have it to themselves
	writers [witnessFamilies]atomic.Int64 // those who change something
}

func (w *witness) others(counts *[witnessFamilies]atomic.Int64, family int) (n int64) {
	for f := range counts {
		if f != family {
			n += counts[f].Load()
		}
	}
	return n
}

// A witnessed tree has one witness a directory. paths[i] is beneath paths[j]
// exactly if its name begins with it.
type witnessed struct {
	*testing.T
	table     *lockstate.Table
	paths     []string
	dirs      []*lockstate.Dir
	witnesses []witness
	granted   atomic.Int64
	written   atomic.Int64
}

// exclusively runs do with the lock on directory i, if that can be had.
func (w *witnessed) exclusively(p *procid.Process, family, i int, do func()) {
	g, err := w.table.Acquire(nil, lockstate.Request{Process: p, Dir: w.dirs[i], Kind: explicit, Protocol: "test"})
	if err != nil {
		w.expected(err)
		return
	}
	defer w.granted.Add(1)
	each := func(f func(*witness)) {
		for j := range w.paths {
			if at(w.paths[j], w.paths[i]) {
				f(&w.witnesses[j])
			}
		}
	}
	each(func(at *witness) {
		at.owners[family].Add(1)
		if n := at.others(&at.owners, family) + at.others(&at.writers, family); n != 0 {
			w.Errorf("%v was granted %s with %d others there", p.ID(), w.paths[i], n)
		}
	})
	do()
	each(func(at *witness) {
		if n := at.others(&at.owners, family) + at.others(&at.writers, family); n != 0 {
			w.Errorf("%v holds %s with %d others there", p.ID(), w.paths[i], n)
		}
		at.owners[family].Add(-1)
	})
	if rand.IntN(4) == 0 {
		g.Abort()
		return
	}
	if l, ok := g.Commit(); !ok {
		w.Errorf("Commit() = false, want true")
	} else if err := w.table.End(l.Token, lockstate.Given); err != nil {
		w.Errorf("End(%d) = %v, want nil", l.Token, err)
	}
}

// write runs a change of directory i, if that is admitted.
func (w *witnessed) write(p *procid.Process, family, i int) {
	op, err := w.table.Begin(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{w.dirs[i]}})
	if err != nil {
		w.expected(err)
		return
	}
	w.present(p, family, i)
	op.End()
}

// open keeps directory i open for writing for a while.
func (w *witnessed) open(p *procid.Process, family, i int, do func()) {
	h, err := w.table.OpenHandle(lockstate.Change{Process: p, Dirs: []*lockstate.Dir{w.dirs[i]}}, "f")
	if err != nil {
		w.expected(err)
		return
	}
	w.present(p, family, i)
	do()
	w.present(p, family, i)
	h.Close()
}

func (w *witnessed) present(p *procid.Process, family, i int) {
	at := &w.witnesses[i]
	at.writers[family].Add(1)
	runtime.Gosched()
	if n := at.others(&at.owners, family); n != 0 {
		w.Errorf("%v changes %s, which %d others hold", p.ID(), w.paths[i], n)
	}
	at.writers[family].Add(-1)
	w.written.Add(1)
}

func (w *witnessed) expected(err error) {
	if !errors.Is(err, lockstate.ErrHeld) && !errors.Is(err, lockstate.ErrOpen) {
		w.Errorf("refused with %v, want %v or %v", err, lockstate.ErrHeld, lockstate.ErrOpen)
	}
}

// TestMutualExclusion lets families of processes fight for a tree. No two of
// them may ever be in the same directory while one has the lock (W3).
func TestMutualExclusion(t *testing.T) {
	w := &witnessed{T: t, table: lockstate.New(lockstate.Options{}), paths: []string{"a", "a/b", "a/b/c", "a/d", "e", "e/f"}}
	for _, path := range w.paths {
		w.dirs = append(w.dirs, dirAt(w.table, path))
	}
	w.witnesses = make([]witness, len(w.paths))
	init := procid.FakeReaper(procid.ID{Pid: 1}, nil)
	var wg sync.WaitGroup
	for family := range witnessFamilies {
		parent := newProc(100+10*family, 1, init)
		for _, p := range []*procid.Process{parent, newProc(101+10*family, 1, parent), newProc(102+10*family, 1, parent)} {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(family), uint64(p.ID().Pid)))
				for range 3000 {
					i, j := rnd.IntN(len(w.paths)), rnd.IntN(len(w.paths))
					switch rnd.IntN(4) {
					case 0:
						w.exclusively(p, family, i, func() { w.write(p, family, j) })
					case 1:
						w.exclusively(p, family, i, func() { w.exclusively(p, family, j, runtime.Gosched) })
					case 2:
						w.open(p, family, i, func() { w.write(p, family, j) })
					default:
						w.write(p, family, i)
					}
				}
			})
		}
	}
	wg.Wait()
	if err := w.table.Check(); err != nil {
		t.Errorf("Check() = %v, want nil", err)
	}
	if w.table.Len() != 0 {
		t.Errorf("Len() = %d at the end, want 0", w.table.Len())
	}
	t.Logf("%d locks, %d changes", w.granted.Load(), w.written.Load())
	if w.granted.Load() == 0 || w.written.Load() == 0 {
		t.Errorf("nobody got anything: this proves nothing")
	}
}

// TestHammer runs everything against everything, renames, removals, exits and
// listings included, and only asks that nothing is torn afterwards.
func TestHammer(t *testing.T) {
	h := &hammer{table: lockstate.New(lockstate.Options{})}
	init := procid.FakeReaper(procid.ID{Pid: 1}, nil)
	var wg sync.WaitGroup
	for c := range 8 {
		parent := newProc(100+c%3, 1, init)
		wg.Go(func() {
			h.client(parent, newProc(200+c, 1, parent), rand.New(rand.NewPCG(7, uint64(c))))
		})
	}
	wg.Wait()
	if err := h.table.Check(); err != nil {
		t.Errorf("Check() = %v, want nil", err)
	}
	for _, l := range h.table.Locks() {
		if err := h.table.End(l.Token, lockstate.Given); err != nil {
			t.Errorf("End(%d) = %v, want nil", l.Token, err)
		}
	}
	for _, name := range hammerNames {
		if d, ok := h.table.Find(name); ok {
			t.Errorf("%s is still known at the end", h.table.Path(d))
		}
	}
}

var hammerNames = [...]string{"a", "b", "c"}

type hammer struct {
	table *lockstate.Table

	// treeMu excludes what must not be in flight during a rename: it is
	// read-held from Begin to End and from Acquire to Commit.
	treeMu sync.RWMutex
}

func (h *hammer) client(parent, p *procid.Process, rnd *rand.Rand) {
	var handles []*lockstate.Handle
	for n := range 2000 {
		var path []*lockstate.Dir
		d := h.table.Root()
		for range 1 + rnd.IntN(3) {
			d = h.table.Dir(d, hammerNames[rnd.IntN(len(hammerNames))])
			path = append(path, d)
		}
		who := p
		if rnd.IntN(3) == 0 {
			who = parent
		}
		change := lockstate.Change{Process: who, Dirs: []*lockstate.Dir{d}, Quiet: rnd.IntN(2) == 0}
		switch rnd.IntN(12) {
		case 0, 1, 2:
			h.acquire(who, d, rnd)
		case 3, 4, 5:
			h.treeMu.RLock()
			op, _ := h.table.Begin(change)
			runtime.Gosched()
			op.End()
			h.treeMu.RUnlock()
		case 6:
			if f, err := h.table.OpenHandle(change, "f"); err == nil {
				handles = append(handles, f)
			}
		case 7:
			for _, f := range handles {
				f.Moved("g", d)
				f.Close()
			}
			handles = nil
		case 8:
			h.change(who, d, hammerNames[n%3], rnd)
		case 9:
			for _, l := range h.table.On(d) {
				h.table.End(l.Token, lockstate.Broken)
			}
			h.table.ReleaseFile(d, "devserver")
		case 10:
			how := procid.Exit{Known: rnd.IntN(2) == 0, Code: rnd.IntN(2)}
			dead, _ := h.table.Exit(p.ID(), how, alive(parent))
			for _, l := range dead {
				h.table.End(l.Token, lockstate.Exited)
			}
		default:
			h.look(who, d)
		}
		for _, d := range path {
			h.table.Forget(d)
		}
	}
	for _, f := range handles {
		f.Close()
	}
}

func (h *hammer) acquire(p *procid.Process, d *lockstate.Dir, rnd *rand.Rand) {
	h.treeMu.RLock()
	defer h.treeMu.RUnlock()
	q := lockstate.Request{Process: p, Dir: d, Kind: lockstate.Kind(rnd.IntN(2)), Protocol: "test", File: "devserver"}
	var cancel <-chan struct{}
	if rnd.IntN(4) == 0 {
		cancel = closed
	}
	g, err := h.table.Acquire(cancel, q)
	if err != nil {
		return
	}
	runtime.Gosched()
	if rnd.IntN(4) == 0 {
		g.Abort()
		return
	}
	g.Commit()
}

// change renames, exchanges or removes, alone.
func (h *hammer) change(p *procid.Process, d *lockstate.Dir, name string, rnd *rand.Rand) {
	h.treeMu.Lock()
	defer h.treeMu.Unlock()
	if h.table.Level(d) < 2 || at(h.table.Path(d), name) {
		return // removed by another, or it would change places with its own parent
	}
	op, err := h.table.Begin(lockstate.Change{Process: p, Trees: []*lockstate.Dir{d}, Into: h.table.Root(), EnteringTree: d})
	if err != nil {
		return
	}
	defer op.End()
	switch rnd.IntN(3) {
	case 0:
		h.table.Remove(d)
	case 1:
		h.table.Move(d, h.table.Root(), name)
	default:
		other := h.table.Dir(h.table.Root(), name)
		defer h.table.Forget(other)
		h.table.Exchange(d, other)
	}
}

func (h *hammer) look(p *procid.Process, d *lockstate.Dir) {
	h.table.Governing(d)
	h.table.Holds(p, d)
	h.table.Chain(p, d)
	h.table.Foreign(p)
	h.table.LeftOpen()
	h.table.Locks()
	h.table.Stats()
	h.table.Owns(p.ID())
	h.table.Path(d)
}
