//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestTransportFollows: the threads that read /dev/fuse run where the requests
// come from, and anywhere when these come from several cores.
func TestTransportFollows(t *testing.T) {
	need(t, "root", "fuse", "taskset")
	if exec.Command("taskset", "-c", "1", "true").Run() != nil {
		t.Skip("a single core")
	}
	m := mountBy(t, "threads")
	mustDo(t, os.WriteFile(m.Back("file"), nil, 0o644))
	on := func(core string) *Agent {
		return awaitAgent(t, func(sock string) {
			cmd := exec.Command("taskset", "-c", core, agentBin())
			cmd.Env = append(os.Environ(), envAgent+"="+sock)
			startCmd(t, cmd)
		})
	}
	first, second := on("0"), on("1")
	ask := func(a *Agent) {
		for i := range 50 {
			a.must("chmod", m.At("file"), []string{"0600", "0644"}[i%2])
		}
	}
	eventually(t, "threads on the first core", func() bool { ask(first); return m.threadsOn("0") > 0 })
	eventually(t, "threads on the second core", func() bool { ask(second); return m.threadsOn("1") > 0 && m.threadsOn("0") == 0 })
	eventually(t, "threads on any core", func() bool {
		for range 100 {
			first.must("chmod", m.At("file"), "0600")
			second.must("chmod", m.At("file"), "0644")
		}
		return m.threadsOn("0") == 0 && m.threadsOn("1") == 0
	})
}

// threadsOn is how many threads of the daemon may run on a core only.
func (m *Mount) threadsOn(core string) (n int) {
	m.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", m.daemon()))
	mustDo(m.t, err)
	for _, file := range files {
		b, _ := os.ReadFile(file) // it may have ended
		if strings.Contains(string(b), "\nCpus_allowed_list:\t"+core+"\n") {
			n++
		}
	}
	return n
}
