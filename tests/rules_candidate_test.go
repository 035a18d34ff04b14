//go:build linux

package tests

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// candidateNames are those that link(2) protocols give their temporary files,
// as a process with that pid makes them.
func candidateNames(t *testing.T, pid int) map[string]string {
	t.Helper()
	host, err := os.Hostname()
	mustDo(t, err)
	return map[string]string{
		"lockfile":               fmt.Sprintf("%s-7f2c0a1b.%d471156789012345678", host, pid),
		"lockfile, signed hash":  fmt.Sprintf("%s-7f2c0a1b.%d-4711", host, pid),
		"lockfile, no threads":   fmt.Sprintf("%s.%d471156789012345678", host, pid),
		"lockfile, elsewhere":    fmt.Sprintf("elsewhere-7f2c0a1b.%d-5678901234567", pid),
		"lockfile 0.9":           fmt.Sprintf("%s-7f2c0a40.%d", host, pid),
		"lockfile 0.9, away":     fmt.Sprintf("elsewhere-7f2c0a40.%d", pid),
		"lockfile 0.8":           fmt.Sprintf("%s.7f2c0a1b1740-%d", host, pid),
		"nova":                   fmt.Sprintf("%s-7f2c0a40-1f2a3b4c.%d", host, pid),
		"flufl.lock":             fmt.Sprintf("devserver.lock|elsewhere|%d|4711567890", pid),
		"Mailman":                fmt.Sprintf("devserver.lock.elsewhere.org.%d.0", pid),
		"exim":                   fmt.Sprintf("devserver.lock.elsewhere.org.%08x.%08x", time.Now().Unix(), pid),
		"script":                 fmt.Sprintf("devserver.lock.%d", pid),
		"shlock":                 fmt.Sprintf("shlock%d", pid),
		"Ruby":                   fmt.Sprintf(".%s_%d_a_program.rb_1764050000_123456_4711.lck", host, pid),
		"Ruby, older":            fmt.Sprintf("%s.%d_a_program_1764050000_123456_4711.lck", host, pid),
		"liblockfile":            fmt.Sprintf(".lk%05da%s", pid, host),
		"liblockfile, elsewhere": fmt.Sprintf(".lk%05daelsewhere", pid),
		"procmail":               "_" + inProcmail(pid) + "." + inProcmail(int(time.Now().Unix())) + "." + host,
		"procmail, comma":        "_" + inProcmail(pid) + "," + inProcmail(int(time.Now().Unix())) + "." + host,
		"procmail, elsewhere":    "_" + inProcmail(pid) + "." + inProcmail(int(time.Now().Unix())) + ".elsewhere",
		"added":                  "tmp.mine",
	}
}

// inProcmail is a number in procmail's digits.
func inProcmail(n int) (digits string) {
	for ; n > 0; n >>= 6 {
		digits += string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[n&63])
	}
	return digits
}

// TestA9Names: the temp file of a link protocol is let through beneath another's
// lock, reaches no backing, and loses by EEXIST.
func TestA9Names(t *testing.T) {
	m := mount(t, "--candidate", "tmp.*")
	a := agent(t)
	a.must("mkdir", m.At("D"))
	before := digest(t, m.Back("D"))
	for what := range candidateNames(t, 1) {
		t.Run(what, func(t *testing.T) {
			m := m.on(t)
			b := agent(t)
			u := m.At("D", candidateNames(t, b.Pid)[what])
			b.want("ok", "open", "u", u, "wronly,creat,excl")
			b.want("ok", "write", "u", "1234\n")
			b.want("ok", "close", "u")
			if got := b.Get("stat", u); !strings.Contains(got, "size=5 nlink=1 ") {
				t.Errorf("stat of the candidate: %s, want size 5 and one link", got)
			}
			if got := b.Get("read", u); got != "1234\n" {
				t.Errorf("content of the candidate: %q", got)
			}
			b.want("EEXIST", "link", u, m.At("D/devserver.lock"))
			b.want("EEXIST", "rename", u, m.At("D/devserver.lock"), "noreplace")
			if got := b.Get("stat", u); !strings.Contains(got, "nlink=1 ") {
				t.Errorf("stat after the lost link: %s, want one link", got)
			}
			for who, other := range map[string]*Agent{"the owner": a, "a stranger": agent(t)} {
				if got := other.Try("stat", u); got != "ENOENT" {
					t.Errorf("stat by %s = %s, want ENOENT", who, got)
				}
			}
			b.want("ok", "unlink", u)
			b.want("ENOENT", "stat", u)
			if after := digest(t, m.Back("D")); after != before {
				t.Errorf("changed in the backing:\n%s", diff(before, after))
			}
		})
	}
	for _, name := range []string{
		"ordinary", "app-1.0", "app-4f3c2d1.20261125", "app-deadbeef.20261125120000", "app.20261125120000",
		"devserver.lock.1", "devserver.1", "devserver.lock|elsewhere|1|2", "devserver.tmp.1.1.1", "shlock1", "devserver.lock.bak",
	} {
		agent(t).want("EBUSY", "creat", m.At("D", name), "wronly,creat,excl")
	}
}

