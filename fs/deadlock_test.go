package fs

import (
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestDeadlockOver: who has had what somebody waits for, and waits for it again by the time
// that one's search for a deadlock comes to him, is not told that there is one (M2).
func TestDeadlockOver(t *testing.T) {
	fs, dir := &FS{table: lockstate.New(lockstate.Options{})}, new(lockstate.Dir)
	waits := func(pid int, blocker func() (id procid.ID, soon, ok bool)) *waiting {
		return &waiting{
			dir: dir, proc: procid.Recorded(procid.ID{Pid: pid, Start: 1}, 0, nil), write: true, hears: true,
			turn: make(chan struct{}), dead: make(chan struct{}), blocker: blocker,
		}
	}
	var holder *waiting
	held := true
	x := waits(1, func() (procid.ID, bool, bool) {
		was := held
		if was {
			held = false
			fs.waits.join(holder, false, false)
		}
		return holder.proc.ID(), false, was
	})
	holder = waits(2, func() (procid.ID, bool, bool) { return procid.ID{}, false, false })
	other := waits(3, nil)
	fs.waits.join(x, false, false)
	fs.waits.join(other, false, false)
	if fs.deadlocked(x, nil) || holder.told() {
		t.Error("one of two is told of a deadlock that there is not")
	}
}
