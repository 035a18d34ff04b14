//go:build linux

package tests

import (
	"sync"
	"testing"
)

// L1: a lease that was granted is there. Whoever is refused because of it while
// it is on its way does not take it for one whose time is over.
func TestL1AttackPending(t *testing.T) {
	need(t, "root", "fuse")
	m := mount(t)
	openDir(t, m.Back("D"))
	stop := make(chan struct{})
	var rivals sync.WaitGroup
	for i := range 3 {
		rival := agent(t)
		rivals.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if rival.Try("put", m.control("ctl"), "acquire D client=rival"+itoa(i), "wronly") == "ok" {
					rival.Try("put", m.control("ctl"), "release D client=rival"+itoa(i), "wronly")
				}
			}
		})
	}
	a := agent(t)
	got := 0
	for range 900 {
		if a.Try("put", m.control("ctl"), "acquire D client=mine", "wronly") != "ok" {
			continue
		}
		got++
		if s := a.Try("getxattr", m.At("D"), "user.stagefs.token"); s != "ok" {
			t.Errorf("acquired, but its token: %s", s)
			break
		}
		if s := a.Try("put", m.control("ctl"), "release D client=mine", "wronly"); s != "ok" {
			t.Errorf("acquired, but to release: %s", s)
			break
		}
	}
	close(stop)
	rivals.Wait()
	t.Logf("granted %d times", got)
}
