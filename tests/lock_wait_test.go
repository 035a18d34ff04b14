//go:build linux

package tests

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// lockFile makes an empty lock file that everybody may open.
func (m *Mount) lockFile(dir string) string {
	m.t.Helper()
	openDir(m.t, m.Back(dir))
	mustDo(m.t, os.WriteFile(m.Back(dir, "devserver"), nil, 0o666))
	mustDo(m.t, os.Chmod(m.Back(dir, "devserver"), 0o666))
	return m.At(dir, "devserver")
}

// awaitWaiters waits until as many wait for dir, and gives back their pids in
// the order of the listing.
func (m *Mount) awaitWaiters(dir string, count int) (pids []int) {
	m.t.Helper()
	eventually(m.t, fmt.Sprintf("%d wait for %s", count, dir), func() bool {
		pids = nil
		for _, w := range m.Listing().Waiters {
			if w.Dir == dir {
				pids = append(pids, w.Pid)
			}
		}
		return len(pids) == count
	})
	return pids
}

// TestA6Lock: opening makes an existence lock, and locking the descriptor turns
// it into one that the unlock ends.
func TestA6Lock(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			openDir(t, m.Back(dir))
			a, b := locker(t), locker(t)
			a.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
			first := m.Locks()[dir]
			if first.Pid != a.Pid || first.Protocol != "open" {
				t.Errorf("row after open(O_CREAT): %+v, want one of pid %d by open", first, a.Pid)
			}
			a.must(call.tryExclusive("x")...)
			if row := m.Locks()[dir]; row.Pid != a.Pid || row.Protocol == "open" || row.Token != first.Token {
				t.Errorf("row after the lock: %+v, want the same one, now by the descriptor", row)
			}
			b.want("EBUSY", "put", m.At(dir, "f"), "", "creat")
			a.must(call.unlock("x")...)
			m.wantFree(dir)
			b.must("put", m.At(dir, "f"), "", "creat")
			a.must("close", "x")
		})
	}
}

// TestA6Shared: a shared lock takes the place of the existence lock as well.
func TestA6Shared(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			openDir(t, m.Back(dir))
			a, b := locker(t), locker(t)
			a.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
			a.must(call.tryShared("x")...)
			if rows := m.Listing().Locks; len(rows) != 1 || rows[0].Kind != "shared" {
				t.Errorf("rows after the shared lock: %+v, want one shared", rows)
			}
			b.must("open", "x", m.At(dir, "devserver"), "rdwr")
			if got := b.Try(call.tryShared("x")...); got != "ok" {
				t.Errorf("another's shared try = %s, want ok", got)
			}
			a.want("EBUSY", "put", m.At(dir, "f"), "", "creat")
			a.must(call.unlock("x")...)
			b.must("close", "x")
			a.Exit(0)
			m.awaitFree(dir)
		})
	}
}

// TestA6Second: that holds for a second lock file, too, which its owner opens under the lock
// that it has already, also if the daemon is upgraded before it locks it.
func TestA6Second(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprint(call.name, " shared ", shared), func(t *testing.T) {
				m := m.on(t)
				try := call.tryExclusive
				if shared {
					try = call.tryShared
				}
				for i, unlocks := range [][]string{{"x", "y"}, {"y", "x"}} {
					dir := fmt.Sprint(call.name, shared, i)
					openDir(t, m.Back(dir))
					a, b := locker(t), locker(t)
					a.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
					a.must(try("x")...)
					a.must("open", "y", m.At(dir, "devserver.lock"), "rdwr,creat")
					if i == 0 {
						m.replace()
					}
					a.must(try("y")...)
					for _, fd := range unlocks {
						b.want("EBUSY", "put", m.At(dir, "f"), "", "creat")
						a.must(call.unlock(fd)...)
					}
					m.wantFree(dir)
					b.must("put", m.At(dir, "f"), "", "creat")
				}
			})
		}
	}
}

// TestA6Race: who opens the lock file first holds the directory already when
// others wait for the file. All get their turn, and none waits for ever.
func TestA6Race(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			m := m.on(t)
			dir := call.name
			openDir(t, m.Back(dir))
			a, b := locker(t), locker(t)
			for _, x := range []*Agent{a, b} {
				x.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
			}
			b2 := b.Start(call.waitExclusive("x")...)
			m.awaitWaiters(dir, 1)
			got := a.Start(call.waitExclusive("x")...)
			eventually(t, "the holder of the directory locks its file", func() bool {
				return m.Locks()[dir].Protocol != "open" || m.Locks()[dir].Pid != a.Pid
			})
			if status := got(); status != "ok" {
				t.Errorf("the opener's lock = %s, want ok", status)
			}
			m.wantOwner(dir, a.Pid)
			a.must(call.unlock("x")...)
			if status := b2(); status != "ok" {
				t.Errorf("the waiter's lock = %s, want ok", status)
			}
			m.wantOwner(dir, b.Pid)
		})
	}
}

