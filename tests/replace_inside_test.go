//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// TestS1ReplaceSupervisor: a supervisor starts what its daemon has become by an upgrade,
// although its own program and that file are gone by then.
func TestS1ReplaceSupervisor(t *testing.T) {
	need(t, "root", "fuse")
	program := filepath.Join(tempDir(t), "stagefs")
	mustDo(t, copyFile(stagefsBin(), program, 0o755))
	m := mountOver(t, "--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	if r := m.replaceBy(program); r.Status != 0 {
		t.Fatal(r)
	}
	old := m.daemon()
	supervisor := "/proc/" + itoa(parentOf(t, old)) + "/fd"
	eventually(t, "the supervisor knows the program", func() bool {
		fds, err := os.ReadDir(supervisor)
		mustDo(t, err)
		return slices.ContainsFunc(fds, func(fd os.DirEntry) bool {
			file, _ := os.Readlink(filepath.Join(supervisor, fd.Name()))
			return file == program
		})
	})
	mustDo(t, os.Remove(program))
	for range 2 {
		old = m.daemon()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitSupervised(old)
		if exe, err := os.Readlink("/proc/" + itoa(m.daemon()) + "/exe"); exe != program+" (deleted)" {
			t.Errorf("the next daemon runs %q, %v; want %q", exe, err, program)
		}
	}
	m.wantOwner("D", a.Pid)
}
