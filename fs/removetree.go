package fs

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxDescent bounds how many descriptors the removal of a tree takes: a user
// can make trees deeper than the daemon may have descriptors.
const maxDescent = 100

// removeTree removes an entry, and what is in it if it is a directory. What is
// deeper than maxDescent goes up beside the entry first. The files in it lose the
// names that are known: one that has another name goes on (W3). What somebody has
// mounted in there stays, with what it is in; EBUSY tells where. So does what cannot be
// removed, of which the error tells the first. held says that the caller holds FS.ns. What
// becomes of name itself is the caller's to tell.
func (fs *FS) removeTree(dir int, name string, held bool) error {
	r := &removal{fs: fs, held: held, top: dir, name: name, todo: []string{name}}
	for len(r.todo) > 0 {
		last := len(r.todo) - 1
		next := r.todo[last]
		r.todo = r.todo[:last]
		_ = r.remove(dir, nil, next, next, maxDescent)
	}
	if r.first != nil {
		return r.first
	}
	if len(r.mounts) > 0 {
		return fmt.Errorf("something is mounted at %s: %w", strings.Join(r.mounts, ", "), unix.EBUSY)
	}
	return nil
}

// A removal is the state of removeTree.
type removal struct {
	fs   *FS
	held bool // FS.ns is
	top  int
	name string
	ups  int
	todo []string // below top

	mounts []string // paths below top
	first  error    // what could not be removed first
}

// remove removes an entry of dir, whose node is parent if it has one. path leads to
// it from top. It takes note of an error.
func (r *removal) remove(dir int, parent *node, name, path string, depth int) error {
	err := r.unlink(dir, parent, name)
	if err == unix.EISDIR || err == unix.EPERM {
		if bad := r.removeDir(dir, name, path, depth); bad != unix.ENOTDIR {
			err = bad
		}
	}
	switch {
	case err == unix.EBUSY || err == unix.EXDEV:
		r.mounts = append(r.mounts, plain(path))
		return nil
	case err == nil || r.first != nil || err == unix.ENOENT && path != r.name:
	case path == r.name:
		r.first = err
	default:
		r.first = fmt.Errorf("%s: %w", plain(path), err)
	}
	return err
}

func (r *removal) removeDir(dir int, name, path string, depth int) error {
	if depth == 0 {
		return r.lift(dir, name)
	}
	var fd int
	err := r.fs.back.asOwner(func() (err error) { fd, err = openHere(dir, name, 0); return err }, place{fd: dir, name: name})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return err
	}
	self := r.fs.nodes.find(r.fs.identityOf(&st)) // nil: nothing in it is known
	names, err := entryNames(fd)
	if err != nil {
		return err
	}
	before := len(r.mounts)
	for _, n := range names {
		if bad := r.remove(fd, self, n, path+"/"+n, depth-1); bad != nil && bad != unix.ENOENT {
			err = bad
		}
	}
	if err != nil || len(r.mounts) > before {
		return err
	}
	return r.fs.back.unlink(dir, name, unix.AT_REMOVEDIR)
}

// openHere opens a directory to read it, with EXDEV if something is mounted there:
// that may be another's, and what nobody answers for. flags are further ones.
func openHere(dir int, name string, flags uint64) (int, error) {
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Openat2(dir, name, &unix.OpenHow{
			Flags:   flags | unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_NO_XDEV,
		})
		return err
	})
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// unlink removes an entry that is no directory.
func (r *removal) unlink(dir int, parent *node, name string) error {
	if parent == nil {
		return r.fs.back.unlink(dir, name, 0)
	}
	if !r.held {
		r.fs.ns.RLock()
		defer r.fs.ns.RUnlock()
	}
	v, err := r.fs.take(dir, name, false)
	if err != nil {
		return err
	}
	if err := r.fs.back.unlink(dir, name, 0); err != nil {
		return err
	}
	r.fs.lostUntold(v, link{parent, name})
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
		err := r.fs.back.move(dir, name, r.top, up)
		if err == nil {
			r.todo = append(r.todo, up)
		}
		if err != unix.EEXIST {
			return err
		}
	}
}
