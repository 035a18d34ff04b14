//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestUmountWaits: when umount returns, the daemon has ended, and lets go of the
// file system that the backing is on.
func TestUmountWaits(t *testing.T) {
	waited := 0
	for range 8 {
		m := mount(t)
		for i := range 300 {
			mustDo(t, os.Mkdir(m.Back(itoa(i)), 0o755))
			_, err := os.ReadDir(m.At(itoa(i)))
			mustDo(t, err)
		}
		r := m.wantStatus(0, "", "umount", m.Path)
		switch {
		case strings.Contains(r.Err, "in the mount namespace of process"): // another test's has a copy
		case running(m.cmd.Process.Pid):
			t.Error("the daemon runs on after the umount")
		default:
			waited++
		}
	}
	if waited == 0 {
		t.Error("the daemon runs on after each umount")
	}
}

// TestUmountPassing: who was inside when umount looked, or was not seen, and has left
// since, keeps nobody from unmounting, however long the look takes.
func TestUmountPassing(t *testing.T) {
	needInject(t)
	for what, inject := range map[string]func(m *Mount){
		"unseen": func(m *Mount) {
			slow := sync.OnceFunc(func() { time.Sleep(2500 * time.Millisecond) })
			m.inject(
				&fault{call: unix.SYS_UMOUNT2, errno: unix.EBUSY, times: 1},
				&fault{call: unix.SYS_READLINKAT, times: 1, is: func(a asked) bool {
					if a.path(1) == "/proc/1/cwd" {
						slow()
					}
					return false
				}})
		},
		"seen": func(m *Mount) {
			inside := exec.Command("sleep", "300")
			inside.Dir = m.Path
			p := startCmd(t, inside)
			m.inject(
				&fault{call: unix.SYS_UMOUNT2, errno: unix.EBUSY, times: 2}, // the kernel may let go later
				&fault{call: unix.SYS_OPENAT, times: 1, is: func(a asked) bool {
					if a.path(1) == "/proc/"+itoa(p.Pid())+"/comm" {
						p.Kill()
					}
					return false
				}})
		},
	} {
		t.Run(what, func(t *testing.T) {
			m := mount(t)
			inject(m)
			if r := run(t, m.cmdBin, "umount", m.Path); r.Status != 0 {
				t.Error(r)
			}
		})
	}
}

// TestUmountBeside: umount unmounts what is left where the mount that it found was
// detached before it could, as a daemon detaches the dead one that it replaces.
func TestUmountBeside(t *testing.T) {
	needInject(t)
	m := mountOver(t)
	mustDo(t, unix.Mount(m.Path, m.Path, "", unix.MS_BIND, ""))
	raced := m.inject(&fault{call: unix.SYS_UMOUNT2, errno: unix.EINVAL, times: 1, is: func(asked) bool {
		return unix.Unmount(m.Path, 0) == nil
	}})
	if r := run(t, m.cmdBin, "umount", m.Path); r.Status != 0 || mountedAt(m.Path) {
		t.Errorf("%v; still mounted: %v", r, mountedAt(m.Path))
	}
	if did := raced.did(); did[0] != 1 {
		t.Errorf("it was too late %d times, want once", did[0])
	}
}

// TestUmountLocked: a mount that came into a mount namespace from one with more privilege
// stays, and umount says why.
func TestUmountLocked(t *testing.T) {
	need(t, "unshare")
	m := mountOver(t)
	for _, lazy := range []string{"--lazy=false", "--lazy"} {
		r := run(t, "unshare", "-Ur", "-m", stagefsBin(), "umount", lazy, m.Path)
		if r.Status != 77 || !strings.Contains(r.Err, "locked in this mount namespace") {
			t.Errorf("umount %s: %v", lazy, r)
		}
	}
	if !mountedAt(m.Path) {
		t.Error("unmounted")
	}
}

