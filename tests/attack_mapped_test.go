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
