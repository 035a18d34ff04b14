//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// aliased mounts a directory with D/x, which has a second name out/x that was
// made before the mount: the kernel knows neither.
func aliased(t *testing.T) *Mount {
	t.Helper()
	dir := staticDir(t)
	openDir(t, filepath.Join(dir, "D"))
	openDir(t, filepath.Join(dir, "D/deep"))
	openDir(t, filepath.Join(dir, "out"))
	openFile(t, filepath.Join(dir, "D/deep/x"), "content")
	mustDo(t, os.Link(filepath.Join(dir, "D/deep/x"), filepath.Join(dir, "out/x")))
	return mountDir(t, dir, dir+".mnt")
}

// aliasAttacks change out/x in every way.
func aliasAttacks(m *Mount, name string) [][]string {
	at := m.At(name)
	return [][]string{
		{"put", at, "evil", ""},
		{"truncate", at, "1"},
		{"chmod", at, "0600"},
		{"utimens", at, "5"},
		{"setxattr", at, "user.evil", "1"},
		{"creat", at, "wronly,trunc"},
		{"creat", at, "rdwr"},
		{"setfacl", at},
		{"chown", at, "1", "1"},
	}
}

// TestAttackOldAlias attacks W3 through a hard link outside of D that nobody
// ever looked up in D.
func TestAttackOldAlias(t *testing.T) {
	m := aliased(t)
	locker, b := agent(t), agent(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	before := digest(t, m.Back("D"))
	for _, c := range aliasAttacks(m, "out/x") {
		b.want("EBUSY", c...)
		if after := digest(t, m.Back("D")); after != before {
			t.Fatalf("%v changed what is beneath D:\n%s", c, diff(before, after))
		}
	}
	b.want("EBUSY", "link", m.At("out/x"), m.At("out/y"))
	locker.must("put", m.At("out/x"), "mine", "")
	locker.must("put", m.At("D/deep/x"), "mine", "")
	locker.must("unlink", m.At("D/devserver"))
	b.must("put", m.At("out/x"), "free", "")
}

// TestAttackOldAliasOpen attacks C3d: the alias is open for writing, or mapped,
// when the lock is taken.
func TestAttackOldAliasOpen(t *testing.T) {
	m := aliased(t)
	mustDo(t, os.WriteFile(m.Back("out/x"), make([]byte, os.Getpagesize()), 0o666))
	locker, b := agent(t), agent(t)
	lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
	b.must("open", "h", m.At("out/x"), "rdwr")
	locker.want("EEXIST", lock...)
	b.must("mmap", "m", "h")
	b.must("close", "h")
	locker.want("EEXIST", lock...)
	b.must("poke", "m", "still mine")
	b.must("munmap", "m")
	eventually(t, "the mapping's end is known", func() bool { return locker.Try(lock...) == "ok" })
	b.want("EBUSY", "open", "h", m.At("out/x"), "rdwr")
}

// TestC3dAliasOpen: the alias that a descendant has open, or a holder who delegates,
// stands in the way as little as what is open in D.
func TestC3dAliasOpen(t *testing.T) {
	m := aliased(t)
	locker := agent(t)
	child := locker.Child()
	child.must("open", "h", m.At("out/x"), "rdwr")
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	m.wantOwner("D", locker.Pid)
	child.must("write", "h", "a child's")
	child.must("close", "h")

	locker.must("open", "h", m.At("out/x"), "rdwr")
	child.must("creat", m.At("D/deep/devserver"), "wronly,creat,excl")
	m.wantOwner("D/deep", child.Pid)
	locker.must("write", "h", "still its own")
}

// TestAttackAliasByOthers attacks W3: who holds D looks at the alias too, which
// must not make the daemon forget it for the stranger.
func TestAttackAliasByOthers(t *testing.T) {
	m := aliased(t)
	locker := agent(t)
	child, b := locker.Child(), agent(t)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	own := child.storm([]string{"creat", m.At("out/x"), "rdonly"}, []string{"creat", m.At("out/x"), "wronly"}, []string{"chmod", m.At("out/x"), "0666"})
	rival := b.storm([]string{"truncate", m.At("out/x"), "3"}, []string{"setxattr", m.At("out/x"), "user.evil", "1"}, []string{"creat", m.At("out/x"), "wronly"})
	time.Sleep(1500 * time.Millisecond)
	own.over()
	for what, n := range rival.over() {
		if what != "truncate EBUSY" && what != "setxattr EBUSY" && what != "creat EBUSY" {
			t.Errorf("a stranger's %s: %d times", what, n)
		}
	}
}

// TestM2AliasSearched: who changes a file with names that nobody looked up is not told of
// the directories that others remove from what they hold, where these names are searched.
func TestM2AliasSearched(t *testing.T) {
	m := aliased(t)
	holder, b := agent(t), agent(t)
	holder.must("mkdir", m.At("held"))
	own := holder.storm([]string{"mkdir", m.At("held/sub")}, []string{"rmdir", m.At("held/sub")})
	changes := b.storm([]string{"chmod", m.At("out/x"), "0600"}, []string{"chmod", m.At("out/x"), "0644"})
	await(t, 3000, changes, own)
	own.over()
	for what, n := range changes.over() {
		if what != "chmod ok" {
			t.Errorf("%s: %d times", what, n)
		}
	}
}

// TestAttackNewAlias attacks W3: a stranger gives a file outside names in D and
// takes them away, and changes it through the outer name all the time.
func TestAttackNewAlias(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("out"))
	openFile(t, m.Back("out/f"), "content")
	locker, b, c := agent(t), agent(t), agent(t)
	storms := []*storm{
		b.storm([]string{"link", m.At("out/f"), m.At("D/f")}, []string{"stat", m.At("out/f")}, []string{"unlink", m.At("D/f")}, []string{"stat", m.At("out/f")}),
		c.storm([]string{"truncate", m.At("out/f"), "1"}, []string{"put", m.At("out/f"), "evil", "trunc"}, []string{"truncate", m.At("out/f"), "7"},
			[]string{"open", "h", m.At("out/f"), "wronly"}, []string{"pwrite", "h", "x", "5", "0"}, []string{"close", "h"}),
	}
	won, with := 0, 0
	for end := seconds(3); time.Now().Before(end) || won < 3; {
		if locker.Try("creat", m.At("D/devserver"), "wronly,creat,excl") != "ok" {
			continue
		}
		won++
		if _, err := os.Lstat(m.Back("D/f")); err == nil {
			with++
		}
		still(t, m, "D", "a file with an alias", 10, storms...)
		locker.must("unlink", m.At("D/devserver"))
		if t.Failed() {
			break
		}
		await(t, 4, storms...)
	}
	t.Logf("%d acquisitions, %d with the alias; rivals: %v %v", won, with, storms[0].over(), storms[1].over())
}

