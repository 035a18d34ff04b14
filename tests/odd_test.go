//go:build linux

package tests

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// An oddDir is the root of a file system that the test itself serves, as the kernel may
// have none.
type oddDir struct {
	fs.Inode
	files map[string]*oddFile
	fails syscall.Errno // how a listing ends, after all files
}

type oddFile struct{ fs.MemRegularFile }

// Setattr is chmod(2), too.
func (f *oddFile) Setattr(ctx context.Context, fh fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if mode, ok := in.GetMode(); ok {
		f.Attr.Mode = mode
	}
	return f.MemRegularFile.Setattr(ctx, fh, in, out)
}

// newOddDir has files of which each holds its own name.
func newOddDir(names ...string) *oddDir {
	d := &oddDir{files: make(map[string]*oddFile)}
	for _, name := range names {
		f := new(oddFile)
		f.Data, f.Attr.Mode = []byte(name), 0o644
		d.files[name] = f
	}
	return d
}

func (d *oddDir) OnAdd(ctx context.Context) {
	for name, f := range d.files {
		d.AddChild(name, d.NewPersistentInode(ctx, f, fs.StableAttr{}), true)
	}
}

func (d *oddDir) Readdir(context.Context) (fs.DirStream, syscall.Errno) {
	return &oddListing{slices.Sorted(maps.Keys(d.files)), d.fails}, 0
}

// An oddListing is a listing of an oddDir.
type oddListing struct {
	left  []string
	fails syscall.Errno
}

func (l *oddListing) HasNext() bool { return len(l.left) > 0 || l.fails != 0 }
func (l *oddListing) Close()        {}

func (l *oddListing) Next() (e fuse.DirEntry, errno syscall.Errno) {
	if len(l.left) == 0 {
		return e, l.fails
	}
	e = fuse.DirEntry{Name: l.left[0], Mode: unix.S_IFREG}
	l.left = l.left[1:]
	return e, 0
}

// serve mounts d in a static directory, as "odd", and serves that elsewhere.
func (d *oddDir) serve(t *testing.T) *Mount {
	t.Helper()
	need(t, "root", "fuse")
	dir := staticDir(t)
	odd := filepath.Join(dir, "odd")
	openDir(t, odd)
	o := &fs.Options{MountOptions: fuse.MountOptions{AllowOther: true, DirectMount: true, Options: []string{"default_permissions"}}}
	if _, err := fs.Mount(odd, d, o); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { unix.Unmount(odd, unix.MNT_DETACH) })
	return mountDir(t, dir, dir+".mnt")
}

// TestM2LongNames: a name may have more than 255 bytes, as where the file system counts
// characters, and is that of no other file.
func TestM2LongNames(t *testing.T) {
	long := strings.Repeat("ä", 150)
	begins, other := long[:len(long)%256], strings.Repeat("ö", 255)
	m := newOddDir(begins, long, other, other[:255]).serve(t)
	a := agent(t)
	check := func(when string) {
		t.Helper()
		for name, want := range map[string]string{begins: "mode=100644 ", long: "mode=100600 ", other: "mode=100644 ", other[:255]: "mode=100644 "} {
			if got := a.Get("read", m.At("odd", name)); got != name {
				t.Errorf("%s: a file whose name has %d bytes holds %q", when, len(name), got)
			}
			if got := a.Get("stat", m.Back("odd", name)); !strings.HasPrefix(got, want) {
				t.Errorf("%s: a file whose name has %d bytes: %s, want %s", when, len(name), got, want)
			}
		}
	}
	a.must("chmod", m.At("odd", long), "0600")
	check("after chmod(2)")
	m.replace()
	check("after an upgrade")
}

// TestM2ListingFails: who lists a directory that can be read in part gets that part, and
// then the error.
func TestM2ListingFails(t *testing.T) {
	d := newOddDir("a", "b", "c", "d", "e")
	d.fails = unix.EIO
	m := d.serve(t)
	a := agent(t)
	for _, dir := range []string{m.Back("odd"), m.At("odd")} {
		answer, names := a.call([]string{"readdir", dir})
		if answer != "EIO" || names != "a b c d e" {
			t.Errorf("readdir of %s: %s, %q", dir, answer, names)
		}
	}
}

// Setxattr and Getxattr are about one attribute of the owner's own.
func (f *oddFile) Setxattr(ctx context.Context, attr string, data []byte, flags uint32) syscall.Errno {
	return f.mayBy(ctx)
}

func (f *oddFile) Getxattr(ctx context.Context, attr string, dest []byte) (uint32, syscall.Errno) {
	if attr != ownersAttr {
		return 0, unix.ENODATA
	}
	return uint32(copy(dest, "x")), f.mayBy(ctx)
}

func (f *oddFile) Removexattr(ctx context.Context, attr string) syscall.Errno { return f.mayBy(ctx) }

func (f *oddFile) mayBy(ctx context.Context) syscall.Errno {
	if by, ok := fuse.FromContext(ctx); !ok || by.Uid != f.Attr.Uid {
		return unix.EPERM
	}
	return 0
}

const ownersAttr = "system.odd_acl"

// TestM2OwnersAttribute: what only the file system knows who may do is not done with the
// daemon's rights: attributes in "system", of which the kernel asks for none.
func TestM2OwnersAttribute(t *testing.T) {
	m := newOddDir("f").serve(t)
	for _, a := range []*Agent{agent(t), stranger(t)} {
		for _, call := range []string{"setxattr", "getxattr", "removexattr"} {
			want := a.Try(call, m.Back("odd/f"), ownersAttr, "x")
			if got := a.Try(call, m.At("odd/f"), ownersAttr, "x"); got != want {
				t.Errorf("%s: %s, want %s", call, got, want)
			}
		}
	}
}
