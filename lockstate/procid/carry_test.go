//go:build linux

package procid_test

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A dead process whose number is another's by now does not take the place of that
// one, in whatever order they come.
func TestTakeUpNumberAgain(t *testing.T) {
	inBothModes(t, func(t *testing.T, first *procid.Resolver, compat bool) {
		dead, living := start(t, "exit 0"), start(t, "exit 0")
		id := lookup(t, first, living.pid()).ID()
		dead.kill()
		zombie(t, dead.pid())
		for _, deadFirst := range []bool{true, false} {
			all := []procid.Carried{
				{ID: procid.ID{Pid: id.Pid, Start: 1}, FD: inherited(t, dead.pid())},
				{ID: id, FD: inherited(t, living.pid())},
			}
			if !deadFirst {
				slices.Reverse(all)
			}
			r := newResolver(t, compat)
			r.TakeUp(all)
			if p := r.Known(uint32(id.Pid)); p == nil || p.ID() != id {
				t.Errorf("Known(%d) = %v, want %v", id.Pid, p, id)
			}
			if p := r.Process(id); p == nil {
				t.Errorf("Process(%v) = nil", id)
			}
			for _, c := range all {
				if flags, err := unix.FcntlInt(uintptr(c.FD), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
					t.Errorf("the descriptor of %v is left to programs", c.ID)
				}
			}
		}
	})
}

// inherited returns a pidfd as a program has it from the one before.
func inherited(t *testing.T, pid int) int {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
		t.Fatal(err)
	}
	return fd
}
