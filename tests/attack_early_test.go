//go:build linux

package tests

import (
	"os"
	"syscall"
	"testing"
	"time"
)

// W3, S1: the next daemon grants nothing before it knows who can still write
// through what the one before has left, however early it is asked.
func TestS1AttackEarly(t *testing.T) {
	m := mount(t, "--supervise")
	needPassthrough(m)
	a, rival := agent(t), stranger(t)
	for _, d := range []string{"A", "B", "C", "D"} {
		a.must("mkdir", m.At(d))
		a.must("chmod", m.At(d), "511")
		for i := range 200 {
			mustDo(t, os.WriteFile(m.Back(d, "other"+itoa(i)), nil, 0o666))
		}
		a.must("open", "f", m.At(d, "f"), "rdwr,creat")
		a.must("write", "f", "mine")
		a.must("mmap", "p"+d, "f")
		a.must("close", "f")
		a.mustCommand(m, "release %s", d)
	}
	asked := 0
	for round := range 6 {
		old := m.daemon()
		over := time.Now().Add(400 * time.Millisecond)
		mustDo(t, syscall.Kill(old, syscall.SIGKILL))
		for time.Now().Before(over) {
			switch got := rival.Try("put", m.control("ctl"), "acquire D", "wronly"); {
			case got == "ok":
				t.Fatalf("round %d: acquired while somebody can write there through a mapping", round)
			case got == "EBUSY":
				asked++
			}
		}
		m.awaitNext(old)
	}
	t.Logf("refused %d times", asked)
}
