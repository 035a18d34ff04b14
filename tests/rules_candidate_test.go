//go:build linux

package tests

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// candidateNames are those that link(2) protocols give their temporary files,
// as processes with small and big pids make them.
func candidateNames(t *testing.T, pid int) map[string]string {
	t.Helper()
	host, err := os.Hostname()
	mustDo(t, err)
	return map[string]string{
		"lockfile":              fmt.Sprintf("%s-7f2c0a1b.%d4711", host, pid),
		"lockfile, signed hash": fmt.Sprintf("%s-7f2c0a1b.%d-4711", host, pid),
		"liblockfile":           fmt.Sprintf(".lk%05da%s", pid, host),
		"liblockfile, long pid": ".lk1234567a" + host,
		"procmail":              "_4YF.q7ZArB." + host,
		"procmail, comma":       "_4YF,q7ZArB." + host,
		"procmail, short pid":   "_Y.q7ZArB." + host,
		"procmail, shorter pid": "_xY.q7ZArB." + host,
		"procmail, long pid":    "_abcd.q7ZArB." + host,
		"added":                 "tmp.mine",
	}
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
	agent(t).want("EBUSY", "creat", m.At("D/ordinary"), "wronly,creat,excl")
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
	b.want("EBUSY|EXDEV", "rename", u, m.At("D/file"))
	b.want("EBUSY|EXDEV", "rename", u, m.At("D/new"))
	b.want("EBUSY|EXDEV", "link", u, m.At("D/new"))
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
	b.Try("creat", u2, "wronly,creat,excl")
	b.Kill()
	eventually(t, "the dead creator's candidates are gone", func() bool {
		c := agent(t)
		return c.Try("creat", u, "wronly,creat,excl") == "ok" && c.Try("creat", u2, "wronly,creat,excl") == "ok"
	})
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed in the backing:\n%s", diff(before, after))
	}
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
