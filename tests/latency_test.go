//go:build linux

package tests

import (
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

// TestR4Time measures how long after kill -9 of its owner a lock is somebody
// else's, as seen by a rival that tries without a pause: kill(2), the owner's
// death and the rival's own tries included. It judges nothing: machines differ.
// STAGEFS_KILLS sets how many owners die.
func TestR4Time(t *testing.T) {
	kills := 50
	if n, err := strconv.Atoi(os.Getenv("STAGEFS_KILLS")); err == nil {
		kills = n
	}
	m := mount(t)
	openDir(t, m.Back("D"))
	rival := agent(t)
	lock := m.At("D/devserver")
	var took []time.Duration
	for range kills {
		owner := agent(t)
		owner.must("creat", lock, "wronly,creat,excl")
		won := rival.StartGet("until", "creat", lock, "wronly,creat,excl")
		start := monotonic()
		owner.Kill()
		at, err := strconv.ParseInt(won(), 10, 64)
		mustDo(t, err)
		took = append(took, time.Duration(at-start))
		rival.must("unlink", lock)
	}
	slices.Sort(took)
	t.Logf("from kill -9 to the rival's lock, %d kills: median %v, p99 %v, worst %v",
		kills, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
}
