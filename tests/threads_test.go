package tests

import (
	"os"
	"testing"
)

// Nothing the daemon tells the kernel waits for a directory's inode lock: each
// such wait would keep a thread, and if the daemon died meanwhile neither it nor
// the process that has that lock could ever end.
func TestThreadsStayFew(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), agent(t)
	other := b.StartGet("until", "creat", m.At("D/ready"), "wronly,creat,excl")
	for i := range 1500 {
		a.must("creat", m.At("D/x"), "wronly,creat")
		a.must("rename", m.At("D/x"), m.At("D/devserver"))
		a.must("unlink", m.At("D/devserver"))
		if i == 0 {
			other()
		}
	}
	tasks, err := os.ReadDir("/proc/" + itoa(m.cmd.Process.Pid) + "/task")
	mustDo(t, err)
	if n := len(tasks); n > 100 {
		t.Errorf("the daemon has %d threads", n)
	}
}
