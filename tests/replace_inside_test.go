//go:build linux

package tests

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestFaultReplaceInside: a daemon is not replaced by a program that lies in its own
// mount, by whatever path, which it could not run without asking itself (M4). It says
// so, and serves on.
func TestFaultReplaceInside(t *testing.T) {
	replaceWays(t, func(t *testing.T, opts []string) {
		m := mountOver(t, opts...)
		mustDo(t, copyFile(stagefsBin(), m.At("stagefs"), 0o755))
		mustDo(t, os.Chmod(m.At("stagefs"), 0o755)) // the umask is the caller's
		bound := tempDir(t)
		mustDo(t, unix.Mount(m.Path, bound, "", unix.MS_BIND, ""))
		defer unix.Unmount(bound, unix.MNT_DETACH)
		refused := func(when, program string) {
			t.Helper()
			r := m.replaceBy(program)
			if r.Status != 69 || !strings.Contains(r.Err, "lies in the mount; copy it elsewhere; the daemon serves on") {
				t.Errorf("%s: mount --replace by %s: %v", when, program, r)
			}
		}
		refused("at first", m.At("stagefs"))
		refused("at first", bound+"/stagefs")
		m.replace()
		refused("replaced", bound+"/stagefs")
		m.restart(nil, opts...)
		refused("in a dead mount's place", m.At("stagefs"))
		a := agent(t)
		a.must("mkdir", m.At("D"))
		mustDo(t, os.Remove(m.At("stagefs")))
		m.replace()
		m.wantOwner("D", a.Pid)
	})
}

// replaceBy has a program replace the daemon. Where that hangs, not even SIGKILL ends
// who uses the mount: then the connection is ended.
func (m *Mount) replaceBy(program string) Result {
	m.t.Helper()
	abort := m.aborter()
	p := startCmd(m.t, exec.Command(program, "mount", "--replace", m.Path))
	select {
	case <-p.done:
	case <-time.After(patience):
		m.cmd.Process.Signal(syscall.SIGKILL)
		abort()
		m.t.Fatalf("mount --replace by %s hangs", program)
	}
	return p.Wait()
}
