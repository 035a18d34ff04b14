//go:build linux

package tests

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// TestM2Posix runs go-fuse's conformance suite on a mount. All of it is done
// by the test process, which is no other's rival.
func TestM2Posix(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		t.Run(name, func(t *testing.T) {
			if name == "FcntlFlockLocksFile" {
				t.Skip("fails on ext4 too: it wants flock(2) and fcntl(2) locks to exclude each other")
			}
			m := mount(t)
			// A directory that the test process does not lock by mkdir, in which
			// all that the suite makes is covered by locks of its own.
			mustDo(t, os.Mkdir(m.Back("base"), 0o755))
			posixtest.All[name](t, m.At("base"))
		})
	}
}
