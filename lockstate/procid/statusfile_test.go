//go:build linux

package procid_test

import (
	"os"
	"testing"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestFSIDs: the IDs for file systems are the last of four, and what is not known, or is the
// kernel's own, passes for nobody.
func TestFSIDs(t *testing.T) {
	const none = procid.NoID
	for name, c := range map[string]struct {
		status   procid.Status
		uid, gid uint32
	}{
		"own":           {"Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nKthread:\t0\n", 4, 8},
		"older":         {"Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n", 4, 8},
		"of the kernel": {"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nKthread:\t1\n", none, none},
		"cut off":       {"Uid:\t0\t0\t0\t0\n", none, none},
		"gone":          {"", none, none},
		"no number":     {"Uid:\t0\t0\t0\tx\nGid:\t0\t0\t0\t0\n", none, none},
	} {
		if uid, gid := c.status.FSIDs(); uid != c.uid || gid != c.gid {
			t.Errorf("%s: FSIDs = %d, %d, want %d, %d", name, uid, gid, c.uid, c.gid)
		}
	}
	if uid, gid := procid.FSIDs(uint32(os.Getpid())); int(uid) != os.Geteuid() || int(gid) != os.Getegid() {
		t.Errorf("FSIDs of this process = %d, %d", uid, gid)
	}
	if uid, gid := procid.FSIDs(0); uid != none || gid != none {
		t.Errorf("FSIDs of thread 0 = %d, %d, want none", uid, gid)
	}
	if uid, _ := procid.FSIDs(2); os.Getpid() != 2 && uid == 0 { // kthreadd, outside of containers
		if s, err := procid.ReadStatus(2); err == nil && s.Field("Kthread") == "1" {
			t.Error("a thread of the kernel's passes for root")
		}
	}
}
