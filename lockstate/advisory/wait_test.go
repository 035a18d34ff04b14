package advisory_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagefs/stagefs/lockstate/advisory"
)

// ended reports how the wait ended, if it has.
func ended(w *advisory.Waiter) (err error, over bool) {
	select {
	case err := <-w.Done():
		return err, true
	default:
		return nil, false
	}
}

func blocks(t testing.TB, w *advisory.Waiter) {
	t.Helper()
	if err, over := ended(w); over {
		t.Fatalf("wait ended: %v", err)
	}
}

func ends(t testing.TB, w *advisory.Waiter, want error) {
	t.Helper()
	err, over := ended(w)
	if !over {
		t.Fatal("still waits")
	}
	if !errors.Is(err, want) {
		t.Fatalf("wait ended: %v, want %v", err, want)
	}
}

// kinds are requests of owner i for the whole file.
var kinds = map[string]func(i uint64, write bool) advisory.Lock{
	"flock":  flock,
	"record": func(i uint64, write bool) advisory.Lock { return record(i, 0, advisory.MaxEnd, write) },
}

func eachKind(t *testing.T, f func(t *testing.T, lock func(i uint64, write bool) advisory.Lock)) {
	for name, lock := range kinds {
		t.Run(name, func(t *testing.T) { f(t, lock) })
	}
}

// TestFIFO: 64 waiters get the lock in order of arrival (A8).
func TestFIFO(t *testing.T) {
	eachKind(t, func(t *testing.T, lock func(uint64, bool) advisory.Lock) {
		synctest.Test(t, func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(0, true), nil)
			var order []uint64 // guarded by the lock
			var wg sync.WaitGroup
			for i := uint64(1); i <= 64; i++ {
				wg.Go(func() {
					if err := table.Wait(key, lock(i, true), nil); err != nil {
						t.Errorf("Wait = %v", err)
					}
					order = append(order, i)
					time.Sleep(time.Second)
					table.Unlock(key, lock(i, true))
				})
				synctest.Wait()
			}
			waiters := table.Waiters(key)
			for i, w := range waiters {
				if w.Owner != uint64(i+1) {
					t.Fatalf("waiter %d: %+v", i, w)
				}
			}
			if len(waiters) != 64 {
				t.Fatalf("%d waiters", len(waiters))
			}
			check(t, table)
			table.Unlock(key, lock(0, true))
			wg.Wait()
			for i, owner := range order {
				if owner != uint64(i+1) {
					t.Fatalf("order = %v", order)
				}
			}
			locks(t, table)
		})
	})
}

// TestOrder: who waits beneath whom, as Linux has it.
func TestOrder(t *testing.T) {
	eachKind(t, func(t *testing.T, lock func(uint64, bool) advisory.Lock) {
		start := func(table *advisory.Table, i uint64, write bool) *advisory.Waiter {
			w := table.Start(key, lock(i, write))
			check(t, table)
			return w
		}
		t.Run("readers go together", func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(1, true), nil)
			r2, w3, r4 := start(table, 2, false), start(table, 3, true), start(table, 4, false)
			table.Unlock(key, lock(1, true))
			check(t, table)
			ends(t, r2, nil)
			blocks(t, w3)
			ends(t, r4, nil)
		})
		t.Run("downgrade lets readers in", func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(1, true), nil)
			w2, r3 := start(table, 2, true), start(table, 3, false)
			try(t, table, lock(1, false), nil)
			blocks(t, w2)
			ends(t, r3, nil)
		})
		t.Run("a reader comes while a writer waits", func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(1, false), nil)
			start(table, 2, true)
			try(t, table, lock(3, false), nil)
			ends(t, start(table, 4, false), nil)
		})
		t.Run("the place of one who gives up", func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(1, false), nil)
			w2, w3, r4 := start(table, 2, true), start(table, 3, true), table.Start(key, lock(4, false))
			w2.Cancel()
			check(t, table)
			ends(t, w2, advisory.ErrCancelled)
			blocks(t, w3)
			w3.Cancel()
			w3.Cancel()
			check(t, table)
			ends(t, r4, nil)
			if n := len(table.Waiters(key)); n != 0 {
				t.Errorf("%d waiters", n)
			}
		})
		t.Run("release", func(t *testing.T) {
			table := advisory.New()
			try(t, table, lock(1, true), nil)
			w2, w3 := start(table, 2, true), start(table, 3, true)
			table.Release(key, 2)
			check(t, table)
			ends(t, w2, advisory.ErrCancelled)
			table.Release(key, 1)
			ends(t, w3, nil)
			check(t, table)
		})
	})
}

func TestPartialRelease(t *testing.T) {
	table := advisory.New()
	try(t, table, record(1, 0, 99, true), nil)
	all := table.Start(key, record(2, 0, 99, true))
	part := table.Start(key, record(3, 50, 59, true))
	check(t, table)
	table.Unlock(key, record(1, 50, 99, true))
	check(t, table)
	blocks(t, all)
	ends(t, part, nil)
	table.Flush(key, 1)
	blocks(t, all)
	table.Flush(key, 3)
	ends(t, all, nil)
	check(t, table)
}

