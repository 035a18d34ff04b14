//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// TestR6AttackBrokenTwice: two admins break one lock, whose owner makes the lock file again
// while the first is removing the others and the second has not begun: that file is the new
// lock's, and stays.
func TestR6AttackBrokenTwice(t *testing.T) {
	needInject(t)
	dir := staticDir(t)
	m := newMount(t, dir, dir)
	armed, steps := atomic.Bool{}, make(chan chan struct{}, 8)
	m.inject(&fault{call: unix.SYS_FSETXATTR, until: func(a asked) <-chan struct{} { // before each file
		if !armed.Load() || a.path(1) != "stagefs" {
			return nil
		}
		goOn := make(chan struct{})
		steps <- goOn
		return goOn
	}})
	m.serve("--lock-name", "devserver", "--lock-name", "more")
	owner, rival := agent(t), agent(t)
	openDir(t, m.At("D"))
	m.Ctl("release D")
	again := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
	owner.must(again...)
	owner.must("creat", m.At("D/more"), "wronly,creat,excl")
	old := m.Locks()["D"].Token
	armed.Store(true)
	first := agent(t).Start("ctl", m.control("ctl"), "break D first")
	close(<-steps)
	more := <-steps
	second := agent(t).Start("ctl", m.control("ctl"), "break D second")
	file := <-steps
	made := owner.Try(again...)
	armed.Store(false)
	close(file)
	if got := second(); got != "ok" {
		t.Errorf("the second break = %s", got)
	}
	close(more)
	if got := first(); got != "ok" {
		t.Errorf("the first break = %s", got)
	}
	if row := m.Locks()["D"]; made != "ok" || row.Token <= old {
		t.Errorf("to make the lock file again = %s; the owner's lock is %+v, after token %d", made, row, old)
	}
	if !exists(m.Back("D/devserver")) || exists(m.Back("D/more")) {
		t.Errorf("the new lock's file is there: %t; what the old one had besides: %t", exists(m.Back("D/devserver")), exists(m.Back("D/more")))
	}
	rival.want("EEXIST", again...)
	owner.must("unlink", m.At("D/devserver"))
	rival.must(again...)
}

// TestS1AttackRetaken: a client takes its lease, or a process its lock, again while an
// admin breaks it. Whoever heard of a new token has the directory from then on, also if
// the daemon dies at that moment; of the lock that was broken nothing is left.
func TestS1AttackRetaken(t *testing.T) {
	needInject(t)
	for how, tries := range map[string]int{"racing": 8, "slow": 3, "killed": 3} {
		for who, client := range map[string]string{"client": " client=c ttl=1m", "process": ""} {
			t.Run(who+"/"+how, func(t *testing.T) {
				dir := staticDir(t)
				r := retaking{m: newMount(t, dir, dir), client: client, how: how}
				r.m.inject(&fault{call: unix.SYS_UNLINKAT, until: r.slowly})
				r.m.start([]string{"--supervise", "--lock-name", "devserver", "--lock-name", "more*"})
				t.Cleanup(r.m.stop)
				r.m.awaitReady()
				heard := 0
				for i := range tries {
					if r.try("D" + itoa(i)) {
						heard++
					}
				}
				t.Logf("%d times it was told that it has it", heard)
			})
		}
	}
}

// A retaking is about an owner that takes its lock again while it is broken.
type retaking struct {
	m           *Mount
	client, how string
	slow        atomic.Bool
}

// slowly has the break take its time with each lock file.
func (r *retaking) slowly(a asked) <-chan struct{} {
	if !r.slow.Load() || !strings.HasPrefix(a.path(1), "more") {
		return nil
	}
	over := make(chan struct{})
	time.AfterFunc(20*time.Millisecond, func() { close(over) })
	return over
}

// try tells whether the owner heard that it has the lock again.
func (r *retaking) try(dir string) (heard bool) {
	const files = 40
	m, t, killed := r.m, r.m.t, r.how == "killed"
	t.Helper()
	openDir(t, m.At(dir))
	m.Ctl("release " + dir)
	owner, rival := agent(t), agent(t)
	old := owner.mustCommand(m, "acquire %s%s", dir, r.client).Token
	for j := range files {
		owner.must("creat", m.At(dir, "more"+itoa(j)), "wronly,creat,excl")
	}
	r.slow.Store(r.how != "racing")
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
	status, out := owner.call([]string{"ctl", m.control("ctl"), "acquire " + dir + r.client})
	if status == "ok" {
		answer = readAnswer(t, out)
	}
	if killed {
		mustDo(t, syscall.Kill(daemon, syscall.SIGKILL))
	}
	r.slow.Store(false)
	<-broken
	eventually(t, "a daemon serves", func() bool { now := m.daemon(); return now != 0 && (now != daemon || !killed) })
	var rows []lockRow
	for _, row := range m.Listing().Locks {
		if row.Dir == dir {
			rows = append(rows, row)
		}
	}
	if len(rows) > 1 || status == "ok" && (len(rows) == 0 || rows[0].Token != answer.Token || answer.Token == old) {
		t.Errorf("the owner heard of token %d, after %d; the table has %+v", answer.Token, old, rows)
	}
	if len(rows) > 0 {
		if r.client != "" {
			owner.mustCommand(m, "renew %s client=c", dir)
		}
		owner.must("put", m.At(dir, "f"), "x", "creat")
		rival.want("EBUSY", "put", m.At(dir, "f"), "y", "creat")
		owner.mustCommand(m, "release %s%s", dir, strings.TrimSuffix(r.client, " ttl=1m"))
	}
	m.wantFree(dir)
	rival.must("creat", m.At(dir, "devserver"), "wronly,creat,excl")
	rival.must("put", m.At(dir, "f"), "y", "creat")
	rival.Kill()
	m.awaitFree(dir)
	if names, err := filepath.Glob(m.Back(dir, "more*")); len(names) > 0 || err != nil {
		t.Errorf("lock files are left: %v, %v", names, err)
	}
	return status == "ok"
}
