package fs

import (
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// TestStaleFinds: a thread is told once in a system call to look again, however often the
// request is asked about that it is told by, or that by which it comes back. What comes to
// another file than it has found then is another system call.
func TestStaleFinds(t *testing.T) {
	var finds staleFinds
	for i, step := range []struct {
		tid    uint32
		unique uint64
		looks  bool // up the node, before
		node   uint64
		names  bool // something in the node, which is no file
		stale  bool
		want   bool
	}{
		{tid: 7, unique: 1, stale: false, want: false},
		{tid: 7, unique: 2, stale: true, want: true},
		{tid: 7, unique: 2, stale: true, want: true},
		{tid: 8, unique: 3, stale: true, want: true},
		{tid: 7, unique: 4, stale: true, want: false},
		{tid: 7, unique: 4, stale: true, want: false},
		{tid: 7, unique: 5, stale: true, want: true},
		{tid: 8, unique: 6, stale: false, want: false},
		{tid: 8, unique: 7, stale: true, want: true},
		{tid: 0, unique: 8, stale: true, want: false},
		{tid: 9, unique: 9, node: 1, stale: true, want: true},
		{tid: 9, unique: 10, node: 2, stale: true, want: true},
		{tid: 9, unique: 11, looks: true, node: 3, stale: true, want: false},
		{tid: 9, unique: 12, node: 3, stale: true, want: true},
		{tid: 9, unique: 13, names: true, node: 4, stale: true, want: false},
	} {
		h := &fuse.InHeader{Unique: step.unique, NodeId: step.node}
		h.Pid = step.tid
		if step.looks {
			finds.looked(step.tid, step.node)
		}
		if got := finds.found(step.stale, !step.names, h); got != step.want {
			t.Errorf("step %d: found(%t) of request %d by %d = %t, want %t", i, step.stale, step.unique, step.tid, got, step.want)
		}
	}
}