// TestSeveralHandles: to Linux, what one owner has set through several
// descriptors is one lock; so whoever waits for a part of it, behind somebody
// who waits for another part, is tried when any of it is unlocked (M2).
func TestSeveralHandles(t *testing.T) {
	whole := record(1, 0, 9, true)
	tail := through(7, record(1, 5, 9, true))
	for _, c := range []struct {
		name   string
		before []advisory.Lock // set before anybody waits
		after  []advisory.Lock // set while both wait
		first  advisory.Lock   // waits on
	}{
		{"the tail set anew while they wait", []advisory.Lock{whole}, []advisory.Lock{tail}, record(2, 4, 5, true)},
		{"the head set anew while they wait", []advisory.Lock{tail, through(7, whole)}, []advisory.Lock{record(1, 0, 4, true)}, record(2, 4, 5, true)},
		{"in three pieces", []advisory.Lock{whole}, []advisory.Lock{through(7, record(1, 5, 6, true)), through(8, record(1, 7, 9, true))}, record(2, 3, 7, true)},
		{"grown while they wait", []advisory.Lock{record(1, 3, 9, true)}, []advisory.Lock{tail, through(8, record(1, 0, 3, true))}, record(2, 0, 5, true)},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := advisory.New()
			for _, l := range c.before {
				try(t, table, l, nil)
			}
			first := table.Start(key, c.first)
			second := table.Start(key, record(3, 5, 8, true))
			check(t, table)
			for _, l := range c.after {
				try(t, table, l, nil)
			}
			blocks(t, first)
			blocks(t, second)
			table.Unlock(key, record(1, 5, 9, true))
			blocks(t, first)
			ends(t, second, nil)
			check(t, table)
			table.Flush(key, 3)
			blocks(t, first)
			table.Flush(key, 1)
			ends(t, first, nil)
			check(t, table)
		})
	}
}

// TestCrowd: nobody sleeps whose way is free, also where very many wait for parts of
// a file and give up, or have parts, in any order.
func TestCrowd(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		table := advisory.New()
		part := func(owner uint64, from, n int) advisory.Lock {
			start := rng.Uint64N(uint64(from))
			l := record(owner, start, start+rng.Uint64N(uint64(n)), rng.IntN(3) > 0)
			l.Handle = 10*owner + rng.Uint64N(3)
			return l
		}
		for range 20 {
			_ = table.Try(key, part(rng.Uint64N(3), 30, 30))
		}
		type waiting struct {
			lock advisory.Lock
			w    *advisory.Waiter
		}
		var line []waiting
		for i := range uint64(200) {
			l := part(10+i, 40, 20)
			line = append(line, waiting{l, table.Start(key, l)})
		}
		check(t, table)
		for len(line) > 0 {
			i := rng.IntN(len(line))
			if rng.IntN(3) == 0 {
				i = 0 // with most behind him
			}
			x := line[i]
			switch err, over := ended(x.w); {
			case over && err == nil:
				table.Unlock(key, x.lock)
			case over:
				t.Fatalf("wait ended: %v", err)
			case rng.IntN(4) == 0:
				holder := rng.Uint64N(3)
				table.Unlock(key, part(holder, 60, 10))
				_ = table.Try(key, part(holder, 30, 10))
				check(t, table)
				continue
			default:
				x.w.Cancel()
				ends(t, x.w, advisory.ErrCancelled)
			}
			check(t, table)
			line = slices.Delete(line, i, i+1)
		}
	}
}

