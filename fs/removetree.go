package fs

import (
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// maxDescent bounds how many descriptors the removal of a tree takes: a user
// can make trees deeper than the daemon may have descriptors.
const maxDescent = 100

// removeTree removes an entry, and what is in it if it is a directory. What is
// deeper than that goes up beside the entry first. The files in it lose the names
// that are known: one that has another name goes on (W3). ns is FS.ns to be taken
// shared, or nil if the caller holds it, or nothing in it is known. What becomes of
// name itself is the caller's to tell.
func (fs *FS) removeTree(dir int, name string, ns sync.Locker) error {
	r := &removal{fs: fs, ns: ns, top: dir, name: name, todo: []string{name}}
	for len(r.todo) > 0 {
		last := len(r.todo) - 1
		next := r.todo[last]
		r.todo = r.todo[:last]
		if err := r.remove(dir, nil, next, maxDescent); err != nil {
			return err
		}
	}
	return nil
}

// A removal is the state of removeTree.
type removal struct {
	fs   *FS
	ns   sync.Locker
	top  int
	name string
	ups  int
	todo []string // below top
}

// remove removes an entry of dir, whose node is parent if it has one.
func (r *removal) remove(dir int, parent *node, name string, depth int) error {
	err := r.unlink(dir, parent, name)
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	if depth == 0 {
		return r.lift(dir, name)
	}
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return err
	}
	self := r.fs.nodes.find(identityOf(&st)) // nil: nothing in it is known
	var names []string
	if err := eachEntry(fd, func(e dirEntry) bool { names = append(names, e.name); return true }); err != nil {
		return err
	}
	for _, n := range names {
		if err := r.remove(fd, self, n, depth-1); err != nil && err != unix.ENOENT {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

// unlink removes an entry that is no directory.
func (r *removal) unlink(dir int, parent *node, name string) error {
	if parent == nil {
		return unix.Unlinkat(dir, name, 0)
	}
	if r.ns != nil {
		r.ns.Lock()
		defer r.ns.Unlock()
	}
	v, err := r.fs.take(dir, name, false)
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(dir, name, 0); err != nil {
		return err
	}
	r.fs.lost(v, link{parent, name})
	if v.st.Nlink > 1 {
		r.fs.notifyAttr(v.node) // it has fewer links
	}
	return nil
}

// lift moves a directory up to the others that are to be removed.
func (r *removal) lift(dir int, name string) error {
	for {
		up := r.name + "-" + strconv.Itoa(r.ups)
		r.ups++
		err := unix.Renameat2(dir, name, r.top, up, unix.RENAME_NOREPLACE)
		if err == nil {
			r.todo = append(r.todo, up)
		}
		if err != unix.EEXIST {
			return err
		}
	}
}