// TestA9NamesEmpty: a candidate that is called as a log could be is one as long as it is
// empty: what is written to it is refused, or stays.
func TestA9NamesEmpty(t *testing.T) {
	m := mount(t, "--lock-name", "devserver.lock")
	openDir(t, m.Back("D"))
	host, err := os.Hostname()
	mustDo(t, err)
	for what, name := range map[string]string{"lockfile 0.9 without threads": host + ".%d", "mutt": "devserver." + host + ".%d"} {
		t.Run(what, func(t *testing.T) {
			m := m.on(t)
			a, b := agent(t), agent(t)
			lock := m.At("D/devserver.lock")
			a.must("creat", lock, "wronly,creat,excl")
			u := m.At("D", fmt.Sprintf(name, b.Pid))
			b.must("open", "u", u, "wronly,creat,excl")
			b.want("EBUSY", "write", "u", "1234")
			b.must("close", "u")
			b.want("EEXIST", "link", u, lock)
			b.must("unlink", u)
			a.must("unlink", lock)
			b.must("creat", u, "wronly,creat,excl")
			b.must("link", u, lock)
			m.wantOwner("D", b.Pid)
			b.Kill()
			m.awaitFree("D")
			eventually(t, "lock file and candidate are gone", func() bool {
				entries, _ := os.ReadDir(m.Back("D"))
				return len(entries) == 0
			})
			c := agent(t)
			u = m.Back("D", fmt.Sprintf(name, c.Pid))
			c.must("put", m.At("D", fmt.Sprintf(name, c.Pid)), "a log", "creat")
			other := candidateName(t, c)
			c.must("creat", m.At("D", other), "wronly,creat,excl")
			c.Kill()
			eventually(t, "another candidate is gone", func() bool { return !exists(m.Back("D", other)) })
			time.Sleep(100 * time.Millisecond)
			mustDo(t, os.Remove(u)) // a dead program's log is still there
		})
	}
}

// TestA9Wins: a candidate that was made in vain wins after the release, with
// its content, and is an ordinary lock file then.
func TestA9Wins(t *testing.T) {
	m := mount(t)
	for _, how := range []string{"link", "rename"} {
		t.Run(how, func(t *testing.T) {
			m := m.on(t)
			a, b := agent(t), stranger(t)
			dir, lock := how, m.At(how, "devserver.lock")
			openDir(t, m.Back(dir))
			a.must("creat", lock, "wronly,creat,excl")
			u := m.At(dir, candidateNames(t, b.Pid)["lockfile"])
			b.must("put", u, "mine", "creat,excl")
			b.want("EEXIST", "link", u, lock)
			a.must("unlink", lock)
			b.must(how, u, lock)
			m.wantOwner(dir, b.Pid)
			want := "nlink=2 "
			if how == "rename" {
				want = "nlink=1 "
			}
			if got := b.Get("stat", lock); !strings.Contains(got, want) || !strings.Contains(got, "uid=65534 ") {
				t.Errorf("stat of the lock file: %s, want %s and the caller's uid", got, want)
			}
			if got, _ := os.ReadFile(m.Back(dir, "devserver.lock")); string(got) != "mine" {
				t.Errorf("content in the backing: %q", got)
			}
			if how == "link" {
				b.must("unlink", u)
			}
			b.must("unlink", lock)
			m.wantFree(dir)
			if entries, _ := os.ReadDir(m.Back(dir)); len(entries) != 0 {
				t.Errorf("left: %v", entries)
			}
		})
	}
}

