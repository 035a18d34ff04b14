//go:build linux

package tests

import (
	"os"
	"testing"
)

// TestR5AttackMapped attacks R5: who writes through a mapping of a file that it has
// closed before it took the directory has changed something, and hands nothing over.
func TestR5AttackMapped(t *testing.T) {
	for name, opts := range map[string][]string{"passing": nil, "not passing": {"--no-passthrough"}} {
		t.Run(name, func(t *testing.T) {
			m := mount(t, opts...)
			for _, dir := range []string{"mapped", "closed"} {
				openDir(t, m.Back(dir))
				mustDo(t, os.WriteFile(m.Back(dir, "old"), make([]byte, os.Getpagesize()), 0o666))
			}
			a := agent(t)
			b, c := a.Child(), a.Child()
			b.must("open", "h", m.At("mapped/old"), "rdwr")
			b.must("mmap", "p", "h")
			b.must("close", "h")
			if m.metric("passthrough") > 0 { // else the kernel keeps the file open
				eventually(t, "the RELEASE has come", func() bool { return m.metric("lingering") > 0 })
			}
			b.must("creat", m.At("mapped/devserver"), "wronly,creat,excl")
			b.must("poke", "p", "new", "unsynced")
			b.Exit(0)
			m.awaitFree("mapped")
			c.must("open", "h", m.At("closed/old"), "rdwr")
			c.must("mmap", "p", "h")
			c.must("poke", "p", "new")
			c.must("munmap", "p")
			c.must("close", "h")
			c.must("creat", m.At("closed/devserver"), "wronly,creat,excl")
			c.Exit(0)
			eventually(t, "the parent has it", func() bool { return m.Locks()["closed"].Pid == a.Pid })
		})
	}
}

// leftOpen is a program whose child takes a directory, and then has its own child write
// there, by a descriptor from before that it has closed itself.
const leftOpen = `
import os, sys, time
at, late = sys.argv[1], sys.argv[2] == "before"
asked, ask = os.pipe()
told, tell = os.pipe()
if os.fork() == 0:
    fd = os.open(at + "/old", os.O_WRONLY)
    if os.fork() == 0:
        os.read(asked, 1)
        os.write(fd, b"new")
        os.write(tell, b"x")
        time.sleep(60)
    os.close(fd)
    if late:
        time.sleep(1.2)
    os.close(os.open(at + "/devserver", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.write(ask, b"x")
    os.read(told, 1)
    if not late:
        time.sleep(1.2)
    os._exit(0)
os.wait()
print("over", flush=True)
time.sleep(60)
`

// TestR5AttackLeftOpen: a descriptor that somebody has closed before he took the directory was
// not the last if the file is open still: what is written through it nobody tells, and so
// nothing is handed over.
func TestR5AttackLeftOpen(t *testing.T) {
	need(t, "python3")
	m := mount(t)
	for _, slept := range []string{"before", "after"} {
		t.Run(slept, func(t *testing.T) {
			t.Parallel()
			openDir(t, m.Back(slept))
			mustDo(t, os.WriteFile(m.Back(slept, "old"), nil, 0o666))
			startLines(t, nil, "python3", "-c", leftOpen, m.At(slept), slept).hear("over")
			m.awaitFree(slept)
		})
	}
}
