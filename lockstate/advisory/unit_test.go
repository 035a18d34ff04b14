package advisory_test

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stagefs/stagefs/lockstate/advisory"
)

// record returns a record lock of an owner, who has one handle of the same
// number.
func record(owner, start, end uint64, write bool) advisory.Lock {
	return advisory.Lock{Owner: owner, Handle: owner, Pid: uint32(owner), Start: start, End: end, Write: write}
}

func through(handle uint64, l advisory.Lock) advisory.Lock {
	l.Handle = handle
	return l
}

func flock(handle uint64, write bool) advisory.Lock {
	return advisory.Lock{Owner: handle, Handle: handle, Pid: uint32(handle), End: advisory.MaxEnd, Write: write, Flock: true}
}

const key = 1

func check(t testing.TB, table *advisory.Table) {
	t.Helper()
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
}

func try(t testing.TB, table *advisory.Table, l advisory.Lock, want error) {
	t.Helper()
	if err := table.Try(key, l); !errors.Is(err, want) {
		t.Fatalf("Try(%+v) = %v, want %v", l, err, want)
	}
	check(t, table)
}

func locks(t testing.TB, table *advisory.Table, want ...advisory.Lock) {
	t.Helper()
	if d := cmp.Diff(want, table.Locks(key)); d != "" {
		t.Fatalf("Locks: -want +got\n%s", d)
	}
	check(t, table)
}

func TestRanges(t *testing.T) {
	const end = advisory.MaxEnd
	r := func(start, end uint64) advisory.Lock { return record(1, start, end, false) }
	w := func(start, end uint64) advisory.Lock { return record(1, start, end, true) }
	const unlock = math.MaxUint32 // as Pid: not a lock but an unlock
	u := func(start, end uint64) advisory.Lock {
		l := r(start, end)
		l.Pid = unlock
		return l
	}
	type seq []advisory.Lock
	for _, c := range []struct {
		name string
		do   seq
		want seq
	}{
		{"unlock nothing", seq{u(0, end)}, nil},
		{"split", seq{w(0, 9), u(3, 5)}, seq{w(0, 2), w(6, 9)}},
		{"split infinite", seq{w(0, end), u(7, 7)}, seq{w(0, 6), w(8, end)}},
		{"cut head", seq{w(5, 9), u(0, 6)}, seq{w(7, 9)}},
		{"cut tail", seq{w(5, 9), u(8, end)}, seq{w(5, 7)}},
		{"unlock several", seq{w(0, 1), r(2, 3), w(5, 9), u(1, 7)}, seq{w(0, 0), w(8, 9)}},
		{"unlock beside", seq{w(5, 9), u(0, 4), u(10, end)}, seq{w(5, 9)}},
		{"merge neighbours", seq{r(0, 4), r(5, 9)}, seq{r(0, 9)}},
		{"merge backwards", seq{r(5, 9), r(0, 4)}, seq{r(0, 9)}},
		{"merge both sides", seq{r(0, 2), r(6, 9), r(3, 5)}, seq{r(0, 9)}},
		{"merge at the end", seq{r(end, end), r(0, end-1)}, seq{r(0, end)}},
		{"gap stays", seq{r(0, 2), r(4, 9)}, seq{r(0, 2), r(4, 9)}},
		{"types don't merge", seq{r(0, 4), w(5, 9)}, seq{r(0, 4), w(5, 9)}},
		{"upgrade the middle", seq{r(0, 9), w(3, 5)}, seq{r(0, 2), w(3, 5), r(6, 9)}},
		{"downgrade merges", seq{r(0, 2), w(3, 5), r(6, 9), r(3, 5)}, seq{r(0, 9)}},
		{"replace all", seq{r(2, 2), w(4, 4), r(6, 6), w(0, end)}, seq{w(0, end)}},
		{"same again", seq{w(3, 5), w(3, 5)}, seq{w(3, 5)}},
		{"inside", seq{w(0, 9), w(3, 5)}, seq{w(0, 9)}},
		{"beyond the end", seq{w(3, math.MaxUint64)}, seq{w(3, end)}},
		// Through another handle: kept apart, but never overlapping.
		{"two handles", seq{r(0, 9), through(2, r(3, 5))}, seq{r(0, 2), through(2, r(3, 5)), r(6, 9)}},
		{"two handles replace", seq{r(3, 5), through(2, r(0, 9))}, seq{through(2, r(0, 9))}},
		{"two handles convert", seq{r(0, 9), through(2, w(3, end))}, seq{r(0, 2), through(2, w(3, end))}},
		{"two handles beside", seq{r(0, 4), through(2, r(5, 9))}, seq{r(0, 4), through(2, r(5, 9))}},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := advisory.New()
			for _, l := range c.do {
				if l.Pid == unlock {
					table.Unlock(key, l)
					check(t, table)
				} else {
					try(t, table, l, nil)
				}
			}
			locks(t, table, c.want...)
		})
	}
}

