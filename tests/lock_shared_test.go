//go:build linux

package tests

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestA5: shared locks keep writers and exclusive lockers out, and let each
// other in; the last one's end frees the directory.
func TestA5(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			readers := []*Agent{locker(t), lockerAs(t, nobody), locker(t)}
			b := locker(t)
			for _, r := range readers {
				r.must("open", "x", file, "rdwr")
				r.must(call.tryShared("x")...)
			}
			b.must("open", "x", file, "rdwr")
			for n := len(readers); n > 0; n-- {
				if rows := m.Listing().Locks; len(rows) != n || rows[0].Kind != "shared" || rows[0].Dir != dir {
					t.Errorf("rows: %+v, want %d shared", rows, n)
				}
				if got := b.Try(call.tryExclusive("x")...); got != "EAGAIN" {
					t.Errorf("exclusive try beside %d readers = %s, want EAGAIN", n, got)
				}
				for who, a := range map[string]*Agent{"a stranger": b, "a sharer": readers[n-1]} {
					for _, try := range [][]string{{"put", m.At(dir, "f"), "x", "creat"}, {"mkdir", m.At(dir, "sub")}} {
						if got := a.Try(try...); got != "EBUSY" {
							t.Errorf("%s by %s beside %d readers = %s, want EBUSY", try[0], who, n, got)
						}
					}
				}
				b.want("EEXIST", "put", m.At(dir, "devserver.lock"), "1", "creat,excl")
				readers[n-1].must(call.unlock("x")...)
			}
			m.wantFree(dir)
			b.must(call.tryExclusive("x")...)
			for _, r := range readers {
				if got := r.Try(call.tryShared("x")...); got != "EAGAIN" {
					t.Errorf("shared try beside the exclusive lock = %s, want EAGAIN", got)
				}
			}
		})
	}
}

// TestA5Calls: flock and fcntl locks, which don't see each other elsewhere,
// meet on the directory of a lock file, and of two lock files.
func TestA5Calls(t *testing.T) {
	m := mount(t)
	for _, first := range lockCalls() {
		for _, second := range lockCalls() {
			for _, name := range []string{"devserver", "devserver.lock"} {
				t.Run(fmt.Sprintf("%s %s %s", first.name, second.name, name), func(t *testing.T) {
					m := m.on(t)
					dir := first.name + second.name + name
					file := m.lockFile(dir)
					a, b := locker(t), locker(t)
					a.must("open", "x", file, "rdwr")
					b.must("open", "x", m.At(dir, name), "rdwr,creat")
					if name == "devserver.lock" {
						b.must("close", "x") // its creation was a lock (A6)
						b.must("unlink", m.At(dir, name))
						b.must("open", "x", file, "rdwr")
					}
					a.must(first.tryShared("x")...)
					if name == "devserver.lock" {
						b.must("close", "x")
						b.must("open", "x", m.At(dir, name), "rdwr,creat") // private (A10)
					}
					if got := b.Try(second.tryExclusive("x")...); got != "EAGAIN" {
						t.Errorf("exclusive beside shared = %s, want EAGAIN", got)
					}
					if got := b.Try(second.tryShared("x")...); got != "ok" {
						t.Errorf("shared beside shared = %s, want ok", got)
					}
					a.must(first.unlock("x")...)
					if got := a.Try(first.tryExclusive("x")...); got != "EAGAIN" {
						t.Errorf("exclusive beside the other's shared = %s, want EAGAIN", got)
					}
					b.must(second.unlock("x")...)
					if got := a.Try(first.tryExclusive("x")...); got != "ok" {
						t.Errorf("exclusive when all is free = %s, want ok", got)
					}
					m.wantOwner(dir, a.Pid)
				})
			}
		}
	}
}

// TestA5InFront: what a child shares is its parent's still (C3a): a stranger does not
// share it, nor get it alone by converting what he shares because its owner let him.
func TestA5InFront(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.At(dir, "devserver")
			owner, other := locker(t), locker(t)
			owner.must("mkdir", m.At(dir))
			owner.must("put", file, "1", "creat,excl")
			child := forked(owner)
			for _, x := range []*Agent{owner, child, other} {
				x.must("open", "x", file, "rdwr")
			}
			child.must(call.tryShared("x")...)
			other.want("EAGAIN", call.tryShared("x")...)
			waits := other.Start(call.wait, "x", call.shared)
			m.awaitWaiters(dir, 1)

			for _, share := range [][]string{call.tryShared("x"), {call.wait, "x", call.shared}} {
				owner.want("ok", share...)
				if got := waits(); got != "ok" {
					t.Errorf("who waited to share = %s, want ok", got)
				}
				other.must(call.unlock("x")...)
				owner.must(call.unlock("x")...)
				waits = other.Start(call.wait, "x", call.shared)
				m.awaitWaiters(dir, 1)
			}
			owner.must(call.tryShared("x")...)
			waits()
			owner.must(call.unlock("x")...)
			child.must(call.unlock("x")...)
			other.want("EAGAIN", call.tryExclusive("x")...)
			other.want("EBUSY", "put", m.At(dir, "f"), "other", "creat")
			if call.name != "flock" { // which has lost what it had
				other.must(call.unlock("x")...)
			}
			owner.must("put", m.At(dir, "f"), "owner", "creat")
			m.wantOwner(dir, owner.Pid)
		})
	}
}

