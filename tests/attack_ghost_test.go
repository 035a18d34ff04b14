//go:build linux

package tests

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestAttackGhostTree attacks W3: a stranger gives a file further names, and has
// the daemon itself remove them with a tree. They must not be counted among the
// file's names then, or the one in G would not be searched for.
func TestAttackGhostTree(t *testing.T) {
	link := func(a *Agent, m *Mount, name string) { a.must("link", m.At("E/x"), m.At(name)) }
	// made gives E/x and G/x another file, made in F. Of a new daemon's kernel G/x
	// is not known again.
	made := func(opts ...string) func(a *Agent, m *Mount) {
		return func(a *Agent, m *Mount) {
			a.must("mkdir", m.At("F"))
			a.must("mkdir", m.At("F/sub"))
			a.must("put", m.At("F/sub/y"), "content", "creat")
			for _, name := range []string{"E/x", "G/x"} {
				a.must("unlink", m.At(name))
				a.must("link", m.At("F/sub/y"), m.At(name))
			}
			m.restart(nil, opts...)
			a.must("stat", m.At("E/x"))
			a.must("stat", m.At("F/sub/y"))
		}
	}
	destroy, quarantine := []string{"--on-crash", "destroy"}, []string{"--on-crash", "quarantine"}
	for _, c := range []struct {
		name string
		opts []string
		make func(a *Agent, m *Mount) // a is killed then
		away func(m *Mount)           // has the daemon remove what it made
	}{
		{"lock directory", nil, func(a *Agent, m *Mount) {
			a.must("mkdir", m.At("E/devserver"))
			link(a, m, "E/devserver/y")
		}, nil},
		{"beneath a lock directory", nil, func(a *Agent, m *Mount) {
			a.must("mkdir", m.At("E/devserver"))
			a.must("mkdir", m.At("E/devserver/sub"))
			link(a, m, "E/devserver/sub/y")
			link(a, m, "E/devserver/z")
		}, nil},
		{"destroyed", destroy, made(destroy...), nil},
		{"quarantined", quarantine, made(quarantine...), func(m *Mount) {
			eventually(t, "it is in quarantine", func() bool { return len(m.quarantine()) == 1 })
			if s := m.Ctl("discard . older=0s"); s != "ok" {
				t.Fatal(s)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := twoNames(t, 0, c.opts...)
			a, b, holder := agent(t), agent(t), agent(t)
			c.make(a, m)
			a.Kill()
			if c.away != nil {
				c.away(m)
			}
			eventually(t, "all that is gone", func() bool {
				left, _ := filepath.Glob(m.Back("*", "devserver"))
				_, hidden := os.Lstat(m.Back(".stagefs"))
				_, made := os.Lstat(m.Back("F"))
				return len(left) == 0 && os.IsNotExist(hidden) && os.IsNotExist(made)
			})
			b.must("open", "r", m.At("E/x"), "rdonly") // so that the kernel goes on knowing it
			for range 3 {
				b.must("sh", "ls -l "+m.At("E"))
				time.Sleep(time.Millisecond)
			}
			if got := b.Get("sh", "stat -c %h "+m.At("E/x")); got != "0 2\n" {
				t.Errorf("links of E/x: %q, want 2", got)
			}
			holder.must("creat", m.At("G/devserver"), "wronly,creat,excl")
			before := digest(t, m.Back("G"))
			for _, cmd := range aliasAttacks(m, "E/x") {
				b.want("EBUSY", cmd...)
			}
			if after := digest(t, m.Back("G")); after != before {
				t.Errorf("changed through another name:\n%s", diff(before, after))
			}
		})
	}
}