// TestAttackGhostName attacks W3: a name of the file is removed while it is
// looked up. The daemon must not count it as one of the file's two names, and
// so not look for the one in D.
func TestAttackGhostName(t *testing.T) {
	m := aliased(t)
	locker, b, c, d := agent(t), agent(t), agent(t), agent(t)
	ghost := m.At("out", "ghost-7f.1") // looks like a candidate: the kernel asks each time
	storms := []*storm{
		b.storm([]string{"link", m.At("out/x"), ghost}, []string{"unlink", ghost}),
		c.storm([]string{"stat", ghost}),
		d.storm([]string{"stat", ghost}),
	}
	for round := range 12 {
		await(t, 60, storms...)
		if round < 11 {
			continue
		}
		for _, s := range storms {
			s.over()
		}
	}
	b.Try("unlink", ghost)
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	before := digest(t, m.Back("D"))
	for _, cmd := range aliasAttacks(m, "out/x") {
		b.want("EBUSY", cmd...)
	}
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed through an alias:\n%s", diff(before, after))
	}
}

// TestAttackTmpfile attacks W3 with files that have no name yet.
func TestAttackTmpfile(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("out"))
	holder, b := agent(t), agent(t)
	b.must("open", "in", m.At("D"), "tmpfile,rdwr")
	b.must("open", "out", m.At("out"), "tmpfile,rdwr")
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	b.want("EBUSY", "linkfd", "in", m.At("D/new"))
	b.want("EBUSY", "linkfd", "out", m.At("D/new"))
	b.want("EBUSY", "open", "more", m.At("D"), "tmpfile,rdwr")
	b.must("linkfd", "out", m.At("out/new"))
	// The holder itself brings in what the stranger can write.
	holder.want("EBUSY", "link", m.At("out/new"), m.At("D/new"))
	holder.want("EBUSY", "rename", m.At("out/new"), m.At("D/new"))
	if got := holder.Get("sh", "ln -L /proc/"+itoa(b.Pid)+"/fd/"+b.Get("fd", "in")+" "+m.At("D/new")); got[0] == '0' {
		t.Errorf("ln of the stranger's file into D: %s", got)
	}
	b.must("write", "in", "x")
	b.must("close", "out")
	b.must("close", "in")
	eventually(t, "the stranger's handle is gone", func() bool { return holder.Try("rename", m.At("out/new"), m.At("D/new")) == "ok" })
}