func TestDeadlock(t *testing.T) {
	ring := func(table *advisory.Table, n uint64, lock func(i, at uint64) advisory.Lock) (closing *advisory.Waiter, rest []*advisory.Waiter) {
		for i := range n {
			try(t, table, lock(i+1, i), nil)
		}
		for i := range n - 1 {
			rest = append(rest, table.Start(key, lock(i+1, i+1)))
			blocks(t, rest[i])
		}
		return table.Start(key, lock(n, 0)), rest
	}
	t.Run("record", func(t *testing.T) {
		for _, n := range []uint64{2, 3, 10, 50} {
			table := advisory.New()
			w, rest := ring(table, n, func(i, at uint64) advisory.Lock { return record(i, at, at, true) })
			ends(t, w, advisory.ErrDeadlock)
			check(t, table)
			table.Flush(key, n) // the one that heard of it gives way
			ends(t, rest[n-2], nil)
			check(t, table)
		}
	})
	t.Run("several files", func(t *testing.T) {
		table := advisory.New()
		a, b := record(1, 0, 0, true), record(2, 0, 0, true)
		_ = table.Try(1, a)
		_ = table.Try(2, b)
		blocks(t, table.Start(2, a))
		ends(t, table.Start(1, b), advisory.ErrDeadlock)
	})
	t.Run("upgrade", func(t *testing.T) {
		table := advisory.New()
		try(t, table, record(1, 0, 9, false), nil)
		try(t, table, record(2, 0, 9, false), nil)
		w := table.Start(key, record(1, 0, 9, true))
		blocks(t, w)
		ends(t, table.Start(key, record(2, 0, 9, true)), advisory.ErrDeadlock)
		table.Flush(key, 2)
		ends(t, w, nil)
	})
	t.Run("on waking", func(t *testing.T) {
		// 3 waits for 1 behind 2; when 2 has got the lock it waits for 3.
		table := advisory.New()
		try(t, table, record(1, 0, 0, true), nil)
		try(t, table, record(3, 1, 1, true), nil)
		w2, w3 := table.Start(key, record(2, 0, 0, true)), table.Start(key, record(3, 0, 0, true))
		table.Flush(key, 1)
		ends(t, w2, nil)
		blocks(t, w3)
		ends(t, table.Start(key, record(2, 1, 1, true)), advisory.ErrDeadlock)
	})
	t.Run("flock has none", func(t *testing.T) {
		table := advisory.New()
		_ = table.Try(1, flock(1, true))
		_ = table.Try(2, flock(2, true))
		blocks(t, table.Start(2, flock(1, true)))
		w := table.Start(1, flock(2, true))
		blocks(t, w)
		w.Cancel()
	})
	t.Run("two owners of one process are descriptions", func(t *testing.T) {
		table := advisory.New()
		w, _ := ring(table, 2, func(i, at uint64) advisory.Lock {
			l := record(i, at, at, true)
			l.Pid = 10
			return l
		})
		blocks(t, w)
	})
	t.Run("not by others' circles", func(t *testing.T) {
		// Threads of 1 wait for 2, threads of 2 for 1; 3 waits for 1.
		table := advisory.New()
		try(t, table, record(1, 0, 0, true), nil)
		try(t, table, record(2, 1, 1, true), nil)
		try(t, table, record(4, 9, 9, true), nil)
		blocks(t, table.Start(key, record(1, 9, 9, true)))
		blocks(t, table.Start(key, record(2, 0, 0, true)))
		w := table.Start(key, record(1, 1, 1, true))
		ends(t, w, advisory.ErrDeadlock)
		blocks(t, table.Start(key, record(3, 0, 0, true)))
	})
}

// TestThousand: 1000 waiters cost no goroutine and no thread, and each release
// hands over to the next one.
func TestThousand(t *testing.T) {
	eachKind(t, func(t *testing.T, lock func(uint64, bool) advisory.Lock) {
		const n = 1000
		table := advisory.New()
		try(t, table, lock(0, true), nil)
		before := runtime.NumGoroutine()
		var waits []*advisory.Waiter
		for i := range uint64(n) {
			waits = append(waits, table.Start(key, lock(i+1, true)))
		}
		if d := runtime.NumGoroutine() - before; d > 0 {
			t.Errorf("%d goroutines more", d)
		}
		check(t, table)
		for i := range uint64(n) {
			blocks(t, waits[i])
			table.Release(key, i)
			ends(t, waits[i], nil)
		}
		locks(t, table, lock(n, true))
	})
}

// TestRaces: lock holders exclude each other, cancelled waiters have nothing,
// and nobody is forgotten.
func TestRaces(t *testing.T) {
	eachKind(t, func(t *testing.T, lock func(uint64, bool) advisory.Lock) {
		table := advisory.New()
		var readers, writers, granted, cancelled atomic.Int64
		var wg sync.WaitGroup
		for i := range uint64(32) {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(i, 0))
				for range 200 {
					l := lock(i, rng.IntN(3) == 0)
					cancel := make(chan struct{})
					if rng.IntN(2) == 0 {
						go func() {
							runtime.Gosched()
							close(cancel)
						}()
					}
					err := table.Wait(key, l, cancel)
					if errors.Is(err, advisory.ErrCancelled) {
						cancelled.Add(1)
						continue
					}
					if err != nil {
						t.Errorf("Wait = %v", err)
						return
					}
					granted.Add(1)
					n := &readers
					if l.Write {
						n = &writers
					}
					n.Add(1)
					if w := writers.Load(); w > 1 || w == 1 && (readers.Load() > 0 || !l.Write) {
						t.Errorf("%d writers with %d readers", w, readers.Load())
					}
					runtime.Gosched()
					n.Add(-1)
					if rng.IntN(2) == 0 {
						table.Unlock(key, l)
					} else {
						table.Release(key, l.Handle)
					}
				}
			})
		}
		wg.Wait()
		locks(t, table)
		t.Logf("%d granted, %d cancelled", granted.Load(), cancelled.Load())
	})
}
