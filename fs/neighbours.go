package fs

import (
	"slices"

	"golang.org/x/sys/unix"
)

// neighbours finds many directories of the backing, one after the other. It keeps
// the one open that the last of them is in: the next one often is there too. It is
// for a while in which nobody changes the backing.
type neighbours struct {
	root  int
	names []string // of the directory that is open
	fd    int      // 0: none is
}

// in opens the directory that the last of some names is in; it is not the
// caller's to close, and stays open until the next call.
func (d *neighbours) in(names []string) (fd int, last string, err error) {
	above, last := names[:len(names)-1], names[len(names)-1]
	if len(above) == 0 {
		return d.root, last, nil
	}
	if d.fd > 0 && slices.Equal(above, d.names) {
		return d.fd, last, nil
	}
	d.close()
	if fd, err = openBeneath(d.root, above, unix.O_PATH); err != nil {
		return -1, "", err
	}
	d.names, d.fd = above, fd
	return fd, last, nil
}

// stat returns the attributes of a directory other than the root.
func (d *neighbours) stat(path string) (st unix.Statx_t, err error) {
	fd, name, err := d.in(split(path))
	if err != nil {
		return st, err
	}
	err = statAt(fd, name, &st)
	if err == nil && !isDirectory(&st) {
		err = unix.ENOTDIR
	}
	return st, err
}

// open returns a descriptor with O_PATH of a directory other than the root.
func (d *neighbours) open(path string) (int, error) {
	fd, name, err := d.in(split(path))
	if err != nil {
		return -1, err
	}
	return openAt(fd, name, unix.O_PATH|unix.O_DIRECTORY, 0)
}

func (d *neighbours) close() {
	if d.fd > 0 {
		unix.Close(d.fd)
	}
	d.names, d.fd = nil, 0
}
