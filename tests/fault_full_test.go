//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// TestFaultFullLock: where the backing has no room for a lock file or a new
// directory, who makes it hears ENOSPC, holds nothing, and leaves nothing; with
// room again, the same call succeeds. Locks that stand go on meanwhile.
func TestFaultFullLock(t *testing.T) {
	disk := newImage(t, 8, "-N", "64")
	m := disk.mount()
	openDir(t, m.Back("D"))
	holder, a, rival := agent(t), agent(t), stranger(t)
	holder.must("mkdir", m.At("held"))
	holder.must("put", m.At("held/devserver"), "x", "creat,excl")
	disk.fillNodes()
	before := digest(t, m.Dir)
	calls := lockWays(m.At("D/devserver"))
	for _, way := range []string{"O_EXCL", "mknod", "mkdir", "symlink"} {
		a.want("ENOSPC", calls[way][0]...)
		m.wantFree("D")
	}
	a.want("ENOSPC", "creat", m.At("D/devserver"), "wronly,creat")
	a.want("ENOSPC", "mkdir", m.At("E"))
	m.wantFree("E")
	a.want("ENOSPC", "creat", m.At("D/plain"), "wronly,creat,excl")
	if after := digest(t, m.Dir); after != before {
		t.Errorf("what failed left something:\n%s", diff(before, after))
	}
	// A lock that needs no file is taken as ever, and one that stands is kept.
	a.mustCommand(m, "acquire D")
	rival.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	a.mustCommand(m, "release D")
	rival.want("EBUSY", "put", m.At("held/devserver"), "y", "")
	m.wantOwner("held", holder.Pid)
	holder.must("unlink", m.At("held/devserver"))
	disk.free()
	for way, call := range calls {
		if way == "link" || way == "rename" {
			a.must("put", m.At("D/devserver.tmp"), "", "creat")
		}
		a.must(call[0]...)
		m.wantOwner("D", a.Pid)
		a.must(call[1]...)
		m.wantFree("D")
	}
	a.must("mkdir", m.At("E"))
	m.wantOwner("E", a.Pid)
}

// TestFaultFullCandidate: a candidate is made in memory, so a full backing is in
// nobody's way until it wins; then the link hears ENOSPC, nobody holds, the
// candidate is what it was, and wins when there is room.
func TestFaultFullCandidate(t *testing.T) {
	for _, full := range []string{"no inode", "no block"} {
		t.Run(full, func(t *testing.T) {
			disk := newImage(t, 8, "-N", "64", "-O", "^inline_data")
			m := disk.mount()
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/file"), "")
			for _, how := range []string{"link", "rename"} {
				holder, a, b := agent(t), agent(t), stranger(t)
				lock := m.At("D/devserver.lock")
				// Another name of a file that is there: its end frees nothing.
				holder.must("link", m.At("D/file"), lock)
				if full == "no inode" {
					disk.fillNodes()
				} else {
					disk.fill()
				}
				u := m.At("D", candidateNames(t, a.Pid)["lockfile"])
				a.must("put", u, "4711\n", "creat,excl")
				a.want("EEXIST", "link", u, lock)
				holder.must("unlink", lock)
				a.want("ENOSPC", how, u, lock)
				m.wantFree("D")
				b.want("ENOENT", "stat", lock)
				if left, _ := os.ReadDir(m.Back("D")); len(left) != 1 {
					t.Errorf("the %s that failed left %v", how, left)
				}
				if got := a.Get("stat", u); !strings.Contains(got, "size=5 nlink=1 ") {
					t.Errorf("the candidate after it: %s", got)
				}
				if got := a.Get("read", u); got != "4711\n" {
					t.Errorf("its content: %q", got)
				}
				disk.free()
				a.must(how, u, lock)
				m.wantOwner("D", a.Pid)
				if got := b.Get("read", lock); got != "4711\n" {
					t.Errorf("the lock file's content: %q", got)
				}
				a.must("unlink", lock)
				if how == "link" {
					a.must("unlink", u)
				}
				m.wantFree("D")
			}
		})
	}
}

