package fs

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// TestSettle: a private file has one node with the file that it becomes, whoever
// saw that first, and keeps it for as long as the kernel knows it by its number.
func TestSettle(t *testing.T) {
	for _, seen := range []bool{false, true} {
		table := lockstate.New(lockstate.Options{})
		tab := newNodeTable(table)
		tab.drop = func(n *node, doomed []int) []int { return doomed }
		tab.shared = func(*node, string) bool { return false }
		tab.isLockName = func(*node, string) bool { return false }
		root := tab.newRoot(identity{dev: 1, ino: 1}, table.Root(), -1)
		st := unix.Statx_t{Mode: unix.S_IFREG, Nlink: 1, Ino: 7, Dev_minor: 1}
		private := tab.anonymous(&unix.Statx_t{Mode: unix.S_IFREG}, -1, new(candidate))
		want := private
		if seen {
			want, _ = tab.see(root, "x", &st, tab.removalsOf(root), 0)
		}
		if n := tab.settle(private, &st, root, []string{"x"}, tab.removalsOf(root)+1, 0); n != nil {
			t.Errorf("seen %v: settled though a name had gone", seen)
		}
		if n := tab.settle(private, &st, root, []string{"x", "y"}, tab.removalsOf(root), 0); n != want {
			t.Errorf("seen %v: settled as %p, want %p", seen, n, want)
		}
		if n, _ := tab.see(root, "y", &st, tab.removalsOf(root), 0); n != want {
			t.Errorf("seen %v: found %p, want %p", seen, n, want)
		}
		if n := tab.get(private.id); n != want || !n.has(link{root, "x"}) || !n.has(link{root, "y"}) {
			t.Errorf("seen %v: its number leads to %p, want %p with both names", seen, n, want)
		}
		tab.forget(want.id, 2)
		if n := tab.find(tab.identityOf(&st)); seen && n != want {
			t.Errorf("the node went while the private file's number leads to it")
		}
		tab.forget(private.id, 1)
		if n := tab.len(); n != 1 || len(tab.settled) != 0 {
			t.Errorf("seen %v: %d nodes and %d numbers left, want the root", seen, n, len(tab.settled))
		}
	}
}
