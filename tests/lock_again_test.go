//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Who has a lock, or shares one, asks again while others wait for it: a local file
// system says yes at once, since they wait for him.

// beside has a reader and a writer who waits for it.
func beside(t *testing.T, m *Mount, call lockCall, dir string) (reader, writer *Agent, wrote func() string) {
	t.Helper()
	file := m.lockFile(dir)
	reader, writer = locker(t), locker(t)
	reader.must("open", "x", file, "rdwr")
	writer.must("open", "x", file, "rdwr")
	reader.must(call.tryShared("x")...)
	wrote = writer.Start(call.waitExclusive("x")...)
	m.awaitWaiters(dir, 1)
	return reader, writer, wrote
}

// wantWaiting fails the test unless as many as before wait, for as many locks.
func (m *Mount) wantWaiting(locks int) {
	m.t.Helper()
	l := m.Listing()
	if len(l.Waiters) != 1 || len(l.Locks) != locks {
		m.t.Errorf("the listing: %+v, want %d locks and who waits", l, locks)
	}
}

// TestA5Again: who shares a directory locks it again, shared, and so does his child,
// waiting or not; a stranger does not.
func TestA5Again(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			reader, writer, wrote := beside(t, m, call, dir)
			late := locker(t)
			late.must("open", "x", m.At(dir, "devserver"), "rdwr")
			child := forked(reader)
			child.must("open", "own", m.At(dir, "devserver"), "rdwr")
			for _, again := range [][]string{call.tryShared("x"), {call.wait, "x", call.shared}} {
				reader.want("ok", again...)
				m.wantWaiting(1)
			}
			for _, nested := range [][]string{call.tryShared("own"), {call.wait, "own", call.shared}} {
				child.want("ok", nested...)
				m.wantWaiting(2)
				child.must(call.unlock("own")...)
				late.want("EAGAIN", call.tryShared("x")...)
			}
			reader.must(call.unlock("x")...)
			if got := wrote(); got != "ok" {
				t.Errorf("the writer = %s, want ok", got)
			}
			reader.want("EAGAIN", call.tryShared("x")...)
			writer.must(call.unlock("x")...)
			m.wantFree(dir)
		})
	}
}

// TestA5AgainCommand: nor does it matter that it is a command by which the directory is
// shared once more.
func TestA5AgainCommand(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	reader, writer, late := agent(t), agent(t), agent(t)
	got := reader.mustCommand(m, "acquire D shared")
	wrote := writer.Start("ctl", m.control("ctl"), "acquire D wait=forever")
	m.awaitWaiters("D", 1)
	for _, wait := range []string{"", " wait=forever"} {
		if again := reader.mustCommand(m, "acquire D shared%s", wait); again.Token != got.Token {
			t.Errorf("again%s: token %d, want %d", wait, again.Token, got.Token)
		}
		child := reader.Child()
		child.mustCommand(m, "acquire D shared%s", wait)
		child.mustCommand(m, "release D")
		late.wantCommand(m, "EBUSY", "acquire D shared")
	}
	reader.mustCommand(m, "acquire D") // alone
	m.awaitWaiters("D", 1)
	reader.mustCommand(m, "release D")
	if s := wrote(); s != "ok" {
		t.Errorf("the writer = %s, want ok", s)
	}
}

