//go:build linux

package tests

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFaultLaidOpen: a daemon that has to clear the dead mount before it can make
// its own says so, and does not take for its owner's what anybody may have put into
// the backing in between: an owner's death removes no lock file of somebody else's
// (R4).
func TestFaultLaidOpen(t *testing.T) {
	t.Run("ordinary user", func(t *testing.T) {
		need(t, "root", "fuse", "fusermount3")
		dir := staticDir(t)
		back := backDoor(t, dir)
		mustDo(t, os.Chown(dir, nobody, nobody))
		m := newMount(t, dir, dir)
		mustDo(t, os.Chown(filepath.Dir(m.State), nobody, nobody))
		m.user = nobody
		t.Cleanup(m.stop)
		start := func() *exec.Cmd { m.start(nil); return m.cmd }
		wantNoTrust(t, start, m.log, dir, back)
	})
	t.Run("nothing can be mounted beneath", func(t *testing.T) {
		needInject(t)
		dir := staticDir(t)
		back := backDoor(t, dir)
		m := newMount(t, dir, dir)
		m.inject(notBeneath()...)
		t.Cleanup(m.stop)
		start := func() *exec.Cmd { m.start(nil); return m.cmd }
		wantNoTrust(t, start, m.log, dir, back)
	})
	// In the copy of its mount namespace such a daemon can unmount nothing unseen.
	t.Run("volume, root directory that is on no mount", func(t *testing.T) {
		need(t, "root", "fuse")
		root := tempDir(t)
		for _, dir := range []string{"proc", "dev", "static"} {
			mustDo(t, os.Mkdir(filepath.Join(root, dir), 0o755))
		}
		bind := func(from, to, fstype string, flags uintptr) {
			mustDo(t, unix.Mount(from, filepath.Join(root, to), fstype, flags, ""))
			t.Cleanup(func() { unix.Unmount(filepath.Join(root, to), unix.MNT_DETACH) })
		}
		bind("/proc", "proc", "", unix.MS_BIND)
		bind("/dev", "dev", "", unix.MS_BIND)
		bind("stagefs-test", "static", "tmpfs", 0)
		mustDo(t, copyFile(stagefsBin(), filepath.Join(root, "stagefs"), 0o755))
		dir, log := filepath.Join(root, "static"), filepath.Join(root, "log")
		mustDo(t, os.Chmod(dir, 0o777))
		back := backDoor(t, dir)
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
		start := func() *exec.Cmd {
			out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			mustDo(t, err)
			defer out.Close()
			cmd := exec.Command("/stagefs", "mount", "--state-dir", "/state", "/static")
			cmd.Dir, cmd.Stdout, cmd.Stderr = "/", out, out
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
			startCmd(t, cmd)
			return cmd
		}
		wantNoTrust(t, start, log, dir, back)
	})
}

// notBeneath has a daemon find that nothing can be mounted beneath another mount: not as
// since Linux 6.5, and not by way of another mount namespace.
func notBeneath() []*fault {
	const beneath = 0x200 // MOVE_MOUNT_BENEATH
	return []*fault{
		{call: unix.SYS_MOVE_MOUNT, is: func(a asked) bool { return a.args[4]&beneath != 0 }, errno: unix.EINVAL, times: 1 << 30},
		{call: unix.SYS_UNSHARE, errno: unix.EPERM, times: 1 << 30},
	}
}

// TestFaultLaidOpenSupervised: a supervisor starts one such daemon after the other, also if
// one is killed when it has cleared the dead mount and its own is not there yet.
func TestFaultLaidOpenSupervised(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	var armed atomic.Bool
	mounting, forever := make(chan int, 1), make(chan struct{})
	t.Cleanup(func() { close(forever) })
	m.inject(append(notBeneath(), &fault{call: unix.SYS_MOUNT, until: func(a asked) <-chan struct{} {
		if !armed.Swap(false) {
			return nil
		}
		mounting <- a.pid
		return forever
	}})...)
	m.serve("--supervise")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	for _, midway := range []bool{false, true} {
		old := m.daemon()
		armed.Store(midway)
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		if midway {
			mustDo(t, syscall.Kill(<-mounting, syscall.SIGKILL))
		}
		m.awaitSupervised(old)
		if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
			t.Errorf("midway %v: D: %+v, want token %d of pid %d", midway, row, token, a.Pid)
		}
	}
}

// TestFaultNotBeneath: a daemon that cannot take the dead mount's place after all, where one
// could as a rule, leaves it where it is, and says so. The next one takes it.
func TestFaultNotBeneath(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	const none = math.MaxInt32 // by which a daemon asks whether the kernel can
	m.inject(&fault{call: unix.SYS_MOVE_MOUNT, is: func(a asked) bool { return a.args[0] != none }, errno: unix.ENOMEM, times: 1})
	m.serve()
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	m.kill()
	m.start(nil)
	<-m.gone
	if status := m.cmd.ProcessState.ExitCode(); status != 71 || !strings.Contains(m.Log(), "cannot allocate memory") {
		t.Errorf("status %d, want 71, and why\n%s", status, m.Log())
	}
	a.want("ENOTCONN", "mkdir", m.At("E"))
	m.start(nil)
	m.awaitReady()
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("D: %+v, want token %d of pid %d", row, token, a.Pid)
	}
}

// backDoor is a path to the content of a directory also when that is covered.
func backDoor(t *testing.T, dir string) string {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

// wantNoTrust starts a daemon, kills it, replaces a lock file in the backing, and
// looks at what the next one makes of it.
func wantNoTrust(t *testing.T, start func() *exec.Cmd, log, dir, back string) {
	read := func() string { b, _ := os.ReadFile(log); return string(b) }
	serves := func(times int) {
		t.Helper()
		eventually(t, "a daemon serves", func() bool { return strings.Count(read(), "stagefs: serving") == times })
	}
	daemon := start()
	serves(1)
	owner := stranger(t)
	owner.must("mkdir", dir+"/D")
	owner.must("creat", dir+"/D/devserver", "wronly,creat,excl")
	daemon.Process.Kill()
	awaitEnd(t, "its end", daemon.Process.Pid)
	mustDo(t, os.WriteFile(back+"/D/other", []byte("another's"), 0o644))
	mustDo(t, os.Rename(back+"/D/other", back+"/D/devserver"))
	start()
	serves(2)
	if text := read(); !strings.Contains(text, "could be written past the mount for a moment") {
		t.Errorf("the log says nothing of that the directory lay open:\n%s", text)
	}
	other := stranger(t)
	owner.Kill()
	eventually(t, "the directory is free", func() bool { return other.Try("put", dir+"/D/file", "x", "creat") == "ok" })
	if b, err := os.ReadFile(back + "/D/devserver"); string(b) != "another's" {
		t.Errorf("the other's lock file: %q, %v", b, err)
	}
}
