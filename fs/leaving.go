package fs

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// A removal takes a name from the backing, and a moment later from the node; and the
// rename of a file gives one to another. The kernel lets it go on beside requests that only
// look at the file, or open it: they have the file already, and are not to hear that it has
// no name any more, nor of the file that has it now.

// unlink takes the name at l, in the open directory dir, from v.
func (fs *FS) unlink(dir int, l link, v *victim, flags int) error {
	leaving := &l.parent.more.Load().leaving
	leaving.Add(1)
	defer leaving.Add(-1)
	if err := unix.Unlinkat(dir, l.name, flags); err != nil {
		v.spared()
		return err
	}
	fs.lost(v, l)
	return nil
}

// at calls f with the place of n, and again if it is not there, as f has found, but
// somewhere else by then. f says ENOENT or ESTALE if it does not find n. The caller
// holds FS.ns.
func (fs *FS) at(n *node, f func(place) error) error {
	for {
		parent, name, fd := n.location()
		p, err := fs.back.placeAt(parent, name, fd)
		if err == nil {
			err = f(p)
			p.done()
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESTALE) || fd >= 0 || parent == nil || n.stays(link{parent, name}) {
			return err
		}
	}
}

// look is at for an f that reads of whatever has the name.
func (fs *FS) look(n *node, f func(place) error) error {
	return fs.at(n, func(p place) error {
		err := f(p)
		// In this order: a name that is not about to go, and is n's still, was before.
		if p.name != "" && (p.ref.node.more.Load().leaving.Load() > 0 && !fs.isAt(n, p) || !n.has(link{p.ref.node, p.name})) {
			n.plain.changed() // what was found was of another file perhaps
			return unix.ESTALE
		}
		return err
	})
}

// isAt reports whether the backing has n at p.
func (fs *FS) isAt(n *node, p place) bool {
	var st unix.Statx_t
	return p.stat(&st) == nil && fs.identityOf(&st) == n.key()
}

// stays reports whether n is where l says, once the removals that may have taken it
// from there are over.
func (n *node) stays(l link) bool {
	leaving := &l.parent.more.Load().leaving
	for {
		over := leaving.Load() == 0
		if parent, name, fd := n.location(); fd >= 0 || (link{parent, name}) != l {
			return false
		}
		if over {
			return true
		}
		time.Sleep(20 * time.Microsecond)
	}
}
