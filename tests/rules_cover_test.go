//go:build linux

package tests

import (
	"os"
	"testing"
)

// TestC1: only a holder renames or removes D or an ancestor of D.
func TestC1(t *testing.T) {
	m := mount(t)
	for _, dir := range []string{"G", "G/P"} {
		openDir(t, m.Back(dir))
	}
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("G/P/D"))
	b.want("EBUSY", "rmdir", m.At("G/P/D")) // empty: only the lock keeps it
	for _, from := range []string{"G", "G/P", "G/P/D"} {
		b.want("EBUSY", "rename", m.At(from), m.At("new"))
		b.want("EBUSY", "rename", m.At(from), m.At("new"), "noreplace")
	}
	a.Child().must("rename", m.At("G/P"), m.At("G/Q"))
	m.wantOwner("G/Q/D", a.Pid)
	b.want("EBUSY", "rename", m.At("G/Q"), m.At("G/P"))
	a.must("rename", m.At("G"), m.At("H"))
	m.wantOwner("H/Q/D", a.Pid)
	a.must("rmdir", m.At("H/Q/D"))
	b.must("rename", m.At("H"), m.At("G"))
}

// TestC2: the nearest lock decides; a child's lock on D/sub is the child's
// until it is released.
func TestC2(t *testing.T) {
	m := mount(t)
	a := agent(t)
	child := a.Child()
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/sub"))
	child.must("creat", m.At("D/sub/devserver"), "wronly,creat,excl")
	m.wantOwner("D", a.Pid)
	m.wantOwner("D/sub", child.Pid)
	child.must("creat", m.At("D/sub/x"), "wronly,creat")
	child.Child().must("creat", m.At("D/sub/y"), "wronly,creat")
	child.must("creat", m.At("D/z"), "wronly,creat")
	a.must("creat", m.At("D/a"), "wronly,creat")
	a.want("EBUSY", "creat", m.At("D/sub/a"), "wronly,creat")
	a.Child().want("EBUSY", "creat", m.At("D/sub/a"), "wronly,creat")
	child.Kill()
	m.awaitFree("D/sub")
	a.must("creat", m.At("D/sub/a"), "wronly,creat")
	if _, err := os.Lstat(m.Back("D/sub/devserver")); err == nil {
		t.Error("the dead child's lock file is left")
	}
}

// TestC3a: a directory that another one has locked can't be acquired; one's own can.
func TestC3a(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	b.want("EEXIST", "creat", m.At("D/devserver.lock"), "wronly,creat,excl")
	a.must("creat", m.At("D/devserver.lock"), "wronly,creat,excl")
	m.wantOwner("D", a.Pid)
}

// TestC3b: who acquires D holds every lock above it.
func TestC3b(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("mkdir", m.At("D/mid"))
	a.must("mkdir", m.At("D/mid/sub"))
	b.want("EBUSY", "mkdir", m.At("D/mid/new"))
	b.want("EEXIST", "creat", m.At("D/mid/sub/devserver"), "wronly,creat,excl")
	a.Child().must("creat", m.At("D/mid/sub/devserver"), "wronly,creat,excl")

	// Every one of them: not the outer one alone.
	a.must("mkdir", m.At("D/lent"))
	a.must("mkdir", m.At("D/lent/sub"))
	child := a.Child()
	child.must("creat", m.At("D/lent/devserver"), "wronly,creat,excl")
	a.want("EEXIST", "creat", m.At("D/lent/sub/devserver"), "wronly,creat,excl")
	a.want("EBUSY", "mkdir", m.At("D/lent/new"))
	child.must("creat", m.At("D/lent/sub/devserver"), "wronly,creat,excl")
}

// TestC3c: no lock beneath D belongs to another process than the one that
// acquires D, or its descendants.
func TestC3c(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("D/sub"))
	a, b := agent(t), agent(t)
	child := a.Child()
	child.must("creat", m.At("D/sub/devserver"), "wronly,creat,excl")
	b.want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	child.Child().want("EEXIST", "creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	m.wantOwner("D", a.Pid)
	m.wantOwner("D/sub", child.Pid)

	// Its own lock beneath is in nobody's way.
	openDir(t, m.Back("E"))
	openDir(t, m.Back("E/sub"))
	a.must("creat", m.At("E/sub/devserver"), "wronly,creat,excl")
	b.want("EEXIST", "creat", m.At("E/devserver"), "wronly,creat,excl")
	a.must("creat", m.At("E/devserver"), "wronly,creat,excl")
	m.wantOwner("E", a.Pid)
	m.wantOwner("E/sub", a.Pid)
}