// TestUmountElsewhere: a mount that a mount namespace has a copy of is served on;
// umount, the next mount and doctor say so, and where it is.
func TestUmountElsewhere(t *testing.T) {
	need(t, "unshare")
	m := mountOver(t)
	p := startCmd(t, exec.Command("unshare", "-m", "--propagation", "private", "sleep", "300"))
	ours, err := os.Readlink("/proc/self/ns/mnt")
	mustDo(t, err)
	ns := filepath.Join("/proc", itoa(p.Pid()), "ns/mnt")
	eventually(t, "it has a namespace of its own", func() bool {
		theirs, err := os.Readlink(ns)
		comm, _ := os.ReadFile(filepath.Join("/proc", itoa(p.Pid()), "comm"))
		return err == nil && theirs != ours && string(comm) == "sleep\n"
	})
	const elsewhere = "in the mount namespace of process "
	pid, where := itoa(m.cmd.Process.Pid), elsewhere+itoa(p.Pid())+" (sleep)"
	there := "nsenter -m -t " + itoa(p.Pid()) + " stagefs umount " + m.Dir
	for _, tt := range []struct {
		status int
		args   []string
		says   []string
	}{
		{0, []string{"umount", m.Path}, []string{"unmounted here", "process " + pid + ", serves on", elsewhere, "nsenter -m -t "}},
		{75, []string{"mount", "--state-dir", m.State, m.Dir}, []string{"by process " + pid, "not mounted here", where, there}},
		{69, []string{"doctor", m.Dir}, []string{"process " + pid, "not mounted here", where, there}},
	} {
		r := m.stagefs(tt.args...)
		// For a moment another test's may have a copy, too, and be named.
		for end := time.Now().Add(patience); !strings.Contains(r.Out+r.Err, where) && tt.status != 0 && time.Now().Before(end); {
			r = m.stagefs(tt.args...)
		}
		for _, says := range tt.says {
			if r.Status != tt.status || !strings.Contains(r.Out+r.Err, says) {
				t.Errorf("stagefs %q: %v; want status %d, and %q said", tt.args, r, tt.status, says)
			}
		}
	}
	p.Kill()
	eventually(t, "the daemon ends", m.dead)
}

// TestUmountBound: of a mount that is shown at another place umount says where it is.
func TestUmountBound(t *testing.T) {
	m := mountOver(t)
	bound := filepath.Join(tempDir(t), "bound")
	openDir(t, bound)
	mustDo(t, unix.Mount(m.Path, bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(bound, unix.MNT_DETACH) })
	r := m.wantStatus(0, "", "umount", m.Path)
	if want := "to end it: stagefs umount " + bound + "\n"; !strings.HasSuffix(r.Err, want) && !strings.Contains(r.Err, "in the mount namespace of process") {
		t.Errorf("umount says %q, want %q at its end", r.Err, want)
	}
	m.wantStatus(0, "", "umount", bound)
	eventually(t, "the daemon ends", m.dead)
}

// TestCommandRoot: that the root cannot be locked is no matter of waiting.
func TestCommandRoot(t *testing.T) {
	m := mount(t)
	m.wantStatus(64, "root", "run", m.Path, "true")
	m.wantStatus(64, "root", "run", "-n", m.Path+"/.", "true")
	m.wantStatus(64, "root", "acquire", m.Path)
	m.wantStatus(64, "root", "acquire", "--client", "c", "-w", "5", m.Path)
	m.wantStatus(64, "root", "wait", m.Path)
}

// TestUmountOthers: an ordinary user hears who mounted.
func TestUmountOthers(t *testing.T) {
	m := mount(t)
	r := sh(t, "/", `setpriv --reuid=65534 --regid=65534 --clear-groups "$1" umount "$2"`, stagefsBin(), m.Path)
	if r.Status != 77 || !strings.Contains(r.Err, "was mounted by the user 0") {
		t.Errorf("stagefs umount: %v; want status 77, and who mounted", r)
	}
	r = sh(t, "/", `setpriv --reuid=54321 --regid=65534 --clear-groups env -u HOME -u XDG_STATE_HOME "$1" mount "$2"`, stagefsBin(), m.Dir)
	if r.Status != 64 || !strings.Contains(r.Err, "--state-dir") {
		t.Errorf("stagefs mount by a user without a home directory: %v; want status 64, and --state-dir named", r)
	}
}
