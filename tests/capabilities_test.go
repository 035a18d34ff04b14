//go:build linux

package tests

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// lacking returns a program that is stagefs without a capability.
func lacking(t *testing.T, capability string) string {
	t.Helper()
	return bySetpriv(t, "--bounding-set=-"+capability)
}

// bySetpriv returns a program that is stagefs with what setpriv(1) makes of its privileges.
func bySetpriv(t *testing.T, options string) string {
	t.Helper()
	path := filepath.Join(tempDir(t), "stagefs")
	writeProgram(t, path, fmt.Appendf(nil, "#!/bin/sh\nexec setpriv %s %s \"$@\"\n", options, stagefsBin()))
	return path
}

// TestM2DaemonGroup: what is made belongs to the caller's group, root's too, where the
// daemon is root's with another group, as one that sg(1) starts or a unit with Group=.
func TestM2DaemonGroup(t *testing.T) {
	need(t, "root", "fuse", "setpriv")
	dir := staticDir(t)
	m := newMount(t, dir, dir+".mnt")
	m.cmdBin = bySetpriv(t, "--regid=1234 --clear-groups")
	m.serve()
	a, b := agent(t), stranger(t)
	for i := range 3 {
		for who, gid := range map[*Agent]uint32{a: 0, b: nobody} {
			for _, command := range []string{"creat %s wronly,creat,excl", "mkdir %s", "symlink x %s", "mknod %s fifo"} {
				name := fmt.Sprintf("%s-%d-%d", strings.Fields(command)[0], gid, i)
				who.must(strings.Fields(fmt.Sprintf(command, m.At(name)))...)
				var st unix.Stat_t
				mustDo(t, unix.Lstat(m.Back(name), &st))
				if st.Gid != gid {
					t.Errorf("%s has group %d, want %d", name, st.Gid, gid)
				}
			}
		}
	}
}

// TestW3Capabilities: a daemon that lacks a capability, as in most containers, knows of
// other users' files whether they are open for writing, also after a crash.
func TestW3Capabilities(t *testing.T) {
	need(t, "root", "fuse", "setpriv")
	for _, capability := range []string{"lease", "fowner"} {
		t.Run(capability, func(t *testing.T) {
			dir := staticDir(t)
			openDir(t, dir+"/D")
			m := newMount(t, dir, dir+".mnt")
			m.cmdBin = lacking(t, capability)
			m.serve()
			locker, b := agent(t), stranger(t)
			lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
			b.must("put", m.At("D/f"), "content", "creat")
			b.must("open", "h", m.At("D/f"), "rdwr")
			locker.want("EEXIST", lock...)
			b.must("close", "h")
			eventually(t, "the directory is free when all is closed", func() bool { return locker.Try(lock...) == "ok" })
			locker.must("unlink", m.At("D/devserver"))

			b.must("open", "h", m.At("D/f"), "rdwr")
			m.restart(nil)
			if locker.Try(lock...) == "ok" && b.Try("write", "h", "evil") == "ok" {
				t.Errorf("a descriptor from before the crash has changed a held file: %q", locker.Get("read", m.At("D/f")))
			}
		})
	}
}

// TestW3Short: a file of which a daemon finds out nothing after a crash, for want of
// descriptors or memory, may be open, and so it is in the way; but not for good.
func TestW3Short(t *testing.T) {
	needInject(t)
	for _, errno := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		t.Run(unix.ErrnoName(errno), func(t *testing.T) {
			m := mount(t)
			openDir(t, m.Back("D"))
			a, b := agent(t), agent(t)
			b.must("put", m.At("D/f"), "content", "creat")
			b.must("open", "h", m.At("D/f"), "rdwr")
			m.inject(&fault{call: unix.SYS_OPENAT, errno: errno, times: 1, is: func(a asked) bool { return a.path(1) == "f" }})
			m.restart(nil)
			lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
			if a.Try(lock...) == "ok" {
				if b.Try("write", "h", "evil") == "ok" {
					t.Errorf("a descriptor from before the crash has changed a held file: %q", a.Get("read", m.At("D/f")))
				}
				return // it died with the mount
			}
			b.Try("close", "h")
			eventually(t, "the directory is free when all is closed", func() bool { return a.Try(lock...) == "ok" })
		})
	}
}
