package fs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// errOpen ends a search for what is open.
var errOpen = errors.New("open for writing")

// detachNodes takes what is about to come back away from those who have it open
// or are in it since before it was put aside: no lock table knows of them. It
// returns a file that somebody may write to, or "", and the lock files in it. The caller
// holds FS.ns alone.
func (fs *FS) detachNodes(dir int, name, as string) (open string, lockFiles []string, err error) {
	d, err := descend(dir)
	if err != nil {
		return "", nil, err
	}
	defer d.close()
	var nodes []*node
	err = d.each(name, func(entry string, st *unix.Statx_t) error {
		n := fs.nodes.find(fs.identityOf(st))
		if n != nil {
			nodes = append(nodes, n)
		}
		if uint32(st.Mode)&unix.S_IFMT == unix.S_IFREG &&
			(n != nil && len(n.writers()) > 0 || openForWriting(d.fd, entry)) {
			open = as + d.path(entry)[len(name):]
			return errOpen
		}
		if len(d.above) > 0 && fs.names.lock.has(entry) {
			lockFiles = append(lockFiles, as+d.path(entry)[len(name):])
		}
		return nil
	})
	if open != "" {
		return open, nil, nil
	}
	if err != nil {
		return "", nil, err
	}
	var doomed []int
	for _, n := range nodes {
		fs.nodes.disown(n)
		if n.isDir() {
			doomed = fs.back.dirs.drop(n, doomed)
		}
	}
	drop(doomed...)
	return "", lockFiles, nil
}

// A merging moves a tree into another one. After an error it is of no use.
type merging struct {
	back     *backing
	from, to *descent
}

func newMerging(back *backing, from, to int) (*merging, error) {
	a, err := descend(from)
	if err != nil {
		return nil, err
	}
	b, err := descend(to)
	if err != nil {
		a.close()
		return nil, err
	}
	return &merging{back, a, b}, nil
}

func (m *merging) close() {
	m.from.close()
	m.to.close()
}

// conflict returns what is in the way of merging an entry into another place.
func (m *merging) conflict(name, as string) (found string, err error) {
	var src, dst unix.Statx_t
	if err := statAt(m.from.fd, name, &src); err != nil {
		return "", err
	}
	switch err := statAt(m.to.fd, as, &dst); {
	case err == unix.ENOENT:
		return "", nil
	case err != nil:
		return "", err
	}
	if (src.Mode&dst.Mode)&unix.S_IFMT != unix.S_IFDIR || src.Mode&unix.S_IFMT != dst.Mode&unix.S_IFMT {
		return m.to.path(as), nil
	}
	err = m.both(name, as, func(entry string) (err error) {
		if found == "" {
			found, err = m.conflict(entry, entry)
		}
		return err
	})
	return found, err
}

// merge moves an entry to another place; directories that are there already get
// what is in it.
func (m *merging) merge(name, as string) error {
	err := m.back.move(m.from.fd, name, m.to.fd, as)
	if err != unix.EEXIST {
		return err
	}
	if err := m.both(name, as, func(entry string) error { return m.merge(entry, entry) }); err != nil {
		return err
	}
	return m.back.unlink(m.from.fd, name, unix.AT_REMOVEDIR)
}

// both goes down into two directories, calls f for each entry of the first, and
// comes back.
func (m *merging) both(name, as string, f func(entry string) error) error {
	if err := errors.Join(m.from.down(name), m.to.down(as)); err != nil {
		return err
	}
	names, err := entryNames(m.from.fd)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := f(n); err != nil {
			return err
		}
	}
	return errors.Join(m.from.up(), m.to.up())
}