// TestA8OneWins: of many that try at once, just one gets the lock, as anywhere.
func TestA8OneWins(t *testing.T) {
	m := mount(t)
	lockers := make([]*Agent, 6)
	for i := range lockers {
		lockers[i] = locker(t)
	}
	for _, made := range []string{"created", "there"} {
		t.Run(made, func(t *testing.T) {
			m := m.on(t)
			none, many := 0, 0
			for round := range 30 {
				dir := fmt.Sprintf("%s%d", made, round)
				openDir(t, m.Back(dir))
				if made == "there" {
					m.lockFile(dir)
				}
				var winners int
				var wg sync.WaitGroup
				answers := make([]string, len(lockers))
				for i, a := range lockers {
					wg.Add(1)
					go func() {
						defer wg.Done()
						if answers[i] = a.Try("open", "x", m.At(dir, "devserver"), "rdwr,creat"); answers[i] == "ok" {
							answers[i] = a.Try("flock", "x", "ex", "nb")
						}
					}()
				}
				wg.Wait()
				for i, a := range lockers {
					switch answers[i] {
					case "ok":
						winners++
					case "EAGAIN":
					default:
						t.Errorf("round %d: try = %s, want ok or EAGAIN", round, answers[i])
					}
					a.must("close", "x")
				}
				if winners == 0 {
					none++
				} else if winners > 1 {
					many++
				}
			}
			if none+many > 0 {
				t.Errorf("of 30 rounds %d had no winner and %d more than one", none, many)
			}
		})
	}
}

// TestA8Fifo: 64 that wait get the directory in the order in which they came.
func TestA8Fifo(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		t.Run(call.name, func(t *testing.T) {
			queue{waiters: 32, call: func(int) lockCall { return call }}.try(t, m.on(t), call.name)
		})
	}
}

// TestA8FifoAcross: so they do when each locks by another call, or another
// file, or finds no lock file and has one of its own (A10).
func TestA8FifoAcross(t *testing.T) {
	m := mount(t)
	calls := lockCalls()
	for name, line := range map[string]queue{
		"calls": {waiters: 16, call: func(i int) lockCall { return calls[i%3] }},
		"files": {waiters: 16, call: func(int) lockCall { return calls[0] }, file: func(i int) string { return []string{"devserver", "devserver.lock"}[i%2] }},
		"mkdir": {waiters: 16, call: func(int) lockCall { return calls[0] }, mkdir: true},
		"both":  {waiters: 16, call: func(i int) lockCall { return calls[i%3] }, mkdir: true},
	} {
		t.Run(name, func(t *testing.T) { line.try(t, m.on(t), name) })
	}
}

// A queue is how some wait for a directory.
type queue struct {
	waiters int
	call    func(i int) lockCall
	file    func(i int) string // nil: devserver
	mkdir   bool               // the holder made the directory, and no lock file
}

func (q queue) try(t *testing.T, m *Mount, dir string) {
	t.Helper()
	holder, parent := locker(t), locker(t)
	if q.file == nil {
		q.file = func(int) string { return "devserver" }
	}
	how := "by descriptor"
	if q.mkdir {
		how = "by mkdir"
	}
	release := holdEither(m, holder, q.call(0), dir, how)
	turns := make([]func() string, q.waiters)
	pids := make([]int, q.waiters)
	for i := range turns {
		w := forked(parent)
		pids[i] = w.Pid
		w.must("open", "x", m.At(dir, q.file(i)), "rdwr,creat")
		turns[i] = w.StartGet("turn", "x", q.call(i).wait, q.call(i).exclusive)
		m.awaitWaiters(dir, i+1)
	}
	if got := m.awaitWaiters(dir, q.waiters); !slices.Equal(got, pids) {
		t.Errorf("waiters in locks.json: %v, want %v", got, pids)
	}
	start := monotonic()
	release()
	at := make([]int64, q.waiters)
	order := make([]int, q.waiters)
	for i, turn := range turns {
		n, err := strconv.ParseInt(turn(), 10, 64)
		mustDo(t, err)
		at[i], order[i] = n, i
	}
	slices.SortFunc(order, func(i, j int) int { return int(at[i] - at[j]) })
	if !slices.IsSorted(order) {
		t.Errorf("turns were taken in the order %v", order)
	}
	slices.Sort(at)
	var took []time.Duration
	for i := range at[1:] {
		took = append(took, time.Duration(at[i+1]-at[i]))
	}
	slices.Sort(took)
	t.Logf("%d turns in %v; from turn to turn: median %v, p99 %v", q.waiters, time.Duration(at[len(at)-1]-start), took[len(took)/2], took[len(took)*99/100])
	m.wantFree(dir)
}

