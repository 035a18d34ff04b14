//go:build linux

package procid_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

func benchBothModes(b *testing.B, f func(b *testing.B, compat bool)) {
	b.Run("native", func(b *testing.B) { f(b, false) })
	b.Run("compat", func(b *testing.B) { f(b, true) })
}

func BenchmarkLookupCached(b *testing.B) {
	for _, kind := range []string{"leader", "thread"} {
		b.Run(kind, func(b *testing.B) {
			benchBothModes(b, func(b *testing.B, compat bool) {
				h := start(b, "threads 3")
				tid := h.numbers(b)[2]
				if kind == "leader" {
					tid = h.pid()
				}
				r := newResolver(b, compat)
				for b.Loop() {
					lookup(b, r, tid)
				}
			})
		})
	}
}

func BenchmarkLookupParallel(b *testing.B) {
	r := newResolver(b, false)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			lookup(b, r, os.Getpid())
		}
	})
}

// A process whose parent is in the cache already: what each new process costs
// at its first request, and at its first acquisition.
func BenchmarkFirstSighting(b *testing.B) {
	benchBothModes(b, func(b *testing.B, compat bool) {
		h := start(b, "tree 1")
		pids := h.numbers(b)
		var first, lineage time.Duration
		for b.Loop() {
			b.StopTimer()
			r := newResolverQuiet(b, compat)
			lookup(b, r, pids[0]).Lineage()
			b.StartTimer()
			t0 := time.Now()
			p := lookup(b, r, pids[1])
			t1 := time.Now()
			p.Lineage()
			lineage += time.Since(t1)
			first += t1.Sub(t0)
			b.StopTimer()
			r.Close()
			b.StartTimer()
		}
		b.ReportMetric(float64(first.Nanoseconds())/float64(b.N), "lookup-ns/op")
		b.ReportMetric(float64(lineage.Nanoseconds())/float64(b.N), "lineage-ns/op")
	})
}

// More threads than the cache holds are looked up, so none is found.
func BenchmarkLookupUncached(b *testing.B) {
	benchBothModes(b, func(b *testing.B, compat bool) {
		h := start(b, "threads 1100")
		tids := h.numbers(b)
		r := newResolver(b, compat)
		n := 0
		for b.Loop() {
			lookup(b, r, tids[n%len(tids)])
			n++
		}
	})
}

// The first sighting of a process three generations below pid 1's child, with
// nothing in the cache: all its ancestors are read, and then looked at for
// reapers.
func BenchmarkLineage(b *testing.B) {
	benchBothModes(b, func(b *testing.B, compat bool) {
		h := start(b, "tree 2")
		pids := h.numbers(b)
		var first, lineage time.Duration
		var n int
		for b.Loop() {
			b.StopTimer()
			r := newResolverQuiet(b, compat)
			b.StartTimer()
			t0 := time.Now()
			p := lookup(b, r, pids[2])
			t1 := time.Now()
			n = len(p.Lineage())
			lineage += time.Since(t1)
			first += t1.Sub(t0)
			b.StopTimer()
			r.Close()
			b.StartTimer()
		}
		b.ReportMetric(float64(first.Nanoseconds())/float64(b.N), "lookup-ns/op")
		b.ReportMetric(float64(lineage.Nanoseconds())/float64(b.N), "lineage-ns/op")
		b.ReportMetric(float64(n), "ancestors")
	})
}

func newResolverQuiet(b *testing.B, compat bool) *procid.Resolver {
	b.Helper()
	r, err := procid.NewResolver(procid.Options{Compat: compat})
	if err != nil {
		b.Fatal(err)
	}
	return r
}

// From kill(2) to the call of the watch.
func BenchmarkWatchLatency(b *testing.B) {
	benchBothModes(b, func(b *testing.B, compat bool) {
		r := newResolver(b, compat)
		var took []time.Duration
		known := 0
		for b.Loop() {
			b.StopTimer()
			h := start(b, "exit 0")
			h.numbers(b)
			type called struct {
				at time.Time
				e  procid.Exit
			}
			c := make(chan called, 1)
			if err := r.Watch(lookup(b, r, h.pid()).ID(), func(_ procid.ID, e procid.Exit) { c <- called{time.Now(), e} }); err != nil {
				b.Fatal(err)
			}
			go h.Wait()
			time.Sleep(time.Millisecond) // let it be quiet
			b.StartTimer()
			t0 := time.Now()
			unix.Kill(h.pid(), unix.SIGKILL)
			end := <-c
			took = append(took, end.at.Sub(t0))
			if end.e.Known {
				known++
			}
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
		b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		b.ReportMetric(100*float64(known)/float64(len(took)), "%known")
	})
}
