//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestAttackDescriptorExclusion attacks A4 and C3a: lockers race by flock(2) and
// fcntl(2), on one lock file or two, and by mkdir of another lock name.
func TestAttackDescriptorExclusion(t *testing.T) {
	m := mount(t)
	type locker struct{ name, file, how string }
	all := []locker{{"flock", "devserver", "flock"}, {"fcntl", "devserver", "setlk"}, {"flock2", "devserver.lock", "flock"}, {"create", "devserver.lock", ""}}
	for i, p := range all {
		for _, q := range all[i:] {
			if p.how == "" || p.file == q.file && (p.how == "") != (q.how == "") {
				continue // where the lock file stays, who makes one never gets it
			}
			t.Run(p.name+"+"+q.name, func(t *testing.T) {
				dir := "fd-" + p.name + "-" + q.name
				openDir(t, m.Back(dir))
				var two []contender
				for _, l := range []locker{p, q} {
					a, file := agent(t), m.At(dir, l.file)
					take := func() string {
						if l.how == "" {
							return a.Try("creat", file, "wronly,creat,excl")
						}
						if got := a.Try("open", "h", file, "rdwr,creat,trunc"); got != "ok" {
							return "open " + got
						}
						got := a.Try(l.how, "h", "wr")
						if got != "ok" {
							a.Try("close", "h")
						}
						return got
					}
					work := func() {
						if got := a.Try("put", m.At(dir, "content"), l.name, "creat,trunc"); got != "ok" {
							t.Errorf("the owner's write = %s", got)
						}
					}
					give := func() {
						if l.how == "" {
							a.must("unlink", file)
						} else {
							a.must("close", "h")
						}
					}
					two = append(two, contender{l.name, "EAGAIN|EEXIST", take, work, give})
				}
				contest(t, two...)
				m.awaitFree(dir)
			})
		}
	}
}

// TestAttackDescriptorInFlight attacks W3 and A10: strangers truncate, write and
// lock the lock file, and work in D, while another process locks it by flock(2).
func TestAttackDescriptorInFlight(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/devserver"), "nobody")
	openFile(t, m.Back("D/file"), "content")
	locker, b, c := agent(t), stranger(t), agent(t)
	lock, at := m.At("D/devserver"), m.At("D")
	storms := []*storm{
		b.storm([]string{"open", "h", lock, "wronly,trunc"}, []string{"pwrite", "h", "x", "3", "0"}, []string{"ftruncate", "h", "2"}, []string{"close", "h"},
			[]string{"put", at + "/file", "evil", "trunc"}, []string{"creat", at + "/n", "wronly,creat"}, []string{"unlink", at + "/n"}),
		c.storm([]string{"open", "h", lock, "rdwr,trunc"}, []string{"write", "h", "evil"}, []string{"fallocate", "h", "0", "0", "9"}, []string{"close", "h"},
			[]string{"truncate", lock, "1"}, []string{"utimens", lock, "1"}, []string{"chmod", lock, "0666"}),
	}
	won := 0
	for end := seconds(2); time.Now().Before(end) || won < 3; {
		locker.must("open", "h", lock, "rdwr")
		if got := locker.Try("flock", "h"); got != "ok" {
			if got != "EAGAIN" {
				t.Errorf("flock = %s", got)
			}
			locker.must("close", "h")
			continue
		}
		won++
		still(t, m, "D", "beneath a flock", 12, storms...)
		locker.must("ftruncate", "h", "0")
		locker.must("pwrite", "h", "p", "4", "0")
		still(t, m, "D", "beneath a flock, with a pid in it", 12, storms...)
		locker.must("close", "h")
		if t.Failed() {
			return
		}
		await(t, 12, storms...)
	}
	t.Logf("%d acquisitions; rivals: %v %v", won, storms[0].over(), storms[1].over())
}

// TestAttackDescriptorKill attacks R4: a script that holds by flock(1) is killed
// with -9, and with it all that it started. The next one gets it at once, also
// one that waits.
func TestAttackDescriptorKill(t *testing.T) {
	need(t, "root", "fuse", "flock")
	m := mount(t)
	openDir(t, m.Back("D"))
	rival := agent(t)
	for i := range 30 {
		cmd := exec.Command("/bin/sh", "-c", `exec 9>D/devserver; flock 9 || exit; echo; sleep 60`)
		cmd.Dir = m.Path
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Stderr = os.Stderr // Wait is to wait for the shell alone
		start, out := linesOf(t, cmd)
		p := start()
		_, err := out.ReadString('\n')
		mustDo(t, err)
		m.wantOwner("D", p.Pid())
		rival.must("open", "h", m.At("D/devserver"), "rdwr,creat,trunc")
		rival.want("EAGAIN", "flock", "h")
		rival.want("EBUSY", "write", "h", "x")
		rival.want("EBUSY", "creat", m.At("D/x"), "wronly,creat")
		var waiter *Proc
		if i%2 == 1 {
			waiter = startCmd(t, exec.Command("flock", m.At("D/devserver"), "true"))
			eventually(t, "it waits", func() bool { return len(m.Listing().Waiters) == 1 })
		}
		killGroup(t, p)
		if waiter != nil {
			if r := waiter.Wait(); r.Status != 0 {
				t.Fatalf("who waited: %v", r)
			}
			m.awaitFree("D")
		}
		eventually(t, "the next one gets it", func() bool { return rival.Try("flock", "h") == "ok" })
		rival.must("creat", m.At("D/x"), "wronly,creat")
		rival.must("close", "h")
		rival.must("unlink", m.At("D/x"))
		m.awaitFree("D")
	}
}

// TestAttackWaitersKilled attacks A8: those who wait are killed or get signals,
// and the others go on waiting, in order; nobody hangs.
func TestAttackWaitersKilled(t *testing.T) {
	need(t, "root", "fuse", "flock")
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/devserver"), "")
	owner := agent(t)
	owner.must("open", "h", m.At("D/devserver"), "rdwr")
	owner.must("flock", "h")
	order := filepath.Join(tempDir(t), "order")
	var waiters []*Proc
	for i := range 40 {
		waiters = append(waiters, startCmd(t, exec.Command("flock", m.At("D/devserver"), "sh", "-c", fmt.Sprintf("echo %d >>%s", i, order))))
		eventually(t, "it waits", func() bool { return len(m.Listing().Waiters) == i+1 })
	}
	want := ""
	for i, w := range waiters {
		switch i % 4 {
		case 1:
			w.Kill()
		case 2:
			syscall.Kill(w.Pid(), syscall.SIGTERM)
			w.Wait()
		default:
			want += itoa(i) + "\n"
		}
	}
	owner.must("close", "h")
	for i, w := range waiters {
		if i%4 == 0 || i%4 == 3 {
			if r := w.Wait(); r.Status != 0 {
				t.Errorf("waiter %d: %v", i, r)
			}
		}
	}
	got, err := os.ReadFile(order)
	mustDo(t, err)
	if string(got) != want {
		t.Errorf("they got it in the order %q, want %q", got, want)
	}
	m.awaitFree("D")
	if w := m.Listing().Waiters; len(w) != 0 {
		t.Errorf("left: %+v", w)
	}
}
