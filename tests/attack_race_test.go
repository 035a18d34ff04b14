//go:build linux

package tests

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// TestAttackInFlight attacks W3: strangers change all that they can in D while
// another process acquires it, by each protocol. What the backing has when the
// acquisition has returned, it still has just before the release.
func TestAttackInFlight(t *testing.T) {
	m := mount(t)
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			dir := "flight-" + p.name
			openDir(t, m.Back(dir))
			openFile(t, m.Back(dir, "file"), "content")
			at := m.At(dir)
			locker, b, c := agent(t), stranger(t), agent(t)
			storms := []*storm{
				b.storm(
					[]string{"creat", at + "/n1", "wronly,creat"}, []string{"setxattr", at + "/file", "user.b", "1"},
					[]string{"unlink", at + "/n1"}, []string{"removexattr", at + "/file", "user.b"},
					[]string{"mkdir", at + "/d1"}, []string{"truncate", at + "/file", "3"}, []string{"rmdir", at + "/d1"},
					[]string{"put", at + "/n2", "x", "creat,trunc"}, []string{"rename", at + "/n2", at + "/n3"}, []string{"unlink", at + "/n3"},
				),
				c.storm(
					[]string{"chmod", at + "/file", "0666"}, []string{"symlink", "x", at + "/s"}, []string{"chmod", at, "0777"},
					[]string{"unlink", at + "/s"}, []string{"utimens", at + "/file"}, []string{"truncate", at + "/file", "9"},
					[]string{"mknod", at + "/p", "fifo"}, []string{"rename", at + "/p", at + "/q", "exchange"}, []string{"unlink", at + "/p"},
					[]string{"link", at + "/file", at + "/l"}, []string{"put", at + "/l", "yy", ""}, []string{"unlink", at + "/l"},
				),
			}
			won := 0
			for end := seconds(1.2); time.Now().Before(end) || won < 3; {
				if p.take(locker, at, "l") != "ok" {
					continue
				}
				won++
				still(t, m, dir, p.name, 25, storms...)
				p.give(locker, at, "l")
				if t.Failed() {
					return
				}
				await(t, 15, storms...)
			}
			t.Logf("%d acquisitions; rivals: %v %v", won, storms[0].over(), storms[1].over())
		})
	}
}

// TestAttackExclusion attacks C3a: lockers race by every pair of protocols.
func TestAttackExclusion(t *testing.T) {
	m := mount(t)
	all := protocols()
	for i, p := range all {
		for _, q := range all[i:] {
			t.Run(p.name+"+"+q.name, func(t *testing.T) {
				dir := "pair-" + p.name + "-" + q.name
				openDir(t, m.Back(dir))
				var two []contender
				for n, pr := range []protocol{p, q} {
					a, id := agent(t), fmt.Sprint(n)
					two = append(two, contender{
						pr.name, "EEXIST", func() string { return pr.take(a, m.At(dir), id) }, func() {}, func() { pr.give(a, m.At(dir), id) },
					})
				}
				contest(t, two...)
				m.wantFree(dir)
			})
		}
	}
}

// TestAttackOneMoment attacks C3 with mkdir(2): of many that make the same
// directory at once one has it, and nobody else writes beneath.
func TestAttackOneMoment(t *testing.T) {
	m := mount(t)
	agents := []*Agent{agent(t), stranger(t), agent(t), stranger(t)}
	for i := range 150 {
		dir := m.At(fmt.Sprint("moment", i))
		answers := make([]func() string, len(agents))
		for j, a := range agents {
			answers[j] = a.Start("mkdir", dir)
		}
		owner := -1
		for j, answer := range answers {
			switch got := answer(); {
			case got == "ok" && owner < 0:
				owner = j
			case got == "ok":
				t.Fatalf("two processes made %s", dir)
			case got != "EEXIST" && got != "EBUSY":
				t.Errorf("mkdir = %s", got)
			}
		}
		if owner < 0 {
			t.Fatal("nobody made it")
		}
		for j, a := range agents {
			want := "EBUSY"
			if j == owner {
				want = "ok"
			} else if j%2 == 1 {
				want = "EBUSY|EACCES" // a directory of root's
			}
			a.want(want, "creat", fmt.Sprintf("%s/by%d", dir, j), "wronly,creat,excl")
		}
	}
}