// crowdPl has processes take turns: it forks them with less memory than Python does.
const crowdPl = `
use POSIX ();
my ($file, $n) = @ARGV;
for (1 .. $n) {
	my $pid = fork;
	defined $pid or die "fork: $!";
	next if $pid;
	my $f;
	sysopen($f, $file, 0102) && flock($f, 2) && flock($f, 8) or print STDERR "$!\n";
	POSIX::_exit(0);
}
<STDIN>;
`

// TestA8Crowd: hundreds that wait take no thread each, don't slow down what others
// do, and are all served; those that are killed meanwhile are in nobody's way.
func TestA8Crowd(t *testing.T) {
	const waiters = 300
	need(t, "perl")
	m := mount(t)
	for _, held := range []string{"by descriptor", "by mkdir"} {
		t.Run(held, func(t *testing.T) {
			m := m.on(t)
			dir := held[3:]
			openDir(t, m.Back("other"+dir))
			worker := agent(t)
			work := func() time.Duration {
				var took []time.Duration
				for i := range 200 {
					start := time.Now()
					worker.must("put", m.At("other"+dir, itoa(i)), "x", "creat,trunc")
					took = append(took, time.Since(start))
				}
				slices.Sort(took)
				return took[len(took)/2]
			}
			holder := locker(t)
			release := holdEither(m, holder, lockCalls()[0], dir, held)
			alone := work()
			crowd := exec.Command("perl", "-e", crowdPl, m.At(dir, "devserver"), itoa(waiters))
			_, err := crowd.StdinPipe() // at its end the crowd's parent ends
			mustDo(t, err)
			parent := startCmd(t, crowd)
			pids := m.awaitWaiters(dir, waiters)
			crowded := work()
			if n := threadsOf(t, m.cmd.Process.Pid); n > waiters/4 {
				t.Errorf("the daemon has %d threads", n)
			}
			t.Logf("create, write, close: median %v alone, %v beside %d waiters; %d threads", alone, crowded, waiters, threadsOf(t, m.cmd.Process.Pid))
			start := time.Now()
			for _, pid := range pids[:waiters/2] {
				syscall.Kill(pid, syscall.SIGKILL)
			}
			m.awaitWaiters(dir, waiters/2)
			t.Logf("%d killed waiters were gone after %v", waiters/2, time.Since(start))
			start = time.Now()
			release()
			eventually(t, "all had their turn", func() bool { return !slices.ContainsFunc(pids, running) })
			t.Logf("%d had their turn in %v", waiters/2, time.Since(start))
			m.awaitFree(dir)
			parent.Kill()
			if said := parent.Wait().Err; said != "" {
				t.Errorf("the crowd: %s", said)
			}
		})
	}
}

func threadsOf(t *testing.T, pid int) int {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	mustDo(t, err)
	return len(tasks)
}

// TestA8WaitKilled: a waiter that is killed is gone in no time, its place too,
// and the next one in line gets the lock.
func TestA8WaitKilled(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, held := range []string{"by descriptor", "by mkdir"} {
			t.Run(call.name+"/"+held, func(t *testing.T) {
				m := m.on(t)
				dir := strings.ReplaceAll(call.name+held, " ", "")
				holder, first, second := locker(t), locker(t), locker(t)
				release := holdEither(m, holder, call, dir, held)
				for _, w := range []*Agent{first, second} {
					w.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
				}
				first.Start(call.waitExclusive("x")...)
				m.awaitWaiters(dir, 1)
				got := second.Start(call.waitExclusive("x")...)
				m.awaitWaiters(dir, 2)
				start := time.Now()
				first.Kill()
				if pids := m.awaitWaiters(dir, 1); pids[0] != second.Pid {
					t.Errorf("who waits: %v, want %d", pids, second.Pid)
				}
				t.Logf("a killed waiter was gone after %v", time.Since(start))
				release()
				if status := got(); status != "ok" {
					t.Errorf("the second waiter's lock = %s, want ok", status)
				}
				m.wantOwner(dir, second.Pid)
				m.awaitWaiters(dir, 0)
			})
		}
	}
}

