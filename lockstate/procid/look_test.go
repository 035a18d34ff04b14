//go:build linux

package procid_test

import (
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Looks at processes that wait for something else than the kernel, here for what is
// known of their parent, have no thread meanwhile.
func TestLooksThatWait(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		const n = 200
		h := start(t, "threads "+strconv.Itoa(n))
		tids := h.numbers(t)
		for try := 0; ; try++ {
			tell := r.Withhold(os.Getpid())
			before := ownThreads(t)
			found := make(chan *procid.Process, n)
			for _, tid := range tids {
				go func() { found <- r.Glance(uint32(tid)) }()
			}
			for waitingLooks() < n && len(found) == 0 {
				time.Sleep(time.Millisecond)
			}
			threads := ownThreads(t) - before
			all := waitingLooks() == n
			tell()
			missed := 0
			for range n {
				if p := <-found; p == nil {
					missed++
				} else if p.ID().Pid != h.pid() {
					t.Errorf("Glance() = %v, want pid %d", p.ID(), h.pid())
				}
			}
			if all && threads > n/4 {
				t.Errorf("%d looks that wait have %d threads", n, threads)
			}
			if all && missed > 0 {
				t.Errorf("%d of %d looks found nothing", missed, n)
			}
			if all || try == 5 {
				return // or too slow a machine: a look ends before the last one begins
			}
		}
	})
}

// Looks that the kernel keeps stand in nobody's way, whoever waits with them: neither
// in that of those who look at other processes, nor for long in that of who waits for
// them. More than some are not begun, but for who has to know.
func TestLooksThatTheKernelKeeps(t *testing.T) {
	const most = 50
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		lookup(t, r, os.Getpid())
		h := start(t, "exit 0")
		h.numbers(t)
		r.Keep(most)
		goOn := make(chan struct{})
		dropped, told := make(chan int, most), make(chan bool, 2*most)
		keep := func(pid int) {
			_, ok := procid.Soon(r, pid, func() int { <-goOn; return pid }, func(pid int) { dropped <- pid })
			told <- ok
		}
		soon := func() (int, bool) { return procid.Soon(r, os.Getpid(), os.Getppid, nil) }
		for i := range most - 1 {
			go keep(-i)
		}
		for range most - 1 {
			if ppid, ok := soon(); !ok || ppid != os.Getppid() {
				t.Errorf("a look beside those that are kept = %v, %v", ppid, ok)
			}
			if <-told {
				t.Errorf("a look that is kept was waited for")
			}
		}
		if _, ok := procid.Soon(r, 0, os.Getppid, nil); ok {
			t.Errorf("a process was looked at that is being looked at in vain")
		}
		keep(-most)
		if <-told {
			t.Errorf("a look that is kept was waited for")
		}
		if _, ok := soon(); ok {
			t.Errorf("%d looks are kept, and another one was begun", most)
		}
		lookup(t, r, h.pid())
		close(goOn)
		for range most {
			<-dropped
		}
		for ok := false; !ok; { // what was dropped is over
			_, ok = procid.Soon(r, 0, os.Getppid, nil)
		}
	})
}

// ownThreads returns how many threads this process has.
func ownThreads(t *testing.T) int {
	t.Helper()
	s, err := procid.ReadStatus(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(s.Field("Threads"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// waitingLooks counts the goroutines that wait for what is withheld.
func waitingLooks() int { return strings.Count(stacks(), "procid.(*Resolver).soon(") }

// stacks returns those of all goroutines.
func stacks() string {
	for b := make([]byte, 1<<20); ; b = make([]byte, 2*len(b)) {
		if n := runtime.Stack(b, true); n < len(b) {
			return string(b[:n])
		}
	}
}

// Whatever becomes of processes while they are looked at, all looks come to an end.
func TestLooksInAStorm(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		before := looking()
		var storm []*exec.Cmd
		for _, script := range []string{
			"while :; do /bin/true & /bin/true; wait; done",
			"while :; do sh -c 'exec sh -c \"exec /bin/true\"' & kill -9 $!; done",
			"while :; do (/bin/true & exec /bin/true); done",
		} {
			cmd := exec.Command("sh", "-c", script)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			cmd.Stderr = io.Discard
			if err := cmd.Start(); err != nil {
				t.Skip(err)
			}
			storm = append(storm, cmd)
		}
		h, d := start(t, "threads 20"), start(t, "deadleader 0")
		tids := append(h.numbers(t), d.numbers(t)...)
		stop := time.Now().Add(time.Second)
		var lookers sync.WaitGroup
		for i := range 64 {
			lookers.Go(func() {
				for n := i; time.Now().Before(stop); n++ {
					pid := tids[n%len(tids)]
					if i%2 == 0 {
						pid = storm[0].Process.Pid + rand.IntN(2000) - 100
					}
					ask(r, uint32(pid), n)
				}
			})
		}
		lookers.Wait()
		for _, cmd := range storm {
			unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
			cmd.Wait()
		}
		for _, tid := range tids {
			if p := lookup(t, r, tid); p.ID().Pid != h.pid() && p.ID().Pid != d.pid() {
				t.Errorf("Lookup(%d) = %v, want pid %d or %d", tid, p.ID(), h.pid(), d.pid())
			}
		}
		for looking() > before {
			time.Sleep(time.Millisecond)
		}
	})
}

// ask has a resolver look at a thread in one of all ways.
func ask(r *procid.Resolver, tid uint32, way int) {
	switch way % 8 {
	case 0:
		r.Lookup(tid, nil)
	case 1:
		r.Seen(tid)
	case 2:
		r.Glance(tid)
	case 3:
		r.ByPid(int(tid))
	case 4:
		procid.Soon(r, int(tid), func() error { _, err := procid.StartOf(int(tid)); return err }, nil)
	case 5:
		stop := make(chan struct{})
		close(stop)
		r.Lookup(tid, stop)
	case 6:
		if p := r.Glance(tid); p != nil {
			r.Watch(p.ID(), func(id procid.ID, _ procid.Exit) { r.Alive(id) })
			r.Alive(procid.ID{Pid: p.ID().Pid, Start: p.ID().Start + 1})
		}
	case 7:
		if p := r.Known(tid); p != nil {
			p.Lineage()
			r.ExitOf(p.ID())
			r.Unwatch(p.ID())
		}
	}
}

// looking counts the goroutines that have to do with a look.
func looking() (n int) {
	s := stacks()
	for _, f := range []string{"procid.Soon[", "procid.(*turns).", "procid.(*Resolver).learn(", "procid.(*Resolver).watchLate("} {
		n += strings.Count(s, f)
	}
	return n
}
