package fs

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// unmounted makes a file system that nobody has mounted, over a directory d with a
// file x, and opens d.
func unmounted(t *testing.T) (fs *FS, top string, d uint64) {
	top = t.TempDir()
	if err := os.Mkdir(filepath.Join(top, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(top, "d", "x"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	procs, err := procid.NewResolver(procid.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { procs.Close() })
	o := Options{Dir: top}
	o.setDefaults()
	if fs, err = newFS(o, root, lockstate.New(lockstate.Options{}), procs); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		fs.close()
		unix.Close(root)
	})
	d = lookedUp(t, fs, fuse.FUSE_ROOT_ID, "d")
	if lookedUp(t, fs, d, "x") == 0 {
		t.Fatal("there is no x")
	}
	return fs, top, d
}

// lookedUp returns the number of what is called so; 0: nothing is.
func lookedUp(t *testing.T, fs *FS, parent uint64, name string) uint64 {
	var out fuse.EntryOut
	h := fuse.InHeader{NodeId: parent}
	h.Pid = uint32(os.Getpid())
	if status := fs.Lookup(nil, &h, name, &out); status != fuse.OK {
		t.Errorf("look up %s: %v", name, status)
	}
	return out.NodeId
}

// TestBesideRename: who asks for a name that is not there, or for the attributes of
// an open directory, does not wait for somebody else's rename.
func TestBesideRename(t *testing.T) {
	fs, _, d := unmounted(t)
	fs.ns.Lock()
	fs.renames.Add(1)
	done := make(chan bool)
	go func() {
		defer close(done)
		if n := lookedUp(t, fs, d, "missing"); n != 0 {
			t.Errorf("missing is node %d", n)
		}
		in := fuse.GetAttrIn{InHeader: fuse.InHeader{NodeId: d}}
		var out fuse.AttrOut
		if status := fs.GetAttr(nil, &in, &out); status != fuse.OK || out.Mode&unix.S_IFMT != unix.S_IFDIR {
			t.Errorf("attributes of an open directory: %v, mode %o", status, out.Mode)
		}
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("it waits")
	}
	if fs.lacks(fs.nodes.get(d), "x") {
		t.Error("x is there")
	}
	fs.renames.Add(1)
	if fs.lacks(fs.nodes.get(d), "missing") {
		t.Error("something is known not to be there while somebody takes several steps")
	}
	fs.ns.Unlock()
	<-done
}

// TestLookupRace: what is replaced all the time is always there, and what is not there
// never is.
func TestLookupRace(t *testing.T) {
	fs, top, d := unmounted(t)
	var over atomic.Bool
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for !over.Load() {
				if lookedUp(t, fs, d, "x") == 0 {
					t.Error("x is not there")
					return
				}
				if n := lookedUp(t, fs, d, "missing"); n != 0 {
					t.Errorf("missing is node %d", n)
					return
				}
			}
		})
	}
	node := fs.nodes.get(d)
	for i := range 1000 {
		name := fmt.Sprint("new", i)
		if err := os.WriteFile(filepath.Join(top, "d", name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if lookedUp(t, fs, d, name) == 0 {
			t.Fatalf("%s is not there", name)
		}
		m := &renaming{
			r:    &request{fs: fs, header: &fuse.InHeader{}, op: "rename"},
			from: link{node, name}, to: link{node, "x"}, alone: true,
		}
		if err := fs.locked(true, func() error { return fs.rename(m) }); err != nil {
			t.Fatal(err)
		}
		if lookedUp(t, fs, d, name) != 0 {
			t.Fatalf("%s is still there", name)
		}
	}
	over.Store(true)
	all.Wait()
}