// TestA5Convert: who shares alone goes to exclusive and back; beside another it
// does not, and then it has what the kernel leaves it elsewhere: flock(2) has
// lost the lock, fcntl(2) keeps it.
func TestA5Convert(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			a, b := locker(t), locker(t)
			for _, x := range []*Agent{a, b} {
				x.must("open", "x", file, "rdwr")
			}
			a.must(call.tryShared("x")...)
			if got := a.Try(call.tryExclusive("x")...); got != "ok" {
				t.Fatalf("upgrade of the only reader = %s, want ok", got)
			}
			if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "explicit" {
				t.Errorf("rows after the upgrade: %+v, want one explicit", rows)
			}
			a.must("put", m.At(dir, "f"), "a", "creat")
			if got := b.Try(call.tryShared("x")...); got != "EAGAIN" {
				t.Errorf("shared try beside the upgraded lock = %s, want EAGAIN", got)
			}
			if got := a.Try(call.tryShared("x")...); got != "ok" {
				t.Fatalf("downgrade = %s, want ok", got)
			}
			if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "shared" {
				t.Errorf("rows after the downgrade: %+v, want one shared", rows)
			}
			a.want("EBUSY", "put", m.At(dir, "f"), "a", "creat")
			b.want("ok", call.tryShared("x")...)
			if got := a.Try(call.tryExclusive("x")...); got != "EAGAIN" {
				t.Errorf("upgrade beside another = %s, want EAGAIN", got)
			}
			left := 2
			if call.name == "flock" {
				left = 1
			}
			if rows := m.Listing().Locks; len(rows) != left {
				t.Errorf("rows after the refused upgrade: %+v, want %d", rows, left)
			}
			a.must(call.unlock("x")...)
			b.must(call.unlock("x")...)
			m.wantFree(dir)
		})
	}
}

// TestA5ConvertOwn: nor does one of two descriptions of the same process, and what it
// has left by then ends like any other.
func TestA5ConvertOwn(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		if call.name == "fcntl" {
			continue // a process's own don't stand in its way
		}
		for _, end := range []string{"unlock", "close"} {
			t.Run(call.name+" "+end, func(t *testing.T) {
				m := m.on(t)
				dir := call.name + end
				file := m.lockFile(dir)
				a, b := locker(t), locker(t)
				for _, fd := range []string{"x", "y"} {
					a.must("open", fd, file, "rdwr")
					a.must(call.tryShared(fd)...)
				}
				a.want("EAGAIN", call.tryExclusive("x")...)
				b.want("EBUSY", "put", m.At(dir, "f"), "b", "creat") // y's
				for _, fd := range []string{"y", "x"} {
					if end == "unlock" {
						a.must(call.unlock(fd)...)
					}
					a.must("close", fd)
				}
				m.awaitFree(dir)
				b.must("put", m.At(dir, "f"), "b", "creat")
				b.must("open", "x", file, "rdwr")
				b.must(call.tryExclusive("x")...)
				m.wantOwner(dir, b.Pid)
			})
		}
	}
}

// TestA5Behind: who shares a directory and then has it alone, by another lock file or
// descriptor, shares it still when that has ended.
func TestA5Behind(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, how := range []string{"file", "descriptor", "conversion", "restart", "before"} {
			t.Run(call.name+" "+how, func(t *testing.T) {
				m := m.on(t)
				dir := call.name + how
				file, other := m.lockFile(dir), m.At(dir, "devserver.lock")
				a, b := locker(t), locker(t)
				a.must("open", "x", file, "rdwr")
				a.must(call.tryShared("x")...)
				if how == "before" {
					m.restart(nil)
				}
				var end []string
				switch how {
				case "file", "restart", "before":
					a.must("put", other, "1", "creat,excl")
					end = []string{"unlink", other}
				case "descriptor", "conversion":
					openFile(t, m.Back(dir, "devserver.lock"), "")
					a.must("open", "y", other, "rdwr")
					if how == "conversion" {
						a.must(call.tryShared("y")...)
					}
					a.must(call.tryExclusive("y")...)
					end = call.unlock("y")
				}
				a.want("ok", "put", m.At(dir, "f"), "a", "creat")
				b.must("open", "x", file, "rdwr")
				b.want("EAGAIN", call.tryShared("x")...)
				if how == "restart" {
					m.restart(nil)
				}
				a.must(end...)
				b.want("EBUSY", "put", m.At(dir, "f"), "b", "creat")
				if how == "restart" || how == "before" {
					a.Exit(0) // its descriptors are the dead mount's
				} else {
					b.want("ok", call.tryShared("x")...)
					b.must(call.unlock("x")...)
					a.must(call.unlock("x")...)
				}
				m.awaitFree(dir)
				b.want("ok", "put", m.At(dir, "f"), "b", "creat")
			})
		}
	}
}

