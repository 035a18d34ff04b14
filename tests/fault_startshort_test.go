//go:build linux

package tests

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// refuses starts a daemon that a fault keeps from serving: it says so, and leaves the dead mount.
func (m *Mount) refuses(f *faults, opts ...string) {
	m.t.Helper()
	m.start(opts)
	eventually(m.t, "it ends, or serves", func() bool { _, err := m.version(); return m.dead() || err == nil })
	if !m.dead() || m.cmd.ProcessState.ExitCode() != 71 || f.did()[0] == 0 {
		m.t.Fatalf("%v; %d calls failed\n%s", m.cmd.ProcessState, f.did()[0], m.Log())
	}
	m.wantDeadMount()
}

// TestFaultShortCovered: a daemon that can't get past the dead mount for want of memory leaves it
// there, as the next one can.
func TestFaultShortCovered(t *testing.T) {
	needInject(t)
	const none = math.MaxInt32 // by which a daemon asks whether the kernel can mount beneath
	for name, c := range map[string]struct {
		call     int
		opts     []string
		beneath  bool
		volumeOf func(*testing.T) string
	}{
		"directory":              {call: unix.SYS_OPEN_TREE, volumeOf: staticDir},
		"volume":                 {call: unix.SYS_UNSHARE, volumeOf: volume},
		"directory, Linux 5.10":  {call: unix.SYS_UNSHARE, volumeOf: staticDir, opts: []string{"--compat"}},
		"mountpoint, Linux 5.10": {call: unix.SYS_UNSHARE, volumeOf: staticDir, opts: []string{"--compat"}, beneath: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := c.volumeOf(t)
			at := dir
			if c.beneath {
				at = filepath.Join(tempDir(t), "mnt")
			}
			m := newMount(t, dir, at)
			m.serve(c.opts...)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			token := m.Locks()["D"].Token
			f := m.inject(&fault{call: c.call, errno: unix.ENOMEM, times: 1, is: func(a asked) bool { return a.args[0] != none }})
			m.kill()
			m.refuses(f, c.opts...)
			m.start(c.opts)
			m.awaitReady()
			if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
				t.Errorf("D: %+v, want token %d of pid %d", row, token, a.Pid)
			}
		})
	}
}

// TestFaultShortRing: where no ring can be had any more when the mount is there already, another
// transport serves one in its place: nobody who comes meanwhile waits for the first, or gets
// past them.
func TestFaultShortRing(t *testing.T) {
	needInject(t)
	needTransport(t, "uring")
	t.Setenv("STAGEFS_MOUNT_OPTS", "")
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	m.serve("--unlocked=deny")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	before := mountsOn(t, m.Path)
	wrote := m.writtenDuring(func() {
		for _, opts := range [][]string{{"--transport=auto"}, {"--transport=uring"}} {
			m.kill()
			var there atomic.Bool // the mount is
			comes := agent(t)
			heard := make(chan string, 1)
			f := m.inject(
				&fault{call: unix.SYS_IO_URING_SETUP, errno: unix.ENOMEM, times: 1, is: func(asked) bool {
					if there.Load() {
						got := comes.Start("stat", m.At("D"))
						go func() { heard <- got() }()
						time.Sleep(20 * time.Millisecond) // it waits
					}
					return there.Load()
				}},
				&fault{call: unix.SYS_WRITE, times: 1, is: func(a asked) bool {
					to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", a.pid, a.args[0]))
					if to == "/dev/fuse" {
						there.Store(true) // the kernel hears that rings will be used
					}
					return false
				}})
			m.start(append(opts, "--unlocked=deny"))
			eventually(t, "it ends, or serves", func() bool { return m.dead() || strings.Contains(m.Log(), fmt.Sprintf("(pid %d)", m.cmd.Process.Pid)) })
			if f.did()[0] != 1 {
				t.Fatalf("%d rings have failed, want 1", f.did()[0])
			}
			select {
			case <-heard:
			case <-time.After(patience):
				t.Error("who came meanwhile waits still")
			}
			if m.dead() {
				m.wantDeadMount()
				m.start([]string{"--unlocked=deny"})
			}
			m.awaitReady()
			m.wantOwner("D", a.Pid)
			if n := mountsOn(t, m.Path); n != before {
				t.Errorf("%d mounts at the path, want %d", n, before)
			}
			a.must("put", m.At("D/x"), "x", "creat")
		}
	})
	if wrote > 0 {
		t.Errorf("the stranger wrote %d times", wrote)
	}
}

