//go:build linux

package tests

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// R4, S1: a daemon that is killed while it makes somebody's lock file leaves
// nothing stale: the next one knows whose it was to be, and removes it with its
// owner, and the temporary file of a link(2) protocol too.
func TestS1AttackMidway(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t, "--supervise", "--depth", "2", "--unlocked", "deny")
	openDir(t, m.Back("b"))
	kinds := []string{"link", "excl", "mkdir", "link"}
	for i := range kinds {
		openDir(t, m.Back("b/S"+itoa(i)))
	}
	dir := tempDir(t)
	mustDo(t, os.Mkdir(filepath.Join(dir, "witness"), 0o777))
	for round := range 15 {
		var workers []*Proc
		for i, kind := range kinds {
			spec, _ := json.Marshal(workerSpec{
				Kind: kind, Mount: m.Path, Slots: []string{"b/S" + itoa(i)}, Hasty: true,
				Journal: filepath.Join(dir, "journal"+itoa(i)), Witness: filepath.Join(dir, "witness"),
			})
			cmd := exec.Command(agentBin())
			cmd.Env = append(os.Environ(), envWorker+"="+string(spec))
			cmd.Dir = "/"
			workers = append(workers, startCmd(t, cmd))
		}
		time.Sleep(time.Duration(150+rand.IntN(150)) * time.Millisecond)
		old := m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		for _, w := range workers {
			w.Kill()
		}
		m.awaitNext(old)
		var left []string
		eventually(t, "all locks end", func() bool {
			l := m.Listing()
			left = litterIn(m.Dir)
			return len(l.Locks) == 0
		})
		if left = litterIn(m.Dir); len(left) > 0 {
			t.Errorf("round %d: left in the backing: %q", round, left)
			for _, path := range left {
				os.RemoveAll(path)
			}
		}
	}
}
