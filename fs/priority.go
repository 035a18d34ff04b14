package fs

import (
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// spareProcs is how many goroutines may run at a time besides one a core. Threads that
// wait in a read of /dev/fuse keep theirs until the runtime takes it back, for
// up to 10 ms on a machine with few cores; so long an exit would go unnoticed
// (measured on 2 cores with 2: p99 of 10.6 ms from kill -9 to a free directory; with 8:
// 1.1). There may be four such threads a core, and some more; see transport.sysmon. But
// on a large machine, so many of the collector would keep it busy.
func spareProcs(cores int) int { return min(3*cores+4, 24) }

func raiseProcs() {
	if n := runtime.NumCPU(); runtime.GOMAXPROCS(0) < n+spareProcs(n) {
		runtime.GOMAXPROCS(n + spareProcs(n))
	}
}

// niceness is what root's daemon runs at: every process that uses the mount
// waits for it, and R4 gives it ten milliseconds on a machine under load.
const niceness = -10

// raisePriority raises the priority of all threads. Those that are made later
// inherit it; one that is being made by a thread whose turn has not come yet does
// not, so it is tried until all have it. (And again later, for one that nobody could see
// then.) A sandbox may forbid it; then the daemon is as good as any other process.
func raisePriority() {
	const passes = 100 // threads come and go, and no more than a few at a time
	for range passes {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return
		}
		raised := false
		for _, t := range tasks {
			tid, err := strconv.Atoi(t.Name())
			if err != nil || nicenessOf(tid) <= niceness {
				continue
			}
			if unix.Setpriority(unix.PRIO_PROCESS, tid, niceness) == nil {
				raised = true
			}
		}
		if !raised {
			return
		}
	}
}

// nicenessOf returns niceness for a thread that is gone.
func nicenessOf(tid int) int {
	n, err := unix.Getpriority(unix.PRIO_PROCESS, tid)
	if err != nil {
		return niceness
	}
	return 20 - n // so the system call has it
}