// TestC3d: while somebody else has a write handle beneath D, D can't be acquired.
func TestC3d(t *testing.T) {
	m := mount(t)
	page := make([]byte, os.Getpagesize())
	fresh := func(dir string) {
		openDir(t, m.Back(dir))
		openDir(t, m.Back(dir, "sub"))
		for _, name := range []string{"file", "sub/file"} {
			mustDo(t, os.WriteFile(m.Back(dir, name), page, 0o666))
			mustDo(t, os.Chmod(m.Back(dir, name), 0o666))
		}
	}
	lock := func(dir string) []string { return []string{"creat", m.At(dir, "devserver"), "wronly,creat,excl"} }

	for _, flags := range []string{"wronly", "rdwr", "append,wronly", "wronly,trunc"} {
		t.Run("open "+flags, func(t *testing.T) {
			m := m.on(t)
			dir := "open " + flags
			fresh(dir)
			a, b := agent(t), stranger(t)
			b.must("open", "h", m.At(dir, "sub/file"), flags)
			a.want("EEXIST", lock(dir)...)
			m.wantFree(dir)
			b.must("write", "h", "still mine")
			b.must("close", "h")
			eventually(t, "the handle's end is known", func() bool { return a.Try(lock(dir)...) == "ok" })
		})
	}
	t.Run("mapping", func(t *testing.T) {
		m := m.on(t)
		fresh("map")
		a, b := agent(t), stranger(t)
		b.must("open", "h", m.At("map/file"), "rdwr")
		b.must("mmap", "m", "h")
		b.must("close", "h")
		a.want("EEXIST", lock("map")...)
		b.must("poke", "m", "still mine")
		b.must("munmap", "m")
		eventually(t, "the mapping's end is known", func() bool { return a.Try(lock("map")...) == "ok" })
	})
	t.Run("O_TMPFILE", func(t *testing.T) {
		m := m.on(t)
		fresh("tmpfile")
		a, b := agent(t), stranger(t)
		b.must("open", "h", m.At("tmpfile"), "tmpfile,rdwr")
		a.want("EEXIST|ok", lock("tmpfile")...)
		// Allowed or not: it must not get a name in there once D is locked.
		if m.Locks()["tmpfile"].Pid == a.Pid {
			b.want("EBUSY", "linkfd", "h", m.At("tmpfile/new"))
		}
	})
	t.Run("read handles", func(t *testing.T) {
		m := m.on(t)
		fresh("read")
		a, b := agent(t), stranger(t)
		b.must("open", "h", m.At("read/file"), "rdonly")
		b.must("open", "d", m.At("read"), "rdonly,directory")
		a.must(lock("read")...)
		b.must("pread", "h", "10", "0")
	})
	t.Run("of descendants", func(t *testing.T) {
		m := m.on(t)
		fresh("family")
		a := agent(t)
		a.Child().must("open", "h", m.At("family/file"), "wronly")
		a.must("open", "h", m.At("family/file"), "wronly")
		a.must(lock("family")...)
	})
	t.Run("of who delegates", func(t *testing.T) {
		m := m.on(t)
		a := agent(t)
		a.must("mkdir", m.At("deleg"))
		a.must("mkdir", m.At("deleg/sub"))
		a.must("open", "h", m.At("deleg/sub/file"), "wronly,creat")
		child := a.Child()
		child.must(lock("deleg/sub")...)
		a.must("write", "h", "kept open")
		child.must("creat", m.At("deleg/sub/new"), "wronly,creat")
	})
}

