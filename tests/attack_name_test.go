//go:build linux

package tests

import (
	"os"
	"sync"
	"testing"
)

// W4, C1: where writing needs a lock, a directory's own lock lets its holder
// rename or remove it. Nobody else gets to do that by asking at the moment in
// which the lock ends.
func TestW4AttackName(t *testing.T) {
	need(t, "root", "fuse")
	for _, tt := range []struct {
		name string
		try  func(m *Mount) []string
	}{
		{"rename", func(m *Mount) []string { return []string{"rename", m.At("b/S"), m.At("b/own/slot")} }},
		{"rmdir", func(m *Mount) []string { return []string{"rmdir", m.At("b/S")} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := mount(t, "--depth", "2", "--unlocked", "deny")
			openDir(t, m.Back("b"))
			openDir(t, m.Back("b/S"))
			holder, rival := agent(t), stranger(t)
			rival.must("mkdir", m.At("b/own"), "0777") // and holds it
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if holder.Try("put", m.control("ctl"), "acquire b/S", "wronly") != "ok" || holder.Try("put", m.control("ctl"), "release b/S", "wronly") != "ok" {
						return // the directory is gone
					}
				}
			})
			heard := map[string]int{}
			for range 3000 {
				got := rival.Try(tt.try(m)...)
				heard[got]++
				if got == "ok" {
					t.Errorf("%q went through, and nobody gave it the directory", tt.try(m))
					break
				}
			}
			close(stop)
			wg.Wait()
			if _, err := os.Stat(m.Back("b/S")); err != nil {
				t.Error(err)
			}
			t.Logf("answers: %v", heard)
		})
	}
}
