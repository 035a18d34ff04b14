//go:build linux

package tests

import (
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// restart kills the daemon as a crash would, does what is to happen in between,
// and starts the next one.
func (m *Mount) restart(between func(), opts ...string) {
	m.t.Helper()
	m.kill()
	if between != nil {
		between()
	}
	m.start(opts)
	m.awaitReady()
}

// TestS1: after kill -9 of the daemon and a new start, owners that live hold
// what they held, with their tokens; what was theirs who died meanwhile is
// released as by R4. So also before Linux 6.5, which makes no mount beneath the dead one
// when asked to.
func TestS1(t *testing.T) {
	for name, opts := range map[string][]string{"native": nil, "compat": {"--compat"}} {
		t.Run(name, func(t *testing.T) { wantRestarted(t, append(opts, "--depth", "2")...) })
	}
}

func wantRestarted(t *testing.T, opts ...string) {
	t.Helper()
	m := mountOver(t, opts...)
	mustDo(t, os.Mkdir(m.At("b"), 0o777))
	mustDo(t, os.Chmod(m.At("b"), 0o777))
	made, locked, opened, dies, moved, chained := agent(t), agent(t), agent(t), agent(t), agent(t), agent(t)
	for _, d := range []string{"locked", "opened", "dies"} {
		mustDo(t, os.Mkdir(m.At("b", d), 0o777))
		mustDo(t, os.Chmod(m.At("b", d), 0o777))
		if s := m.Ctl("release b/" + d); s != "ok" {
			t.Fatal(s)
		}
	}
	made.must("mkdir", m.At("b", "made"))
	made.must("put", m.At("b", "made", "content"), "content", "wronly,creat")
	child := made.Child("setsid")
	child.must("put", m.At("b", "made", "child"), "content", "wronly,creat")
	locked.must("creat", m.At("b", "locked", "devserver"), "wronly,creat,excl")
	opened.must("open", "l", m.At("b", "opened", "devserver"), "rdwr,creat")
	opened.must("flock", "l", "ex,nb")
	dies.must("creat", m.At("b", "dies", "devserver"), "wronly,creat,excl")
	moved.must("mkdir", m.At("b", "from"))
	moved.must("rename", m.At("b", "from"), m.At("b", "to"))
	chained.must("mkdir", m.At("b", "chain\xff\n"))
	before := m.Locks()

	m.restart(dies.Kill, opts...)
	if strings.Contains(m.Log(), "could be written past the mount for a moment") {
		t.Errorf("DIR lay open:\n%s", m.Log())
	}
	if n := mountsOn(t, m.Path); n != 1 {
		t.Errorf("%d mounts, want 1", n)
	}

	after := m.Locks()
	for _, dir := range []string{"b/made", "b/locked", "b/opened", "b/to"} {
		if after[dir].Token != before[dir].Token || after[dir].Pid != before[dir].Pid || after[dir].Token == 0 {
			t.Errorf("%s: token %d of pid %d, want %d of %d", dir, after[dir].Token, after[dir].Pid, before[dir].Token, before[dir].Pid)
		}
	}
	if len(after) != len(before)-1 {
		t.Errorf("%d locks, want %d: %v", len(after), len(before)-1, after)
	}
	m.wantFree("b/dies")
	if _, err := os.Lstat(m.At("b", "dies", "devserver")); !os.IsNotExist(err) {
		t.Errorf("the dead owner's lock file: %v", err)
	}
	other := stranger(t)
	for _, dir := range []string{"made", "locked", "opened", "to", "chain\xff\n"} {
		other.want("EBUSY", "creat", m.At("b", dir, "x"), "wronly,creat")
	}
	other.want("EEXIST", "creat", m.At("b", "locked", "devserver"), "wronly,creat,excl")
	// Holders go on.
	made.must("put", m.At("b", "made", "more"), "x", "wronly,creat")
	child.must("put", m.At("b", "made", "more"), "y", "wronly")
	locked.must("put", m.At("b", "locked", "more"), "x", "wronly,creat")
	opened.must("put", m.At("b", "opened", "more"), "x", "wronly,creat")
	// And end what they had.
	last := after["b/opened"].Token
	for _, row := range after {
		last = max(last, row.Token)
	}
	locked.must("unlink", m.At("b", "locked", "devserver"))
	m.wantFree("b/locked")
	opened.want("ENOTCONN", "close", "l")
	other.must("creat", m.At("b", "opened", "x"), "wronly,creat")
	made.Kill()
	child.Kill()
	m.awaitFree("b/made")
	other.must("mkdir", m.At("b", "new"))
	if token := m.Locks()["b/new"].Token; token <= last {
		t.Errorf("token %d after %d", token, last)
	}
}

// TestS1Shared: neither does it end shared ones (A5), by whatever they were taken:
// nobody writes and nobody gets the directory alone until the last sharer is done.
func TestS1Shared(t *testing.T) {
	m := mount(t)
	file := m.lockFile("D")
	sharers := []*Agent{locker(t), locker(t), locker(t), agent(t)}
	for i, call := range lockCalls() {
		sharers[i].must("open", "x", file, "rdwr")
		sharers[i].must(call.tryShared("x")...)
	}
	if got := runCmdAs(t, sharers[3], "acquire", "-s", m.At("D")); !strings.HasPrefix(got, "0 ") {
		t.Fatal(got)
	}
	var before []lockRow
	eventually(t, "the command's lock is its parent's", func() bool {
		before = m.Listing().Locks
		return len(before) == len(sharers) && before[3].Pid == sharers[3].Pid
	})
	m.restart(nil)

	after := m.Listing().Locks
	if len(before) != len(sharers) || len(after) != len(before) {
		t.Fatalf("%d locks, and %d after the restart, want %d: %+v", len(before), len(after), len(sharers), after)
	}
	for i, row := range after {
		if row.Kind != "shared" || row.Token != before[i].Token || row.Pid != before[i].Pid {
			t.Errorf("after the restart: %+v, before: %+v", row, before[i])
		}
	}
	late, other := locker(t), locker(t)
	for _, a := range []*Agent{late, other} {
		a.must("open", "x", file, "rdwr")
	}
	late.must("flock", "x", "sh", "nb")
	for i, a := range append(sharers, late) {
		other.want("EAGAIN", "flock", "x", "ex", "nb")
		other.want("EAGAIN", "setlk", "x", "wr")
		other.want("EBUSY", "put", m.At("D/f"), "other", "creat")
		a.want("EBUSY", "put", m.At("D/f"), "a sharer", "creat")
		switch i {
		case 0: // its descriptor is dead, and closed all the same
			a.want("ENOTCONN", "close", "x")
		case 3:
			if got := runCmdAs(t, a, "release", m.At("D")); !strings.HasPrefix(got, "0 ") {
				t.Fatal(got)
			}
		default:
			a.Kill()
		}
		eventually(t, "it shares no more", func() bool { return len(m.Listing().Locks) == len(sharers)-i })
	}
	other.must("flock", "x", "ex", "nb")
	other.must("put", m.At("D/f"), "other", "creat")
}

// TestS1Unmounted: a clean end of the daemon ends no lock either (M4).
func TestS1Unmounted(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	token := m.Locks()["D"].Token
	mustDo(t, m.cmd.Process.Signal(syscall.SIGTERM))
	<-m.gone
	m.start(nil)
	m.awaitReady()
	if row := m.Locks()["D"]; row.Token != token || row.Pid != a.Pid {
		t.Errorf("token %d of pid %d, want %d of %d", row.Token, row.Pid, token, a.Pid)
	}
	stranger(t).want("EBUSY", "mkdir", m.At("D", "x"))
}

// reboot makes what the killed daemon left look as if it were of an earlier boot.
func (m *Mount) reboot() {
	m.t.Helper()
	files, _ := filepath.Glob(filepath.Join(m.State, "*.journal.*"))
	if len(files) != 1 {
		m.t.Fatalf("journals %q", files)
	}
	journal, err := os.ReadFile(files[0])
	mustDo(m.t, err)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	mustDo(m.t, err)
	var changed strings.Builder
	for line := range strings.Lines(string(journal)) {
		_, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		rest = strings.Replace(rest, strings.TrimSpace(string(boot)), "an-earlier-boot", 1)
		fmt.Fprintf(&changed, "%08x %s\n", crc32.Checksum([]byte(rest), crc32.MakeTable(crc32.Castagnoli)), rest)
	}
	if !strings.Contains(changed.String(), "an-earlier-boot") {
		m.t.Fatalf("journal %q", journal)
	}
	mustDo(m.t, os.WriteFile(files[0], []byte(changed.String()), 0o600))
}

// TestS1Boot: an owner of an earlier boot, or of another pid namespace, is dead,
// whoever has its pid now. A lease goes on, for the time that it has left.
func TestS1Boot(t *testing.T) {
	m := mountOver(t)
	a := agent(t)
	a.must("mkdir", m.At("D"))
	for dir, ttl := range map[string]string{"long": "1m", "short": "1s"} {
		openDir(t, m.At(dir))
		m.Ctl("release " + dir)
		a.must("put", m.control("ctl"), "acquire "+dir+" client="+dir+" ttl="+ttl+"\n", "wronly")
	}
	token := m.Locks()["long"].Token
	m.restart(func() {
		m.reboot()
		time.Sleep(time.Second) // the machine is off for longer than the short lease
	})
	m.wantFree("D")
	m.wantFree("short")
	row := m.Locks()["long"]
	if row.Token != token || row.Client != "long" || row.Deadline <= 0 || row.Deadline > 59 {
		t.Errorf("the lease after the boot: %+v, want token %d and less than 59 s left", row, token)
	}
	stranger(t).want("EBUSY", "creat", m.At("long", "x"), "wronly,creat")
	a.must("put", m.control("ctl"), "renew long client=long\n", "wronly")
}

// TestS1Race: processes take and release directories while the daemon is killed
// again and again. Who was told that he holds, holds; nothing that was released
// is held.
func TestS1Race(t *testing.T) {
	m := mountOver(t)
	const workers = 6
	var (
		agents  [workers]*Agent
		holding [workers]atomic.Int32 // 1: surely, 0: surely not, -1: cannot tell
		stop    atomic.Bool
		wg      sync.WaitGroup
		pause   sync.RWMutex // held while the test looks
		takes   atomic.Int64

		mu    sync.Mutex
		errs  = make(map[string]int)
		heard = func(got string) { mu.Lock(); errs[got]++; mu.Unlock() }
	)
	for i := range agents {
		agents[i] = agent(t)
		dir := m.At("D" + itoa(i))
		wg.Go(func() {
			for !stop.Load() {
				pause.RLock()
				if holding[i].Load() != 1 {
					got := agents[i].Try("mkdir", dir)
					switch got {
					case "ok":
						holding[i].Store(1)
						takes.Add(1)
					case "EEXIST": // made by a call that was cut off
						if agents[i].Try("rmdir", dir) == "ok" {
							holding[i].Store(0)
						}
					default:
						heard(got)
						holding[i].Store(-1)
					}
				} else {
					switch got := agents[i].Try("rmdir", dir); got {
					case "ok":
						holding[i].Store(0)
					default:
						heard(got)
						holding[i].Store(-1)
					}
				}
				pause.RUnlock()
			}
		})
	}
	other := stranger(t)
	for range 15 {
		time.Sleep(time.Duration(20+takes.Load()%30) * time.Millisecond) // at any moment of theirs
		m.kill()
		pause.Lock()
		m.start(nil)
		m.awaitReady()
		rows := m.Locks()
		for i := range agents {
			dir := "D" + itoa(i)
			row, held := rows[dir]
			_, err := os.Lstat(m.At(dir))
			switch h := holding[i].Load(); {
			case h == 1 && (!held || row.Pid != agents[i].Pid):
				t.Errorf("%s: held by pid %d, want %d", dir, row.Pid, agents[i].Pid)
			case h == 1:
				other.want("EBUSY", "creat", m.At(dir, "x"), "wronly,creat")
			case h == 0 && held:
				t.Errorf("%s was released, and is held by pid %d", dir, row.Pid)
			case held && err != nil:
				t.Errorf("%s is held and not there", dir)
			}
		}
		pause.Unlock()
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d acquisitions, 15 kills of the daemon; heard %v", takes.Load(), errs)
	for got := range errs {
		if !oneOf(got, "ENOTCONN|ECONNABORTED|ECANCELED|EIO|ENOENT") {
			t.Errorf("somebody heard %s", got)
		}
	}
}

// TestS1Candidate: the temporary file of a link(2) protocol goes with its creator
// (R4), however many daemons have died or been replaced before.
func TestS1Candidate(t *testing.T) {
	for _, while := range []string{"a daemon serves", "none does"} {
		t.Run(while, func(t *testing.T) {
			m := mountOver(t)
			mustDo(t, os.Mkdir(m.At("D"), 0o777))
			m.Ctl("release D")
			a := agent(t)
			u := m.At("D", candidateNames(t, a.Pid)["lockfile"])
			a.must("put", u, "x", "creat")
			m.replace()
			m.restart(nil)
			time.Sleep(200 * time.Millisecond) // a file of this age is not the next daemon's
			m.restart(nil)
			m.replace()
			m.restart(nil)
			if !exists(u) {
				t.Fatal("it is gone before its creator")
			}
			if while == "none does" {
				m.restart(a.Kill)
			} else {
				a.Kill()
			}
			eventually(t, "it goes with its creator", func() bool { return !exists(u) })
		})
	}
}

// TestS1CandidateWon: so does one that has won, of which the next daemon sees the
// lock name first.
func TestS1CandidateWon(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	u := m.At("D", candidateName(t, a))
	a.must("put", u, "pid", "creat,excl")
	a.must("link", u, m.At("D/devserver.lock"))
	m.restart(nil)
	b := agent(t)
	b.must("open", "h", m.At("D/devserver.lock"), "rdonly")
	a.must("unlink", m.At("D/devserver.lock"))
	if !exists(m.Back("D", candidateName(t, a))) {
		t.Fatal("it is gone before its creator")
	}
	a.Kill()
	eventually(t, "it goes with its creator", func() bool { return !exists(m.Back("D", candidateName(t, a))) })
}

// TestR5Watched: a lock that its owner watches is not handed over by the next daemon either,
// nor by the next program.
func TestR5Watched(t *testing.T) {
	for name, next := range map[string]func(*Mount){
		"killed":   func(m *Mount) { m.restart(nil) },
		"replaced": (*Mount).replace,
	} {
		t.Run(name, func(t *testing.T) {
			m := mountOver(t)
			openDir(t, m.At("D"))
			m.Ctl("release D")
			parent := agent(t)
			owner := parent.Child()
			token := owner.mustCommand(m, "acquire D").Token
			owner.must("open", "follow", m.control("ctl"), "rdwr")
			owner.must("write", "follow", fmt.Sprintf("watch D token=%d", token))
			next(m)
			m.wantOwner("D", owner.Pid)
			owner.Exit(0)
			m.awaitFree("D")
		})
	}
}
