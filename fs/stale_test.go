package fs

import (
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
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
		in     uint64
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
		{tid: 9, unique: 13, names: true, node: 4, stale: true, want: true},
		{tid: 9, unique: 14, names: true, node: 4, stale: true, want: false},
		{tid: 9, unique: 15, names: true, node: 4, stale: true, want: true},
		{tid: 9, unique: 16, looks: true, in: 6, names: true, node: 5, stale: true, want: false},
		{tid: 9, unique: 17, node: 5, stale: true, want: true},
		{tid: 9, unique: 18, looks: true, in: 6, names: true, node: 6, stale: true, want: false},
		{tid: 9, unique: 19, names: true, node: 6, stale: true, want: true},
		{tid: 9, unique: 20, looks: true, in: 6, names: true, node: 0, stale: true, want: false},
	} {
		h := &fuse.InHeader{Unique: step.unique, NodeId: step.node}
		h.Pid = step.tid
		if step.looks {
			finds.looked(step.tid, step.in, step.node, "name")
		}
		if got := finds.found(step.stale, !step.names, h, ""); got != step.want {
			t.Errorf("step %d: found(%t) of request %d by %d = %t, want %t", i, step.stale, step.unique, step.tid, got, step.want)
		}
	}
}

// TestStaleAgain: the kernel looks twice for a name that it finds no more, and for what is
// there instead: that is one system call still, in which a thread is told once. What it then
// does in the directory may be another one, but for making that name, and what it looks for
// besides is.
func TestStaleAgain(t *testing.T) {
	type look struct {
		in, node uint64
		name     string
	}
	none, file, other := look{5, 0, "file"}, look{5, 2, "file"}, look{5, 2, "other"}
	for i, tt := range []struct {
		looks   []look
		comesTo uint64
		names   bool // something there, which is a directory
		again   bool
		makes   string
	}{
		{[]look{{1, 5, "D"}, none, file}, 2, false, true, ""},
		{[]look{none, file}, 2, false, true, ""},
		{[]look{none}, 5, true, true, ""},
		{[]look{none, none}, 5, true, false, ""},
		{[]look{none, none}, 5, true, true, "file"},
		{[]look{none, file}, 5, true, true, "file"},
		{[]look{none, none}, 5, true, false, "other"},
		{[]look{none, none, none}, 5, true, false, "file"},
		{[]look{none, file}, 2, true, false, ""},
		{[]look{none, other}, 2, false, false, ""},
		{[]look{none, {6, 2, "file"}}, 2, false, false, ""},
		{[]look{none, none, file}, 2, false, false, ""},
		{[]look{none, {1, 5, "D"}, file}, 2, false, false, ""},
	} {
		var finds, goneFinds staleFinds
		first := &fuse.InHeader{Unique: 1, NodeId: 1}
		first.Pid = 7
		finds.found(true, true, first, tt.makes)
		goneFinds.gone(true, first)
		told := true
		for _, l := range tt.looks {
			told = finds.looked(7, l.in, l.node, l.name)
			goneFinds.looked(7, l.in, l.node, l.name)
		}
		if told != tt.again && !tt.names {
			t.Errorf("case %d: the kernel may remember what is looked up: %t, want %t", i, !told, !tt.again)
		}
		second := &fuse.InHeader{Unique: 2, NodeId: tt.comesTo}
		second.Pid = 7
		if again := !finds.found(true, !tt.names, second, ""); again != tt.again {
			t.Errorf("case %d: it has come back: %t, want %t", i, again, tt.again)
		}
		if tt.names {
			continue
		}
		want := map[bool]fuse.Status{true: fuse.ENOENT, false: fuse.Status(unix.ESTALE)}[tt.again]
		if got := goneFinds.gone(true, second); got != want {
			t.Errorf("case %d: gone again: %v, want %v", i, got, want)
		}
	}
}

// TestStaleGone: a thread hears ESTALE once in a system call, be it told so when it asks for
// attributes, and ENOENT at the next file that is gone. Then it is in another one.
func TestStaleGone(t *testing.T) {
	var finds staleFinds
	for i, step := range []struct {
		tid  uint32
		attr bool // it asks for attributes
		node uint64
		want unix.Errno
		not  bool // it finds no name before, and then comes to a file without a look

		empty bool // it finds no name at first
	}{
		{tid: 1, node: 1, want: unix.ESTALE},
		{tid: 1, node: 2, want: unix.ENOENT},
		{tid: 1, node: 3, want: unix.ESTALE},
		{tid: 2, attr: true, node: 1, want: unix.ESTALE},
		{tid: 2, node: 2, want: unix.ENOENT},
		{tid: 2, attr: true, node: 3, want: unix.ESTALE},
		{tid: 2, attr: true, node: 4, want: unix.ENOENT},
		{tid: 3, node: 1, want: unix.ESTALE},
		{tid: 3, attr: true, node: 2, want: unix.ENOENT},
		{tid: 3, node: 3, want: unix.ESTALE},
		{tid: 4, attr: true, node: 1, want: unix.ESTALE},
		{tid: 4, node: 2, want: unix.ESTALE, not: true},
		{tid: 5, attr: true, node: 1, want: unix.ESTALE},
		{tid: 5, attr: true, node: 2, want: unix.ENOENT, empty: true},
		{tid: 0, node: 1, want: unix.ESTALE},
		{tid: 0, attr: true, node: 2, want: unix.ESTALE},
	} {
		h := &fuse.InHeader{Unique: uint64(i + 1), NodeId: step.node}
		h.Pid = step.tid
		if step.empty {
			finds.looked(step.tid, 0, 0, "name")
		}
		if step.not {
			finds.looked(step.tid, 0, 0, "name")
		} else {
			finds.looked(step.tid, 0, step.node, "name")
		}
		got := fuse.Status(0)
		if step.attr {
			got = finds.goneAttr(h)
		} else {
			got = finds.gone(true, h)
		}
		if got != fuse.Status(step.want) {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}
