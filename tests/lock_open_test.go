//go:build linux

package tests

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestA10: the lock file opens for everybody in every mode, and nobody but a
// holder changes it.
func TestA10(t *testing.T) {
	m := mount(t)
	for _, held := range []string{"lock file", "flock", "fcntl", "OFD"} {
		t.Run(held, func(t *testing.T) {
			m := m.on(t)
			dir := strings.ReplaceAll(held, " ", "")
			openDir(t, m.Back(dir))
			file := m.At(dir, "devserver")
			a, b, user := locker(t), agent(t), stranger(t)
			a.must("open", "x", file, "rdwr,creat")
			if held == "lock file" {
				a.must("write", "x", "4711\n")
				a.must("close", "x")
			} else {
				for _, call := range lockCalls() {
					if call.name == held {
						a.must(call.tryExclusive("x")...)
					}
				}
				a.must("write", "x", "4711\n")
			}
			before := digest(t, m.Back(dir))
			for _, who := range []*Agent{b, user} {
				for _, flags := range []string{"rdonly", "wronly", "rdwr", "rdwr,append", "wronly,trunc", "rdwr,creat", "rdwr,creat,trunc", "rdonly,nofollow"} {
					if got := who.Try("open", "f", file, flags); got != "ok" {
						t.Errorf("open(%s) = %s, want ok", flags, got)
						continue
					}
					if !strings.HasPrefix(flags, "rdonly") {
						who.want("EBUSY", "ftruncate", "f", "0")
						who.want("EBUSY", "write", "f", "x")
						who.want("EBUSY", "pwrite", "f", "x", "1", "0")
						if got := who.Try("fallocate", "f", "0", "0", "100"); got == "ok" {
							t.Errorf("fallocate through open(%s) = ok", flags)
						}
						if got := who.Try("copyrange", "/etc/passwd", "f"); got == "ok" {
							t.Errorf("copy_file_range through open(%s) = ok", flags)
						}
						if got := who.Try("mmap", "m", "f"); got == "ok" {
							who.Try("poke", "m", "x")
							who.Try("munmap", "m")
						}
					}
					who.must("close", "f")
				}
				for _, try := range [][]string{
					{"unlink", file}, {"rename", file, file + ".old"}, {"utimens", file}, {"truncate", file, "100"}, {"setxattr", file, "user.x", "1"},
				} {
					if got := who.Try(try...); got == "ok" {
						t.Errorf("%s by another = ok", try[0])
					}
				}
			}
			if after := digest(t, m.Back(dir)); after != before {
				t.Errorf("changed by who doesn't hold it:\n%s", diff(before, after))
			}
			if got := b.Get("read", file); got != "4711\n" {
				t.Errorf("content: %q", got)
			}
			a.want("ok", "put", file, "12\n", "trunc")
			if got := b.Get("read", file); got != "12\n" {
				t.Errorf("content that the holder wrote: %q", got)
			}
		})
	}
}

// TestA10Handle: what a descriptor of the lock file may do changes with the
// lock, not with when it was opened.
func TestA10Handle(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			dir := call.name
			file := m.on(t).lockFile(dir)
			a, b := locker(t), locker(t)
			for _, x := range []*Agent{a, b} {
				x.must("open", "x", file, "rdwr")
			}
			a.want("ok", "write", "x", "free ")
			for range 2 {
				a.must(call.tryExclusive("x")...)
				a.want("ok", "write", "x", "a ")
				b.want("EBUSY", "write", "x", "b ")
				a.must(call.unlock("x")...)
				b.must(call.tryExclusive("x")...)
				b.want("ok", "ftruncate", "x", "0")
				b.want("ok", "write", "x", "b ")
				a.want("EBUSY", "write", "x", "late ")
				b.must(call.unlock("x")...)
			}
		})
	}
}

