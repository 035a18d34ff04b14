//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
)

// acquired is what a client says that got the lock and released it.
const acquired = "exit 0: acquired\nreleased"

// TestA8Across: whichever protocol holds the lock file, each other one says
// what it says on a plain directory where that one holds it.
func TestA8Across(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	python := clientForker(t)
	var clients []client
	for _, c := range existenceClients() {
		if c.lock == "devserver.lock" {
			need(t, c.needs...)
			clients = append(clients, c)
		}
	}
	pairs := 0
	for _, holder := range clients {
		if oneOf(holder.name, "lockfile LinkLockFile without threads|lockfile 0.9|lockfile 0.8|dotlockfile -p") {
			continue // whose lock file is as that of another one
		}
		t.Run(holder.name, func(t *testing.T) {
			m := m.on(t)
			b := bench{t: t, c: holder, python: python}
			plain, dir := filepath.Join(tempDir(t), "plain"), "held by "+holder.name
			b.prepare(plain)
			b.prepare(m.Back(dir))
			_, releasePlain := b.hold(plain)
			_, release := b.hold(m.At(dir))
			before := digest(t, m.Back(dir))
			for _, c := range clients {
				pairs++
				rival := bench{t: t, c: c, python: python}
				switch want, got := rival.try(plain), rival.try(m.At(dir)); {
				case want == acquired && got != acquired:
					// Some break another's lock on a plain directory, a dangling
					// symlink above all. Here nobody does (A11).
				case got != want || got == acquired:
					t.Errorf("%s said %q, want as on a plain directory %q", c.name, got, want)
				}
			}
			if after := digest(t, m.Back(dir)); after != before {
				t.Errorf("the refused clients changed:\n%s", diff(before, after))
			}
			releasePlain()
			if got := release(); got != acquired {
				t.Errorf("the holder said %q at the end, want %q", got, acquired)
			}
			m.awaitFree(dir)
		})
	}
	t.Logf("%d pairs of holder and rival", pairs)
}

// TestA11Clients: programs that break a lock file because it is old break none
// that somebody holds, however old it is; on a plain directory they do.
func TestA11Clients(t *testing.T) {
	need(t, "root", "fuse", "dotlockfile", "lockfile")
	m := mount(t)
	for name, script := range map[string]string{
		"dotlockfile":      `dotlockfile -r 1 -i 1 "$1/devserver.lock"`,
		"procmail -l":      `lockfile -1 -r1 -l5 -s0 "$1/devserver.lock"`,
		"find and rm":      `find "$1" -name devserver.lock -mmin +5 -delete && ! ls "$1"/devserver.lock`,
		"test and rm -f":   `[ -n "$(find "$1"/devserver.lock -mmin +5)" ] && rm -f "$1"/devserver.lock`,
		"rm of a dead pid": `kill -0 99999999 2>/dev/null || rm -f "$1"/devserver.lock`,
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			a := agent(t)
			plain := filepath.Join(tempDir(t), "plain")
			openDir(t, plain)
			openDir(t, m.Back(name))
			for _, dir := range []string{plain, m.At(name)} {
				a.must("creat", dir+"/devserver.lock", "wronly,creat,excl")
				a.must("utimens", dir+"/devserver.lock", "1000000000")
			}
			before := digest(t, m.Back(name))
			r := sh(t, "/", script, plain)
			if lock, _ := os.Lstat(plain + "/devserver.lock"); lock != nil && lock.ModTime().Unix() == 1000000000 {
				t.Errorf("on a plain directory: %v, want the old lock to be broken", r)
			}
			if r := sh(t, "/", script, m.At(name)); r.Status == 0 {
				t.Errorf("on the mount: %v, want a failure", r)
			}
			m.wantOwner(name, a.Pid)
			if after := digest(t, m.Back(name)); after != before {
				t.Errorf("changed:\n%s", diff(before, after))
			}
		})
	}
}
