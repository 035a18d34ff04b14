//go:build linux

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// nested makes a static directory with another one, sub, in it.
func nested(t *testing.T) (dir, sub string) {
	t.Helper()
	dir = staticDir(t)
	sub = filepath.Join(dir, "a", "sub")
	for _, d := range []string{filepath.Dir(sub), sub} {
		openDir(t, d)
	}
	return dir, sub
}

// bindMount shows a directory at another place, until the test ends. What is mounted there
// is not mounted on the directory itself, too, as it would be where systemd shares all.
func bindMount(t *testing.T, dir string) (at string) {
	t.Helper()
	at = filepath.Join(tempDir(t), "bind")
	mustDo(t, os.Mkdir(at, 0o755))
	mustDo(t, unix.Mount(dir, at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	mustDo(t, unix.Mount("", at, "", unix.MS_PRIVATE, ""))
	return at
}

// refusesOverlap expects that dir is not served, over itself or elsewhere, because
// of what a daemon serves; not by doctor's opinion either.
func refusesOverlap(t *testing.T, m *Mount, dir string) {
	t.Helper()
	pid := itoa(m.cmd.Process.Pid)
	elsewhere := filepath.Join(tempDir(t), "mnt")
	mustDo(t, os.Mkdir(elsewhere, 0o755))
	for _, args := range [][]string{{dir}, {dir, elsewhere}} {
		args = append([]string{"mount", "--state-dir", filepath.Join(tempDir(t), "state")}, args...)
		wantRefusal(t, "75", []string{"process " + pid, "inside of"}, args...)
	}
	if r := run(t, stagefsBin(), "doctor", dir); r.Status != 69 || !strings.Contains(r.Out, "inside of") || !strings.Contains(r.Out, pid) {
		t.Errorf("doctor %s: %v, want that process %d is in the way", dir, r, m.cmd.Process.Pid)
	}
}

// TestM1Overlap: no two daemons serve directories of which one is inside the
// other, by whatever paths; each would give out locks of its own.
func TestM1Overlap(t *testing.T) {
	need(t, "root", "fuse")
	t.Run("around", func(t *testing.T) {
		dir, sub := nested(t)
		m := mountDir(t, sub, sub)
		refusesOverlap(t, m, dir)
		refusesOverlap(t, m, filepath.Dir(sub))
		m.replace() // goes on with what it serves
		refusesOverlap(t, m, dir)
		// Beside it, and of a similar name.
		openDir(t, sub+"2")
		mountDir(t, sub+"2", sub+"2")
		m.kill()
		mustDo(t, unix.Unmount(sub, unix.MNT_DETACH))
		wantRefusal(t, "75", []string{"sub2"}, "mount", "--state-dir", m.State, dir)
		m.start(nil)
		m.awaitReady()
	})
	t.Run("inside", func(t *testing.T) {
		dir, sub := nested(t)
		m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
		refusesOverlap(t, m, sub)
		m.replace()
		refusesOverlap(t, m, sub)
		refusesOverlap(t, m, filepath.Dir(sub))
		m.stop()
		// A daemon that is about to end is waited for.
		for range 5 {
			inner := mountDir(t, sub, sub)
			mustDo(t, unix.Unmount(sub, 0))
			m.start(nil)
			m.awaitReady()
			mustDo(t, unix.Unmount(m.Path, 0))
			<-m.gone
			<-inner.gone
		}
		m.start(nil)
		m.awaitReady()
	})
	t.Run("in a mount", func(t *testing.T) {
		dir, sub := nested(t)
		mountDir(t, dir, dir)
		wantRefusal(t, "66", []string{"beneath the stagefs mount " + dir}, "mount", "--state-dir", filepath.Join(tempDir(t), "state"), sub)
	})
	t.Run("inner bound", func(t *testing.T) {
		dir, sub := nested(t)
		bound := bindMount(t, sub)
		openDir(t, filepath.Join(bound, "deep"))
		m := mountDir(t, filepath.Join(bound, "deep"), filepath.Join(bound, "deep"))
		refusesOverlap(t, m, bound)
		refusesOverlap(t, m, dir)
		m.replace()
		refusesOverlap(t, m, dir)
	})
	t.Run("outer bound", func(t *testing.T) {
		dir, sub := nested(t)
		bound := bindMount(t, filepath.Dir(sub))
		m := mountDir(t, bound, bound)
		refusesOverlap(t, m, sub)
		refusesOverlap(t, m, dir)
	})
	t.Run("another file system", func(t *testing.T) {
		dir, sub := nested(t)
		mustDo(t, unix.Mount("none", sub, "tmpfs", 0, ""))
		t.Cleanup(func() { unix.Unmount(sub, unix.MNT_DETACH) })
		openDir(t, sub+"/deep")
		m := mountDir(t, sub+"/deep", sub+"/deep")
		refusesOverlap(t, m, dir)
		m.stop()
		m = mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
		refusesOverlap(t, m, sub)
		refusesOverlap(t, m, sub+"/deep")
	})
}

// TestM1OverlapUser: nor two users, one of whom may not read what is between.
func TestM1OverlapUser(t *testing.T) {
	m := mountUser(t)
	mustDo(t, os.Chmod(filepath.Dir(m.Dir), 0o711))
	refusesOverlap(t, m, filepath.Dir(m.Dir))
	m.stop()
	outer := mountDir(t, filepath.Dir(m.Dir), filepath.Join(tempDir(t), "mnt"))
	m.start(nil)
	eventually(t, "the inner one ends", m.dead)
	if m.cmd.ProcessState.ExitCode() != 75 || !strings.Contains(m.Log(), itoa(outer.cmd.Process.Pid)) {
		t.Errorf("the inner one: %v\n%s", m.cmd.ProcessState, m.Log())
	}
}

// TestM1OverlapNamespace: nor in another mount and PID namespace, where nothing of the
// other is seen.
func TestM1OverlapNamespace(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	dir, sub := nested(t)
	m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
	r := run(t, "unshare", "-m", "-p", "-f", "--mount-proc", "--propagation", "private", "sh", "-c",
		`umount -l "$0"; "$1" mount -d --state-dir "$2" "$3"`, m.Path, stagefsBin(), filepath.Join(tempDir(t), "state"), sub)
	if r.Status != 75 || !strings.Contains(r.Err, "inside of") {
		t.Errorf("in another namespace: %v", r)
	}
}

// TestM1OverlapRace: of two that start at once, one gets it, and the other says so.
func TestM1OverlapRace(t *testing.T) {
	need(t, "root", "fuse")
	for range 10 {
		dir, sub := nested(t)
		var all []*exec.Cmd
		for _, d := range []string{dir, sub} {
			cmd := exec.Command(stagefsBin(), "mount", "-d", "--state-dir", filepath.Join(tempDir(t), "state"), d, tempDir(t))
			all = append(all, cmd)
		}
		var started []*Proc
		for _, cmd := range all {
			started = append(started, startCmd(t, cmd))
		}
		for _, p := range started {
			p.Wait()
		}
		served := 0
		for _, cmd := range all {
			switch status := cmd.ProcessState.ExitCode(); status {
			case 0:
				served++
				if r := run(t, stagefsBin(), "umount", cmd.Args[len(cmd.Args)-1]); r.Status != 0 {
					t.Error(r)
				}
			case 75:
			default:
				t.Errorf("%q: status %d", cmd.Args, status)
			}
		}
		if served != 1 {
			t.Errorf("%d are served, want 1", served)
		}
	}
}

// TestM1OverlapCrash: neighbours that are killed start again in each other's sight.
func TestM1OverlapCrash(t *testing.T) {
	_, sub := nested(t)
	openDir(t, sub+"2")
	var all []*Mount
	for _, d := range []string{sub, sub + "2"} {
		all = append(all, mountDir(t, d, d, "--supervise"))
	}
	for range 3 {
		for _, m := range all {
			mustDo(t, syscall.Kill(m.daemon(), syscall.SIGKILL))
		}
		for _, m := range all {
			m.awaitReady()
		}
	}
}