// TestW3Enters: nothing enters a locked directory, by whatever call, that somebody else has
// open for writing.
func TestW3Enters(t *testing.T) {
	m := mount(t)
	for _, dir := range []string{"D", "F", "F/sub"} {
		openDir(t, m.Back(dir))
	}
	for _, file := range []string{"D/own", "F/file", "F/sub/file"} {
		openFile(t, m.Back(file), "content")
	}
	a, b := agent(t), agent(t)
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	b.must("open", "file", m.At("F/file"), "wronly")
	b.must("open", "below", m.At("F/sub/file"), "wronly")
	for _, call := range [][]string{
		{"link", m.At("F/file"), m.At("D/new")},
		{"rename", m.At("F/file"), m.At("D/new")},
		{"rename", m.At("F/file"), m.At("D/own"), "exchange"},
		{"rename", m.At("D/own"), m.At("F/file"), "exchange"},
		{"rename", m.At("F/sub"), m.At("D/new")},
		{"rename", m.At("F/sub"), m.At("D/own"), "exchange"},
		{"rename", m.At("D/own"), m.At("F/sub"), "exchange"},
	} {
		a.want("EBUSY", call...)
	}
	b.must("close", "file")
	b.must("close", "below")
	eventually(t, "the end of one handle is known", func() bool { return a.Try("link", m.At("F/file"), m.At("D/new")) == "ok" })
	eventually(t, "and of the other one", func() bool { return a.Try("rename", m.At("F/sub"), m.At("D/sub")) == "ok" })
}

// TestC4: directories nearer to the root than --depth are containers, which
// mkdir never locks; an explicit lock works there, but not on the root.
func TestC4(t *testing.T) {
	m := mount(t, "--depth", "3")
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("x"))
	a.must("mkdir", m.At("x/y"))
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Errorf("rows for containers: %+v", rows)
	}
	b.must("mkdir", m.At("x/y/z"))
	m.wantOwner("x/y/z", b.Pid)
	a.must("mkdir", m.At("x/w"))
	a.must("creat", m.At("x/w/devserver"), "wronly,creat,excl")
	m.wantOwner("x/w", a.Pid)
	b.want("EBUSY", "mkdir", m.At("x/w/new"))
	b.want("EEXIST", "creat", m.At("x/devserver"), "wronly,creat,excl") // C3c

	a.must("creat", m.At("devserver.tmp"), "wronly,creat")
	for way, calls := range lockWays(m.At("devserver")) {
		a.Try(calls[0]...)
		for _, row := range m.Listing().Locks {
			if row.Dir == "." || row.Dir == "" {
				t.Errorf("%s has locked the root: %+v", way, row)
			}
		}
		b.want("ok", "mkdir", m.At("x-"+way))
		a.Try(calls[1]...)
	}
	l := locker(t)
	l.must("open", "x", m.At("devserver"), "rdwr,creat")
	for _, call := range lockCalls() {
		l.must(call.tryExclusive("x")...) // as on any file
		b.must("creat", m.At("free-"+call.name), "wronly,creat")
		b.must("mkdir", m.At("x-"+call.name))
		l.must(call.unlock("x")...)
	}
	a.wantCommand(m, "EBUSY", "acquire .")
}

// TestC5: reading is free for everyone, always.
func TestC5(t *testing.T) {
	m := mount(t)
	a, b := agent(t), stranger(t)
	a.must("mkdir", m.At("D"))
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("put", m.At("D/file"), "content", "creat")
	a.must("symlink", "file", m.At("D/sym"))
	a.must("setxattr", m.At("D/file"), "user.k", "v")
	a.must("open", "h", m.At("D/file"), "rdwr")
	for _, read := range [][]string{
		{"read", m.At("D/file")},
		{"read", m.At("D/sym")},
		{"read", m.At("D/devserver")},
		{"stat", m.At("D/file")},
		{"readdir", m.At("D")},
		{"getxattr", m.At("D/file"), "user.k"},
		{"open", "r", m.At("D/file"), "rdonly"},
		{"pread", "r", "7", "0"},
		{"chdir", m.At("D")},
	} {
		b.want("ok", read...)
	}
	if got := b.Get("read", m.At("D/file")); got != "content" {
		t.Errorf("read = %q", got)
	}
	a.must("put", m.At("D/prog"), "#!/bin/sh\necho runs\n", "creat")
	a.must("chmod", m.At("D/prog"), "0755")
	for _, script := range []string{"D/prog", "cd D && ls -la && ./prog", "cp -a D '" + tempDir(t) + "' && tar cf - D | tar tf - | grep -c D/prog"} {
		if got := b.Get("sh", "cd '"+m.Path+"' && "+script+" 2>&1"); got[0] != '0' {
			t.Errorf("%s: %q", script, got)
		}
	}
}
