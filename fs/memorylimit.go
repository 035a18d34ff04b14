package fs

import (
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// obeyMemoryLimit has the collector know how much memory the control group has: what lies
// uncollected counts there, and the kernel ends the daemon for it. GOMEMLIMIT goes before.
func obeyMemoryLimit() {
	if debug.SetMemoryLimit(-1) != math.MaxInt64 {
		return
	}
	lines, _ := cgroupsOf(os.Getpid())
	for line := range strings.Lines(lines) {
		_, id, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		controllers, _, _ := strings.Cut(id, ":")
		if controllers != "" && controllers != "memory" {
			continue
		}
		dir, _, _ := cgroupDir(id)
		// A quarter is for the program, the supervisor's too, and for what the kernel keeps.
		if most := memoryLimit(dir); most < math.MaxInt64 {
			debug.SetMemoryLimit(most / 4 * 3)
		}
	}
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
