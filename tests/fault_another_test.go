//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// wantAnother expects that the next daemon refuses to serve what is in the place of the
// directory that the dead mount showed, each time, and touches neither.
func (m *Mount) wantAnother() {
	m.t.Helper()
	for range 2 {
		m.start(nil)
		eventually(m.t, "it refuses", m.dead)
		if status := m.cmd.ProcessState.ExitCode(); status != 66 {
			m.t.Errorf("status %d, want 66\n%s", status, m.Log())
		}
		m.wantLog("is not the directory that the dead mount", m.Path, "stagefs umount "+m.Path)
		m.wantDeadMount()
	}
	if strings.Contains(m.Log(), "are lost") {
		m.t.Errorf("said that locks are lost:\n%s", m.Log())
	}
}

// wantDeadMount expects that nobody gets at anything.
func (m *Mount) wantDeadMount() {
	m.t.Helper()
	if m.user != 0 { // which tells others nothing
		if !mountedAt(m.Path) {
			m.t.Errorf("%s: the dead mount is gone", m.Path)
		}
		return
	}
	var st unix.Statfs_t
	if err := unix.Statfs(m.Path, &st); err != unix.ENOTCONN {
		m.t.Errorf("statfs %s = %v, want %v", m.Path, err, unix.ENOTCONN)
	}
}

// TestFaultAnother: a daemon that takes a dead one's place serves the same directory,
// or none: not what a detached file system leaves, nor what has its directory's name
// now. When that is back, so is the mount, with its locks (S1).
func TestFaultAnother(t *testing.T) {
	need(t, "root", "fuse")
	for name, uid := range map[string]uint32{"root": 0, "user": nobody} {
		t.Run("renamed, "+name, func(t *testing.T) {
			if uid != 0 {
				need(t, "fusermount3")
			}
			dir := staticDir(t)
			m := newMount(t, dir, filepath.Join(tempDir(t), "mnt"))
			for _, path := range []string{dir, m.Path, filepath.Dir(m.State)} {
				mustDo(t, os.Chown(path, int(uid), int(uid)))
			}
			m.user = uid
			m.start(nil)
			t.Cleanup(m.stop)
			m.wantLog("stagefs: serving")
			a := agentAs(t, uid)
			a.must("mkdir", m.At("A1"))
			m.kill()
			old := dir + ".old"
			mustDo(t, os.Rename(dir, old))
			openDir(t, dir)
			m.wantAnother()
			mustDo(t, os.Remove(dir))
			mustDo(t, os.Rename(old, dir))
			m.start(nil)
			eventually(t, "it is as before", func() bool { return a.Try("put", m.At("A1/f"), "x", "creat") == "ok" })
			if uid == 0 {
				m.wantOwner("A1", a.Pid)
			}
			// Who gives up the dead mount means what is there now.
			m.kill()
			mustDo(t, os.Rename(dir, old))
			openDir(t, dir)
			m.wantAnother()
			if r := run(t, stagefsBin(), "umount", m.Path); r.Status != 0 {
				t.Fatal(r)
			}
			m.start(nil)
			eventually(t, "it is mounted", func() bool { return mountedAt(m.Path) })
			eventually(t, "the other one is served", func() bool { return a.Try("mkdir", m.At("B")) == "ok" })
			if !exists(filepath.Join(dir, "B")) {
				t.Error("it is not what is there now")
			}
			if uid == 0 {
				m.restart(nil)
				m.wantOwner("B", a.Pid)
			}
		})
	}
	t.Run("detached", func(t *testing.T) {
		disk := newImage(t, 8)
		mustDo(t, os.Chmod(disk.Dir, 0o777))
		m := mountDir(t, disk.Dir, filepath.Join(tempDir(t), "mnt"), "--supervise")
		a := agent(t)
		a.must("mkdir", m.At("A1"))
		token := m.Locks()["A1"].Token
		mustDo(t, unix.Unmount(disk.Dir, unix.MNT_DETACH))
		mustDo(t, syscall.Kill(m.daemon(), syscall.SIGKILL))
		m.wantLog("is not the directory that the dead mount")
		time.Sleep(12 * time.Second) // for longer than a daemon may fail to start
		if m.dead() {
			t.Fatalf("the supervisor ended: %v\n%s", m.cmd.ProcessState, m.Log())
		}
		m.wantDeadMount()
		if n := strings.Count(m.Log(), "is not the directory"); n != 1 {
			t.Errorf("said %d times why, want once", n)
		}
		disk.attach()
		m.awaitReady()
		if row := m.Locks()["A1"]; row.Token != token || row.Pid != a.Pid {
			t.Errorf("A1: %+v, want token %d of pid %d", row, token, a.Pid)
		}
		// SIGTERM is heard meanwhile, too.
		time.Sleep(time.Second) // it has served well: what is wrong is said anew
		mustDo(t, unix.Unmount(disk.Dir, unix.MNT_DETACH))
		mustDo(t, syscall.Kill(m.daemon(), syscall.SIGKILL))
		eventually(t, "it is said again", func() bool { return strings.Count(m.Log(), "is not the directory") == 2 })
		mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
		eventually(t, "the supervisor ends", m.dead)
		if mountedAt(m.Path) {
			t.Error("a dead mount is left")
		}
	})
	t.Run("no place is known", func(t *testing.T) {
		m := mount(t)
		m.kill()
		places, _ := filepath.Glob(filepath.Join(m.State, "*.place"))
		if len(places) != 1 {
			t.Fatalf("places %q", places)
		}
		mustDo(t, os.Remove(places[0]))
		mustDo(t, os.Rename(m.Dir, m.Dir+".old"))
		openDir(t, m.Dir)
		m.start(nil)
		m.awaitReady()
	})
}
