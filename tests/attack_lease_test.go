//go:build linux

package tests

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fight is a client that wants a directory again and again, and writes the
// token of its lease into a file there, through one descriptor, for longer than
// the lease may last.
func (h *hands) fight(ctl, file, dir, client string, d time.Duration) (string, error) {
	token := make([]byte, 8)
	var got, wrote, refused int
	for end := time.Now().Add(d); time.Now().Before(end); {
		out, err := h.do([]string{"ctl", ctl, fmt.Sprintf("acquire %s client=%s ttl=10ms wait=1s", dir, client)})
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(out, `"token":`)
		var n uint64
		fmt.Sscan(strings.TrimLeft(rest, " "), &n)
		binary.LittleEndian.PutUint64(token, n)
		got++
		fd, err := unix.Open(file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			refused++
			continue
		}
		for until := time.Now().Add(time.Duration(rand.IntN(30)) * time.Millisecond); time.Now().Before(until); {
			if _, err := unix.Pwrite(fd, token, 0); err != nil {
				refused++
				break
			}
			wrote++
			if rand.IntN(200) == 0 {
				h.do([]string{"ctl", ctl, fmt.Sprintf("renew %s client=%s", dir, client)})
			}
		}
		unix.Close(fd)
	}
	return fmt.Sprintf("%d leases, %d writes, %d refused", got, wrote, refused), nil
}

// TestL3Fight: clients with 10 ms to live fight for one directory, and are
// stopped and woken up at any moment. The tokens in the backing never go back:
// once the next acquisition has returned, nothing of the one before lands (W3).
func TestL3Fight(t *testing.T) {
	seconds := 5
	if testing.Short() {
		seconds = 2
	}
	// Where nobody holds the directory, a client that was stopped before it
	// opened the file could write its old token, and rightly so (W4).
	m := mount(t, "--unlocked=deny")
	openDir(t, m.Back("D"))
	mustDo(t, os.WriteFile(m.Back("D/state"), make([]byte, 8), 0o666))
	var clients []*Agent
	var results []func() string
	for i := range 3 {
		a := agent(t)
		clients = append(clients, a)
		results = append(results, a.StartGet("fight", m.control("ctl"), m.At("D/state"), "D", fmt.Sprint("c", i), itoa(seconds)))
	}
	f, err := os.Open(m.Back("D/state"))
	mustDo(t, err)
	defer f.Close()
	var last uint64
	values, stops := 0, 0
	buf := make([]byte, 8)
	stop := time.Now()
	for end := time.Now().Add(time.Duration(seconds) * time.Second); time.Now().Before(end); {
		if _, err := f.ReadAt(buf, 0); err != nil {
			t.Fatal(err)
		}
		now := binary.LittleEndian.Uint64(buf)
		if now < last {
			t.Fatalf("token %d after %d: a late write", now, last)
		}
		if now > last {
			values++
		}
		last = now
		if time.Since(stop) > 25*time.Millisecond {
			victim := clients[rand.IntN(len(clients))].Pid
			syscall.Kill(victim, syscall.SIGSTOP)
			go func() {
				time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
				syscall.Kill(victim, syscall.SIGCONT)
			}()
			stop = time.Now()
			stops++
		}
	}
	time.Sleep(50 * time.Millisecond) // the last SIGCONT
	for _, c := range clients {
		syscall.Kill(c.Pid, syscall.SIGCONT)
	}
	for _, r := range results {
		t.Log(r())
	}
	t.Logf("%d tokens were seen in the backing, with %d stops", values, stops)
	if values < 10 {
		t.Errorf("only %d leases wrote anything", values)
	}
	m.awaitFree("D")
}

// TestL1Many: a thousand leases that expire at once are gone, with their lock
// files, and everybody can go on.
func TestL1Many(t *testing.T) {
	const leases = 1000
	m := mount(t)
	a := agent(t)
	name := func(i int) string { return fmt.Sprintf("d%03d", i) }
	for i := range leases {
		openDir(t, m.Back(name(i)))
		a.mustCommand(m, "acquire %s client=x ttl=1h", name(i))
		if i%10 == 0 {
			a.must("creat", m.At(name(i), "devserver"), "wronly,creat,excl")
		}
	}
	s := m.events(t)
	var lines strings.Builder
	for i := range leases {
		fmt.Fprintf(&lines, "renew %s client=x ttl=100ms\n", name(i))
	}
	a.must("ctl", m.control("ctl"), lines.String())
	began := time.Now()
	for ended := 0; ended < leases; {
		if e := s.next(); e.Event == "released" && e.Reason == "expired" {
			ended++
		}
	}
	t.Logf("%d leases ended within %v", leases, time.Since(began))
	if rows := m.Listing().Locks; len(rows) != 0 {
		t.Errorf("%d rows are left", len(rows))
	}
	for i := range leases {
		if _, err := os.Lstat(m.Back(name(i), "devserver")); err == nil {
			t.Errorf("the lock file in %s is left", name(i))
		}
	}
	agent(t).mustCommand(m, "acquire %s", name(0))
}