// TestA10Private: where the directory is held without a lock file, whoever
// opens one gets one of its own, to try and to wait with, and for nothing else.
func TestA10Private(t *testing.T) {
	need(t, "touch")
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.At(dir, "devserver")
			a, b, c := locker(t), lockerAs(t, nobody), locker(t)
			a.must("mkdir", m.At(dir))
			mustDo(t, os.Chmod(m.Back(dir), 0o777))
			before := digest(t, m.Back(dir))
			b.want("ENOENT", "open", "x", file, "rdwr")
			b.want("EEXIST", "open", "x", file, "rdwr,creat,excl")
			for _, flags := range []string{"wronly,creat", "rdonly,creat", "rdwr,creat,trunc", "rdwr,creat"} {
				b.want("ok", "open", "x", file, flags)
				kind := call.exclusive
				if call.name != "flock" && strings.HasPrefix(flags, "rdonly") {
					kind = call.shared
				}
				b.want("EAGAIN", call.tryArgs("x", kind)...)
				if !strings.HasPrefix(flags, "rdonly") {
					b.want("EBUSY", "write", "x", "mine")
				}
				for _, op := range []string{"link", "rename"} {
					b.want("EEXIST", op, file, file+".lock")
					b.want("EBUSY", op, file, m.At(dir, "other"))
				}
				for who, other := range map[string]*Agent{"the holder": a, "another": c} {
					if got := other.Try("stat", file); got != "ENOENT" {
						t.Errorf("stat of a private lock file by %s = %s, want ENOENT", who, got)
					}
				}
				b.must("close", "x")
				eventually(t, "it goes with its last close", func() bool { return b.Try("stat", file) == "ENOENT" })
			}
			if names := agent(t).Get("readdir", m.At(dir)); names != "" {
				t.Errorf("readdir: %q, want nothing", names)
			}
			if r := run(t, "touch", file); r.Status == 0 || !strings.Contains(r.Err, "busy") {
				t.Errorf("touch: %v, want it to fail as busy", r)
			}
			if after := digest(t, m.Back(dir)); after != before {
				t.Errorf("changed:\n%s", diff(before, after))
			}

			b.must("open", "x", file, "rdwr,creat")
			c.must("open", "x", file, "rdwr,creat")
			got := b.Start(call.waitExclusive("x")...)
			m.awaitWaiters(dir, 1)
			a.Kill()
			if status := got(); status != "ok" {
				t.Fatalf("the wait = %s, want ok", status)
			}
			m.wantOwner(dir, b.Pid)
			b.want("ok", "write", "x", "won\n")
			if content, err := os.ReadFile(m.Back(dir, "devserver")); string(content) != "won\n" {
				t.Errorf("the winner's file in the backing: %q, %v", content, err)
			}
			if got := agent(t).Get("stat", file); !strings.Contains(got, "uid=65534 ") || !strings.Contains(got, "nlink=1 ") {
				t.Errorf("stat of the winner's file: %s, want the caller's uid, one link", got)
			}
			c.want("EAGAIN", call.tryExclusive("x")...)
			wantKeptOut(t, m, dir, locker(t))
			got = c.Start(call.waitExclusive("x")...)
			m.awaitWaiters(dir, 1)
			b.must(call.unlock("x")...)
			if status := got(); status != "ok" {
				t.Errorf("the second wait = %s, want ok", status)
			}
			m.wantOwner(dir, c.Pid)
			b.want("EAGAIN", call.tryExclusive("x")...)
			b.want("EBUSY", "write", "x", "late\n")
			c.must("close", "x")
			m.awaitFree(dir)
			b.want("ok", call.tryExclusive("x")...)
			if entries, _ := os.ReadDir(m.Back(dir)); len(entries) != 1 || entries[0].Name() != "devserver" {
				t.Errorf("left in the backing: %v, want the lock file", entries)
			}
		})
	}
}

// TestA10PrivateMany: one program may wait for many directories at a time.
func TestA10PrivateMany(t *testing.T) {
	m := mount(t)
	call := lockCalls()[0]
	a, b := locker(t), locker(t)
	for i := range 100 {
		dir := "D" + itoa(i)
		a.must("mkdir", m.At(dir))
		b.must("open", dir, m.At(dir, "devserver"), "rdwr,creat")
		b.want("EAGAIN", call.tryExclusive(dir)...)
	}
	a.Kill()
	for i := range 100 {
		eventually(t, "the dead one's lock ends", func() bool { return b.Try(call.tryExclusive("D"+itoa(i))...) == "ok" })
	}
}

// TestA10PrivateOvertaken: while some wait with files of their own, the holder
// makes the real lock file; afterwards all of them lock that one.
func TestA10PrivateOvertaken(t *testing.T) {
	m := mount(t)
	a := locker(t)
	a.must("mkdir", m.At("D"))
	file := m.At("D/devserver")
	var waiters []*Agent
	var got []func() string
	for i := range 4 {
		w := locker(t)
		w.must("open", "x", file, "rdwr,creat")
		got = append(got, w.Start(lockCalls()[i%2].waitExclusive("x")...))
		m.awaitWaiters("D", i+1)
		waiters = append(waiters, w)
	}
	a.must("put", file, "real\n", "creat,excl")
	if content := agent(t).Get("read", file); content != "real\n" {
		t.Errorf("content of the holder's lock file for others: %q", content)
	}
	a.must("put", m.At("D/f"), "x", "creat")
	a.must("unlink", file)
	left, last := slices.Clone(waiters), a.Pid
	for range waiters {
		var owner int
		eventually(t, "one of them gets the directory", func() bool {
			owner = m.Locks()["D"].Pid
			return owner != 0 && owner != last
		})
		last = owner
		i := slices.IndexFunc(left, func(w *Agent) bool { return w.Pid == owner })
		if i < 0 {
			t.Fatalf("owner %d is none of the waiters", owner)
		}
		j := slices.Index(waiters, left[i])
		if status := got[j](); status != "ok" {
			t.Errorf("a wait = %s, want ok", status)
		}
		if n := len(m.Listing().Waiters); n != len(left)-1 {
			t.Errorf("%d wait beside the owner, want %d", n, len(left)-1)
		}
		left[i].must("put", m.At("D/f"), "mine", "trunc")
		left[i].must("close", "x")
		left = slices.Delete(left, i, i+1)
	}
	m.awaitFree("D")
}
