//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestAttackCrowd attacks C3a and liveness: 300 rivals on one directory.
func TestAttackCrowd(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	witness := tempDir(t)
	script := `set -C
		if : >D/devserver; then
			mkdir "$1/held" || echo two at once
			: >"D/f$$" || echo refused
			rm "D/f$$"
			rmdir "$1/held"
			rm D/devserver || echo no release
			echo won
		fi 2>/dev/null`
	crowd := make([]*Proc, 300)
	for i := range crowd {
		cmd := exec.Command("/bin/sh", "-c", script, "sh", witness)
		cmd.Dir = m.Path
		crowd[i] = startCmd(t, cmd)
	}
	won := 0
	for _, p := range crowd {
		switch r := p.Wait(); r.Out {
		case "won\n":
			won++
		case "":
		default:
			t.Errorf("a rival: %v", r)
		}
	}
	t.Logf("%d of %d got it", won, len(crowd))
	if won == 0 {
		t.Error("nobody got it")
	}
	m.awaitFree("D")
	if rest, _ := os.ReadDir(m.Back("D")); len(rest) != 0 {
		t.Errorf("left: %v", rest)
	}
}

// TestAttackHeldBack attacks A12: stagers of siblings that are held back get
// signals, or are killed. They do not hang, and the owner is not kept from its
// lock file.
func TestAttackHeldBack(t *testing.T) {
	m := mount(t)
	for i := range 6 {
		board := fmt.Sprint("board", i)
		owner, rival := agent(t), agent(t)
		owner.must("mkdir", m.At(board))
		owner.must("mkdir", m.At(board, "v1"))
		answer := rival.Start("mkdir", m.At(board, "v2"))
		switch i % 3 {
		case 0: // released by the lock file
			owner.must("creat", m.At(board, "v1/devserver"), "wronly,creat,excl")
			if got := answer(); got != "ok" {
				t.Errorf("the sibling's mkdir = %s", got)
			}
			m.wantOwner(filepath.Join(board, "v1"), owner.Pid)
			m.wantOwner(filepath.Join(board, "v2"), rival.Pid)
		case 1: // signals
			for range 20 {
				syscall.Kill(rival.Pid, syscall.SIGURG)
				syscall.Kill(rival.Pid, syscall.SIGWINCH)
			}
			if got := answer(); !oneOf(got, "EINTR|EBUSY|ok") {
				t.Errorf("mkdir with signals = %s", got)
			}
			owner.must("creat", m.At(board, "v1/devserver"), "wronly,creat,excl")
		case 2: // killed
			time.Sleep(5 * time.Millisecond)
			rival.Kill()
			owner.must("creat", m.At(board, "v1/devserver"), "wronly,creat,excl")
			owner.must("mkdir", m.At(board, "v3"))
			if _, err := os.Lstat(m.Back(board, "v2")); err == nil {
				t.Error("the killed one's directory was made")
			}
		}
	}
}

// TestAttackKilledClients attacks M4 and R4: clients are killed in the middle
// of anything. Nothing of them stays in the daemon.
func TestAttackKilledClients(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	before := m.metric("handles")
	for i := range 30 {
		a := agent(t)
		u := m.At("D", candidateName(t, a))
		s := a.storm(
			[]string{"creat", m.At("D/devserver"), "wronly,creat,excl"}, []string{"open", "h", m.At("D/f"), "rdwr,creat"}, []string{"write", "h", "x"},
			[]string{"creat", u, "wronly,creat,excl"}, []string{"link", u, m.At("D/devserver")}, []string{"mkdir", m.At("D/sub")},
			[]string{"rename", m.At("D/f"), m.At("D/g")}, []string{"close", "h"}, []string{"unlink", m.At("D/devserver")}, []string{"rmdir", m.At("D/sub")}, []string{"unlink", u},
		)
		await(t, 7+i, s)
		a.Kill()
		s.end()
	}
	b := agent(t)
	b.want("ok", "creat", m.At("D/devserver"), "wronly,creat,excl")
	eventually(t, "no handle is left", func() bool { return m.metric("handles") <= before })
	for _, row := range m.Listing().Locks {
		if row.Pid != b.Pid {
			t.Errorf("left: %+v", row)
		}
	}
	rest, err := os.ReadDir(m.Back("D"))
	mustDo(t, err)
	for _, e := range rest {
		if !oneOf(e.Name(), "devserver|f|g|sub") {
			t.Errorf("left: %s", e.Name())
		}
	}
}

