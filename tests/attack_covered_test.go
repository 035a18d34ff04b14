//go:build linux

package tests

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// TestA1AttackPending attacks A1: a directory is made beneath one that its maker is
// about to acquire, and does not get. Then that covers nothing, and the new one has a
// lock of its own.
func TestA1AttackPending(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D/wide"))
	openDir(t, m.Back("E"))
	for i := range 2000 { // which are searched for names of what is open
		mustDo(t, os.WriteFile(m.Back("D/wide", fmt.Sprint(i)), nil, 0o666))
	}
	openFile(t, m.Back("D/devserver"), "")
	openFile(t, m.Back("E/x"), "")
	mustDo(t, os.Link(m.Back("E/x"), m.Back("D/wide/x")))
	writer, owner := agent(t), agent(t)
	maker := owner.Child()
	writer.must("open", "f", m.At("E/x"), "rdwr") // the other name is not known
	owner.must("open", "h", m.At("D/devserver"), "rdwr")
	tries := owner.storm([]string{"flock", "h"})
	for i, end := 0, time.Now().Add(3*time.Second); time.Now().Before(end); i++ {
		dir := fmt.Sprintf("D/new%d", i)
		maker.must("mkdir", m.At(dir))
		if got := writer.Try("creat", m.At(dir, "f"), "wronly,creat"); got != "EBUSY" {
			m.wantOwner(dir, maker.Pid)
			t.Fatalf("a stranger makes a file in a directory that was just made: %s, want EBUSY", got)
		}
		m.wantOwner(dir, maker.Pid)
		maker.must("rmdir", m.At(dir))
	}
	if counts := tries.over(); counts["flock ok"] > 0 {
		t.Errorf("D was acquired: %v", counts)
	}
}
