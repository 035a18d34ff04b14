//go:build linux

package tests

import (
	"os"
	"testing"
	"time"
)

// TestR4AttackTruncated: a dead owner's lock is in nobody's way, also where whom it refuses
// is let through, with nothing changed: what is opened with O_TRUNC as it ends is truncated.
func TestR4AttackTruncated(t *testing.T) {
	need(t, "root", "fuse")
	for _, what := range []string{"candidate", "lock file"} {
		t.Run(what, func(t *testing.T) {
			disk := newImage(t, 16)
			m := disk.mount()
			openDir(t, m.Back("D"))
			openFile(t, m.Back("D/devserver"), "of before")
			owner, a := agent(t), agent(t)
			name := "D/devserver"
			if what == "candidate" {
				name = "D/" + candidateName(t, a)
				a.must("put", m.At(name), "of before", "creat,excl")
			}
			owner.must("creat", m.At("D/devserver.lock"), "wronly,creat,excl")
			thaw := disk.freeze()
			defer thaw() // before anything is waited for that is stuck
			owner.Kill()
			opened := make(chan string, 1)
			got := a.Start("open", "f", m.At(name), "wronly,trunc")
			go func() {
				status := "no answer"
				defer func() { opened <- status }()
				status = got()
			}()
			status := ""
			select {
			case status = <-opened:
			case <-time.After(100 * time.Millisecond): // it waits for the lock to end
			}
			thaw()
			if status == "" {
				status = <-opened
			}
			if status != "ok" {
				t.Errorf("open = %s, want ok", status)
			}
			m.wantFree("D")
			if got, err := os.ReadFile(m.Back(name)); err != nil || len(got) > 0 {
				t.Errorf("opened with O_TRUNC, it holds %q, %v", got, err)
			}
		})
	}
}