// TestAttackEndUnderLoad attacks M4: the daemon is told to end while everybody
// works. It ends, and no client hangs.
func TestAttackEndUnderLoad(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			m := mount(t, "--grace", "500ms")
			openDir(t, m.Back("D"))
			var storms []*storm
			for i := range 4 {
				a := agent(t)
				d := m.At("D")
				s := a.storm(
					[]string{"creat", d + "/devserver", "wronly,creat,excl"}, []string{"put", fmt.Sprintf("%s/f%d", d, i), "x", "creat"}, []string{"mkdir", fmt.Sprintf("%s/d%d", d, i)},
					[]string{"rename", fmt.Sprintf("%s/f%d", d, i), fmt.Sprintf("%s/g%d", d, i)}, []string{"unlink", d + "/devserver"}, []string{"rmdir", fmt.Sprintf("%s/d%d", d, i)},
				)
				storms = append(storms, s)
			}
			await(t, 100, storms...)
			mustDo(t, m.cmd.Process.Signal(sig))
			select {
			case <-m.gone:
			case <-time.After(patience):
				t.Error("the daemon does not end")
			}
			await(t, 50, storms...)
			for _, s := range storms {
				s.over()
			}
		})
	}
}

// TestAttackSymlinkSwap attacks M3: a stranger swaps a directory for a symlink
// while others work in it. The link leads nowhere on the mount, but out of the
// backing for whoever would follow it there.
func TestAttackSymlinkSwap(t *testing.T) {
	dir := staticDir(t)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	mnt := filepath.Join(tempDir(t), "other", "depth", "mnt")
	openDir(t, outside)
	openFile(t, filepath.Join(outside, "f"), "secret")
	openDir(t, filepath.Join(outside, "sub"))
	openDir(t, filepath.Join(dir, "S"))
	openDir(t, filepath.Join(dir, "S/d"))
	openFile(t, filepath.Join(dir, "S/d/f"), "content")
	mustDo(t, os.Symlink("../../outside", filepath.Join(dir, "S/l")))
	mustDo(t, os.Symlink("../../outside/f", filepath.Join(dir, "S/lf")))
	m := mountDir(t, dir, mnt)
	before := digest(t, outside)
	root, other, b := agent(t), agent(t), stranger(t)
	d := m.At("S/d")
	storms := []*storm{
		b.storm([]string{"rename", d, m.At("S/l"), "exchange"}, []string{"rename", m.At("S/lf"), d + "/f", "exchange"}),
		root.storm([]string{"put", d + "/f", "evil", "trunc"}, []string{"chmod", d + "/f", "0600"}, []string{"chown", d + "/f", "1", "1"},
			[]string{"truncate", d + "/f", "1"}, []string{"setxattr", d + "/f", "user.evil", "1"}, []string{"creat", d + "/new", "wronly,creat"}),
		other.storm([]string{"unlink", d + "/new"}, []string{"mkdir", d + "/dir"}, []string{"link", d + "/f", d + "/g"}, []string{"rename", d + "/g", d + "/h"},
			[]string{"creat", d + "/devserver", "wronly,creat,excl"}, []string{"unlink", d + "/devserver"}, []string{"rmdir", d + "/sub"}, []string{"unlink", d + "/h"}, []string{"rmdir", d + "/dir"}),
	}
	await(t, 1200, storms...)
	for _, s := range storms {
		s.over()
	}
	if after := digest(t, outside); after != before {
		t.Errorf("changed outside of the mount:\n%s", diff(before, after))
	}
}

