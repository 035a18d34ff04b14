//go:build linux

package procid_test

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

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
func waitingLooks() int {
	b := make([]byte, 1<<20)
	for {
		n := runtime.Stack(b, true)
		if n < len(b) {
			return strings.Count(string(b[:n]), "procid.(*Resolver).soon(")
		}
		b = make([]byte, 2*len(b))
	}
}
