//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A linkedMount is one over a directory that was given through symlinks.
type linkedMount struct {
	*Mount
	real string
}

func mountLink(t *testing.T, opts ...string) linkedMount {
	t.Helper()
	real, at := staticDir(t), tempDir(t)
	mustDo(t, os.Mkdir(filepath.Join(at, "sub"), 0o755))
	mustDo(t, os.Symlink(real, filepath.Join(at, "second")))
	mustDo(t, os.Symlink("../second", filepath.Join(at, "sub", "first")))
	mustDo(t, os.Symlink("sub/first", filepath.Join(at, "link")))
	link := filepath.Join(at, "link")
	return linkedMount{mountDir(t, link, link, opts...), real}
}

// forget has the kernel forget the attributes of the root, so that whoever looks at
// the dead mount hears ENOTCONN.
func (m linkedMount) forget() {
	mustDo(m.t, os.Mkdir(m.At("passing"), 0o755))
	mustDo(m.t, os.Remove(m.At("passing")))
}

// TestFaultLinkKilled: where the directory was given through symlinks, another daemon
// takes the dead mount's place as well (S1), with the state of before.
func TestFaultLinkKilled(t *testing.T) {
	m := mountLink(t, "--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for range 3 {
		old := m.daemon()
		m.forget()
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		m.awaitNext(old)
		if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
			t.Fatalf("D: %+v, want token %d of pid %d", row, token, a.Pid)
		}
	}
	if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 || mountedAt(m.real) {
		t.Errorf("stagefs umount: %v; mounted: %v", r, mountedAt(m.real))
	}
	m.wantEnded(0)
}

// TestFaultLinkTerminated: nor does a supervisor leave a dead mount there that is told
// to end when its daemon has just been killed (M4).
func TestFaultLinkTerminated(t *testing.T) {
	m := mountLink(t, "--supervise")
	pid, supervisor := m.daemon(), m.cmd.Process
	m.forget()
	halt(t, supervisor.Pid)
	mustDo(t, syscall.Kill(pid, syscall.SIGKILL))
	awaitEnd(t, "its end", pid)
	mustDo(t, supervisor.Signal(syscall.SIGTERM))
	mustDo(t, supervisor.Signal(syscall.SIGCONT))
	m.wantEnded(0)
	if mountedAt(m.real) {
		t.Error("a dead mount is left")
		run(t, "umount", "-l", m.real)
	}
}

// TestFaultLinkOwn: a directory that was given by way of the process itself, by its working
// directory or a descriptor, is the same to each daemon that a supervisor starts.
func TestFaultLinkOwn(t *testing.T) {
	for _, path := range []string{"/proc/self/cwd", "/proc/thread-self/cwd/.", "/dev/fd/3", "/proc/self/fd/3/../static"} {
		t.Run(path, func(t *testing.T) {
			need(t, "root", "fuse")
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			m.cmdBin = filepath.Join(tempDir(t), "stagefs")
			script := "#!/bin/sh\ncd " + dir + " && exec 3<. && exec " + stagefsBin() + " mount --supervise --state-dir " + m.State + " " + path + "\n"
			mustDo(t, os.WriteFile(m.cmdBin, []byte(script), 0o755))
			m.serve()
			old := m.daemon()
			mustDo(t, syscall.Kill(old, syscall.SIGKILL))
			m.awaitNext(old)
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Errorf("stagefs umount: %v", r)
			}
			m.wantEnded(0)
		})
	}
}
