//go:build linux

package tests

import (
	"testing"
	"time"
)

// TestR4AttackInherited: while the end of one of its locks takes a moment, a process that was
// killed has another one by a descriptor that its child has, too. The child locks that anew
// meanwhile: the lock is the child's then, and does not end with those of the dead one.
func TestR4AttackInherited(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("K"))
	openFile(t, m.Back("K/devserver"), "")
	for call, kinds := range map[string][2]string{"flock": {"ex", "un"}, "ofdsetlk": {"wr", "un"}} {
		for how, calls := range map[string][][]string{
			"unlocks": {{call, "l", kinds[1]}, {call, "l", kinds[0]}},
			"again":   {{call, "l", kinds[0]}},
		} {
			t.Run(call+"/"+how, func(t *testing.T) {
				m := m.on(t)
				dir := call + how
				openDir(t, m.Back(dir))
				owner, rival := locker(t), locker(t)
				// It is waited for whether its owner had closed that one for good (R7).
				owner.must("put", m.control("ctl"), "acquire K on-crash=destroy", "")
				owner.must("open", "k", m.At("K/devserver"), "rdwr")
				owner.must("flock", "k", "ex")
				owner.must("open", "l", m.At(dir, "devserver"), "rdwr,creat")
				owner.must(call, "l", kinds[0])
				child := forked(owner)
				owner.must("close", "k")
				rival.must("open", "l", m.At(dir, "devserver"), "rdwr")
				owner.Kill()
				for _, c := range calls {
					child.must(c...)
				}
				m.awaitFree("K")
				try := []string{call, "l", kinds[0]}
				if call == "flock" {
					try = append(try, "nb")
				}
				for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
					if got := rival.Try(try...); got != "EAGAIN" {
						t.Fatalf("what the child has locked another one locks, too: %s", got)
					}
				}
				m.wantOwner(dir, child.Pid)
				child.must("put", m.At(dir, "file"), "x", "creat")
			})
		}
	}
}