// TestA9Limits: a candidate is small, only for its creator, gone with it, and
// good for nothing but to become the lock file.
func TestA9Limits(t *testing.T) {
	m := mount(t)
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	a.must("put", m.At("D/file"), "x", "creat")
	before := digest(t, m.Back("D"))
	u := m.At("D", candidateNames(t, b.Pid)["lockfile"])
	b.must("open", "u", u, "rdwr,creat,excl")
	if got := b.Try("pwrite", "u", "x", "1048576", "0"); got == "ok" {
		t.Error("a megabyte was written to a candidate")
	}
	b.want("EFBIG", "ftruncate", "u", "1048576")
	b.want("EFBIG", "truncate", u, "1048576")
	b.want("EBUSY|EXDEV", "rename", u, m.At("D/file"))
	b.want("EBUSY|EXDEV", "rename", u, m.At("D/new"))
	b.want("EBUSY|EXDEV", "link", u, m.At("D/new"))
	openDir(t, m.Back("E"))
	b.want("EBUSY|EXDEV", "link", u, m.At("E/devserver.lock"))
	b.want("EBUSY|EXDEV", "rename", u, m.At("E/devserver.lock"))
	m.wantFree("E")
	if got := b.Try("mkdir", u+"2"); got == "ok" {
		t.Error("a directory was let through")
	}
	for _, name := range []string{m.At("elsewhere")} {
		b.Try("rename", u, name) // whatever it answers, D is not changed
	}
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed in the backing:\n%s", diff(before, after))
	}
	u2 := m.At("D", candidateNames(t, b.Pid)["procmail"])
	b.must("creat", u2, "wronly,creat,excl")
	child := b.Child()
	child.must("stat", u)
	child.must("stat", u2)
	b.Kill()
	eventually(t, "the dead creator's candidates are gone", func() bool {
		return child.Try("stat", u) == "ENOENT" && child.Try("stat", u2) == "ENOENT"
	})
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed in the backing:\n%s", diff(before, after))
	}
}

// TestA9Many: nobody has more of them than any protocol needs, and each that goes
// makes room.
func TestA9Many(t *testing.T) {
	m := mount(t, "--candidate", "tmp.*")
	a, b, c := agent(t), agent(t), agent(t)
	a.must("mkdir", m.At("D"))
	create := func(i int) []string { return []string{"creat", m.At("D", "tmp."+itoa(i)), "wronly,creat,excl"} }
	const most = 16
	for i := range most {
		b.must(create(i)...)
	}
	b.want("EBUSY", create(most)...)
	c.must(create(most)...)
	b.must("unlink", m.At("D", "tmp.0"))
	b.must(create(most)...)
	b.want("EBUSY", create(most+1)...)
}

// TestA9Own: in a directory that is free, a candidate is an ordinary file; if
// its creator dies with a lock made from it, both go (R4).
func TestA9Own(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	u, lock := m.At("D", candidateNames(t, a.Pid)["lockfile"]), m.At("D/devserver.lock")
	a.must("creat", u, "wronly,creat,excl")
	a.must("link", u, lock)
	m.wantOwner("D", a.Pid)
	a.Kill()
	m.awaitFree("D")
	eventually(t, "the dead owner's lock file and candidate are gone", func() bool {
		entries, _ := os.ReadDir(m.Back("D"))
		return len(entries) == 0
	})
	b.must("creat", lock, "wronly,creat,excl")
}

// TestA9Chown: who makes a candidate while another one has the directory sees whom it was
// given to.
func TestA9Chown(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	u := m.At("D", candidateNames(t, a.Pid)["lockfile"])
	a.must("creat", u, "wronly,creat,excl")
	for _, c := range []struct{ uid, gid, want string }{{"1", "-1", "1:0"}, {"-1", "2", "1:2"}, {"3", "4", "3:4"}} {
		a.must("chown", u, c.uid, c.gid)
		if got := a.Get("sh", "stat -c %u:%g "+u); got != "0 "+c.want+"\n" {
			t.Errorf("after chown %s %s: %q, want %s", c.uid, c.gid, got, c.want)
		}
	}
}