// TestL1Accuracy: a lease ends soon after its deadline, with the machine idle and
// loaded: for who waits for it. Who asks is told in time in any case.
func TestL1Accuracy(t *testing.T) {
	for _, load := range []int{0, 4} {
		t.Run(fmt.Sprintf("%d busy loops", load), func(t *testing.T) {
			leases := 300
			if testing.Short() {
				leases = 100
			}
			m := mount(t)
			a := agent(t)
			for range load {
				startCmd(t, exec.Command("sh", "-c", "while :; do :; done"))
			}
			s := m.events(t)
			deadline := make(map[string]time.Time)
			for i := range leases {
				dir := fmt.Sprint("d", i)
				openDir(t, m.Back(dir))
				got := a.mustCommand(m, "acquire %s client=x ttl=%dms", dir, 500+rand.IntN(1000))
				// The daemon told what was left when it answered.
				deadline[dir] = got.Since.Add(time.Duration(got.TTL * float64(time.Second)))
			}
			var late []time.Duration
			for len(late) < leases {
				if e := s.next(); e.Event == "released" && e.Reason == "expired" {
					late = append(late, e.Time.Sub(deadline[e.Dir]))
				}
			}
			wantPrompt(t, "from a lease's deadline to its end", late)
		})
	}
}

// TestL1Names: an ID with odd characters is one client's, and forges no row of
// the listing.
func TestL1Names(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a := agent(t)
	for _, id := range []string{
		"a b", `a"b`, `a\b`, "a,b=c", "x for 3.0 s", "Ünïcode ✓", "-n", "%s%n", "'; DROP TABLE locks", "D  explicit  command  1", strings.Repeat("i", 256),
	} {
		a.mustCommand(m, "acquire D client=%q", id)
		rows := m.Listing().Locks
		if len(rows) != 1 || rows[0].Client != id {
			t.Errorf("rows: %+v, want client %q", rows, id)
		}
		text, err := os.ReadFile(m.control("locks"))
		mustDo(t, err)
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		if len(lines) != 2 {
			t.Errorf("client %q: %d lines in the listing, want 2:\n%s", id, len(lines), text)
		}
		c := carrier(t, 0, id)
		c.must("put", m.At("D/f"), "", "creat")
		a.wantCommand(m, "EBUSY", "acquire D client=other")
		a.mustCommand(m, "release D client=%q", id)
	}
}

// TestS1Lease: leases and the locks of scopes outlive the daemon, but not
// their deadline.
func TestS1Lease(t *testing.T) {
	m := mountOver(t)
	for _, d := range []string{"long", "short", "group"} {
		mustDo(t, os.Mkdir(m.At(d), 0o777))
		mustDo(t, os.Chmod(m.At(d), 0o777))
		m.Ctl("release " + d)
	}
	a, holder := agent(t), carrier(t, 0, "x")
	g := agentBy(t, &syscall.SysProcAttr{Setpgid: true})
	peer := agentBy(t, &syscall.SysProcAttr{Setpgid: true, Pgid: g.Pid})
	joiner := agent(t)
	long := a.mustCommand(m, "acquire long client=x ttl=1h")
	a.mustCommand(m, "acquire short client=x ttl=1h")
	a.must("creat", m.At("short/devserver"), "wronly,creat,excl")
	joiner.mustCommand(m, "join long client=x")
	group := g.mustCommand(m, "acquire group owner=group")
	a.mustCommand(m, "renew short client=x ttl=200ms")
	m.restart(func() {
		g.Kill()
		time.Sleep(250 * time.Millisecond) // the deadline passes while nobody serves
	})
	rows := m.Locks()
	if r := rows["long"]; r.Token != long.Token || r.Client != "x" || r.TTL != 3600 || r.Deadline <= 3000 || r.Deadline > 3600 {
		t.Errorf("the lease: %+v, want token %d", r, long.Token)
	}
	if r := rows["group"]; r.Token != group.Token || r.Pid != peer.Pid || r.Scope != "group" {
		t.Errorf("the group's lock: %+v, want token %d and pid %d", r, group.Token, peer.Pid)
	}
	m.awaitFree("short")
	if _, err := os.Lstat(m.At("short/devserver")); err == nil {
		t.Error("the lock file of the lease that is over is left")
	}
	for _, x := range []*Agent{holder, joiner} {
		x.must("put", m.At("long/f"), "", "creat")
	}
	agent(t).want("EBUSY", "put", m.At("long/f"), "", "")
	peer.must("put", m.At("group/f"), "", "creat")
	if got := a.mustCommand(m, "renew long client=x ttl=20ms"); got.Token != long.Token {
		t.Errorf("renewed: %+v, want token %d", got, long.Token)
	}
	m.awaitFree("long")
}

// TestL4Step: a step of the wall clock neither ends nor extends a lease. It
// disturbs all else on the machine, and so runs only when asked for.
func TestL4Step(t *testing.T) {
	if os.Getenv("STAGEFS_EXCLUSIVE") == "" {
		t.Skip("steps the machine's clock; set STAGEFS_EXCLUSIVE=1")
	}
	step := func(d time.Duration) {
		var now unix.Timespec
		mustDo(t, unix.ClockGettime(unix.CLOCK_REALTIME, &now))
		now = unix.NsecToTimespec(now.Nano() + int64(d))
		mustDo(t, unix.ClockSettime(unix.CLOCK_REALTIME, &now))
	}
	m := mount(t)
	openDir(t, m.Back("D"))
	openDir(t, m.Back("E"))
	a, b := agent(t), agent(t)
	for _, d := range []time.Duration{time.Hour, -time.Hour} {
		a.mustCommand(m, "acquire D client=x ttl=1m")
		step(d)
		rows := m.Locks()
		errno, _ := b.command(m, "acquire E client=y ttl=30ms")
		m.awaitFree("E")
		step(-d)
		if errno != "ok" {
			t.Errorf("acquired after a step by %v: %s", d, errno)
		}
		if r := rows["D"]; r.Deadline <= 30 || r.Deadline > 60 {
			t.Errorf("%v s left after a step by %v, want about 60", r.Deadline, d)
		}
		a.mustCommand(m, "renew D client=x")
		a.mustCommand(m, "release D client=x")
	}
}