// TestM2LockFileAgain: who has a lock for reading takes another range, or the lock for
// writing, before whoever waits for it: that is no deadlock.
func TestM2LockFileAgain(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls()[1:] {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			reader, writer, wrote := beside(t, m, call, dir)
			for _, again := range []string{call.try, call.wait} {
				reader.want("ok", again, "x", call.shared, "1", "5")
				m.wantWaiting(1)
				reader.want("ok", again, "x", call.exclusive)
				reader.must("put", m.At(dir, "f"), "mine", "creat")
				m.wantWaiting(1)
				reader.must(call.try, "x", call.shared)
				m.wantWaiting(1)
			}
			reader.must(call.unlock("x")...)
			if got := wrote(); got != "ok" {
				t.Errorf("the writer = %s, want ok", got)
			}
			writer.must(call.unlock("x")...)
			m.wantFree(dir)
		})
	}
	t.Run("two readers", func(t *testing.T) { // each for the other
		m := m.on(t)
		call := lockCalls()[1]
		a, b := locker(t), locker(t)
		for _, x := range []*Agent{a, b} {
			x.must("open", "x", m.lockFile("two"), "rdwr")
			x.must(call.tryShared("x")...)
		}
		first := a.Start(call.waitExclusive("x")...)
		m.awaitWaiters("two", 1)
		b.want("EDEADLK", call.waitExclusive("x")...)
		b.must(call.unlock("x")...)
		if got := first(); got != "ok" {
			t.Errorf("the first = %s, want ok", got)
		}
	})
	t.Run("a child before its parent", func(t *testing.T) { // but behind it, as it waits for it
		m := m.on(t)
		call := lockCalls()[1]
		file := m.lockFile("child")
		a, b := locker(t), locker(t)
		child := forked(a)
		for _, x := range []*Agent{a, b, child} {
			x.must("open", "x", file, "rdwr")
		}
		a.must(call.tryShared("x")...)
		b.must(call.tryShared("x")...)
		got := child.Start(call.waitExclusive("x")...)
		m.awaitWaiters("child", 1)
		alone := a.Start(call.waitExclusive("x")...)
		m.awaitWaiters("child", 2)
		b.must(call.unlock("x")...)
		if s := alone(); s != "ok" {
			t.Errorf("the parent = %s, want ok", s)
		}
		a.must(call.unlock("x")...)
		if s := got(); s != "ok" {
			t.Errorf("the child = %s, want ok", s)
		}
	})
}

// TestA4Again: who has a directory to himself locks it again by the same descriptor
// while his child waits for it.
func TestA4Again(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			file := m.lockFile(dir)
			holder := locker(t)
			child := forked(holder)
			holder.must("open", "x", file, "rdwr")
			child.must("open", "x", file, "rdwr")
			holder.must(call.tryExclusive("x")...)
			got := child.Start(call.waitExclusive("x")...)
			m.awaitWaiters(dir, 1)
			for _, again := range [][]string{call.tryExclusive("x"), call.waitExclusive("x")} {
				holder.want("ok", again...)
				m.wantWaiting(1)
			}
			holder.must(call.unlock("x")...)
			if s := got(); s != "ok" {
				t.Errorf("the child = %s, want ok", s)
			}
		})
	}
	t.Run("another range", func(t *testing.T) { // that a second child has, and gives up
		m := m.on(t)
		file := m.lockFile("range")
		holder := locker(t)
		has, waits := forked(holder), forked(holder)
		for _, x := range []*Agent{holder, has, waits} {
			x.must("open", "x", file, "rdwr")
		}
		holder.must("setlk", "x", "wr", "0", "5")
		has.must("setlk", "x", "wr", "10", "5")
		got := waits.Start("setlkw", "x", "wr", "0", "5")
		m.awaitWaiters("range", 1)
		other := holder.Start("setlkw", "x", "wr", "10", "5")
		m.awaitWaiters("range", 2)
		has.must("setlk", "x", "un")
		if s := other(); s != "ok" {
			t.Errorf("the other range = %s, want ok", s)
		}
		holder.must("setlk", "x", "un")
		if s := got(); s != "ok" {
			t.Errorf("who waited = %s, want ok", s)
		}
	})
}

// TestA5AgainScript: so flock(1) in a script that shares a directory, while a stranger
// waits, neither hangs nor costs it its lock.
func TestA5AgainScript(t *testing.T) {
	need(t, "flock")
	m := mount(t)
	file := m.lockFile("D")
	reader, writer := agent(t), agent(t)
	writer.must("open", "x", file, "rdwr")
	const script = `exec 8<>%[1]s && flock -s 8 || exit
		until [ -e %[2]s ]; do sleep 0.01; done
		flock -s %[1]s echo nested && flock -s 8 && flock -s -n 8 && echo again`
	going := filepath.Join(tempDir(t), "go")
	out := reader.StartGet("sh", fmt.Sprintf(script, file, going))
	eventually(t, "the script has it", func() bool { return len(m.Listing().Locks) == 1 })
	wrote := writer.Start("flockw", "x")
	m.awaitWaiters("D", 1)
	mustDo(t, os.WriteFile(going, nil, 0o644))
	if s := out(); s != "0 nested\nagain\n" {
		t.Errorf("the script: %q", s)
	}
	if s := wrote(); s != "ok" {
		t.Errorf("the writer = %s, want ok", s)
	}
}
