package fs

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// obeyMemoryLimit has the collector know how much memory the control group has: what lies
// uncollected counts there, and the kernel ends the daemon for it. GOMEMLIMIT goes before.
func obeyMemoryLimit() {
	if debug.SetMemoryLimit(-1) != math.MaxInt64 {
		return
	}
	debug.SetMemoryLimit(heapLimit())
}

// heapLimit returns how many bytes the heap may have. A quarter of what the control group
// may have is for the program, the supervisor's too, and for what the kernel keeps.
func heapLimit() int64 {
	if most := memoryLimit(memoryCgroup()); most < math.MaxInt64 {
		return most / 4 * 3
	}
	return math.MaxInt64
}

// besidesLocks is how much of the heap is for all else, in bytes.
const besidesLocks = 16 << 20

// roomStep is by how many bytes of locks the limit may be out of date: it can be changed at
// any time.
const roomStep = 4 << 20

// room returns how many bytes locks may take. There are never so many that the next daemon
// could not take them over: it would be killed, and so would all after it.
func (s *Server) room(want int) (most int, err error) {
	limit := heapLimit()
	if most := max(limit-besidesLocks, limit/2); int64(want) <= most {
		return int(min(int64(want)+roomStep, most)), nil
	}
	if skipped, ok := s.full.pass(time.Now()); ok {
		s.fs.log.Error("no more locks can be had: they would not outlive the daemon in the memory of its control group; give it more",
			append([]any{"locks", s.fs.table.Len(), "MiB", limit / 3 * 4 >> 20}, skipped...)...)
	}
	return 0, fmt.Errorf("the locks need all memory of the daemon's control group: %w", unix.ENOLCK)
}

// memoryCgroup returns where the cgroup is seen that bounds this process's memory; "": nowhere.
func memoryCgroup() (dir string) {
	lines, _ := cgroupsOf(os.Getpid())
	for line := range strings.Lines(lines) {
		_, id, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		switch controllers, _, _ := strings.Cut(id, ":"); controllers {
		case "memory": // else version 2 may have it
			dir, _, _ = cgroupDir(id)
			return dir
		case "":
			dir, _, _ = cgroupDir(id)
		}
	}
	return dir
}

// memoryLimit returns how many bytes a cgroup may have, and those that it is in.
func memoryLimit(dir string) int64 {
	most := int64(math.MaxInt64)
	for ; len(dir) > 1; dir = filepath.Dir(dir) {
		for _, file := range []string{"memory.high", "memory.max", "memory.limit_in_bytes"} {
			b, _ := os.ReadFile(filepath.Join(dir, file))
			if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 && n < most {
				most = n
			}
		}
	}
	return most
}

// MemoryKills returns how many processes of this one's control group the kernel has killed
// for want of memory, and how many bytes that group may have.
func MemoryKills() (kills int, limit int64) {
	dir := memoryCgroup()
	for _, file := range []string{"memory.events", "memory.oom_control"} {
		b, _ := os.ReadFile(filepath.Join(dir, file))
		if _, count, ok := bytes.Cut(b, []byte("oom_kill ")); ok {
			_, _ = fmt.Sscan(string(count), &kills)
		}
	}
	return kills, memoryLimit(dir)
}
