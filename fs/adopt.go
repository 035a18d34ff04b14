package fs

import (
	"cmp"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// What a file that passes was opened or mapped for goes on after the death of
// the daemon: the kernel needs it no more. So a daemon whose predecessor died
// looks, before it grants anything, which files are open for writing, where the
// earlier one has recorded that some are (hot.go). They linger as handles of nobody
// until nobody has them open (W3, R8).

// adopt takes over what an earlier daemon left open in some places. The mount
// does not answer yet. The error is why it can't look, for want of descriptors or memory:
// another daemon may.
func (fs *FS) adopt(places []hotPlace) error {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	for _, p := range places {
		for dirs := []string{string(p.Dir)}; len(dirs) > 0; {
			dir := dirs[len(dirs)-1]
			below, err := fs.adoptDir(dir)
			if procid.IsShort(err) {
				return fmt.Errorf("%s: %s: %w", dir, cannotLook, err)
			}
			if err != nil && !isGone(err) {
				fs.log.Warn(cannotLook, "dir", dir, "err", err)
			}
			if dirs = dirs[:len(dirs)-1]; p.Deep {
				dirs = append(dirs, below...)
			}
		}
	}
	return nil
}

const cannotLook = "cannot look for files that are still open for writing"

// adoptDir takes over what is open in one directory and returns those in it.
func (fs *FS) adoptDir(dir string) (dirs []string, err error) {
	fd, err := fs.openUnread(dir)
	if err != nil {
		return nil, err
	}
	var open []string
	err = eachEntry(fd, func(e dirEntry) bool {
		switch e.typeIn(fd) {
		case unix.DT_DIR:
			dirs = append(dirs, join(dir, e.name))
		case unix.DT_REG, unix.DT_UNKNOWN:
			if openForWriting(fd, e.name) {
				open = append(open, e.name)
			}
		}
		return true
	})
	unix.Close(fd)
	for _, name := range open {
		about := []any{"path", join(dir, name)}
		if bad := fs.adoptFile(join(dir, name)); bad != nil {
			about = append(about, "err", bad)
			err = cmp.Or(ifShort(bad), err)
		}
		fs.log.Warn("a file is still open for writing by the mount of a daemon that died", about...)
	}
	return dirs, err
}

// openForWriting reports whether anybody has a file below dir open for writing, or may
// have: only of its own files a process without CAP_LEASE finds out, and for want of
// descriptors or memory nobody does. What fails otherwise nobody has open: a file that
// somebody has is in memory, with its key if it is encrypted (fscrypt).
func openForWriting(dir int, name string) bool {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err == unix.EPERM { // another user's, without CAP_FOWNER
		fd, err = openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return procid.IsShort(err)
	}
	defer unix.Close(fd)
	err = readLease(fd)
	return err == unix.EAGAIN || err == unix.EACCES
}

func (fs *FS) adoptFile(path string) (err error) {
	if e := fs.nodeAt(path, func(n *node) { err = fs.adoptNode(n) }); e != nil {
		return e
	}
	return err
}

func (fs *FS) adoptNode(n *node) error {
	dirs, name := n.covering()
	lock, err := fs.table.OpenHandle(lockstate.Change{Dirs: dirs, Quiet: true, Force: true}, name)
	if err != nil {
		return err
	}
	h := &handle{node: n, flags: unix.O_RDWR, mode: ioPassing, lock: lock}
	h.released.Store(1) // long ago
	n.addWriter(lock)
	fs.handles.addWriter(h)
	f := n.lockFile()
	defer n.unlockFile(f)
	f.lingering = append(f.lingering, h)
	fs.heatLocked(n, f)
	fs.keepLookingLocked(n, f)
	return nil
}
