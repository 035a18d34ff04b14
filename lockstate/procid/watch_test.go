//go:build linux

package procid_test

import (
	"bufio"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// R4, R5, R7: a watch tells that a process is dead, and how it died.
func TestWatch(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(h *process)
		code int
		want procid.Exit
	}{
		{"exit 0", func(h *process) { h.stdin.Close() }, 0, procid.Exit{Known: true}},
		{"exit 1", func(h *process) { h.stdin.Close() }, 1, procid.Exit{Known: true, Code: 1}},
		{"exit 255", func(h *process) { h.stdin.Close() }, 255, procid.Exit{Known: true, Code: 255}},
		{"SIGKILL", func(h *process) { h.kill() }, 0, procid.Exit{Known: true, Signal: int(unix.SIGKILL)}},
		{"SIGHUP", func(h *process) { h.Process.Signal(unix.SIGHUP) }, 0, procid.Exit{Known: true, Signal: int(unix.SIGHUP)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
				t.Run("zombie", func(t *testing.T) {
					h := start(t, "exit "+strconv.Itoa(tt.code))
					h.numbers(t)
					id := lookup(t, r, h.pid()).ID()
					ended := watch(t, r, id)
					tt.end(h)
					if got, want := <-ended, (ending{id, tt.want}); got != want {
						t.Errorf("watch called with %v, want %v", got, want)
					}
					h.Wait()
					if r.KnowsExits() {
						// In the cache still, so its end is known still.
						if got := r.ExitOf(id); got != tt.want {
							t.Errorf("ExitOf(%v) after it was reaped = %v, want %v", id, got, tt.want)
						}
					}
				})
				t.Run("reaped at once", func(t *testing.T) {
					for range 4 {
						h := start(t, "exit "+strconv.Itoa(tt.code))
						h.numbers(t)
						id := lookup(t, r, h.pid()).ID()
						ended := watch(t, r, id)
						reaped := make(chan error)
						go func() { reaped <- h.Wait() }()
						tt.end(h)
						got := <-ended
						if got.id != id {
							t.Errorf("watch called for %v, want %v", got.id, id)
						}
						if got.exit != tt.want && (r.KnowsExits() || got.exit.Known) {
							t.Errorf("watch called with %v, want %v", got.exit, tt.want)
						}
						<-reaped
					}
				})
			})
		})
	}
}

func TestExitSuccess(t *testing.T) {
	for _, tt := range []struct {
		exit procid.Exit
		want bool
	}{
		{procid.Exit{}, false},
		{procid.Exit{Known: true}, true},
		{procid.Exit{Known: true, Code: 1}, false},
		{procid.Exit{Known: true, Signal: 9}, false},
	} {
		if got := tt.exit.Success(); got != tt.want {
			t.Errorf("%v.Success() = %v, want %v", tt.exit, got, tt.want)
		}
	}
}

// A process that its parent left is reaped by pid 1, at a speed of its own.
func TestWatchAbandoned(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "tree 1")
		pids := h.numbers(t)
		child := lookup(t, r, pids[1]).ID()
		ended := watch(t, r, child)
		h.kill()
		zombie(t, h.pid()) // and its children have another parent
		unix.Kill(child.Pid, unix.SIGKILL)
		got := <-ended
		if want := (procid.Exit{Known: true, Signal: 9}); got.id != child || got.exit != want && (r.KnowsExits() || got.exit.Known) {
			t.Errorf("watch called with %v, want %v %v", got, child, want)
		}
	})
}

// An ordinary user's daemon: the kernel shows it another user's status only
// after that one was reaped, and a 0 before, which must not pass for success.
func TestWatchWithoutPermission(t *testing.T) {
	for _, tt := range []struct {
		name string
		reap bool
		want []int
	}{
		{"zombie", false, []int{0, 0, 0}},
		{"reaped", true, []int{1, 3, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := start(t, "exit 3")
			h.numbers(t)
			daemon := watchedByNobody(t, h)
			daemon.numbers(t)
			h.stdin.Close()
			if tt.reap {
				h.Wait()
			}
			if got := daemon.numbers(t); !slices.Equal(got, tt.want) && got[0] != 0 {
				t.Errorf("another user saw known, code, signal = %v, want %v", got, tt.want)
			}
		})
	}
}

// watchedByNobody starts an ordinary user's daemon that tells how h ends.
func watchedByNobody(t *testing.T, h *process) *process {
	t.Helper()
	const nobody = 65534
	return startIn(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}, "observe "+strconv.Itoa(h.pid()))
}

