//go:build linux

package tests

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestR2AttackTakenAgain attacks R2 and H3: one of a session has closed the lock file as
// it dies, and is not quite dead. Another one of it locks that anew: the end of the first
// is not the end of the second one's lock.
func TestR2AttackTakenAgain(t *testing.T) {
	e, m := newElsewhere(t), mount(t, "--owner=session", "--on-crash=quarantine")
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/devserver"), "")
	leader, rival := agentOfSession(t), agent(t)
	owner, peer := leader.Child(), leader.Child()
	for _, a := range []*Agent{owner, peer} {
		a.must("open", "x", m.At("D/devserver"), "rdwr")
	}
	owner.must("setlk", "x", "wr")
	owner.must("open", "y", e.m.At("f"), "rdwr") // is closed after it
	halt(t, e.m.cmd.Process.Pid)
	t.Cleanup(e.answer) // before the agents are waited for
	mustDo(t, unix.PidfdSendSignal(owner.ends, unix.SIGKILL, nil, 0))
	eventually(t, "the other one has the lock", func() bool { return peer.Try("setlk", "x", "wr") == "ok" })
	if l := m.Locks()["D"]; l.Pid != owner.Pid {
		t.Fatalf("the lock: %+v, want that of pid %d still", l, owner.Pid)
	}
	e.answer()
	eventually(t, "the first one's death is carried out", func() bool { return m.Locks()["D"].Pid != owner.Pid })
	rival.want("EBUSY", "put", m.At("D/f"), "x", "creat")
	rival.want("EBUSY", "ctl", m.control("ctl"), "acquire D")
	peer.must("put", m.At("D/f"), "x", "creat")
	peer.must("setlk", "x", "un")
	m.wantFree("D")
}
