//go:build linux

package advisory_test

import (
	"syscall"
	"testing"

	"github.com/stagefs/stagefs/lockstate/advisory"
	"golang.org/x/sys/unix"
)

// What Linux does where its documentation is silent, measured on a real file,
// and the table beside it.

// sleeps waits until the call is asleep in the kernel.
func (k *kernel) sleeps(p *proc, id int) {
	k.t.Helper()
	if got := k.settled(map[int]*proc{id: p}); len(got) > 0 {
		k.t.Fatalf("answered: %v", got)
	}
}

// TestKernelFIFO: conflicting waiters get flock and record locks in order of
// arrival: 64 descriptions of one process, and 8 processes.
func TestKernelFIFO(t *testing.T) {
	for _, c := range []struct {
		op           string
		procs, slots int
	}{{"flock", 1, 65}, {"posix", 9, 1}} {
		t.Run(c.op, func(t *testing.T) {
			k := newKernel(t, c.procs)
			n := c.procs * c.slots
			who := func(i int) (*proc, int) { return k.procs[i/c.slots], 10 + i%c.slots }
			call := func(i int, lock command) int {
				p, slot := who(i)
				lock.Op, lock.Slot = c.op, slot
				return k.send(p, lock)
			}
			ids := make([]int, n)
			for i := range n {
				p, slot := who(i)
				k.call(p, command{Op: "open", Slot: slot})
				if i == 0 {
					k.await(p, call(i, command{Type: unix.F_WRLCK}))
					continue
				}
				ids[i] = call(i, command{Type: unix.F_WRLCK, Wait: true})
				k.sleeps(p, ids[i])
			}
			for i := range n {
				p, _ := who(i)
				if i > 0 {
					if r := k.await(p, ids[i]); r.Errno != 0 {
						t.Fatalf("waiter %d: %v", i, r.Errno)
					}
				}
				for j := i + 1; j < n; j++ {
					p, _ := who(j)
					if p.drain(); p.early[ids[j]].ID != 0 {
						t.Fatalf("waiter %d came before its turn, after %d", j, i)
					}
				}
				k.await(p, call(i, command{Type: unix.F_UNLCK}))
			}
		})
	}
}

// TestKernelStarves: a new reader passes a waiting writer, whether it tries or
// waits.
func TestKernelStarves(t *testing.T) {
	k := newKernel(t, 3)
	for _, p := range k.procs {
		k.call(p, command{Op: "open", Slot: 5})
	}
	for _, op := range []string{"flock", "posix"} {
		t.Run(op, func(t *testing.T) {
			k.call(k.procs[0], command{Op: op, Slot: 5, Type: unix.F_RDLCK})
			id := k.send(k.procs[1], command{Op: op, Slot: 5, Type: unix.F_WRLCK, Wait: true})
			k.sleeps(k.procs[1], id)
			for _, wait := range []bool{false, true} {
				if r := k.call(k.procs[2], command{Op: op, Slot: 5, Type: unix.F_RDLCK, Wait: wait}); r.Errno != 0 {
					t.Errorf("reader, wait=%v: %v", wait, r.Errno)
				}
			}
			for _, p := range []int{0, 2} {
				k.call(k.procs[p], command{Op: op, Slot: 5, Type: unix.F_UNLCK})
			}
			if r := k.await(k.procs[1], id); r.Errno != 0 {
				t.Error(r.Errno)
			}
			k.call(k.procs[1], command{Op: op, Slot: 5, Type: unix.F_UNLCK})
		})
	}
}

// TestKernelDeadlockDepth: how long a circle Linux finds. The table finds any.
func TestKernelDeadlockDepth(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	const most = 14
	k := newKernel(t, most)
	for _, p := range k.procs {
		k.call(p, command{Op: "open", Slot: 5})
	}
	longest := 0
	for n := 2; n <= most; n++ {
		table := advisory.New()
		at := func(i int, wait bool) command {
			return command{Op: "posix", Slot: 5, Type: unix.F_WRLCK, Start: int64(i % n), Len: 1, Wait: wait}
		}
		lock := func(i, byte int) advisory.Lock { return record(uint64(i+1), uint64(byte%n), uint64(byte%n), true) }
		for i, p := range k.procs[:n] {
			k.call(p, at(i, false))
			try(t, table, lock(i, i), nil)
		}
		calls := make(map[int]*proc)
		for i, p := range k.procs[:n-1] {
			id := k.send(p, at(i+1, true))
			k.sleeps(p, id)
			calls[id] = p
			blocks(t, table.Start(key, lock(i, i+1)))
		}
		last := k.procs[n-1]
		closing := k.send(last, at(n, true))
		calls[closing] = last
		ends(t, table.Start(key, lock(n-1, n)), advisory.ErrDeadlock)
		if r, ok := k.settled(calls)[closing]; ok {
			if r.Errno != syscall.EDEADLK {
				t.Fatalf("circle of %d: %v", n, r.Errno)
			}
			longest = n
			// Undo from the end: everyone else gets what it waits for.
			delete(calls, closing)
			for i := n - 1; i >= 0; i-- {
				k.call(k.procs[i], command{Op: "posix", Slot: 5, Type: unix.F_UNLCK})
				if i > 0 {
					for id, p := range calls {
						if p == k.procs[i-1] {
							k.await(p, id)
						}
					}
				}
			}
			continue
		}
		break
	}
	t.Logf("circles of up to %d processes are found", longest)
	if longest < 2 {
		t.Error("none")
	}
}