// TestAttackOpenOntoLock attacks C3d: what becomes the lock file is open for
// writing by somebody else.
func TestAttackOpenOntoLock(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	for _, how := range []string{"rename", "link"} {
		t.Run(how, func(t *testing.T) {
			file := m.At("f-" + how)
			openFile(t, m.Back("f-"+how), "content")
			locker, b := agent(t), agent(t)
			b.must("open", "h", file, "wronly")
			if got := locker.Try(how, file, m.At("D/devserver")); got != "ok" {
				if got != "EEXIST" {
					t.Errorf("%s = %s, want EEXIST", how, got)
				}
				return
			}
			before := digest(t, m.Back("D"))
			b.Try("write", "h", "evil")
			if after := digest(t, m.Back("D")); after != before {
				t.Errorf("a stranger wrote the lock file:\n%s", diff(before, after))
			}
			locker.must("unlink", m.At("D/devserver"))
		})
	}
}

// TestAttackPassedHandle attacks W3 with a descriptor that was passed on: its
// opener is gone, or is the holder's own.
func TestAttackPassedHandle(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/f"), "content")
	locker, b := agent(t), agent(t)
	lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
	b.must("open", "h", m.At("D/f"), "wronly")
	passed, closePassed := copyFD(t, b, "h")
	b.Kill()
	locker.want("EEXIST", lock...)
	if _, err := unix.Write(passed, []byte("still ours")); err != nil {
		t.Errorf("write through a handle from before: %v", err)
	}
	closePassed()
	eventually(t, "the passed handle's end is known", func() bool { return locker.Try(lock...) == "ok" })

	// A holder may pass its own; the next owner waits for it (R8).
	locker.must("open", "h", m.At("D/f"), "wronly")
	_, closePassed = copyFD(t, locker, "h")
	locker.must("unlink", m.At("D/devserver"))
	locker.Kill()
	next := agent(t)
	next.want("EEXIST", lock...)
	closePassed()
	eventually(t, "the passed handle's end is known", func() bool { return next.Try(lock...) == "ok" })
}

// TestAttackUnlinkedOpen attacks M2: an open file without a name, or without
// one that the kernel knows, goes on as on any file system.
func TestAttackUnlinkedOpen(t *testing.T) {
	m := aliased(t)
	a := agent(t)
	openFile(t, m.Back("out/single"), "content")
	for _, file := range []string{"out/x", "out/single"} {
		a.must("open", "h", m.At(file), "rdwr")
		a.must("unlink", m.At(file))
		self := "/proc/" + itoa(a.Pid) + "/fd/" + a.Get("fd", "h")
		for _, c := range [][]string{
			{"write", "h", "CONTENT"},
			{"pread", "h", "7", "0"},
			{"ftruncate", "h", "3"},
			{"fchmod", "h", "0600"},
			{"sh", "stat -L " + self + " >/dev/null"},
			{"sh", "echo x >> " + self},
			{"fallocate", "h", "0", "0", "100"},
		} {
			if got := a.Get(c...); c[0] == "sh" && got != "0 " {
				t.Errorf("%s unlinked: %v: %s", file, c, got)
			}
		}
		a.must("close", "h")
	}
}

// TestAttackManyAliases attacks W3 through one of many names of a file, of
// which one is beneath a lock: whichever goes and comes meanwhile.
func TestAttackManyAliases(t *testing.T) {
	m := mount(t)
	maker, locker, b := agent(t), agent(t), agent(t)
	for _, dir := range []string{"D", "out"} {
		openDir(t, m.Back(dir))
	}
	maker.must("put", m.At("out/0"), "content", "creat")
	const many = 100
	for i := range many {
		maker.must("link", m.At("out/0"), m.At("out", strconv.Itoa(i+1)))
	}
	maker.must("link", m.At("out/1"), m.At("D/x"))
	maker.must("link", m.At("out/1"), m.At("out/devserver.0"))
	locker.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	refused := func(name string) {
		t.Helper()
		before := digest(t, m.Back("D"))
		for _, c := range aliasAttacks(m, name) {
			b.want("EBUSY", c...)
		}
		if after := digest(t, m.Back("D")); after != before {
			t.Fatalf("what is beneath D changed through %s:\n%s", name, diff(before, after))
		}
	}
	refused("out/50")
	for i := range many {
		b.must("unlink", m.At("out", strconv.Itoa(i)))
	}
	b.must("rename", m.At("out", strconv.Itoa(many)), m.At("out/last"))
	refused("out/last")
	locker.must("rename", m.At("D/x"), m.At("D/y"))
	refused("out/last")
	locker.must("unlink", m.At("D/y"))
	b.must("put", m.At("out/last"), "free", "")
}