func TestGet(t *testing.T) {
	table := advisory.New()
	get := func(want advisory.Lock, conflict ...advisory.Lock) {
		t.Helper()
		got, ok := table.Get(key, want)
		if ok != (len(conflict) > 0) || ok && got != conflict[0] {
			t.Errorf("Get(%+v) = %+v, %v, want %+v", want, got, ok, conflict)
		}
	}
	get(record(1, 0, 9, true))
	try(t, table, record(2, 20, 29, false), nil)
	try(t, table, record(1, 10, 19, false), nil)
	try(t, table, through(7, record(1, 20, 24, false)), nil)
	get(record(3, 0, advisory.MaxEnd, true), record(2, 20, 29, false)) // owner 2 came first
	get(record(3, 0, 19, true), record(1, 10, 24, false))              // joined across handles
	get(record(3, 24, 24, false))
	get(record(1, 10, 24, true), record(2, 20, 29, false))
	get(record(1, 10, 19, true))
	if got, ok := table.GetOwn(key, record(2, 0, advisory.MaxEnd, false)); !ok || got != record(2, 20, 29, false) {
		t.Errorf("GetOwn = %+v, %v", got, ok)
	}
	// flock(2) and fcntl(2) don't see each other.
	try(t, table, flock(9, true), nil)
	get(record(3, 0, 9, true))
	get(flock(8, false), flock(9, true))
}

func TestConflictError(t *testing.T) {
	table := advisory.New()
	try(t, table, record(1, 5, 9, true), nil)
	err := table.Try(key, record(2, 0, advisory.MaxEnd, false))
	var c *advisory.ConflictError
	if !errors.As(err, &c) || c.Lock != record(1, 5, 9, true) {
		t.Errorf("Try = %v (%+v)", err, c)
	}
	locks(t, table, record(1, 5, 9, true))
}

// TestFlockConversion: flock(2): a conversion isn't atomic, and one that is
// refused has lost the lock.
func TestFlockConversion(t *testing.T) {
	table := advisory.New()
	try(t, table, flock(1, false), nil)
	try(t, table, flock(2, false), nil)
	try(t, table, flock(1, true), advisory.ErrConflict)
	locks(t, table, flock(2, false))
	try(t, table, flock(2, true), nil) // alone now
	try(t, table, flock(1, false), advisory.ErrConflict)
	try(t, table, flock(2, false), nil) // down
	try(t, table, flock(1, false), nil)
	locks(t, table, flock(2, false), flock(1, false))
}

// TestRecordConversion: a record lock that can't be converted is kept.
func TestRecordConversion(t *testing.T) {
	table := advisory.New()
	try(t, table, record(1, 0, 9, false), nil)
	try(t, table, record(2, 5, 5, false), nil)
	try(t, table, record(1, 0, 9, true), advisory.ErrConflict)
	locks(t, table, record(1, 0, 9, false), record(2, 5, 5, false))
	try(t, table, record(1, 0, 4, true), nil)
	locks(t, table, record(1, 0, 4, true), record(1, 5, 9, false), record(2, 5, 5, false))
}

// TestClose: R2, M2. Owner 1 is a process with handles 1 and 2, owner 100 the
// OFD locks of handle 2, which another process has too.
func TestClose(t *testing.T) {
	table := advisory.New()
	ofd := through(2, record(100, 50, 59, true))
	try(t, table, record(1, 0, 9, true), nil)
	try(t, table, through(2, record(1, 10, 19, false)), nil)
	try(t, table, ofd, nil)
	try(t, table, flock(2, true), nil)

	table.Flush(key, 1) // close of any descriptor drops all POSIX locks
	locks(t, table, flock(2, true), ofd)
	table.Release(key, 1)
	locks(t, table, flock(2, true), ofd)
	table.Release(key, 2)
	locks(t, table)
	if _, ok := table.Get(key, record(9, 0, advisory.MaxEnd, true)); ok {
		t.Error("something is left")
	}
}

// TestOwnerReused: the kernel makes a new description with the number of an
// old one whose release is still to come. That ends the old one's locks only.
func TestOwnerReused(t *testing.T) {
	table := advisory.New()
	try(t, table, through(1, record(100, 0, 99, true)), nil)
	try(t, table, through(2, record(100, 10, 19, true)), nil)
	table.Release(key, 1)
	locks(t, table, through(2, record(100, 10, 19, true)))

	// The same range and type: still the new one's.
	try(t, table, through(3, record(100, 10, 19, true)), nil)
	table.Release(key, 2)
	locks(t, table, through(3, record(100, 10, 19, true)))

	old := flock(1, true)
	fresh := flock(2, true)
	fresh.Owner = old.Owner
	try(t, table, old, nil)
	try(t, table, fresh, advisory.ErrConflict) // known by handle
	table.Release(key, 1)
	try(t, table, fresh, nil)
}

func TestLimit(t *testing.T) {
	table := advisory.New()
	table.SetLimit(2)
	try(t, table, record(1, 0, 0, true), nil)
	try(t, table, record(1, 2, 12, true), nil)
	try(t, table, record(1, 20, 20, true), advisory.ErrLimit)
	try(t, table, flock(1, true), advisory.ErrLimit)
	table.Unlock(key, record(1, 5, 5, true)) // splits all the same
	locks(t, table, record(1, 0, 0, true), record(1, 2, 4, true), record(1, 6, 12, true))
	table.Flush(key, 1)
	try(t, table, flock(1, true), nil)
}

func TestRange(t *testing.T) {
	table := advisory.New()
	try(t, table, record(1, 5, 4, true), advisory.ErrRange)
	if err := <-table.Start(key, record(1, 5, 4, true)).Done(); !errors.Is(err, advisory.ErrRange) {
		t.Errorf("Start = %v", err)
	}
	table.Unlock(key, record(1, 5, 4, true))
	locks(t, table)
}
