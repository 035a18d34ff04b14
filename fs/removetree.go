package fs

import (
	"strconv"

	"golang.org/x/sys/unix"
)

// maxDescent bounds how many descriptors the removal of a tree takes: a user
// can make trees deeper than the daemon may have descriptors.
const maxDescent = 100

// removeTree removes an entry, and what is in it if it is a directory. What is
// deeper than that goes up beside the entry first.
func removeTree(dir int, name string) error {
	r := &removal{top: dir, name: name, todo: []string{name}}
	for len(r.todo) > 0 {
		last := len(r.todo) - 1
		next := r.todo[last]
		r.todo = r.todo[:last]
		if err := r.remove(dir, next, maxDescent); err != nil {
			return err
		}
	}
	return nil
}

// A removal is the state of removeTree.
type removal struct {
	top  int
	name string
	ups  int
	todo []string // below top
}

func (r *removal) remove(dir int, name string, depth int) error {
	err := unix.Unlinkat(dir, name, 0)
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
	var names []string
	if err := eachEntry(fd, func(e dirEntry) bool { names = append(names, e.name); return true }); err != nil {
		return err
	}
	for _, n := range names {
		if err := r.remove(fd, n, depth-1); err != nil && err != unix.ENOENT {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
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