// TestAttackForgotten attacks the daemon's memory: the kernel forgets all that
// it can while locks are held and everybody works. Locks, open files and
// candidates stay.
func TestAttackForgotten(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("E"))
	owner, b, c := agent(t), agent(t), agent(t)
	for _, d := range []string{"D", "D/sub", "D/sub/deep"} {
		owner.must("mkdir", m.At(d))
	}
	owner.must("creat", m.At("D/content"), "wronly,creat") // or D is free again (A12)
	owner.must("creat", m.At("D/sub/deep/devserver"), "wronly,creat,excl")
	owner.must("open", "h", m.At("D/sub/deep/f"), "rdwr,creat")
	owner.must("open", "u", m.At("D/sub/deep/gone"), "rdwr,creat")
	owner.must("unlink", m.At("D/sub/deep/gone"))
	b.must("open", "e", m.At("E/f"), "rdwr,creat")
	u := m.At("D/sub", candidateName(t, b))
	b.must("put", u, "pid", "creat,excl")
	s := c.storm([]string{"stat", m.At("D/sub/deep/f")}, []string{"put", m.At("E/g"), "x", "creat"}, []string{"creat", m.At("D/x"), "wronly,creat"},
		[]string{"unlink", m.At("E/g")}, []string{"stat", m.At("E/none")}, []string{"readdir", m.At("D/sub/deep")})
	for range 6 {
		mustDo(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0o200))
		await(t, 12, s)
		owner.must("write", "h", "x")
		owner.must("write", "u", "x")
		b.must("write", "e", "x")
		b.must("stat", u)
		b.want("EEXIST", "link", u, m.At("D/sub/devserver"))
		b.want("EBUSY", "put", m.At("D/sub/deep/f"), "x", "")
		b.want("EEXIST", "creat", m.At("D/sub/deep/devserver.lock"), "wronly,creat,excl")
		c := agent(t)
		c.want("EEXIST", "creat", m.At("E/devserver"), "wronly,creat,excl") // b's handle
	}
	for what, n := range s.over() {
		if what == "creat ok" || strings.HasSuffix(what, " ESTALE") {
			t.Errorf("%s: %d times", what, n)
		}
	}
	m.wantOwner("D/sub/deep", owner.Pid)
	b.must("unlink", u)
	owner.must("unlink", m.At("D/sub/deep/devserver"))
}