// TestA5Starve: a waiting exclusive lock is not starved by readers who come and
// go, and a reader who comes after it is behind it.
func TestA5Starve(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			first, writer, late := locker(t), locker(t), locker(t)
			for _, a := range []*Agent{first, writer, late} {
				a.must("open", "x", file, "rdwr")
			}
			first.must(call.tryShared("x")...)
			wrote := writer.StartGet("turn", "x", call.wait, call.exclusive)
			m.awaitWaiters(dir, 1)
			if got := late.Try(call.tryShared("x")...); got != "EAGAIN" {
				t.Errorf("shared try behind a waiting exclusive lock = %s, want EAGAIN", got)
			}
			read := late.StartGet("turn", "x", call.wait, call.shared)
			m.awaitWaiters(dir, 2)
			first.must(call.unlock("x")...)
			w, _ := strconv.ParseInt(wrote(), 10, 64)
			r, _ := strconv.ParseInt(read(), 10, 64)
			if w == 0 || r < w {
				t.Errorf("the late reader was %v earlier than the writer", time.Duration(w-r))
			}
			m.wantFree(dir)
		})
	}
}

// TestA5Fifo: who waits for an exclusive lock does not overtake who waited for a shared one
// before.
func TestA5Fifo(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			holder, reader, writer := locker(t), locker(t), locker(t)
			for _, a := range []*Agent{holder, reader, writer} {
				a.must("open", "x", file, "rdwr")
			}
			for range 8 {
				holder.must(call.tryExclusive("x")...)
				reads := reader.Start(call.wait, "x", call.shared)
				m.awaitWaiters(dir, 1)
				writes := writer.Start(call.waitExclusive("x")...)
				m.awaitWaiters(dir, 2)
				holder.must(call.unlock("x")...)
				if got := reads(); got != "ok" {
					t.Fatalf("the reader = %s, want ok", got)
				}
				m.wantWaiting(1)
				reader.must(call.unlock("x")...)
				if got := writes(); got != "ok" {
					t.Fatalf("the writer = %s, want ok", got)
				}
				writer.must(call.unlock("x")...)
			}
		})
	}
}

// TestA5StarveAcross: nor is it by readers who lock by another call, or by
// another lock file.
func TestA5StarveAcross(t *testing.T) {
	m := mount(t)
	calls := lockCalls()
	for _, name := range []string{"devserver", "devserver.lock"} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			dir := "of-" + name
			file := m.lockFile(dir)
			first, writer, late := locker(t), locker(t), locker(t)
			first.must("open", "x", file, "rdwr")
			writer.must("open", "x", file, "rdwr")
			first.must(calls[0].tryShared("x")...)
			late.must("open", "x", m.At(dir, name), "rdwr,creat")
			wrote := writer.Start("turn", "x", "flock", "ex")
			m.awaitWaiters(dir, 1)
			if got := late.Try(calls[1].tryShared("x")...); got != "EAGAIN" {
				t.Errorf("shared fcntl try on %s behind a waiting exclusive flock = %s, want EAGAIN", name, got)
			}
			first.must(calls[0].unlock("x")...)
			late.must("close", "x")
			if got := wrote(); got != "ok" {
				t.Errorf("the writer's turn = %s, want ok", got)
			}
		})
	}
}

