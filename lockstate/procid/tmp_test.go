//go:build linux

package procid_test
import ("testing";"sync/atomic")
func BenchmarkTmpBusy(b *testing.B) {
	var stop atomic.Bool
	defer stop.Store(true)
	for range 2 { go func(){ for !stop.Load() {} }() }
	BenchmarkWatchLatency(b)
}
