package advisory_test

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/stagefs/stagefs/lockstate/advisory"
	"pgregory.net/rapid"
)

// The model knows, for each byte, who has it. The last byte stands for the
// rest of the file.
const width = 12

type cell struct {
	write  bool
	handle uint64
}

type model struct {
	table   *advisory.Table
	records map[uint64]*[width]*cell // by owner
	flocks  map[uint64]bool          // by handle: exclusive
	waits   []*modelWait             // in order of arrival
}

type modelWait struct {
	lock advisory.Lock
	w    *advisory.Waiter
}

// TestModel compares the table with the model (rapid). Owners 1 to 4 are
// processes with two handles each, and one thread.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			table:   advisory.New(),
			records: make(map[uint64]*[width]*cell), flocks: make(map[uint64]bool),
		}
		for o := uint64(1); o <= 4; o++ {
			m.records[o] = new([width]*cell)
		}
		t.Repeat(map[string]func(*rapid.T){
			"":        m.check,
			"try":     m.try,
			"try2":    m.try,
			"wait":    m.wait,
			"wait2":   m.wait,
			"unlock":  m.unlock,
			"flush":   m.flush,
			"release": m.release,
			"cancel":  m.cancel,
			"get":     m.get,
		})
	})
}

func (m *model) draw(t *rapid.T) advisory.Lock {
	o := rapid.Uint64Range(1, 4).Draw(t, "owner")
	start := rapid.Uint64Range(0, width-1).Draw(t, "start")
	end := rapid.Uint64Range(start, width-1).Draw(t, "end")
	if end == width-1 {
		end = advisory.MaxEnd
	}
	l := advisory.Lock{
		Owner: o, Handle: 10*o + rapid.Uint64Range(0, 1).Draw(t, "handle"), Pid: uint32(o),
		Start: start, End: end, Write: rapid.Bool().Draw(t, "write"),
		Flock: rapid.IntRange(0, 3).Draw(t, "flock") == 0,
	}
	if l.Flock {
		l.Start, l.End = 0, advisory.MaxEnd
	}
	return l
}

func cells(l advisory.Lock) (from, to int) { return int(l.Start), int(min(l.End, width-1)) }

func (m *model) busy(l advisory.Lock) bool {
	return slices.ContainsFunc(m.waits, func(x *modelWait) bool { return x.lock.Owner == l.Owner })
}

// obstacles returns the owners whose locks are in l's way.
func (m *model) obstacles(l advisory.Lock) map[uint64]bool {
	who := make(map[uint64]bool)
	if l.Flock {
		for h, write := range m.flocks {
			if h != l.Handle && (write || l.Write) {
				who[h/10] = true
			}
		}
		return who
	}
	from, to := cells(l)
	for o, row := range m.records {
		for _, c := range row[from : to+1] {
			if o != l.Owner && c != nil && (c.write || l.Write) {
				who[o] = true
			}
		}
	}
	return who
}

func conflict(a, b advisory.Lock) bool {
	return a.Flock == b.Flock && (a.Write || b.Write) && a.Start <= b.End && b.Start <= a.End &&
		(a.Flock && a.Handle != b.Handle || !a.Flock && a.Owner != b.Owner)
}

func (m *model) set(l advisory.Lock, c *cell) {
	if l.Flock {
		if delete(m.flocks, l.Handle); c != nil {
			m.flocks[l.Handle] = l.Write
		}
		return
	}
	from, to := cells(l)
	for i := from; i <= to; i++ {
		m.records[l.Owner][i] = c
	}
}

func (m *model) grant(l advisory.Lock) { m.set(l, &cell{l.Write, l.Handle}) }

// convert drops what a flock conversion drops.
func (m *model) convert(l advisory.Lock) {
	if write, ok := m.flocks[l.Handle]; l.Flock && ok && write != l.Write {
		delete(m.flocks, l.Handle)
	}
}

func (m *model) try(t *rapid.T) {
	l := m.draw(t)
	if m.busy(l) {
		t.Skip()
	}
	m.convert(l)
	free := len(m.obstacles(l)) == 0
	err := m.table.Try(key, l)
	switch {
	case err == nil:
		if !free {
			t.Fatalf("Try(%+v) passed an obstacle", l)
		}
		m.grant(l)
	case !errors.Is(err, advisory.ErrConflict), free:
		t.Fatalf("Try(%+v) = %v", l, err)
	}
	m.settle(t)
}

func (m *model) wait(t *rapid.T) {
	l := m.draw(t)
	if m.busy(l) {
		t.Skip()
	}
	m.convert(l)
	m.waits = append(m.waits, &modelWait{l, m.table.Start(key, l)})
	m.settle(t)
}

func (m *model) unlock(t *rapid.T) {
	l := m.draw(t)
	m.table.Unlock(key, l)
	m.set(l, nil)
	m.settle(t)
}

func (m *model) flush(t *rapid.T) {
	o := rapid.Uint64Range(1, 4).Draw(t, "owner")
	m.table.Flush(key, o)
	m.records[o] = new([width]*cell)
	m.settle(t)
}