// TestR5Candidate: the candidate that a lock file was linked from stays as long as the lock
// does, though its maker exits: a child of his that releases the lock looks at both names
// first, as Python's lockfile does. Both go when the last owner dies.
func TestR5Candidate(t *testing.T) {
	session := []string{"--owner", "session"}
	for name, test := range map[string]struct {
		opts   []string
		exits  func(m *Mount, exit func())
		before func(m *Mount)
	}{
		"parent's":                  {},
		"parent's, then restarted":  {before: func(m *Mount) { m.restart(nil) }},
		"parent's, then upgraded":   {before: (*Mount).replace},
		"session's":                 {opts: session},
		"session's, without daemon": {opts: session, exits: func(m *Mount, exit func()) { m.restart(exit) }},
	} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, test.opts...)
			heir := agentOfSession(t)
			maker := heir.Child()
			child := maker.Child()
			u := candidateName(t, maker)
			for _, dir := range []string{"D", "E"} {
				openDir(t, m.Back(dir))
				maker.must("creat", m.At(dir, u), "wronly,creat,excl")
				maker.must("link", m.At(dir, u), m.At(dir, "devserver.lock"))
			}
			if exit := func() { maker.Exit(0) }; test.exits != nil {
				test.exits(m, exit)
			} else {
				exit()
			}
			for _, dir := range []string{"D", "E"} {
				eventually(t, "another one has "+dir, func() bool { pid := m.Locks()[dir].Pid; return pid == heir.Pid || pid == child.Pid })
			}
			if test.before != nil {
				test.before(m)
			}
			for _, dir := range []string{"D", "E"} {
				if got, want := readNames(t, m.Back(dir)), []string{"devserver.lock", u}; !slices.Equal(slices.Sorted(slices.Values(got)), want) {
					t.Errorf("left in %s: %q, want %q", dir, got, want)
				}
			}
			heir.must("unlink", m.At("D", u))
			heir.must("unlink", m.At("D/devserver.lock"))
			m.wantFree("D")
			child.Exit(0)
			heir.Kill()
			m.awaitFree("E")
			eventually(t, "no lock file and no candidate is left", func() bool {
				return len(readNames(t, m.Back("D")))+len(readNames(t, m.Back("E"))) == 0
			})
		})
	}
}

// TestR5CandidatesMany: many of them do not keep who has got the locks from having candidates
// of his own where somebody else has the directory (A9), and all go when he dies, also after a
// restart.
func TestR5CandidatesMany(t *testing.T) {
	m := mount(t)
	heir := agentOfSession(t)
	const many = 20
	for i := range many {
		dir := "D" + itoa(i)
		openDir(t, m.Back(dir))
		maker := heir.Child()
		u := m.At(dir, candidateName(t, maker))
		maker.must("creat", u, "wronly,creat,excl")
		maker.must("link", u, m.At(dir, "devserver.lock"))
		maker.Exit(0)
	}
	left := func() (files int) {
		for i := range many {
			files += len(readNames(t, m.Back("D"+itoa(i))))
		}
		return files
	}
	eventually(t, "the heir has all locks", func() bool {
		n := 0
		for _, l := range m.Locks() {
			if l.Pid == heir.Pid {
				n++
			}
		}
		return n == many
	})
	m.restart(nil)
	if n := left(); n != 2*many {
		t.Errorf("%d files are left, want %d", n, 2*many)
	}
	openDir(t, m.Back("X"))
	agent(t).mustCommand(m, "acquire X")
	u := m.At("X", candidateName(t, heir))
	heir.must("creat", u, "wronly,creat,excl")
	if got := heir.Try("link", u, m.At("X/devserver.lock")); got != "EEXIST" {
		t.Errorf("link = %s, want EEXIST", got)
	}
	heir.Kill()
	eventually(t, "all files are gone", func() bool { return left() == 0 })
}

// TestR4CandidateReplaced: what was put in the place of a candidate past the mount is not
// its creator's: it stays when that one dies, and the other ones go.
func TestR4CandidateReplaced(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	const all = 9
	name := func(i int) string { return strings.Replace(candidateName(t, a), "-7f00ab", "-7f00a"+itoa(i), 1) }
	for i := range all {
		a.must("creat", m.At("D", name(i)), "wronly,creat,excl")
	}
	replaced := m.Back("D", name(all/2))
	mustDo(t, os.WriteFile(replaced+".new", nil, 0o644))
	mustDo(t, os.Rename(replaced+".new", replaced))
	a.Kill()
	var left []string
	eventually(t, "the dead process's candidates are gone", func() bool {
		left = readNames(t, m.Back("D"))
		return len(left) <= 1
	})
	if len(left) != 1 {
		t.Error("what took the place of one is gone, too")
	}
}

