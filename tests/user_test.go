//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// mountUser serves a directory of the user nobody, by a daemon of that user.
func mountUser(t *testing.T, opts ...string) *Mount {
	t.Helper()
	need(t, "root", "fuse", "fusermount3")
	dir := staticDir(t)
	mustDo(t, os.Chown(dir, nobody, nobody))
	m := newMount(t, dir, dir)
	mustDo(t, os.Chown(filepath.Dir(m.State), nobody, nobody))
	m.user = nobody
	m.start(opts)
	t.Cleanup(m.stop)
	eventually(t, "the daemon says that it serves", func() bool {
		if m.dead() {
			t.Fatalf("stagefs mount ended: %v\n%s", m.cmd.ProcessState, m.Log())
		}
		return strings.Contains(m.Log(), "serving")
	})
	return m
}

// TestM1User: an ordinary user mounts for its own processes, and is told what
// is missing; locks work as ever.
func TestM1User(t *testing.T) {
	m := mountUser(t)
	if log := m.Log(); !strings.Contains(log, "warning") {
		t.Errorf("said %q, want what an ordinary user's mount lacks", log)
	}
	a, b := stranger(t), stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/file"), "content", "creat")
	b.want("EBUSY", "put", m.At("D/file"), "rival", "")
	b.want("EBUSY", "mkdir", m.At("D/new"))
	b.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	b.want("ok", "read", m.At("D/file"))
	if got := b.Get("read", m.control("locks")); !strings.Contains(got, itoa(a.Pid)) {
		t.Errorf("locks: %s, want pid %d", got, a.Pid)
	}
	if got := runCmdAs(t, b, m, "break", "--why", "mine to break", m.At("D")); got != "0 " {
		t.Errorf("stagefs break by who mounted: %q", got)
	}
	b.must("mkdir", m.At("D/new"))
	a.must("mkdir", m.At("E"))
	a.Kill()
	eventually(t, "the dead owner's lock is gone", func() bool { return b.Try("mkdir", m.At("E/new")) == "ok" })
	// Others are kept out by the kernel.
	if allowed, _ := os.ReadFile("/etc/fuse.conf"); !strings.Contains("\n"+string(allowed), "\nuser_allow_other") {
		agent(t).want("EACCES", "readdir", m.Path)
	}
}

// TestM1UserNoRights: a directory that the user may not write to, or a
// mountpoint that is not the user's, is refused with a clear error.
func TestM1UserNoRights(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	dir := filepath.Join(tempDir(t), "roots")
	mustDo(t, os.Mkdir(dir, 0o755))
	cmd := exec.Command(stagefsBin(), "mount", "--state-dir", filepath.Join(tempDir(t), "state"), dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if r := runCmd(t, cmd); r.Status == 0 || r.Err == "" || mountedAt(dir) {
		t.Errorf("mount over root's directory by a user: %v, mounted: %v", r, mountedAt(dir))
	}
}