func (m *model) release(t *rapid.T) {
	h := rapid.Uint64Range(1, 4).Draw(t, "owner")*10 + rapid.Uint64Range(0, 1).Draw(t, "handle")
	m.waits = slices.DeleteFunc(m.waits, func(x *modelWait) bool {
		if x.lock.Handle != h {
			return false
		}
		x.w.Cancel()
		<-x.w.Done()
		return true
	})
	m.settle(t)
	m.table.Release(key, h)
	delete(m.flocks, h)
	for _, row := range m.records {
		for i, c := range row {
			if c != nil && c.handle == h {
				row[i] = nil
			}
		}
	}
	m.settle(t)
}

func (m *model) cancel(t *rapid.T) {
	if len(m.waits) == 0 {
		t.Skip()
	}
	i := rapid.IntRange(0, len(m.waits)-1).Draw(t, "waiter")
	x := m.waits[i]
	m.waits = slices.Delete(m.waits, i, i+1)
	x.w.Cancel()
	if err := <-x.w.Done(); !errors.Is(err, advisory.ErrCancelled) {
		t.Fatalf("cancelled: %v", err)
	}
	m.settle(t)
}

func (m *model) get(t *rapid.T) {
	l := m.draw(t)
	got, ok := m.table.Get(key, l)
	who := m.obstacles(l)
	if ok != (len(who) > 0) || ok && (!who[got.Owner] || !conflict(got, l)) {
		t.Fatalf("Get(%+v) = %+v, %v, want one of %v", l, got, ok, who)
	}
	if !ok || l.Flock {
		return
	}
	row := m.records[got.Owner]
	from, to := cells(got)
	same := func(i int) bool {
		return i >= 0 && i < width && row[i] != nil && row[i].write == got.Write
	}
	for i := from; i <= to; i++ {
		if !same(i) {
			t.Fatalf("Get(%+v) = %+v: doesn't have byte %d", l, got, i)
		}
	}
	if same(from-1) || same(to+1) {
		t.Fatalf("Get(%+v) = %+v: has more", l, got)
	}
}

// settle takes note of the waits that are over.
func (m *model) settle(t *rapid.T) {
	var dead []advisory.Lock
	m.waits = slices.DeleteFunc(m.waits, func(x *modelWait) bool {
		err, over := ended(x.w)
		switch {
		case !over:
			return false
		case errors.Is(err, advisory.ErrDeadlock) && !x.lock.Flock:
			dead = append(dead, x.lock)
		case err != nil:
			t.Fatalf("wait for %+v: %v", x.lock, err)
		default:
			m.grant(x.lock)
		}
		return true
	})
	for _, l := range dead {
		if !m.circle(l) {
			t.Fatalf("deadlock of %+v without a circle", l)
		}
	}
}

// circle reports whether l's owner would wait for itself.
func (m *model) circle(l advisory.Lock) bool {
	seen := make(map[uint64]bool)
	var visit func(l advisory.Lock) bool
	visit = func(l advisory.Lock) bool {
		next := m.obstacles(l)
		for _, x := range m.waits {
			if conflict(x.lock, l) {
				next[x.lock.Owner] = true
			}
		}
		for o := range next {
			if o == l.Owner && len(seen) == 0 {
				return true
			}
			if seen[o] {
				continue
			}
			seen[o] = true
			for _, x := range m.waits {
				if x.lock.Owner == o && !x.lock.Flock && visit(x.lock) {
					return true
				}
			}
		}
		return false
	}
	visit(l)
	return seen[l.Owner]
}

func (m *model) check(t *rapid.T) {
	if err := m.table.Check(); err != nil {
		t.Fatal(err)
	}
	records := make(map[uint64]*[width]*cell)
	for o := uint64(1); o <= 4; o++ {
		records[o] = new([width]*cell)
	}
	flocks := make(map[uint64]bool)
	for _, l := range m.table.Locks(key) {
		if l.Flock {
			flocks[l.Handle] = l.Write
			continue
		}
		from, to := cells(l)
		for i := from; i <= to; i++ {
			records[l.Owner][i] = &cell{l.Write, l.Handle}
		}
	}
	if !maps.Equal(flocks, m.flocks) {
		t.Fatalf("flock: %v, want %v", flocks, m.flocks)
	}
	for o, row := range records {
		for i, c := range row {
			if w := m.records[o][i]; (c == nil) != (w == nil) || c != nil && *c != *w {
				t.Fatalf("owner %d byte %d: %v, want %v", o, i, c, w)
			}
		}
	}
	for _, x := range m.waits {
		if len(m.obstacles(x.lock)) == 0 {
			t.Fatalf("%+v waits for nothing", x.lock)
		}
	}
	got := m.table.Waiters(key)
	if !slices.EqualFunc(got, m.waits, func(a advisory.Lock, b *modelWait) bool { return a == b.lock }) {
		t.Fatalf("waiters: %+v", got)
	}
}