// TestA4Parts: who has a part of the lock file locked for writing has the directory alone,
// whatever it locks of other parts for reading.
func TestA4Parts(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls()[1:] {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			a, b := locker(t), locker(t)
			for _, x := range []*Agent{a, b} {
				x.must("open", "x", m.lockFile(dir), "rdwr")
			}
			alone := func(then string) {
				t.Helper()
				if got := a.Try("put", m.At(dir, "f"), then, "creat"); got != "ok" {
					t.Errorf("%s: to write = %s, want ok", then, got)
				}
				if got := b.Try(call.try, "x", call.shared, "50", "5"); got != "EAGAIN" {
					t.Errorf("%s: a stranger's shared lock = %s, want EAGAIN", then, got)
				}
			}
			a.must(call.try, "x", call.exclusive, "0", "5")
			a.must(call.try, "x", call.shared, "20", "5")
			alone("another part for reading")
			a.must(call.wait, "x", call.exclusive, "20", "5")
			a.must(call.wait, "x", call.shared, "20", "5")
			alone("one of two parts for reading only")
			sharing := func(then string) {
				t.Helper()
				if got := b.Try(call.try, "x", call.shared, "50", "5"); got != "ok" {
					t.Errorf("%s: a stranger's shared lock = %s, want ok", then, got)
				}
				if got := a.Try("put", m.At(dir, "f"), "x", "creat"); got != "EBUSY" {
					t.Errorf("%s: to write = %s, want EBUSY", then, got)
				}
				b.must(call.try, "x", "un", "0", "0")
			}
			a.must(call.wait, "x", call.shared, "0", "25")
			sharing("all parts for reading")
			a.must(call.try, "x", call.exclusive, "0", "5")
			alone("a part for writing again")
			waits := b.Start(call.wait, "x", call.shared, "50", "5")
			m.awaitWaiters(dir, 1)
			a.must(call.try, "x", "un", "0", "5")
			if got := waits(); got != "ok" {
				t.Errorf("who waited to share = %s, want ok", got)
			}
			b.must(call.try, "x", "un", "0", "0")
			sharing("that part unlocked")
			a.must(call.try, "x", "un", "0", "0")
			m.wantFree(dir)
			a.must(call.try, "x", call.exclusive, "0", "5")
			a.must(call.try, "x", call.shared, "20", "5")
			a.must(call.try, "x", "un", "0", "3")
			alone("some of what was for writing unlocked")
			a.must(call.try, "x", "un", "3", "2")
			sharing("all of what was for writing unlocked")
			a.must(call.try, "x", "un", "20", "5")
			m.wantFree(dir)
			// What it has open for writing is in the way of who wants to share, still.
			a.must(call.try, "x", call.exclusive, "0", "5")
			a.must(call.try, "x", call.shared, "20", "5")
			a.must("open", "w", m.At(dir, "f"), "wronly")
			a.must(call.try, "x", "un", "0", "5")
			b.want("EAGAIN", call.try, "x", call.shared, "50", "5")
			a.must("close", "w")
			sharing("closed what was open for writing")
			a.Kill()
			m.awaitFree(dir)
		})
	}
}

// TestA5AttackParts: threads of the owner close copies of the lock file, which drops all
// of its locks, while another one unlocks the part that it had for writing. What is left
// is what the kernel would have left, and the directory's lock goes with it.
func TestA5AttackParts(t *testing.T) {
	need(t, "/usr/bin/python3")
	m := mount(t)
	b := locker(t)
	b.must("open", "x", m.lockFile("D"), "rdwr")
	script := `
import fcntl, os, sys, threading, time
path, locks, end = sys.argv[1], sys.argv[2], time.time() + float(sys.argv[3])
fd = os.open(path, os.O_RDWR)
def closing():
    while time.time() < end:
        os.close(os.open(path, os.O_RDWR))
others = [threading.Thread(target=closing) for _ in range(3)]
for o in others: o.start()
rounds = 0
while time.time() < end:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 0)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 5, 20)
    except BlockingIOError:
        pass  # a stranger shares it
    fcntl.lockf(fd, fcntl.LOCK_UN, 5, 0)
    os.close(os.open(path, os.O_RDWR))  # none of its locks is left
    told = open(locks).read()
    if str(os.getpid()) in told.split():
        sys.exit("stale: " + told)
    rounds += 1
for o in others: o.join()
print(rounds, flush=True)
sys.stdin.read()
`
	cmd := exec.Command("/usr/bin/python3", "-c", script, m.At("D/devserver"), m.control("locks"), "2")
	in, err := cmd.StdinPipe()
	mustDo(t, err)
	start, out := linesOf(t, cmd)
	p := start()
	shared := 0
	for end := seconds(2); time.Now().Before(end); {
		if b.Try("setlk", "x", "rd", "50", "5") == "ok" {
			shared++
			b.must("setlk", "x", "un", "0", "0")
		}
	}
	rounds, err := out.ReadString('\n')
	if err != nil {
		t.Fatal(p.Wait())
	}
	t.Logf("%s rounds, shared %d times", strings.TrimSpace(rounds), shared)
	m.wantFree("D")
	b.must("setlk", "x", "wr")
	b.must("put", m.At("D/f"), "x", "creat")
	b.must("close", "x")
	m.wantFree("D")
	in.Close()
	if r := p.Wait(); r.Status != 0 {
		t.Error(r)
	}
}