// TestAttackAncestorRename attacks C1 and W3: a stranger renames the directory
// above while D is acquired. Once it is, no ancestor moves.
func TestAttackAncestorRename(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("G"))
	openDir(t, m.Back("G/one"))
	openDir(t, m.Back("G/one/mid"))
	openDir(t, m.Back("G/one/mid/D"))
	openDir(t, m.Back("G/x"))
	locker, b, c := agent(t), stranger(t), agent(t)
	storms := []*storm{
		b.storm([]string{"rename", m.At("G/one"), m.At("G/two")}, []string{"rename", m.At("G/two"), m.At("G/one")}),
		c.storm([]string{"rename", m.At("G/one/mid"), m.At("G/x"), "exchange"}, []string{"rename", m.At("G/two/mid"), m.At("G/x"), "exchange"}),
	}
	places := []string{"G/one/mid/D", "G/two/mid/D", "G/x/D"}
	won := 0
	for end := seconds(2); time.Now().Before(end) || won < 3; {
		for _, dir := range places {
			got := locker.Try("creat", m.At(dir, "devserver"), "wronly,creat,excl")
			if !oneOf(got, "ok|ENOENT|ENOTDIR|EEXIST|ESTALE") {
				t.Errorf("acquire = %s", got)
			}
			if got != "ok" {
				continue
			}
			won++
			rows := m.Locks()
			if len(rows) != 1 {
				t.Fatalf("rows: %+v, want one", rows)
			}
			for at, row := range rows {
				before, err := os.Stat(m.Back(at, "devserver"))
				if err != nil || row.Pid != locker.Pid {
					t.Errorf("the lock is listed on %s (pid %d): %v", at, row.Pid, err)
				}
				still(t, m, at, "D", 10, storms...)
				if after, err := os.Stat(m.Back(at, "devserver")); err != nil || !os.SameFile(before, after) {
					t.Errorf("D was moved away from %s while it was held: %v", at, err)
				}
				locker.must("unlink", m.At(at, "devserver"))
			}
			if t.Failed() {
				return
			}
			await(t, 10, storms...)
		}
	}
	t.Logf("%d acquisitions; rivals: %v %v", won, storms[0].over(), storms[1].over())
}

// TestAttackRenameInto attacks W3: what a holder moves into D is nobody else's
// to write, also if a stranger opens it at that moment.
func TestAttackRenameInto(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("out"))
	openDir(t, m.Back("D"))
	openFile(t, m.Back("out/f"), "old")
	holder, b := agent(t), stranger(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	s := b.storm(
		[]string{"open", "h", m.At("out/f"), "wronly"}, []string{"pwrite", "h", "n", "40", "0"}, []string{"ftruncate", "h", "10"}, []string{"close", "h"},
		[]string{"truncate", m.At("out/f"), "5"}, []string{"put", m.At("out/f"), "zzz", ""},
	)
	moved := 0
	for end := seconds(2); time.Now().Before(end) || moved < 3; {
		got := holder.Try([]string{"rename", "link"}[moved%2], m.At("out/f"), m.At("D/f"))
		if !oneOf(got, "ok|EBUSY") {
			t.Errorf("= %s", got)
		}
		if got != "ok" {
			continue
		}
		still(t, m, "D", "a file that came in", 12, s)
		if moved%2 == 0 {
			holder.must("rename", m.At("D/f"), m.At("out/f"))
		} else {
			holder.must("unlink", m.At("D/f"))
		}
		if t.Failed() {
			return
		}
		await(t, 10, s)
		moved++
	}
	t.Logf("%d moves; rival: %v", moved, s.over())
}

// TestAttackTreeInto is TestAttackRenameInto for a directory with a file that
// the stranger has open through a name outside which nobody ever looked up in
// the tree.
func TestAttackTreeInto(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("out"))
	openDir(t, m.Back("tree"))
	openDir(t, m.Back("D"))
	openFile(t, m.Back("out/f"), "old")
	mustDo(t, os.Link(m.Back("out/f"), m.Back("tree/f")))
	holder, b := agent(t), stranger(t)
	holder.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	b.must("open", "h", m.At("out/f"), "wronly")
	if got := holder.Try("rename", m.At("tree"), m.At("D/tree")); got == "ok" {
		before := digest(t, m.Back("D"))
		b.Try("write", "h", "new")
		if after := digest(t, m.Back("D")); after != before {
			t.Errorf("a stranger wrote what was moved into D:\n%s", diff(before, after))
		}
	} else if got != "EBUSY" {
		t.Errorf("rename = %s", got)
	}
}
