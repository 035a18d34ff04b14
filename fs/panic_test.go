package fs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// TestPanic: a request that panics, which the transport answers with EIO, leaves
// nothing behind that others wait for: the next one takes the directory.
func TestPanic(t *testing.T) {
	self := func(n uint64) fuse.InHeader {
		h := fuse.InHeader{NodeId: n}
		h.Pid = uint32(os.Getpid())
		return h
	}
	create := func(name string) func(*FS, uint64) {
		return func(fs *FS, d uint64) {
			fs.Create(nil, &fuse.CreateIn{InHeader: self(d), Flags: unix.O_WRONLY | unix.O_CREAT, Mode: 0o644}, name, nil)
		}
	}
	attempt := func(exclusive bool) func(*FS, uint64) {
		return func(fs *FS, d uint64) {
			h, n := self(d), fs.nodes.get(d)
			r := &request{fs: fs, header: &h, op: "test", parent: n}
			fs.attempt(r, exclusive, func() error {
				if _, err := r.acquire(lockstate.Request{Dir: n.dir, Kind: lockstate.Explicit, Protocol: "create", File: "devserver"}); err != nil {
					return err
				}
				for range 2 {
					if _, err := r.admit(lockstate.Change{Dirs: []*lockstate.Dir{n.dir}}); err != nil {
						return err
					}
				}
				panic("as it happens")
			})
		}
	}
	for name, do := range map[string]func(*FS, uint64){
		"lock file": create("devserver"),
		"file":      create("new"),
		"open": func(fs *FS, d uint64) {
			fs.Open(nil, &fuse.OpenIn{InHeader: self(lookedUp(t, fs, d, "x")), Flags: unix.O_WRONLY}, nil)
		},
		"shared":    attempt(false),
		"exclusive": attempt(true),
	} {
		t.Run(name, func(t *testing.T) {
			fs, top, d := unmounted(t)
			func() {
				defer func() {
					if recover() == nil {
						t.Error("it did not panic")
					}
				}()
				do(fs, d)
			}()
			if !fs.ns.TryLock() {
				t.Fatal("names are locked")
			}
			fs.ns.Unlock()
			if n := fs.table.Len(); n != 0 {
				t.Errorf("%d locks are left, want none", n)
			}
			if n := fs.handles.len() + len(fs.handles.writers()); n != 0 {
				t.Errorf("%d handles are left, want none", n)
			}
			os.Remove(filepath.Join(top, "d", "devserver"))
			now := make(chan struct{})
			close(now)
			g, err := fs.table.Acquire(now, lockstate.Request{
				Process: procid.Fake(procid.ID{Pid: 1 << 30, Start: 1}, nil), Dir: fs.nodes.get(d).dir, Kind: lockstate.Explicit, File: "devserver",
			})
			if err != nil {
				t.Fatalf("another process's Acquire = %v, want nil", err)
			}
			g.Abort()
		})
	}
}
