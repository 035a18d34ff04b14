//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
)

// TestR6AttackRetaken: an owner that takes its lock again while somebody breaks it has
// one afterwards, or what it made does not stand in the next one's way: no lock file and
// no lock on a descriptor is left that locks nothing. The more lock files there are to be
// removed, the more time it has.
func TestR6AttackRetaken(t *testing.T) {
	m := mount(t, "--lock-name", "devserver", "--lock-name", "more*")
	for name, again := range map[string][]string{
		"create": {"until", "creat", m.At("create/devserver"), "wronly,creat,excl"},
		"rename": {"until", "rename", m.At("rename/file"), m.At("rename/devserver"), "noreplace"},
		"flock":  {"flock", "l"},
		"fcntl":  {"setlk", "l", "wr"},
	} {
		t.Run(name, func(t *testing.T) {
			m := m.on(t)
			openDir(t, m.Back(name))
			lock := func(a *Agent) string {
				if name == "create" || name == "rename" {
					return a.Try("creat", m.At(name, "devserver"), "wronly,creat,excl")
				}
				a.must("open", "l", m.At(name, "devserver"), "rdwr,creat")
				return a.Try(again...)
			}
			for i := range 12 {
				owner, next := agent(t), agent(t)
				if got := lock(owner); got != "ok" {
					t.Fatalf("to lock it = %s", got)
				}
				for j := range 20 {
					owner.must("creat", m.At(name, "more"+itoa(j)), "wronly,creat,excl")
				}
				openFile(t, m.Back(name, "file"), "")
				broken := make(chan string)
				go func() { broken <- m.Ctl("break " + name + " test") }()
				time.Sleep(time.Duration(i) * 300 * time.Microsecond)
				got := owner.Try(again...)
				if s := <-broken; s != "ok" {
					t.Fatalf("break = %s", s)
				}
				if _, locked := m.Locks()[name]; !locked {
					if s := lock(next); s != "ok" {
						t.Errorf("try %d: nobody holds it, but to lock it = %s; its owner heard %s during the break", i, s, got)
					}
				}
				owner.Kill()
				next.Kill()
				m.awaitFree(name)
				os.Remove(m.Back(name, "devserver"))
			}
		})
	}
}

// TestL1AttackRetaken: a client takes its lease again while an admin breaks it. Whoever
// heard of a new token has the directory from then on, also if the daemon dies at that
// moment; of the lease that was broken nothing is left.
func TestL1AttackRetaken(t *testing.T) {
	const files = 40
	for how, tries := range map[string]int{"served": 16, "killed": 6} {
		t.Run(how, func(t *testing.T) {
			m := mountOver(t, "--supervise", "--lock-name", "devserver", "--lock-name", "more*")
			heard := 0
			for i := range tries {
				dir := "D" + itoa(i)
				openDir(t, m.At(dir))
				m.Ctl("release " + dir)
				client, rival := agent(t), agent(t)
				old := client.mustCommand(m, "acquire %s client=c ttl=1m", dir).Token
				for j := range files {
					client.must("creat", m.At(dir, "more"+itoa(j)), "wronly,creat,excl")
				}
				daemon := m.daemon()
				broken := make(chan bool)
				go func() {
					if f, err := os.OpenFile(m.control("ctl"), os.O_WRONLY, 0); err == nil {
						f.WriteString("break " + dir + " test")
						f.Close()
					}
					close(broken)
				}()
				// Once one of the files is gone, what it has had is about to end.
				eventually(t, "the break begins", func() bool {
					for end := time.Now().Add(time.Second); time.Now().Before(end); {
						if names, _ := os.ReadDir(m.Back(dir)); len(names) < files {
							return true
						}
					}
					return false
				})
				var answer lockstate.Answer
				status, out := client.call([]string{"ctl", m.control("ctl"), "acquire " + dir + " client=c ttl=1m"})
				if status == "ok" {
					answer = readAnswer(t, out)
				}
				if how == "killed" {
					syscall.Kill(daemon, syscall.SIGKILL)
				}
				<-broken
				eventually(t, "a daemon serves", func() bool { now := m.daemon(); return now != 0 && (now != daemon || how == "served") })
				row, locked := m.Locks()[dir]
				switch {
				case status == "ok" && (!locked || row.Token != answer.Token || row.Token == old && how == "served"):
					t.Errorf("try %d: the client heard of token %d, after %d; the table has %+v", i, answer.Token, old, row)
				case status == "ok":
					heard++
				}
				if locked {
					client.mustCommand(m, "renew %s client=c", dir)
					client.must("put", m.At(dir, "f"), "x", "creat")
					rival.want("EBUSY", "put", m.At(dir, "f"), "y", "creat")
					client.mustCommand(m, "release %s client=c", dir)
				}
				m.wantFree(dir)
				rival.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
				rival.must("put", m.At(dir, "f"), "y", "creat")
				rival.Kill()
				m.awaitFree(dir)
				if names, err := filepath.Glob(m.Back(dir, "more*")); len(names) > 0 || err != nil {
					t.Errorf("try %d: lock files are left: %v, %v", i, names, err)
				}
			}
			t.Logf("%d times it was told that it has it", heard)
		})
	}
}
