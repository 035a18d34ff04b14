//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// TestTransportSpread: while many call at a time, there is a thread on each core
// that reads /dev/fuse.
func TestTransportSpread(t *testing.T) {
	need(t, "root", "fuse", "taskset")
	if exec.Command("taskset", "-c", "0,1", "true").Run() != nil || exec.Command("taskset", "-c", "1", "true").Run() != nil {
		t.Skip("a single core")
	}
	m := mountBy(t, "threads")
	file := filepath.Join(m.Path, "file")
	mustDo(t, os.WriteFile(file, nil, 0o644))
	stop := make(chan struct{})
	var callers sync.WaitGroup
	defer callers.Wait()
	defer close(stop)
	for i := range 4 {
		callers.Go(func() {
			runtime.LockOSThread() // a caller is a thread
			for mode := os.FileMode(0o600); ; mode ^= 0o044 {
				select {
				case <-stop:
					return
				default:
					if err := os.Chmod(file, mode); err != nil {
						t.Errorf("caller %d: %v", i, err)
						return
					}
				}
			}
		})
	}
	for _, core := range []string{"0", "1"} {
		eventually(t, "a thread on core "+core, func() bool { return m.threadsOn(core) > 0 })
	}
}

// threadsOn is how many threads of the daemon may run on one core only.
func (m *Mount) threadsOn(core string) int {
	return m.threadsThat(func(tid string) bool {
		b, _ := os.ReadFile("/proc/" + tid + "/status") // it may have ended
		return strings.Contains(string(b), "\nCpus_allowed_list:\t"+core+"\n")
	})
}

// threadsThat is how many threads of the daemon are so.
func (m *Mount) threadsThat(is func(tid string) bool) (n int) {
	m.t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", m.daemon()))
	mustDo(m.t, err)
	for _, task := range tasks {
		if is(task.Name()) {
			n++
		}
	}
	return n
}
