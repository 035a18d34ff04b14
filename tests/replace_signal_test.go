//go:build linux

package tests

import (
	"os/exec"
	"syscall"
	"testing"
)

// TestM4ReplaceSignal: a daemon that has been told to end is not replaced any
// more: it unmounts, and ends.
func TestM4ReplaceSignal(t *testing.T) {
	dir := staticDir(t)
	for range 20 {
		m := newMount(t, dir, dir)
		m.start(nil)
		m.awaitReady()
		a := agent(t)
		a.must("chdir", m.Path) // it takes a moment to end, and serves meanwhile
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		p := startCmd(t, exec.Command(stagefsBin(), "mount", "--replace", m.Path))
		a.must("chdir", "/")
		eventually(t, "the daemon ends", m.dead)
		if status := m.cmd.ProcessState.ExitCode(); status != 0 {
			t.Errorf("the daemon's status is %d:\n%s", status, shorten(m.Log()))
		}
		if r := p.Wait(); r.Status == 0 {
			t.Errorf("replaced after SIGTERM: %v", r)
		}
		if mountedAt(m.Path) {
			t.Fatal("still mounted")
		}
	}
}
