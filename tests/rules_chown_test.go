//go:build linux

package tests

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestW1ChownToNobodyNew: chown(path, -1, -1) takes privileges away and changes
// the ctime, and reaches a file system as a request that changes nothing. The
// kernel makes the same before a write.
func TestW1ChownToNobodyNew(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, name := range []string{"suid", "plain", "mine"} {
		openFile(t, m.Back("D", name), "content")
		mustDo(t, unix.Chown(m.Back("D", name), nobody, nobody))
	}
	mustDo(t, unix.Chmod(m.Back("D/suid"), 0o6755))
	mustDo(t, unix.Chmod(m.Back("D/mine"), 0o6777))
	locker, owner := stranger(t), stranger(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")

	var before, after unix.Stat_t
	for _, name := range []string{"suid", "plain"} {
		mustDo(t, unix.Lstat(m.Back("D", name), &before))
		owner.want("EBUSY", "chown", m.At("D", name), "-1", "-1")
		mustDo(t, unix.Lstat(m.Back("D", name), &after))
		if before.Mode != after.Mode || before.Ctim != after.Ctim {
			t.Errorf("%s: mode %o, ctime %v after a refused chown, before %o, %v", name, after.Mode, after.Ctim, before.Mode, before.Ctim)
		}
	}
	// What the holders write takes privileges away as ever.
	locker.must("put", m.At("D/mine"), "more", "append")
	locker.Child().must("chown", m.At("D/suid"), "-1", "-1")
	for name, want := range map[string]uint32{"mine": 0o777, "suid": 0o755} {
		mustDo(t, unix.Lstat(m.Back("D", name), &after))
		if got := after.Mode & 0o7777; got != want {
			t.Errorf("%s has mode %o after its holder's change, want %o", name, got, want)
		}
	}
	locker.must("unlink", m.At("D/devserver"))
	owner.must("chown", m.At("D/plain"), "-1", "-1")
}
