//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestA4: an exclusive lock on the lock file, by whichever call and whoever
// made the file, locks the directory against all; its end frees the directory
// and leaves the file (R2).
func TestA4(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, made := range []string{"there", "created"} {
			t.Run(call.name+"/"+made, func(t *testing.T) {
				m := m.on(t)
				dir := call.name + made
				openDir(t, m.Back(dir))
				file := m.At(dir, "devserver")
				flags := "rdwr,creat"
				if made == "there" {
					mustDo(t, os.WriteFile(m.Back(dir, "devserver"), nil, 0o666))
					mustDo(t, os.Chmod(m.Back(dir, "devserver"), 0o666))
				}
				a, b := lockerAs(t, nobody), locker(t)
				a.must("open", "x", file, flags)
				if made == "there" {
					m.wantFree(dir)
				}
				a.must(call.tryExclusive("x")...)
				row := m.Locks()[dir]
				protocol := "fcntl"
				if call.name == "flock" {
					protocol = "flock"
				}
				if row.Kind != "explicit" || row.Pid != a.Pid || row.File != "devserver" || row.Protocol != protocol || row.UID != nobody {
					t.Errorf("row: %+v, want an explicit one of pid %d by %s", row, a.Pid, protocol)
				}
				a.must("put", m.At(dir, "of-a"), "a", "creat")
				wantKeptOut(t, m, dir, b)

				a.must(call.unlock("x")...)
				m.wantFree(dir)
				if _, err := os.Stat(m.Back(dir, "devserver")); err != nil {
					t.Errorf("the lock file after the unlock: %v, want it there", err)
				}
				b.must("put", m.At(dir, "of-b"), "b", "creat")
				b.must("open", "y", file, "rdwr")
				b.must(call.tryExclusive("y")...)
				m.wantOwner(dir, b.Pid)
				a.want("EBUSY", "put", m.At(dir, "of-a"), "a", "creat")
			})
		}
	}
}

// wantKeptOut reports an error unless a locker that does not hold dir is
// refused in it, in the words of each protocol (A8).
func wantKeptOut(t *testing.T, m *Mount, dir string, b *Agent) {
	t.Helper()
	before := digest(t, m.Back(dir))
	b.want("EBUSY", "put", m.At(dir, "of-b"), "b", "creat")
	b.want("EBUSY", "mkdir", m.At(dir, "sub-of-b"))
	for _, file := range []string{"devserver", "devserver.lock"} {
		b.want("EEXIST", "put", m.At(dir, file), "b", "creat,excl")
		for _, call := range lockCalls() {
			if got := b.Try("open", "try", m.At(dir, file), "rdwr,creat"); got != "ok" {
				t.Errorf("open(%s, O_RDWR|O_CREAT) = %s, want ok (A10)", file, got)
				continue
			}
			if got := b.Try(call.tryExclusive("try")...); got != "EAGAIN" {
				t.Errorf("exclusive try by %s on %s = %s, want EAGAIN", call.name, file, got)
			}
			if got := b.Try(call.tryShared("try")...); got != "EAGAIN" {
				t.Errorf("shared try by %s on %s = %s, want EAGAIN", call.name, file, got)
			}
			b.must("close", "try")
		}
	}
	if after := digest(t, m.Back(dir)); after != before {
		t.Errorf("refused, but changed:\n%s", diff(before, after))
	}
}

// TestA8TryLock: whatever holds the directory, a try-lock hears EAGAIN.
func TestA8TryLock(t *testing.T) {
	m := mount(t)
	held := map[string]func(a *Agent, dir string){
		"mkdir": func(a *Agent, dir string) { a.must("mkdir", m.At(dir)) },
		"lock file": func(a *Agent, dir string) {
			openDir(t, m.Back(dir))
			a.must("put", m.At(dir, "devserver"), "1", "creat,excl")
		},
		"other name": func(a *Agent, dir string) {
			openDir(t, m.Back(dir))
			a.must("put", m.At(dir, "devserver.lock"), "1", "creat,excl")
		},
		"opened": func(a *Agent, dir string) {
			openDir(t, m.Back(dir))
			a.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
		},
		"command": func(_ *Agent, dir string) {
			openDir(t, m.Back(dir))
			agent(t).mustCommand(m, "acquire %s", dir)
		},
		"lease": func(_ *Agent, dir string) {
			openDir(t, m.Back(dir))
			agent(t).mustCommand(m, "acquire %s client=x ttl=1h", dir)
		},
	}
	for _, call := range lockCalls() {
		held[call.name] = func(a *Agent, dir string) {
			openDir(t, m.Back(dir))
			mustDo(t, os.WriteFile(m.Back(dir, "devserver"), nil, 0o666))
			a.must("open", "x", m.At(dir, "devserver"), "rdonly")
			if call.name != "flock" {
				a.must("open", "x", m.At(dir, "devserver"), "rdwr")
			}
			a.must(call.tryExclusive("x")...)
		}
	}
	n := 0
	for what, hold := range held {
		n++
		dir := fmt.Sprintf("D%d", n)
		t.Run(what, func(t *testing.T) {
			a, b := locker(t), locker(t)
			hold(a, dir)
			wantKeptOut(t, m.on(t), dir, b)
		})
	}
}

// TestA8TryLockAround: a lock above (C3b), one beneath (C3c) and a stranger's
// write handle (C3d) are in a try-lock's way like any other, and its own are not.
func TestA8TryLockAround(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			top := call.name
			openDir(t, m.Back(top))
			a, b := locker(t), locker(t)
			for _, dir := range []string{"above", "below", "open"} {
				openDir(t, m.Back(top, dir))
				openDir(t, m.Back(top, dir, "sub"))
				for _, at := range []string{"", "sub"} {
					file := m.Back(top, dir, at, "devserver")
					mustDo(t, os.WriteFile(file, nil, 0o666))
				}
			}
			try := func(who *Agent, want, dir string) {
				t.Helper()
				who.must("open", "t", m.At(top, dir, "devserver"), "rdwr")
				if got := who.Try(call.tryExclusive("t")...); got != want {
					t.Errorf("try in %s = %s, want %s", dir, got, want)
				}
				who.must("close", "t")
			}
			a.must("open", "x", m.At(top, "above/devserver"), "rdwr")
			a.must(call.tryExclusive("x")...)
			try(b, "EAGAIN", "above/sub")
			try(a, "ok", "above/sub")
			a.must("open", "x", m.At(top, "below/sub/devserver"), "rdwr")
			a.must(call.tryExclusive("x")...)
			try(b, "EAGAIN", "below")
			try(a, "ok", "below")
			a.must("open", "w", m.At(top, "open/sub/file"), "wronly,creat")
			try(b, "EAGAIN", "open")
			try(a, "ok", "open")
			a.must("close", "w")
			try(b, "ok", "open")
			m.awaitFree(filepath.Join(top, "open")) // the kernel sends the RELEASE when close(2) has returned
		})
	}
}