// TestA9Again: who has released a lock by its name alone, as the dev server does, has
// its candidate left. When it comes again, and somebody else has the lock, it hears
// that from link(2), whatever it does to the candidate first; and changes no content.
func TestA9Again(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	u, lock := m.At("D", candidateName(t, a)), m.At("D/devserver.lock")
	a.must("creat", u, "wronly,creat,excl")
	a.must("link", u, lock)
	a.must("unlink", lock)
	m.wantFree("D")
	b.must("creat", lock, "wronly,creat,excl")
	c := agent(t)
	for _, who := range []*Agent{b, c} {
		who.must("stat", u)
	}
	for _, try := range [][]string{{"open", "u", u, "wronly"}, {"chmod", u, "600"}, {"utimens", u}, {"unlink", u}} {
		c.want("EBUSY", try...)
	}
	a.want("ok", "open", "u", u, "wronly,creat,trunc")
	a.want("EBUSY", "write", "u", "1234")
	before := digest(t, m.Back("D"))
	a.want("ok", "utimens", u)
	a.want("ok", "chmod", u, "600")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed in the backing:\n%s", diff(before, after))
	}
	a.want("EBUSY", "truncate", u, "1")
	a.want("EEXIST", "link", u, lock)
	if got := a.Get("stat", u); !strings.Contains(got, "size=0 nlink=1 ") {
		t.Errorf("stat of the candidate: %s, want it empty, with one link", got)
	}
	m.wantOwner("D", b.Pid)

	// What the holder takes for itself is content, whoever had it open.
	b.must("rename", u, m.At("D/content"))
	b.must("put", m.At("D/content"), "mine", "trunc")
	a.want("EBUSY", "write", "u", "1234")
	a.must("close", "u")
	for _, try := range [][]string{{"open", "u", m.At("D/content"), "wronly,trunc"}, {"chmod", m.At("D/content"), "600"}, {"utimens", m.At("D/content")}} {
		a.want("EBUSY", try...)
	}
	if got, _ := os.ReadFile(m.Back("D/content")); string(got) != "mine" {
		t.Errorf("content: %q", got)
	}
	b.must("link", m.At("D/content"), u) // and so is what it makes under that name
	for _, try := range [][]string{{"open", "u", u, "wronly,trunc"}, {"chmod", u, "600"}, {"unlink", u}} {
		a.want("EBUSY", try...)
	}
	b.must("unlink", u)
	a.want("ok", "creat", u, "wronly,creat,trunc") // a private one
	a.want("EEXIST", "link", u, lock)
	b.must("unlink", lock)
	a.must("link", u, lock)
	m.wantOwner("D", a.Pid)
}

// ordinaryNames are of the form of candidates' names, and what builds make.
var ordinaryNames = []string{"app-1.0", "linux-6.6", "config-6.1", "node-18.1-2", "lib-2024.12", "_button.module.css", "_io.module.css"}

// TestW1OrdinaryNames: a stranger's file is refused though its name has the form of
// a candidate's.
func TestW1OrdinaryNames(t *testing.T) {
	m := mount(t)
	agent(t).must("mkdir", m.At("D"))
	before := digest(t, m.Back("D"))
	b := agent(t)
	for _, name := range ordinaryNames {
		b.want("EBUSY", "creat", m.At("D", name), "wronly,creat")
		b.want("EBUSY", "creat", m.At("D", name), "wronly,creat,excl")
		b.want("ENOENT", "stat", m.At("D", name))
	}
	if r := run(t, "cp", "/etc/passwd", m.At("D/config-6.1")); r.Status == 0 {
		t.Errorf("cp: %v, want a failure", r)
	}
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed in the backing:\n%s", diff(before, after))
	}
}

// TestA9Stamps: a build that is named by a commit and the time of day is none of a link
// protocol's files, although the time begins with the pid of who makes it. Neither is it
// removed with that process, nor does it come to nothing where somebody else holds.
func TestA9Stamps(t *testing.T) {
	need(t, "root", "fuse", "unshare")
	m := mount(t)
	agent(t).must("mkdir", m.At("D"))
	openDir(t, m.Back("F"))
	now := time.Now()
	for _, stamp := range []string{
		fmt.Sprint(now.UnixNano()), fmt.Sprint(now.UnixMicro()), fmt.Sprint(now.UnixMilli()),
		now.Format("20060102150405"), now.Format("20060102150405") + "123456789",
	} {
		for _, digits := range []int{2, 3, 4} {
			name := "app-3f2a9c1." + stamp
			r := run(t, "unshare", "--pid", "--fork", "--mount-proc", "sh", "-c",
				`echo $1 >/proc/sys/kernel/ns_last_pid; sh -c 'echo $$; echo built >"$1"' sh "$2"`, "sh", itoa(atoi(stamp[:digits])-1), m.At("F", name))
			if r.Status != 0 || r.Out != stamp[:digits]+"\n" {
				t.Fatalf("make %s: %v, want the pid %s", name, r, stamp[:digits])
			}
			time.Sleep(50 * time.Millisecond) // more than R4 takes
			if got, err := os.ReadFile(m.Back("F", name)); string(got) != "built\n" {
				t.Errorf("%s, made by a process %s = %q, %v", name, stamp[:digits], got, err)
			}
			_ = os.Remove(m.At("F", name))
		}
		agent(t).want("EBUSY", "creat", m.At("D", "app-3f2a9c1."+stamp), "wronly,creat,excl")
	}
}

