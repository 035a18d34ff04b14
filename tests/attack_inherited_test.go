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

// inheritedMany is a program that locks many lock files, forks a child that has them open,
// too, closes its own, and is killed a while later. Another process dies at the same time.
const inheritedMany = `
import fcntl, os, signal, sys, time
at, many = sys.argv[1], int(sys.argv[2])
told, tell = os.pipe()
def child(do):
    pid = os.fork()
    if pid == 0:
        do()
        os.write(tell, b"x")
        while True:
            signal.pause()
    os.read(told, 1)
    return pid
def owner():
    files = []
    for i in range(many):
        os.mkdir("%s/%d" % (at, i))
        files.append(os.open("%s/%d/devserver" % (at, i), os.O_RDWR | os.O_CREAT))
        fcntl.flock(files[i], fcntl.LOCK_EX | fcntl.LOCK_NB)
    child(lambda: None)
    for f in files:
        os.close(f)
first = child(owner)
second = child(lambda: os.open(at + "/other/devserver", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
time.sleep(.2)
for pid in first, second:
    os.kill(pid, signal.SIGKILL)
print("killed", flush=True)
signal.pause()
`

// TestR4AttackInheritedMany: what a dead process had closed is open in its child still, and
// so is not waited for, as long after the close: each of many would keep the end of another
// process's lock waiting, which here were 40 s.
func TestR4AttackInheritedMany(t *testing.T) {
	need(t, "python3")
	m := mount(t, "--on-crash", "destroy")
	openDir(t, m.Back("other"))
	startLines(t, nil, "python3", "-c", inheritedMany, m.Path, "400").hear("killed")
	// A listing of the locks waits like everything else.
	eventually(t, "what the other one left is destroyed", func() bool { return !exists(m.Back("other/devserver")) })
	m.awaitFree("other")
}
