package fs

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// The backing has a directory of its own under the name that the control
// directory takes in the mount: no client can reach it. It is there only while
// something is in it:
//
//	.stagefs/trash/N         what is about to be deleted
//	.stagefs/quarantine/N    what was put aside (R7), N being the lock's token
//	.stagefs/made/N          which things are about to be moved to one of these
const (
	trashDir      = "trash"
	quarantineDir = "quarantine"
	madeDir       = "made"
)

// errForeignHidden: the backing has something else there.
var errForeignHidden = errors.New("the static directory has a " + ControlDir + " that is not stagefs's: a directory of the daemon's user, with mode 0700")

// openHidden opens one of the hidden directories. With make it makes it, or
// else returns ENOENT.
func (fs *FS) openHidden(name string, make bool) (int, error) {
	at := fs.back.root
	for _, n := range []string{ControlDir, name} {
		fd, err := -1, error(nil)
		if make {
			err = unix.Mkdirat(at, n, 0o700)
		}
		if err == nil || err == unix.EEXIST {
			fd, err = openAt(at, n, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		}
		if at != fs.back.root {
			unix.Close(at)
		}
		if err != nil {
			if err == unix.ENOTDIR || err == unix.ELOOP {
				err = errForeignHidden
			}
			return -1, err
		}
		var st unix.Statx_t
		if err := statAt(fd, "", &st); err != nil || st.Uid != fs.uid || st.Mode&0o077 != 0 {
			unix.Close(fd)
			return -1, errors.Join(err, errForeignHidden)
		}
		at = fd
	}
	return at, nil
}

// tidyHidden removes the hidden directories that are empty.
func (fs *FS) tidyHidden() {
	fd, err := openAt(fs.back.root, ControlDir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return
	}
	for _, n := range []string{trashDir, quarantineDir, madeDir} {
		unix.Unlinkat(fd, n, unix.AT_REMOVEDIR)
	}
	unix.Close(fd)
	unix.Unlinkat(fs.back.root, ControlDir, unix.AT_REMOVEDIR)
}

// newHidden makes a directory of its own for a token and returns its name.
func newHidden(dir int, token uint64) (name string, fd int, err error) {
	for n := 0; ; n++ {
		name = strconv.FormatUint(token, 10)
		if n > 0 {
			name += "-" + strconv.Itoa(n)
		}
		if err = unix.Mkdirat(dir, name, 0o700); err == unix.EEXIST {
			continue
		}
		if err != nil {
			return "", -1, err
		}
		if fd, err = openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
			unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
		return name, fd, err
	}
}

// removeEmpty removes a directory of the trash or the quarantine that nothing
// was moved to: one with a description at the most. It returns ENOTEMPTY if there
// is anything else. What cannot be looked at stays.
func removeEmpty(dir int, name string) error {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	described, more := false, false
	err = eachEntry(fd, func(e dirEntry) bool {
		described, more = described || e.name == aboutFile, more || e.name != aboutFile
		return !more
	})
	switch {
	case err != nil:
		return err
	case more:
		return unix.ENOTEMPTY
	case described:
		if err := unix.Unlinkat(fd, aboutFile, 0); err != nil {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

// tidyQuarantine forgets what an earlier daemon was about to put in quarantine,
// and did not.
func (fs *FS) tidyQuarantine() {
	fd, err := fs.openHidden(quarantineDir, false)
	if err == unix.ENOENT {
		return
	}
	if err == nil {
		defer unix.Close(fd)
		var names []string
		names, err = entryNames(fd)
		for _, n := range names {
			if e := removeEmpty(fd, n); e != nil && e != unix.ENOTEMPTY && e != unix.ENOTDIR {
				err = errors.Join(err, fmt.Errorf("%s: %w", n, e))
			}
		}
	}
	if err != nil {
		fs.log.Warn("cannot look at all that is in quarantine; it is kept", "err", err)
	}
}

// emptyTrash deletes what is in the trash. It is slow, and nobody waits for it.
func (fs *FS) emptyTrash() {
	fs.trashMu.Lock()
	defer fs.trashMu.Unlock()
	fd, err := fs.openHidden(trashDir, false)
	if err != nil {
		return
	}
	names, err := entryNames(fd)
	for _, n := range names {
		if fs.control.isShutting() {
			break // the next daemon goes on
		}
		fs.hiddenMu.Lock()
		filling := fs.filling[trashDir+"/"+n]
		fs.hiddenMu.Unlock()
		if filling {
			continue // who does that empties the trash afterwards
		}
		if e := fs.removeTree(fd, n, false); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", n, e))
		}
	}
	unix.Close(fd)
	if err != nil {
		fs.log.Warn("cannot empty the trash", "err", err)
	}
	fs.hiddenMu.Lock()
	fs.tidyHidden()
	fs.hiddenMu.Unlock()
}
