//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// reference measures what the client says on a plain directory: when nobody
// has the lock, and when another one of its kind has.
func (b bench) reference() (free, held string) {
	b.t.Helper()
	dir := filepath.Join(tempDir(b.t), "plain")
	b.prepare(dir)
	free = b.try(dir)
	_, release := b.hold(dir)
	held = b.try(dir)
	release()
	return free, held
}

// whenFree: it gets the lock, and leaves nothing.
func (b bench) whenFree(m *Mount, dir, free, held string) {
	b.prepare(m.Back(dir))
	before := shape(b.t, m.Back(dir))
	b.same(b.try(m.At(dir)), free)
	b.leftNothing(m, dir, before)
}

// whenLocked: another client of the same kind has it.
func (b bench) whenLocked(m *Mount, dir, free, held string) {
	b.prepare(m.Back(dir))
	before := shape(b.t, m.Back(dir))
	holder, release := b.hold(m.At(dir))
	locked := digest(b.t, m.Back(dir))
	eventually(b.t, "the lock is the holder's", func() bool { // a tool that has exited hands it over (R5)
		row := m.Locks()[filepath.Join(dir, b.c.dir)]
		return row.Kind == "explicit" && b.ownedBy(row.Pid, holder.Pid())
	})
	b.same(b.try(m.At(dir)), held)
	if b.c.setUp == "" {
		if now := digest(b.t, m.Back(dir)); now != locked {
			b.t.Errorf("the refused client changed:\n%s", diff(locked, now))
		}
	}
	b.same(release(), free)
	b.leftNothing(m, dir, before)
}

// whenMade: another process holds the directory because it made it; there is
// no lock file that the client could see.
func (b bench) whenMade(m *Mount, dir, free, held string) {
	owner := agent(b.t)
	b.makeAs(owner, m.At(dir))
	before := digest(b.t, m.Back(dir))
	b.same(b.try(m.At(dir)), held)
	if after := digest(b.t, m.Back(dir)); after != before {
		b.t.Errorf("the refused client changed:\n%s", diff(before, after))
	}
	m.wantOwner(dir, owner.Pid)
}

func (b bench) makeAs(owner *Agent, dir string) {
	b.t.Helper()
	owner.must("mkdir", dir)
	if b.c.setUp == "" {
		return
	}
	env := "export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; cd " + dir + "; "
	if got := owner.Get("sh", env+b.c.setUp); got != "0 " {
		b.t.Fatalf("set-up by the owner: %s", got)
	}
}

// whenKilled: the holder is killed with -9; the next one gets the lock at its
// first try, and nothing stale is left (R4).
func (b bench) whenKilled(m *Mount, dir, free, held string) {
	b.prepare(m.Back(dir))
	before := shape(b.t, m.Back(dir))
	holder, _ := b.hold(m.At(dir))
	holderRow := m.Locks()[filepath.Join(dir, b.c.dir)]
	killGroup(b.t, holder)
	m.awaitFree(filepath.Join(dir, b.c.dir))
	eventually(b.t, "the dead holder's lock file is gone", func() bool {
		_, err := os.Lstat(m.Back(dir, b.c.lock))
		return os.IsNotExist(err)
	})
	b.same(b.try(m.At(dir)), free)
	b.leftNothing(m, dir, before)
	if holderRow.Pid == 0 {
		b.t.Errorf("the holder had no lock")
	}
}

func (b bench) same(got, want string) {
	b.t.Helper()
	if got != want {
		b.t.Errorf("said %q, want as on a plain directory %q", got, want)
	}
}

// leftNothing expects no lock, and no file that was not there before.
func (b bench) leftNothing(m *Mount, dir, before string) {
	b.t.Helper()
	m.awaitFree(filepath.Join(dir, b.c.dir))
	if b.c.setUp != "" {
		if _, err := os.Lstat(m.Back(dir, b.c.lock)); err == nil {
			b.t.Errorf("%s is left", b.c.lock)
		}
		return
	}
	if after := shape(b.t, m.Back(dir)); after != before {
		b.t.Errorf("left in the directory:\n%s", diff(before, after))
	}
}

// ownedBy tells whether pid is ancestor or a descendant of it: the program may
// be the script's child, and hand over to it or not yet.
func (b bench) ownedBy(pid, ancestor int) bool {
	for ; pid > 1; pid = parentOf(b.t, pid) {
		if pid == ancestor {
			return true
		}
	}
	return false
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	f := statFields(fmt.Sprintf("/proc/%d/stat", pid))
	if f == nil {
		return 0
	}
	return atoi(f[1])
}
