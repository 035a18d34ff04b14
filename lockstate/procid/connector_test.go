//go:build linux

package procid_test

import (
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// needExits skips a test where the kernel does not tell how a process ended
// that was reaped at once.
func needExits(t *testing.T, r *procid.Resolver) {
	t.Helper()
	if !r.KnowsExits() {
		t.Skip("before Linux 6.15 this takes the process events connector: CAP_NET_ADMIN and the initial namespaces")
	}
}

// R4, R5: what became of a process is known also when its parent reaped it
// before anybody else could look, however busy the machine is.
func TestWatchReapedByBusyParent(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		needExits(t, r)
		const n = 40
		parent := start(t, "reap 40")
		pids := parent.numbers(t)
		var ends [n]<-chan ending
		for i, pid := range pids {
			ends[i] = watch(t, r, lookup(t, r, pid).ID())
		}
		parent.stdin.Close()
		unknown := 0
		for i := range ends {
			want := procid.Exit{Known: true, Code: i % 4}
			if i%4 == 3 {
				want = procid.Exit{Known: true, Signal: int(unix.SIGKILL)}
			}
			got := (<-ends[i]).exit
			if !got.Known {
				unknown++
			} else if got != want {
				t.Errorf("watch of %d called with %v, want %v", pids[i], got, want)
			}
		}
		if unknown > 0 {
			t.Errorf("the ends of %d of %d processes are unknown", unknown, n)
		}
	})
}

// The threads of a process may end before it, its first one included, and then
// the last one's end is that of the process.
func TestWatchReapedThreads(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		needExits(t, r)
		for _, tt := range []struct {
			role string
			end  func(t *testing.T, h *process)
			want procid.Exit
		}{
			{"threads 20", func(t *testing.T, h *process) { h.kill() }, procid.Exit{Known: true, Signal: 9}},
			{"threads 20", func(t *testing.T, h *process) { h.stdin.Close() }, procid.Exit{Known: true}},
			{"deadleader 7", func(t *testing.T, h *process) { h.stdin.Close() }, procid.Exit{Known: true, Code: 7}},
			{"deadleader 0", func(t *testing.T, h *process) { h.kill() }, procid.Exit{Known: true, Signal: 9}},
			// Its first thread ends at the exec, without ending the process.
			{"execthread", func(t *testing.T, h *process) {
				h.stdin.Write([]byte{'\n'})
				h.numbers(t)
				h.kill()
			}, procid.Exit{Known: true, Signal: 9}},
		} {
			h := start(t, tt.role)
			h.numbers(t)
			ended := watch(t, r, lookup(t, r, h.pid()).ID())
			reaped := make(chan struct{})
			go func() { h.Process.Wait(); close(reaped) }()
			tt.end(t, h)
			if got := (<-ended).exit; got != tt.want {
				t.Errorf("%s: watch called with %v, want %v", tt.role, got, tt.want)
			}
			<-reaped
		}
	})
}

// Events that were lost make an end unknown, not another one, and those that
// follow count again.
func TestWatchLostEvents(t *testing.T) {
	// The kernel tells of an end when the process can be reaped, or later; and it
	// tells the listener that came first last.
	told, err := procid.ListenExits()
	if err != nil {
		t.Skip(err)
	}
	defer told.Close()
	r := newResolver(t, true)
	needExits(t, r)
	h := start(t, "exit 3")
	h.numbers(t)
	ended := watch(t, r, lookup(t, r, h.pid()).ID())
	listen := r.Deafen()
	crowd := start(t, "threads 50")
	crowd.numbers(t)
	crowd.kill()
	crowd.Wait()
	if err := told.Await(crowd.pid(), 50); err != nil {
		t.Fatal(err)
	}
	h.stdin.Close()
	h.Wait()
	if err := told.Await(h.pid(), 1); err != nil {
		t.Fatal(err)
	}
	listen()
	if got := (<-ended).exit; got != (procid.Exit{Missed: true}) {
		t.Errorf("watch called with %v though the event was lost, want unknown and missed", got)
	}

	h = start(t, "exit 3")
	h.numbers(t)
	ended = watch(t, r, lookup(t, r, h.pid()).ID())
	h.stdin.Close()
	h.Wait()
	if got, want := (<-ended).exit, (procid.Exit{Known: true, Code: 3}); got != want {
		t.Errorf("watch called with %v after the loss, want %v", got, want)
	}
}

// What an ordinary user's daemon says it knows, of other users' processes too,
// it knows.
func TestKnowsExits(t *testing.T) {
	const nobody = 65534
	for _, role := range []string{"observe", "observecompat"} {
		t.Run(role, func(t *testing.T) {
			h := start(t, "exit 3")
			h.numbers(t)
			daemon := startIn(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}, role+" "+strconv.Itoa(h.pid()))
			knows := daemon.numbers(t)[0]
			h.stdin.Close()
			h.Wait()
			got := daemon.numbers(t)
			t.Logf("KnowsExits() = %v, watch told %v", knows == 1, got)
			if want := []int{1, 3, 0}; !slices.Equal(got, want) && (knows == 1 || got[0] == 1) {
				t.Errorf("KnowsExits() = %v, but known, code, signal = %v, want %v", knows == 1, got, want)
			}
		})
	}
}