// holdEither makes dir and takes it, with a lock file there or not.
func holdEither(m *Mount, a *Agent, call lockCall, dir, how string) (release func()) {
	m.t.Helper()
	if how == "by mkdir" {
		a.must("mkdir", m.At(dir))
		mustDo(m.t, os.Chmod(m.Back(dir), 0o777))
		return func() { a.Kill() }
	}
	a.must("open", "h", m.lockFile(dir), "rdwr")
	a.must(call.tryExclusive("h")...)
	return func() { a.must(call.unlock("h")...) }
}

// TestA8WaitSignal: a signal with a handler ends the wait with EINTR, or the
// wait goes on if the handler says so (SA_RESTART).
func TestA8WaitSignal(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, held := range []string{"by descriptor", "by mkdir"} {
			t.Run(call.name+"/"+held, func(t *testing.T) {
				m := m.on(t)
				dir := strings.ReplaceAll(call.name+held, " ", "")
				holder, w := locker(t), locker(t)
				release := holdEither(m, holder, call, dir, held)
				w.must("open", "x", m.At(dir, "devserver"), "rdwr,creat")
				got := w.Start(call.waitExclusive("x")...)
				m.awaitWaiters(dir, 1)
				mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR1))
				if status := got(); status != "EINTR" {
					t.Errorf("the interrupted lock = %s, want EINTR", status)
				}
				m.awaitWaiters(dir, 0)
				got = w.Start(call.waitExclusive("x")...)
				m.awaitWaiters(dir, 1)
				mustDo(t, syscall.Kill(w.Pid, syscall.SIGUSR2))
				time.Sleep(50 * time.Millisecond) // for the signal to be handled
				m.awaitWaiters(dir, 1)
				release()
				if status := got(); status != "ok" {
					t.Errorf("the restarted lock = %s, want ok", status)
				}
				m.wantOwner(dir, w.Pid)
			})
		}
	}
}

// TestA4OpenerDies: who waits with a description whose opener has died meanwhile gets
// the lock for itself, and keeps it.
func TestA4OpenerDies(t *testing.T) {
	m := mount(t)
	file := m.lockFile("D")
	for _, call := range lockCalls() {
		for range 2 {
			holder, opener, other := locker(t), locker(t), locker(t)
			holder.must("open", "x", file, "rdwr")
			holder.must(call.tryExclusive("x")...)
			opener.must("open", "x", file, "rdwr")
			waiter := forked(opener)
			done := waiter.Start(call.waitExclusive("x")...)
			m.awaitWaiters("D", 1)
			opener.Kill()
			holder.must(call.unlock("x")...)
			if got := done(); got != "ok" {
				t.Fatalf("%s: the wait ended with %s", call.name, got)
			}
			m.wantOwner("D", waiter.Pid)
			other.must("open", "x", file, "rdwr")
			other.want("EAGAIN", call.tryExclusive("x")...)
			waiter.must("put", m.At("D/f"), "waiter", "creat")
			waiter.must(call.unlock("x")...)
			m.wantFree("D")
		}
	}
}

// TestA4Opener: what a child locks through a description that its parent has opened is the
// parent's, and does not end with the child, but with fcntl(2) locks proper, which are the
// child's.
func TestA4Opener(t *testing.T) {
	m := mount(t)
	for _, call := range lockCalls() {
		for _, waits := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, waits %v", call.name, waits), func(t *testing.T) {
				m := m.on(t)
				dir := fmt.Sprint(call.name, waits)
				file := m.lockFile(dir)
				opener, rival := locker(t), locker(t)
				opener.must("open", "x", file, "rdwr")
				rival.must("open", "x", file, "rdwr")
				child := forked(opener)
				if waits {
					rival.must(call.tryExclusive("x")...)
					done := child.Start(call.waitExclusive("x")...)
					m.awaitWaiters(dir, 1)
					rival.must(call.unlock("x")...)
					if got := done(); got != "ok" {
						t.Fatalf("the wait ended with %s", got)
					}
				} else {
					child.must(call.tryExclusive("x")...)
				}
				child.must("put", m.At(dir, "f"), "child", "creat")
				if call.name == "fcntl" {
					m.wantOwner(dir, child.Pid)
					opener.want("EBUSY", "put", m.At(dir, "f"), "opener", "")
					child.Kill()
					m.awaitFree(dir)
					return
				}
				m.wantOwner(dir, opener.Pid)
				child.Kill()
				opener.must("put", m.At(dir, "f"), "opener", "")
				rival.want("EAGAIN", call.tryExclusive("x")...)
				rival.want("EBUSY", "put", m.At(dir, "f"), "rival", "")
				m.wantOwner(dir, opener.Pid)
				opener.must(call.unlock("x")...)
				m.wantFree(dir)
				rival.must(call.tryExclusive("x")...)
			})
		}
	}
}