// TestFaultFullDestroy: what a crashed owner left is destroyed also where that leaves no room
// for anything, as where it has failed of that; and nothing else is (R7).
func TestFaultFullDestroy(t *testing.T) {
	for _, full := range []string{"no inode", "no block"} {
		for name, lock := range map[string]func(m *Mount, a *Agent){
			"new": func(m *Mount, a *Agent) { a.must("mkdir", m.At("D")) },
			"old": func(m *Mount, a *Agent) {
				openDir(t, m.Back("D"))
				openDir(t, m.Back("D", "also"))
				openFile(t, m.Back("D", "also", "old"), "1")
				a.must("creat", m.At("D", "devserver"), "wronly,creat,excl")
			},
		} {
			t.Run(full+", "+name, func(t *testing.T) {
				disk := newImage(t, 8, "-N", "64")
				m := disk.mount("--on-crash", "destroy")
				a, reader := agent(t), agent(t)
				lock(m, a)
				a.must("mkdir", m.At("D", "sub"))
				for _, name := range []string{"a", "sub/b", "sub/c", "sub/d"} {
					a.must("put", m.At("D", name), strings.Repeat("x", 64<<10), "wronly,creat")
				}
				if name == "old" {
					a.must("put", m.At("D", "also", "new"), strings.Repeat("x", 64<<10), "wronly,creat")
				}
				reader.must("open", "r", m.At("D", "sub", "b"), "rdonly")
				if full == "no inode" {
					disk.fillNodes()
				} else {
					disk.fill()
				}
				a.Kill()
				m.awaitFree("D")
				if name == "old" {
					wantTree(t, m.At("D"), []string{"also/", "also/old=1"})
				} else if exists(m.At("D")) {
					t.Errorf("D is there with %q", tree(t, m.At("D")))
				}
				if got := reader.Get("pread", "r", "1", "0"); got != "x" {
					t.Errorf("who has it open reads %q, want x", got)
				}
				reader.must("close", "r")
				disk.free()
				eventually(t, "the trash is gone", func() bool { return !exists(m.Back(".stagefs")) })
			})
		}
	}
}

// TestFaultFullWrite: a holder's write hears ENOSPC where there is no room left,
// and every write that succeeded is there; later ones succeed when there is
// room.
func TestFaultFullWrite(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			disk := newImage(t, 8)
			m := disk.mount(opts...)
			a := agent(t)
			a.must("mkdir", m.At("D"))
			a.must("open", "f", m.At("D/f"), "rdwr,creat")
			a.must("open", "m", m.At("D/m"), "rdwr,creat")
			a.must("ftruncate", "m", "4096")
			const block = 32 << 10
			written := 0
			for ; ; written++ {
				got := a.Try("pwrite", "f", string(rune('a'+written%26)), itoa(block), itoa(written*block))
				if got == "ENOSPC" {
					break
				}
				if got != "ok" || written > 1024 {
					t.Fatalf("write number %d on a full disk = %s, want ENOSPC in the end", written, got)
				}
			}
			a.want("ENOSPC", "fallocate", "f", "0", "0", "100000000")
			a.want("ENOSPC|ok", "put", m.At("D/more"), strings.Repeat("x", 8192), "creat")
			m.wantOwner("D", a.Pid)
			stranger(t).want("EBUSY", "put", m.At("D/f"), "x", "")
			wantBlocks(t, m.Back("D/f"), written, block)
			a.must("unlink", m.At("D/more"))
			mustDo(t, os.WriteFile(m.Back("room"), nil, 0o600))
			a.must("unlink", m.At("D/m"))
			a.must("ftruncate", "f", itoa(written/2*block))
			a.must("pwrite", "f", string(rune('a'+(written/2)%26)), itoa(block), itoa(written/2*block))
			a.must("close", "f")
			wantBlocks(t, m.Back("D/f"), written/2+1, block)
		})
	}
}

// wantBlocks expects a file of that many blocks at least, each of them filled
// with a letter of its own.
func wantBlocks(t *testing.T, path string, blocks, size int) {
	t.Helper()
	b, err := os.ReadFile(path)
	mustDo(t, err)
	if len(b) < blocks*size {
		t.Fatalf("%s has %d bytes, want the %d that were written", path, len(b), blocks*size)
	}
	for i := range blocks {
		if want := strings.Repeat(string(rune('a'+i%26)), size); string(b[i*size:(i+1)*size]) != want {
			t.Errorf("%s: block %d is not what was written", path, i)
		}
	}
}
