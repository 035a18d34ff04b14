//go:build linux

package tests

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A foldDir is a directory of a file system to which names that differ in case alone are the
// same, which the test itself serves, as the kernel may have none.
type foldDir struct {
	fs.Inode
	mu   *sync.Mutex // of all of them
	kids map[string]foldEntry
}

type foldEntry struct {
	name string
	dir  *foldDir
}

func (d *foldDir) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode = 0o777
	return 0
}

func (d *foldDir) Lookup(_ context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.kids[strings.ToLower(name)]
	if !ok {
		return nil, unix.ENOENT
	}
	out.Mode = 0o777
	return e.dir.EmbeddedInode(), 0
}

func (d *foldDir) Mkdir(ctx context.Context, name string, _ uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, there := d.kids[strings.ToLower(name)]; there {
		return nil, unix.EEXIST
	}
	kid := &foldDir{mu: d.mu, kids: make(map[string]foldEntry)}
	inode := d.NewPersistentInode(ctx, kid, fs.StableAttr{Mode: unix.S_IFDIR})
	d.kids[strings.ToLower(name)] = foldEntry{name, kid}
	out.Mode = 0o777
	return inode, 0
}

func (d *foldDir) Rmdir(_ context.Context, name string) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.kids[strings.ToLower(name)]
	if len(e.dir.kids) > 0 {
		return unix.ENOTEMPTY
	}
	delete(d.kids, strings.ToLower(name))
	return 0
}

func (d *foldDir) Rename(_ context.Context, name string, to fs.InodeEmbedder, newName string, _ uint32) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.kids[strings.ToLower(name)]
	delete(d.kids, strings.ToLower(name))
	to.(*foldDir).kids[strings.ToLower(newName)] = foldEntry{newName, e.dir}
	return 0
}

func (d *foldDir) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []fuse.DirEntry
	for _, e := range d.kids {
		all = append(all, fuse.DirEntry{Name: e.name, Mode: unix.S_IFDIR})
	}
	return fs.NewListDirStream(all), 0
}

// newFolding makes a static directory with such a file system mounted within, as "odd".
func newFolding(t *testing.T) (dir string) {
	t.Helper()
	need(t, "root", "fuse")
	dir = staticDir(t)
	odd := filepath.Join(dir, "odd")
	openDir(t, odd)
	o := &fs.Options{MountOptions: fuse.MountOptions{AllowOther: true, DirectMount: true, Options: []string{"default_permissions"}}}
	if _, err := fs.Mount(odd, &foldDir{mu: new(sync.Mutex), kids: make(map[string]foldEntry)}, o); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { unix.Unmount(odd, unix.MNT_DETACH) })
	return dir
}

// TestC1OtherCase: where names that differ in case alone are the same directory's, nobody
// removes or renames by another one what somebody else holds, while it is known.
func TestC1OtherCase(t *testing.T) {
	dir := newFolding(t)
	m := mountDir(t, dir, dir+".mnt")
	a, b := agent(t), agent(t)
	a.must("mkdir", m.At("odd/Held"))
	b.must("mkdir", m.At("odd/mine"))
	for _, call := range [][]string{
		{"mkdir", m.At("odd/HELD/sub")},
		{"rmdir", m.At("odd/held")},
		{"rename", m.At("odd/hELD"), m.At("odd/taken")},
		{"rename", m.At("odd/mine"), m.At("odd/heLD")},
	} {
		b.want("EBUSY", call...)
	}
	if row, ok := m.Locks()["odd/Held"]; !ok || row.Pid != a.Pid {
		t.Errorf("the lock is %+v, want one of process %d", row, a.Pid)
	}
	a.must("rename", m.At("odd/HELD"), m.At("odd/moved"))
	if row, ok := m.Locks()["odd/moved"]; !ok || row.Pid != a.Pid {
		t.Errorf("the lock after a rename is %+v, want one of process %d", row, a.Pid)
	}
	b.want("EBUSY", "rmdir", m.At("odd/Moved"))
	a.must("rmdir", m.At("odd/MOVED"))
	if rows := m.Locks(); len(rows) != 1 {
		t.Errorf("locks %+v, want none of what was removed", rows)
	}
}

// TestM5OtherCase: a warning names what is mounted within and takes names that differ in case
// alone for the same, and --strict refuses it; an ordinary directory is not taken for such.
func TestM5OtherCase(t *testing.T) {
	plain := staticDir(t)
	openFile(t, filepath.Join(plain, "Readme"), "x")
	mustDo(t, os.Link(filepath.Join(plain, "Readme"), filepath.Join(plain, "rEADME")))
	dir := newFolding(t)
	mustDo(t, os.Mkdir(filepath.Join(dir, "odd/Some"), 0o777))
	const says = "that differ in case alone"
	if r := run(t, stagefsBin(), "doctor", plain); strings.Contains(r.Out, says) {
		t.Errorf("doctor: %v", r)
	}
	r := run(t, "timeout", "8", stagefsBin(), "mount", "--strict", "--state-dir", filepath.Join(tempDir(t), "state"), dir)
	if r.Status != 75 || !strings.Contains(r.Err, "names in "+filepath.Join(dir, "odd")+" "+says) {
		t.Errorf("mount --strict: %v", r)
	}
	for at, want := range map[string]bool{dir: true, plain: false} {
		m := newMount(t, at, at+".mnt")
		m.serve()
		if got := strings.Contains(m.Log(), "names in "+filepath.Join(at, "odd")+" "+says); got != want {
			t.Errorf("%s: warned: %t, want %t", at, got, want)
		}
	}
}
