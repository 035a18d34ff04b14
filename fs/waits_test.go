package fs

import (
	"testing"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestStandBack: who was called, and does not hold any more what it waits for, does not try
// before it is called again, whatever wakes it (A8).
func TestStandBack(t *testing.T) {
	fs, dir := &FS{table: lockstate.New(lockstate.Options{})}, new(lockstate.Dir)
	waits := func(pid int) *waiting {
		x := &waiting{
			dir: dir, proc: procid.Recorded(procid.ID{Pid: pid, Start: 1}, 0, nil), write: true,
			turn: make(chan struct{}), dead: make(chan struct{}),
		}
		fs.waits.join(x, false, false)
		return x
	}
	want := func(what string, x *waiting, may, lost bool) {
		t.Helper()
		if m, l := fs.mayTry(x); m != may || l != lost {
			t.Errorf("%s: mayTry() = %v, %v, want %v, %v", what, m, l, may, lost)
		}
	}
	front, x, y := waits(1), waits(2), waits(3)
	if !fs.waits.call(x, false) {
		t.Fatal("it is not called")
	}
	if fs.waits.call(y, false) {
		t.Error("both of two are called that want the same")
	}
	want("called", x, false, true)
	fs.standBack(x)
	want("back in line", x, false, true)
	want("at the front", front, true, false)
	if called, all := fs.waits.behind(front, 0); len(called) != 0 || len(all) != 2 {
		t.Errorf("behind() = %d called, %d others, want that it is looked again", len(called), len(all))
	}
	fs.leaveLine(front)
	want("first in line", x, true, false)
}