// TestAttackStorm lets everybody do everything in one small tree, lock files,
// candidates and renamed directories included. Nobody hangs, the daemon answers
// afterwards, and no lock is left.
func TestAttackStorm(t *testing.T) {
	m := mount(t, "--depth", "2")
	openDir(t, m.Back("S"))
	for _, d := range []string{"a", "b", "c"} {
		openDir(t, m.Back("S", d))
	}
	var storms []*storm
	for i, as := range []func(*testing.T) *Agent{agent, stranger, agent, stranger, agent} {
		a := as(t)
		u := candidateName(t, a)
		var commands [][]string
		add := func(words ...string) { commands = append(commands, words) }
		for j := range 9 {
			d, e := m.At("S", string("abc"[(i+j)%3])), m.At("S", string("abc"[(i*2+j+1)%3]))
			f := fmt.Sprintf("%s/f%d", d, j%2)
			add("creat", f, "wronly,creat")
			add("link", f, d+"/devserver")
			add("open", "h", f, "rdwr,creat")
			add("link", f, e+"/g")
			add("write", "h", "x")
			add("rename", e+"/g", d+"/devserver.lock")
			add("creat", d+"/"+u, "rdwr,creat,excl")
			add("open", "u", d+"/"+u, "rdwr")
			add("stat", d+"/"+u)
			add("link", d+"/"+u, d+"/devserver")
			add("write", "u", "y")
			add("rename", d+"/"+u, e+"/other")
			add("close", "u")
			add("mkdir", d+"/sub")
			add("rename", d, e, "exchange")
			add("mkdir", e+"/sub/devserver")
			add("link", f, e+"/devserver")
			add("rename", e+"/sub", d+"/moved")
			add("truncate", f, "0")
			add("unlink", d+"/devserver")
			add("unlink", e+"/devserver")
			add("unlink", d+"/devserver.lock")
			add("close", "h")
			add("unlink", f)
			add("unlink", e+"/g")
			add("unlink", d+"/"+u)
			add("unlink", e+"/other")
			add("rmdir", e+"/sub/devserver")
			add("rmdir", e+"/sub")
			add("rmdir", d+"/moved/devserver")
			add("rmdir", d+"/moved")
			add("readdir", d)
		}
		storms = append(storms, a.storm(commands...))
	}
	for end := seconds(4); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		m.Listing() // looks at all owners, and reaps
	}
	for i, s := range storms {
		counts := s.over()
		for what, n := range counts {
			for _, bad := range []string{" EIO", " EDEADLK", " EINTR", " ESTALE"} {
				if len(what) > len(bad) && what[len(what)-len(bad):] == bad {
					t.Errorf("storm %d: %s: %d times", i, what, n)
				}
			}
		}
		t.Logf("storm %d: %d commands", i, s.so())
		s.a.Kill()
	}
	for _, d := range []string{"S/a", "S/b", "S/c"} {
		m.awaitFree(d)
	}
	eventually(t, "no lock is left", func() bool { return len(m.Listing().Locks) == 0 })
	a := agent(t)
	for _, d := range []string{"a", "b", "c"} {
		a.Try("unlink", m.At("S", d, "devserver"))
		a.want("ok", "creat", m.At("S", d, "devserver"), "wronly,creat,excl")
		a.must("rename", m.At("S", d), m.At("S", d+"2"))
	}
}

// TestAttackCopyToLockFile: the mount does not stand still where a file that the
// daemon has not opened yet is copied into a lock file while names change.
func TestAttackCopyToLockFile(t *testing.T) {
	for _, opts := range [][]string{nil, {"--transport=threads"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			m := mount(t, opts...)
			holder := agent(t)
			const files = 50
			for i := range files {
				mustDo(t, os.WriteFile(m.Back("src"+itoa(i)), []byte("content"), 0o666))
			}
			holder.must("mkdir", m.At("D"))
			holder.must("open", "l", m.At("D/devserver"), "rdwr,creat,excl")
			until := seconds(3)
			var movers sync.WaitGroup
			for i := range 3 {
				a, from, to := agent(t), m.At("E"+itoa(i)), m.At("F"+itoa(i))
				openDir(t, m.Back("E"+itoa(i)))
				movers.Go(func() {
					for time.Now().Before(until) {
						if got := a.Try("rename", from, to); got != "ok" {
							t.Errorf("rename: %s", got)
							return
						}
						from, to = to, from
					}
				})
			}
			for i := 0; time.Now().Before(until); i++ {
				holder.must("copyrange", m.At("src"+itoa(i%files)), "l")
			}
			movers.Wait()
		})
	}
}

// TestAttackClosing: what is opened for writing and closed over and over while somebody
// tries to acquire the directory is looked at no longer than it may be mapped.
func TestAttackClosing(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	var storms []*storm
	for i := range 3 {
		path := "D/" + itoa(i)
		openFile(t, m.Back(path), "content")
		storms = append(storms, agent(t).storm([]string{"put", m.At(path), "x", ""}))
	}
	lock := m.At("D/devserver")
	storms = append(storms, agent(t).storm([]string{"creat", lock, "wronly,creat,excl"}, []string{"unlink", lock}))
	await(t, 3000, storms...)
	for _, s := range storms {
		s.over()
	}
	eventually(t, "all is closed", func() bool { return m.metric("handles") == 0 && m.metric("lingering") == 0 })
}
