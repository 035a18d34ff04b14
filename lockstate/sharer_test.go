package lockstate_test

import (
	"testing"

	"github.com/stagefs/stagefs/lockstate"
)

// TestC3aPendingSharer: who shares a lock that is about to be his lets nobody share what
// somebody else has behind it, and who is about to share lets nobody in yet.
func TestC3aPendingSharer(t *testing.T) {
	f := newFixture(t, lockstate.Options{})
	acquire := func(path string, k lockstate.Kind) *lockstate.Grant {
		t.Helper()
		g, err := f.Acquire(closed, f.request(f.child, path, k))
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	behind := f.take(f.parent, "d", lockstate.Explicit)
	front, shares := acquire("d", lockstate.Explicit), acquire("d", lockstate.Shared)
	shares.Commit()
	f.refused(f.stranger, "d", lockstate.Shared, lockstate.ErrHeld, behind.Token)
	front.Abort()
	f.refused(f.stranger, "d", lockstate.Shared, lockstate.ErrHeld, behind.Token)

	own := f.take(f.child, "e", lockstate.Explicit)
	shares = acquire("e", lockstate.Shared)
	f.refused(f.stranger, "e", lockstate.Shared, lockstate.ErrHeld, own.Token)
	shares.Abort()
	bell := f.Bell()
	acquire("e", lockstate.Shared).Commit()
	select {
	case <-bell:
	default:
		t.Error("who waits to share was not called")
	}
	f.take(f.stranger, "e", lockstate.Shared)
}