// Reaped between two looks at it, a process has nothing to hide any more; the 0
// that was shown before is no success for that.
func TestWatchReapedBetween(t *testing.T) {
	strace, err := exec.LookPath("strace")
	switch {
	case err == nil:
	case os.Getenv("STAGEFS_REQUIRE") == "1":
		t.Fatal(err)
	default:
		t.Skip("needs strace")
	}
	for _, call := range []string{"openat", "readlinkat"} {
		t.Run(call, func(t *testing.T) {
			h := start(t, "exit 3")
			h.numbers(t)
			daemon := watchedByNobody(t, h)
			if daemon.numbers(t)[0] == 0 {
				t.Skip("this kernel keeps no exit status of the reaped")
			}
			// Each look takes so long that the process is gone at the next.
			slow := exec.Command(strace, "-f", "-o", "/dev/null", "-e", "trace="+call, "-e", "inject="+call+":delay_enter=100000", "-p", strconv.Itoa(daemon.pid()))
			said, err := slow.StderrPipe()
			if err == nil {
				err = slow.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { slow.Process.Kill(); slow.Wait() })
			if line, err := bufio.NewReader(said).ReadString('\n'); !strings.Contains(line, "attached") {
				t.Skipf("strace can't trace: %q, %v", line, err)
			}
			h.stdin.Close()
			zombie(t, h.pid())
			time.Sleep(50 * time.Millisecond)
			h.Wait()
			if got, want := daemon.numbers(t), []int{1, 3, 0}; !slices.Equal(got, want) {
				t.Errorf("another user saw known, code, signal = %v, want %v", got, want)
			}
		})
	}
}

func TestWatchTheDead(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "exit 4")
		id := identify(t, h)
		h.stdin.Close()
		zombie(t, h.pid())
		if got, want := <-watch(t, r, id), (ending{id, procid.Exit{Known: true, Code: 4}}); got != want {
			t.Errorf("watch of a zombie called with %v, want %v", got, want)
		}
		h.Wait()
		unheard := procid.Exit{Missed: r.KnowsExits()}
		if got, want := <-watch(t, r, id), (ending{id, unheard}); got != want {
			t.Errorf("watch of one that is gone called with %v, want %v", got, want)
		}

		// One that the cache still holds.
		h = start(t, "exit 4")
		h.numbers(t)
		id = lookup(t, r, h.pid()).ID()
		h.stdin.Close()
		h.Wait()
		want := procid.Exit{Known: true, Code: 4}
		if !r.KnowsExits() {
			want = procid.Exit{}
		}
		if got := <-watch(t, r, id); got != (ending{id, want}) {
			t.Errorf("watch of one that is gone called with %v, want %v", got, want)
		}

		// The pid lives, as another process.
		self := procid.Self()
		self.Start--
		if got := <-watch(t, r, self); got != (ending{self, unheard}) {
			t.Errorf("watch of a former process called with %v, want %v and unknown", got, self)
		}
	})
}

// R5: where the kernel tells how processes end, an end of which nothing was
// heard is no success, whyever that is.
func TestWatchUnheard(t *testing.T) {
	for _, reap := range []bool{true, false} {
		r := newResolver(t, false)
		if !r.KnowsExits() {
			t.Skip("the kernel does not tell")
		}
		r.Blind()
		h := start(t, "exit 0")
		h.numbers(t)
		id := lookup(t, r, h.pid()).ID()
		ended := watch(t, r, id)
		h.stdin.Close()
		if reap {
			h.Wait()
		} else {
			zombie(t, h.pid())
		}
		if got := (<-ended).exit; got != (procid.Exit{Missed: true}) {
			t.Errorf("watch called with %v, reaped: %v, want unknown and missed", got, reap)
		}
		if got := r.ExitOf(id); got != (procid.Exit{Missed: true}) {
			t.Errorf("ExitOf() = %v, reaped: %v, want unknown and missed", got, reap)
		}
	}
}

func TestWatchTwice(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "exit 0")
		h.numbers(t)
		id := lookup(t, r, h.pid()).ID()
		r.KnowsExits() // takes one, once
		before := descriptors(t)
		first, second := watch(t, r, id), watch(t, r, id)
		if got := descriptors(t); got != before {
			t.Errorf("%d descriptors more for two watches of a cached process, want none", got-before)
		}
		h.kill()
		<-first
		<-second
		// A call of its own: the others were used up.
		<-watch(t, r, id)
		if len(first)+len(second) > 0 {
			t.Errorf("a watch was called twice")
		}
	})
}

func TestUnwatch(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "exit 0")
		h.numbers(t)
		id := lookup(t, r, h.pid()).ID()
		dropped := []<-chan ending{watch(t, r, id), watch(t, r, id)}
		r.Unwatch(id)
		r.Unwatch(id)
		kept := watch(t, r, id)
		h.kill()
		<-kept // its predecessors on the same descriptor would have been called before
		if slices.ContainsFunc(dropped, func(c <-chan ending) bool { return len(c) > 0 }) {
			t.Errorf("a watch was called though it was dropped")
		}
	})
}

// A callback that takes its time holds no other up, and may use the resolver.
func TestSlowCallback(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		slow, fast := start(t, "exit 0"), start(t, "exit 0")
		slow.numbers(t)
		fast.numbers(t)
		slowID := lookup(t, r, slow.pid()).ID()
		began, goOn, done := make(chan bool), make(chan bool), make(chan bool)
		if err := r.Watch(slowID, func(id procid.ID, _ procid.Exit) {
			began <- r.Alive(id)
			<-goOn
			r.Unwatch(id)
			close(done)
		}); err != nil {
			t.Fatal(err)
		}
		ended := watch(t, r, lookup(t, r, fast.pid()).ID())
		slow.kill()
		if <-began {
			t.Errorf("Alive(%v) = true in its own watch", slowID)
		}
		fast.kill()
		<-ended
		close(goOn)
		<-done
	})
}
