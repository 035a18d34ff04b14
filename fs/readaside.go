package fs

import "golang.org/x/sys/unix"

// keepReadable gives each file that somebody has open in what is about to be put aside, or
// is that itself, a descriptor: no name will lead to it any more, and whoever has it open or
// mapped goes on reading (C5). The caller holds FS.ns alone. top is nil if the kernel does
// not know it.
func (fs *FS) keepReadable(top *node) {
	switch {
	case top == nil:
	case top.isFile():
		fs.keepOpen(top, false)
	case top.isDir():
		for n := range fs.nodes.files.all() {
			if n.isFile() && n.isBeneath(top) {
				fs.keepOpen(n, true)
			}
		}
	}
}

// keepOpen opens a file to be read, if there are handles of it. below says that it is in the
// directory that is put aside: whoever goes by its name hears of that first.
func (fs *FS) keepOpen(n *node, below bool) {
	f := n.lockKnownFile()
	if f == nil {
		return
	}
	defer n.unlockFile(f)
	if f.handles() == 0 {
		return
	}
	f.aside = f.aside || below
	if f.fd >= 0 {
		return
	}
	fd, err := fs.openNode(n, unix.O_RDONLY|unix.O_NONBLOCK)
	if err == nil {
		fs.keepLocked(f, fd)
	}
}

// isBeneath reports whether a name of the file n that is known is in the directory top, at
// any depth.
func (n *node) isBeneath(top *node) (is bool) {
	n.everyName(func(in *node, _ string) bool {
		for in != nil && in != top {
			in = in.parent
		}
		is = in == top
		return !is
	})
	return is
}

// showAside takes note that no name leads to a file that was put aside, in the kernel either.
func (n *node) showAside() {
	if f := n.lockKnownFile(); f != nil {
		f.aside = true
		n.unlockFile(f)
	}
}

// statAside returns the attributes of a file that was put aside to who has it open, or
// ESTALE: the kernel looks up the name again then, if it goes by that.
func (n *node) statAside(st *unix.Statx_t) error {
	f := n.lockKnownFile()
	if f == nil {
		return unix.ESTALE
	}
	defer n.unlockFile(f)
	if f.fd < 0 || !f.aside {
		return unix.ESTALE
	}
	return statAt(f.fd, "", st)
}
