//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

// TestR4Priority: each thread of root's daemon runs before ordinary processes,
// also one that was made while the others were raised.
func TestR4Priority(t *testing.T) {
	need(t, "root", "fuse")
	for range 5 {
		m := mount(t)
		mustDo(t, os.WriteFile(m.At("file"), nil, 0o644))
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", m.daemon()))
		mustDo(t, err)
		for _, task := range tasks {
			tid, err := strconv.Atoi(filepath.Base(task))
			mustDo(t, err)
			const niceness = -10
			if got, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil && 20-got != niceness {
				t.Errorf("thread %d of %d: nice %d, want %d", tid, len(tasks), 20-got, niceness)
			}
		}
	}
}