// TestA9Large: what holds more than a link protocol writes is not removed with its
// creator, although it has a candidate's name.
func TestA9Large(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("F"))
	for size, stays := range map[int]bool{4096: false, 4097: true} {
		a := agent(t)
		name := candidateNames(t, a.Pid)["lockfile"]
		a.must("open", "u", m.At("F", name), "wronly,creat,excl")
		a.must("write", "u", strings.Repeat("x", size))
		a.Exit(3)
		there := func() bool { return exists(m.Back("F", name)) }
		if stays {
			time.Sleep(100 * time.Millisecond) // more than R4 takes
			if !there() {
				t.Errorf("a file of %d bytes is gone with its creator", size)
			}
		} else {
			eventually(t, "the candidate is gone", func() bool { return !there() })
		}
	}
}

// TestR5OrdinaryNames: what a holder makes or removes under such a name is content,
// so that nothing is handed over to its parent. Its own candidate is none.
func TestR5OrdinaryNames(t *testing.T) {
	m := mount(t)
	parent := agent(t)
	for i, name := range append([]string{""}, ordinaryNames...) {
		for _, how := range []string{"made", "removed"} {
			dir := fmt.Sprintf("D%d%s", i, how)
			child := parent.Child()
			child.must("mkdir", m.At(dir))
			path := m.At(dir, name)
			if name == "" {
				path = m.At(dir, candidateName(t, child))
			} else if how == "removed" {
				openFile(t, m.Back(dir, name), "x")
			}
			if how == "made" || name == "" {
				child.must("creat", path, "wronly,creat,excl")
			}
			if how == "removed" {
				child.must("unlink", path)
			}
			child.Exit(0)
			if name == "" {
				eventually(t, dir+" is handed over", func() bool { return m.Locks()[dir].Pid == parent.Pid })
			} else {
				m.awaitFree(dir)
			}
		}
	}
}

// TestA9Namespaces: a client in a container tells the pid that it has there, and the
// name of that host. Its candidate is let through, and goes with it.
func TestA9Namespaces(t *testing.T) {
	need(t, "root", "fuse", "unshare", debianPython)
	m := mount(t)
	holder := agent(t)
	holder.must("mkdir", m.At("D"))
	openDir(t, m.Back("F"))
	program := `
import os, socket, sys
socket.sethostname("elsewhere")
from lockfile.linklockfile import LinkLockFile
for d in sys.argv[1:]:
    lock = LinkLockFile(d + "/devserver")
    try:
        lock.acquire(timeout=-1)
        print("acquired", os.path.basename(lock.unique_name).startswith("elsewhere-"), os.path.exists(lock.unique_name))
    except Exception as e:
        print(type(e).__name__)
print(os.getpid(), flush=True)
os._exit(3)
`
	container := func(program string, args ...string) Result {
		return run(t, "unshare", append([]string{"--pid", "--fork", "--uts", debianPython, "-W", "ignore", "-c", program}, args...)...)
	}
	if r := container(program, m.At("D"), m.At("F")); r.Out != "AlreadyLocked\nacquired True True\n1\n" {
		t.Errorf("LinkLockFile prints %v", r)
	}
	m.awaitFree("F")
	eventually(t, "the dead owner's lock file and candidate are gone", func() bool {
		entries, _ := os.ReadDir(m.Back("F"))
		return len(entries) == 0
	})
	// Its pid is 1, with which many a version begins.
	r := container(`
import sys
for name in ["app-1.1", "app-1.10", "linux-6.12", "linux-6.1", "build-20261125.1"]:
    try:
        open(sys.argv[1] + "/" + name, "w")
        print(name)
    except OSError as e:
        pass
`, m.At("D"))
	if r.Status != 0 || r.Out != "" {
		t.Errorf("made for the holder's directory: %v", r)
	}
}
