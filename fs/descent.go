package fs

import (
	"strings"

	"golang.org/x/sys/unix"
)

// A descent is a place in a tree of the backing that nobody else changes, with
// one descriptor however deep it is: a user can make trees deeper than the daemon
// may have descriptors.
type descent struct {
	fd     int
	above  []step // from the top down
	top    int    // the caller's
	reborn bool   // see isReborn
}

// A step leads from a directory to one in it.
type step struct {
	from identity
	name string
}

// descend begins at an open directory, which stays the caller's, and open.
func descend(dir int) (*descent, error) {
	fd, err := dup(dir)
	if err != nil {
		return nil, err
	}
	return &descent{fd: fd, top: dir, reborn: isReborn(dir)}, nil
}

func (d *descent) close() { unix.Close(d.fd) }

// down goes to a directory in this one.
func (d *descent) down(name string) error {
	var st unix.Statx_t
	if err := statAt(d.fd, "", &st); err != nil {
		return err
	}
	fd, err := openAt(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	unix.Close(d.fd)
	d.fd = fd
	d.above = append(d.above, step{identityIn(d.reborn, &st), name})
	return nil
}

// up goes back. It fails if the directory was moved elsewhere past the mount
// (M3).
func (d *descent) up() error {
	last := len(d.above) - 1
	fd, err := d.parent(last)
	if err != nil {
		return err
	}
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil || identityIn(d.reborn, &st) != d.above[last].from {
		unix.Close(fd)
		return unix.ESTALE
	}
	unix.Close(d.fd)
	d.fd = fd
	d.above = d.above[:last]
	return nil
}

// parent opens the directory above, which is that many below the top. The top may
// be what the mount is over: ".." would lead into the mount (M4).
func (d *descent) parent(below int) (int, error) {
	if below == 0 {
		return dup(d.top)
	}
	return openAt(d.fd, "..", unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

// path is where an entry of this directory is in the tree.
func (d *descent) path(entry string) string {
	var names []string
	for _, s := range d.above {
		names = append(names, s.name)
	}
	return strings.Join(append(names, entry), "/")
}

// each calls f with an entry and all that is beneath it, until it fails: then d
// is no place any more.
func (d *descent) each(name string, f func(name string, st *unix.Statx_t) error) error {
	var st unix.Statx_t
	if err := statAt(d.fd, name, &st); err != nil {
		return err
	}
	if err := f(name, &st); err != nil || !isDirectory(&st) {
		return err
	}
	if err := d.down(name); err != nil {
		return err
	}
	names, err := entryNames(d.fd)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := d.each(n, f); err != nil {
			return err
		}
	}
	return d.up()
}