// TestFaultShortOwnMount: no daemon serves a mount of which it does not know what the kernel calls
// it: it could not tell which descriptors are of a dead one (R2), nor unmount it.
func TestFaultShortOwnMount(t *testing.T) {
	needInject(t)
	m := mount(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	m.kill()
	var there atomic.Bool
	f := m.inject(
		&fault{call: unix.SYS_OPENAT, errno: unix.EMFILE, times: 1, is: func(a asked) bool { return a.path(1) == "/proc/self/mountinfo" && there.Load() }},
		&fault{call: unix.SYS_UMOUNT2, times: 1, is: func(asked) bool { there.Store(true); return false }}) // of the dead mount, when there is another
	m.refuses(f)
	m.healthy()
	m.start(nil)
	m.awaitReady()
	m.wantOwner("D", a.Pid)
}

// TestFaultShortPlace: a daemon that can't read where the directory was served last may be about to
// serve a copy of it, or what has its name now.
func TestFaultShortPlace(t *testing.T) {
	needInject(t)
	t.Run("copy", func(t *testing.T) {
		disk, twin, dir := newTwins(t)
		m, _ := mountHeld(t, dir)
		before := m.Locks()
		m.stop()
		copied := newMount(t, filepath.Join(twin.Dir, "static"), filepath.Join(tempDir(t), "mnt"))
		copied.State = m.State
		mustDo(t, os.Mkdir(copied.Back("D"), 0o777))
		look := copied.failingLook()
		for what, is := range map[string]func(string) bool{
			"the place": func(path string) bool { return strings.HasSuffix(path, ".place") },
			"the other": func(path string) bool { return path == disk.Dir },
		} {
			if look.during(unix.EMFILE, 1, is, func() {
				copied.start(nil)
				eventually(t, "it ends, or serves", func() bool { return copied.dead() || mountedAt(copied.Path) })
			}) != 1 || !copied.dead() {
				t.Errorf("if %s can't be looked at, the copy is served:\n%s", what, copied.Log())
			}
			copied.stop()
		}
		m.start(nil)
		m.awaitReady()
		for name, row := range m.Locks() {
			if row.Token != before[name].Token {
				t.Errorf("%s: %+v, want %+v", name, row, before[name])
			}
		}
	})
	t.Run("another", func(t *testing.T) {
		dir := staticDir(t)
		m := mountDir(t, dir, filepath.Join(tempDir(t), "mnt"))
		a := agent(t)
		a.must("mkdir", m.At("D"))
		m.kill()
		mustDo(t, os.Rename(dir, dir+".old"))
		openDir(t, dir)
		for _, name := range []string{m.State, ".place", ".lock"} {
			f := m.inject(&fault{call: unix.SYS_OPENAT, errno: unix.EMFILE, times: 1, is: func(a asked) bool {
				return strings.HasPrefix(a.path(1), m.State) && strings.HasSuffix(a.path(1), name)
			}})
			m.refuses(f)
		}
		m.healthy()
		mustDo(t, os.Remove(dir))
		mustDo(t, os.Rename(dir+".old", dir))
		m.start(nil)
		m.awaitReady()
		m.wantOwner("D", a.Pid)
	})
}

// TestFaultShortCandidate: no daemon serves that can't look at a candidate of a process that has
// died: nobody would remove it.
func TestFaultShortCandidate(t *testing.T) {
	needInject(t)
	m := mountOver(t)
	a, dies := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	dies.must("mkdir", m.At("G"))
	name := candidateName(t, dies)
	dies.must("put", m.At("G", name), "pid", "creat,excl")
	m.kill()
	dies.Kill()
	var looked atomic.Bool
	f := m.inject(&fault{call: unix.SYS_STATX, errno: unix.ENOMEM, times: 1, is: func(a asked) bool { return a.path(1) == name && !looked.Swap(true) }})
	m.refuses(f)
	m.start(nil)
	m.awaitReady()
	m.wantOwner("D", a.Pid)
	eventually(t, "the candidate is removed", func() bool { return slices.Equal(tree(t, m.At("G")), nil) })
}

// TestW3ShortAlias: who writes to a file is refused if it can't be told whether that is one in a
// directory that somebody else holds, by a name that nobody has looked up.
func TestW3ShortAlias(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	openDir(t, filepath.Join(dir, "D"))
	openDir(t, filepath.Join(dir, "out"))
	openFile(t, filepath.Join(dir, "D/x"), "content")
	mustDo(t, os.Link(filepath.Join(dir, "D/x"), filepath.Join(dir, "out/y")))
	m := newMount(t, dir, dir+".mnt")
	f := m.inject(&fault{call: unix.SYS_STATX, errno: unix.ENOMEM, times: 1, is: func(a asked) bool { return a.path(1) == "x" }})
	m.serve()
	locker, other := agent(t), agent(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	put := []string{"put", m.At("out/y"), "evil", ""}
	if got := other.Try(put...); got != "ENOMEM" || f.did()[0] != 1 {
		t.Errorf("if the name can't be looked at: %s, want ENOMEM; %d looks failed", got, f.did()[0])
	}
	other.want("EBUSY", put...)
	wantContent(t, m.Back("D/x"), "content")
}

// TestH2ShortStart: a daemon that was too short of descriptors at its start to hear who makes which
// process hears it when it is not any more.
func TestH2ShortStart(t *testing.T) {
	needInject(t)
	needBirths(t)
	m := newMount(t, staticDir(t), filepath.Join(tempDir(t), "mnt"))
	f := m.inject(&fault{call: unix.SYS_PERF_EVENT_OPEN, errno: unix.EMFILE, times: 1})
	m.serve()
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	if f.did()[0] != 1 {
		t.Fatalf("%d calls failed, want 1", f.did()[0])
	}
	eventually(t, "who was left behind is known", func() bool {
		o, _ := a.Orphan(leftTwice)
		defer o.Kill()
		return o.Try("put", m.At("D/x"), "x", "creat") == "ok"
	})
	other, _ := b.Orphan(leftTwice)
	other.want("EBUSY", "put", m.At("D/x"), "x", "creat")
}
