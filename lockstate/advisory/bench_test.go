package advisory_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/advisory"
)

func BenchmarkLockUnlock(b *testing.B) {
	for name, lock := range kinds {
		b.Run(name, func(b *testing.B) {
			table := advisory.New()
			l := lock(1, true)
			b.ReportAllocs()
			for b.Loop() {
				if err := table.Try(key, l); err != nil {
					b.Fatal(err)
				}
				table.Unlock(key, l)
			}
		})
	}
}

// Other files' locks don't matter, nor does what waits for them.
func BenchmarkLockUnlockBesideWaiters(b *testing.B) {
	table := advisory.New()
	for i := range uint64(1000) {
		_ = table.Try(i+10, flock(1, true))
		table.Start(i+10, flock(2, true))
	}
	b.ReportAllocs()
	for b.Loop() {
		_ = table.Try(key, flock(3, true))
		table.Unlock(key, flock(3, true))
	}
}

// One owner with many ranges, as databases have.
func BenchmarkManyRanges(b *testing.B) {
	for _, n := range []uint64{100, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			table := advisory.New()
			for i := range n {
				_ = table.Try(key, record(1, 4*i, 4*i, true))
			}
			l := record(1, 2*n+2, 2*n+2, true)
			b.ReportAllocs()
			for b.Loop() {
				_ = table.Try(key, l)
				table.Unlock(key, l)
			}
		})
	}
}

// BenchmarkHandOver: 1000 waiters in line, each of which is a goroutine that
// unlocks as soon as it has the lock.
func BenchmarkHandOver(b *testing.B) {
	for name, lock := range kinds {
		b.Run(name, func(b *testing.B) {
			const n = 1000
			var times []time.Duration
			for b.Loop() {
				table := advisory.New()
				_ = table.Try(key, lock(0, true))
				released := make([]time.Time, n+1)
				granted := make([]time.Time, n+1)
				done := make(chan struct{})
				for i := uint64(1); i <= n; i++ {
					w := table.Start(key, lock(i, true))
					go func() {
						<-w.Done()
						granted[i] = time.Now()
						released[i] = time.Now()
						table.Unlock(key, lock(i, true))
						if i == n {
							close(done)
						}
					}()
				}
				released[0] = time.Now()
				table.Unlock(key, lock(0, true))
				<-done
				for i := range n {
					times = append(times, granted[i+1].Sub(released[i]))
				}
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "ns/median")
			b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "ns/p99")
		})
	}
}

// BenchmarkEnqueue: the cost of joining a line of 1000.
func BenchmarkEnqueue(b *testing.B) {
	for name, lock := range kinds {
		b.Run(name, func(b *testing.B) {
			table := advisory.New()
			for i := range uint64(1000) {
				table.Start(key, lock(i, true))
			}
			b.ReportAllocs()
			for b.Loop() {
				table.Start(key, lock(2000, true)).Cancel()
			}
		})
	}
}

// BenchmarkCancelLine: 1000 waiters in line who all give up, the first one first.
func BenchmarkCancelLine(b *testing.B) {
	for name, lock := range kinds {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				table := advisory.New()
				_ = table.Try(key, lock(0, true))
				var line []*advisory.Waiter
				for i := range uint64(1000) {
					line = append(line, table.Start(key, lock(i+1, true)))
				}
				for _, w := range line {
					w.Cancel()
				}
			}
		})
	}
}
