//go:build linux

package procid_test

import (
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// trace has a debugger that waits for nothing attach to all threads of a helper, but
// for the first one if it spares that.
func trace(t *testing.T, h *process, spare int) (debugger *process) {
	t.Helper()
	role := "trace "
	if spare != 0 {
		role = "tracebut "
	}
	d := start(t, role+strconv.Itoa(h.pid()))
	if got := d.numbers(t); got[0] < 1 {
		t.Fatalf("%d threads are traced", got[0])
	}
	return d
}

// awaitHusk waits until no thread of a process is left but zombies.
func awaitHusk(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !procid.OnlyZombies(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it has not died")
		}
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); n != 0 {
		t.Fatal("its pidfd tells that it is dead")
	}
}

// R4: a process is dead when no thread of it will run again, although a debugger has
// not waited for them.
func TestHuskIsDead(t *testing.T) {
	for _, tt := range []struct {
		name, role string
		end        func(h *process)
		want       procid.Exit
	}{
		{"killed", "exit 3", func(h *process) { h.kill() }, procid.Exit{Known: true, Signal: 9}},
		{"exit", "exit 3", func(h *process) { h.stdin.Close() }, procid.Exit{Known: true, Code: 3}},
		{"its first thread was dead", "deadleader 7", func(h *process) { h.kill() }, procid.Exit{Known: true, Signal: 9}},
	} {
		for _, spare := range []int{0, 1} {
			t.Run(tt.name+" "+strconv.Itoa(spare), func(t *testing.T) {
				inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
					h := start(t, tt.role)
					h.numbers(t)
					id := lookup(t, r, h.pid()).ID()
					asked := newResolver(t, false)
					lookup(t, asked, h.pid())
					toldOnce := watch(t, asked, id)
					ended := watch(t, r, id)
					debugger := trace(t, h, spare)
					if !r.Alive(id) || !asked.Alive(id) {
						t.Errorf("Alive(%v) = false of one that is traced", id)
					}
					tt.end(h)
					awaitHusk(t, h.pid())

					time.Sleep(procid.FreshTime) // since it was asked before

					// Who asks is not told what is false, and the watch fires by that.
					if asked.Alive(id) || newResolver(t, false).Alive(id) {
						t.Errorf("Alive(%v) = true", id)
					}
					for _, c := range []<-chan ending{toldOnce, ended, watch(t, asked, id), watch(t, newResolver(t, false), id)} {
						select {
						case got := <-c:
							if want := (ending{id, tt.want}); got != want {
								t.Errorf("watch called with %v, want %v", got, want)
							}
						case <-time.After(10 * time.Second):
							t.Error("the watch has not been called")
						}
					}
					if got := asked.ExitOf(id); got != tt.want {
						t.Errorf("ExitOf(%v) = %v, want %v", id, got, tt.want)
					}
					debugger.kill()
					h.Wait()
					if asked.Alive(id) {
						t.Errorf("Alive(%v) = true after it was reaped", id)
					}
					select {
					case got := <-ended:
						t.Errorf("watch called again: %v", got)
					default:
					}
				})
			})
		}
	}
}

// wantTold expects that the watch of a husk is called because of what tell does, where
// nothing else would have told.
func wantTold(t *testing.T, tell func(r *procid.Resolver, id procid.ID)) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		r.Deaf()
		h := start(t, "exit 3")
		h.numbers(t)
		id := lookup(t, r, h.pid()).ID()
		ended := watch(t, r, id)
		r.LookLate(id)
		debugger := trace(t, h, 0)
		h.kill()
		awaitHusk(t, h.pid())
		select {
		case <-ended:
			t.Error("the watch has been called by itself")
		default:
		}
		tell(r, id)
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Error("the watch has not been called")
		}
		debugger.kill()
		tell(r, id) // of nobody any more
	})
}

// A process that is suspected is looked at at once.
func TestHuskSuspected(t *testing.T) {
	wantTold(t, func(r *procid.Resolver, id procid.ID) { r.Suspect(id) })
}

// Who asks after a process that was seen alive a moment ago, and has died since, is
// told soon.
func TestHuskAskedAgain(t *testing.T) {
	wantTold(t, func(r *procid.Resolver, id procid.ID) {
		r.LookedNow(id)
		r.Alive(id) // goes by that, and is wrong, or is so late that it looks itself
	})
}

// Who was carried over as a husk is one again.
func TestHuskCarried(t *testing.T) {
	old, r := newResolver(t, false), newResolver(t, false)
	h := start(t, "exit 3")
	h.numbers(t)
	id := lookup(t, old, h.pid()).ID()
	debugger := trace(t, h, 0)
	defer debugger.kill()
	h.kill()
	awaitHusk(t, h.pid())
	all := old.Carry()
	for i := range all {
		fd, err := unix.Dup(all[i].FD)
		if err != nil {
			t.Fatal(err)
		}
		all[i].FD = fd
	}
	r.TakeUp(all)
	select {
	case <-watch(t, r, id):
	case <-time.After(10 * time.Second):
		t.Error("the watch has not been called")
	}
}

// A thread that waits in execve(2) for the end of the others lives, although these
// are zombies, the first one among them.
func TestHuskNotInExec(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		for range 5 {
			h := start(t, "execthread")
			h.numbers(t)
			id := lookup(t, r, h.pid()).ID()
			ended := watch(t, r, id)
			debugger := trace(t, h, 0)
			if !inExec(h) {
				debugger.kill()
				h.kill()
				continue
			}
			for range 200 {
				if !r.Alive(id) {
					t.Fatalf("Alive(%v) = false though a thread lives", id)
				}
			}
			debugger.kill()
			h.numbers(t) // the new program
			if !r.Alive(id) {
				t.Errorf("Alive(%v) = false after execve(2)", id)
			}
			select {
			case e := <-ended:
				t.Errorf("watch called with %v", e)
			default:
			}
			h.stdin.Close()
			h.Wait()
			<-ended
			return
		}
		t.Skip("the first thread lives on each time")
	})
}

// inExec has a thread of a traced helper wait in execve(2), and reports whether its
// first thread has ended by that. It has not if the helper has executed before it was
// traced, or if a signal has stopped it.
func inExec(h *process) bool {
	h.stdin.Write([]byte("\n"))
	for end := time.Now().Add(2 * time.Second); !procid.IsZombie(h.pid()); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// Other threads that are zombies, and a first one that is, make no dead process.
func TestHuskNotWithALivingThread(t *testing.T) {
	inBothModes(t, func(t *testing.T, r *procid.Resolver, _ bool) {
		h := start(t, "deadleader 7")
		h.numbers(t)
		id := lookup(t, r, h.pid()).ID()
		ended := watch(t, r, id)
		trace(t, h, 0)
		for range 200 {
			r.Suspect(id)
			if !r.Alive(id) || procid.OnlyZombies(h.pid()) {
				t.Fatalf("Alive(%v) = false though a thread lives", id)
			}
		}
		select {
		case e := <-ended:
			t.Errorf("watch called with %v", e)
		default:
		}
	})
	if procid.OnlyZombies(os.Getpid()) {
		t.Error("OnlyZombies of this process")
	}
}
