//go:build linux

package tests

import (
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// TestFaultRunNoThread: a lease that `stagefs run` renews lasts while its user may make no
// more threads, as where COMMAND has made all the processes that there may be.
func TestFaultRunNoThread(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	const user = 4096 + 17 // nobody else's: the limit is on what all of a user's processes have
	cmd := exec.Command(stagefsBin(), "run", "--client", "ci/42", "--ttl", "4s", m.At("D"), "sh", "-c", "prlimit --pid $PPID --nproc=1:1 && echo no more; read line")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: user, Gid: user}}
	in, err := cmd.StdinPipe()
	mustDo(t, err)
	start, out := outputOf(t, cmd)
	p := start()
	says(t, out, "no more")
	token := m.Locks()["D"].Token
	// Each renewal, of which there are four meanwhile, waits on a thread.
	time.Sleep(1200 * time.Millisecond)
	if got := m.Locks()["D"].Token; got != token {
		t.Errorf("the lock there has token %d, want %d", got, token)
	}
	in.Close()
	if r := p.Wait(); r.Status != 1 { // read(1) at the end of its input
		t.Errorf("stagefs run: %v, want status 1", r)
	}
}
