package fs

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// TestAwaitRemoved: who asks for the room that is left waits for what the kernel drops,
// which is neither what somebody has open nor what it does not know to be gone.
func TestAwaitRemoved(t *testing.T) {
	tab, root := nodesOnly()
	removed := func(ino uint64, told bool) *node {
		n := tab.plainFile(root, ino)
		fd, err := unix.Open("/", unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if !n.keep(fd, false, told) {
			t.Fatalf("node %d is not kept", ino)
		}
		return n
	}
	asked := 0
	await := func(open ...*node) bool {
		return tab.awaitRemoved(func() int32 {
			asked++
			set := make(map[*node]struct{})
			for _, n := range open {
				set[n] = struct{}{}
			}
			return tab.countAwaited(set)
		})
	}

	untold := removed(7, false)
	if await() {
		t.Error("waited for what the kernel does not know to be gone")
	}
	opened := removed(8, true)
	if n := tab.countAwaited(map[*node]struct{}{untold: {}, opened: {}, root: {}}); n != 1 {
		t.Errorf("countAwaited = %d, want the one of which the kernel was told", n)
	}
	if !await(untold, opened) || asked != 1 {
		t.Errorf("did not wait for what is open, or asked %d times for it", asked)
	}
	if await(untold, opened) {
		t.Error("waited a second time for what is open")
	}
	if n := tab.countAwaited(map[*node]struct{}{opened: {}}); n != 0 {
		t.Errorf("countAwaited = %d, want none that was waited for", n)
	}
}

// TestVanishedRace: whoever looks at a lock file just when its owner removes it does not
// take it for one that the daemon has removed.
func TestVanishedRace(t *testing.T) {
	tab, root := nodesOnly()
	for ino := range uint64(2000) {
		n := tab.plainFile(root, 2+ino)
		n.assume()
		over := make(chan bool)
		go func() {
			n.keep(1<<20, false, true) // no descriptor: it is not used
			n.relink(link{root, "x"}, link{})
			close(over)
		}()
		for done := false; !done; {
			select {
			case <-over:
				done = true
			default:
			}
			if n.vanished() {
				t.Fatalf("the file %d passes for one that the daemon has removed", ino)
			}
		}
	}
}

// nodesOnly returns a table with a root, of no file system.
func nodesOnly() (*nodeTable, *node) {
	table := lockstate.New(lockstate.Options{})
	tab := newNodeTable(table)
	return tab, tab.newRoot(identity{dev: 1, ino: 1}, table.Root(), -1)
}

// plainFile adds a file called x.
func (t *nodeTable) plainFile(parent *node, ino uint64) *node {
	st := unix.Statx_t{Mode: unix.S_IFREG, Nlink: 1, Ino: ino, Dev_minor: 1}
	n, _ := t.see(parent, "x", &st, t.removalsOf(parent), 0)
	return n
}
