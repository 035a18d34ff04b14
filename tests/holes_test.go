//go:build linux

package tests

import (
	"strings"
	"testing"
)

// TestM2MappedHoles: what is stored in a mapping is no hole to who looks for data, such as
// cp(1), although the kernel has not written it yet.
func TestM2MappedHoles(t *testing.T) {
	for _, opts := range [][]string{nil, {"--no-passthrough"}} {
		t.Run(strings.Join(opts, ""), func(t *testing.T) {
			m := mount(t, opts...)
			a, b := agent(t), agent(t)
			look := func(dir string) string {
				var log strings.Builder
				at := dir + "/f" + strings.ReplaceAll(dir[len(dir)-3:], "/", "")
				a.must("open", "h", at, "rdwr,creat")
				a.must("ftruncate", "h", "1048576")
				a.must("mmap", "map", "h")
				b.must("open", "reads", at, "rdonly")
				for _, data := range []string{"", "first", "second"} {
					if data != "" {
						a.must("poke", "map", data, "unsynced")
					}
					for _, call := range [][]string{{"seek", "reads", "data", "0"}, {"seek", "reads", "hole", "0"}, {"sh", "cp --sparse=auto " + at + " " + at + ".copy; tr -d '\\0' <" + at + ".copy"}} {
						answer, out := b.call(call)
						log.WriteString(data + " " + call[0] + " " + answer + " " + out + "\n")
					}
				}
				a.must("munmap", "map")
				a.must("close", "h")
				b.must("close", "reads")
				return log.String()
			}
			if want, got := look(m.Dir), look(m.Path); got != want {
				t.Errorf("with options %q, differs from the plain directory:\n%s", opts, diff(want, got))
			}
		})
	}
}
