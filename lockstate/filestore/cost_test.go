package filestore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestCost tells what an acquisition and a release cost more because they
// outlive the daemon.
func TestCost(t *testing.T) {
	const n = 20000
	s, err := filestore.Open(t.TempDir(), filestore.Options{Key: "key"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	owner := procid.Fake(procid.ID{Pid: 1000, Start: 1}, procid.Fake(procid.ID{Pid: 999, Start: 1}, nil))
	for _, o := range []struct {
		name  string
		store lockstate.Store
	}{{"in memory", nil}, {"kept", s}} {
		tab := lockstate.New(lockstate.Options{Store: o.store, Reserve: s.Reserve, LastToken: s.Tokens(), World: "a boot and a pid namespace"})
		d := tab.At("board", "version")
		took := make([]time.Duration, n)
		for i := range took {
			began := time.Now()
			g, err := tab.Acquire(nil, lockstate.Request{Process: owner, Dir: d, Kind: lockstate.Explicit, Protocol: "create", File: "devserver"})
			if err != nil {
				t.Fatal(err)
			}
			l, _ := g.Commit()
			tab.End(l.Token, lockstate.Given)
			took[i] = time.Since(began)
		}
		tab.Forget(d)
		slices.Sort(took)
		t.Logf("%s: acquire and release: median %v, p99 %v, max %v", o.name, took[n/2], took[n*99/100], took[n-1])
	}
}
