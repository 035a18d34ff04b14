package fs

import (
	"cmp"
	"errors"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// lostKeys remembers where descriptors were seen that keep locks which another
// daemon gave, and whose close(2) nobody is told of (R2).
type lostKeys struct {
	mu   sync.Mutex
	seen map[uint64]openFile // by token
}

// lostTime is how often somebody who waits for such a lock looks whether it is
// kept still. There is no other way to know.
const lostTime = 200 * time.Millisecond

// An openFile is a descriptor of another process.
type openFile struct {
	proc procid.ID
	fd   string
}

// seenAs returns what a file that is open is to those who have it open: device
// and inode number.
func (fs *FS) seenAs(h *handle) []lockstate.FileID {
	switch {
	case h.cand != nil:
		return []lockstate.FileID{{Dev: fs.mountDev, Ino: privateIno(h.node.id)}}
	case h.as != 0: // the kernel may not have heard yet that it is a file of the backing
		return []lockstate.FileID{{Dev: fs.mountDev, Ino: h.node.shownIno()}, {Dev: fs.mountDev, Ino: privateIno(h.as)}}
	}
	return []lockstate.FileID{{Dev: fs.mountDev, Ino: h.node.shownIno()}}
}

// endIfClosed ends a lock that was kept by a descriptor of a mount that has died, if
// that is closed by now (R2).
func (fs *FS) endIfClosed(l lockstate.Lock) bool {
	if !l.LostKey || fs.stillOpen(l) {
		return false
	}
	fs.table.EndLost(l.Token)
	fs.lostKeys.forget(l.Token)
	return true
}

// stillOpen reports whether the owner of a lock, or another holder, has a file
// open by whose descriptor the lock was taken before the daemon's death. Of
// waiters that have it open, too, none counts.
func (fs *FS) stillOpen(l lockstate.Lock) bool {
	if len(l.Opened) == 0 {
		return true // recorded by a daemon that did not know
	}
	files := l.Opened
	switch ino, err := fs.inoAt(l.Path, l.File); {
	case procid.IsShort(err):
		return true // not known to be closed
	case err == nil:
		files = append(files, lockstate.FileID{Dev: files[0].Dev, Ino: ino})
	}
	k := &fs.lostKeys
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.seen == nil {
		k.seen = make(map[uint64]openFile)
	}
	open := func(pid int, look func() (openFile, error)) bool {
		// What one has open that is in execve(2) is not known, nor that of one who may not
		// be looked at.
		at, unsure := soon(fs.procs, pid, look)
		if at.fd != "" {
			k.seen[l.Token] = at
		}
		return unsure != nil || at.fd != ""
	}
	if at, ok := k.seen[l.Token]; ok && fs.procs.Alive(at.proc) && open(at.proc.Pid, func() (openFile, error) {
		shows, err := fs.shows(at, files)
		if !shows {
			return openFile{}, err
		}
		return at, nil
	}) {
		return true
	}
	delete(k.seen, l.Token)
	if open(l.Owner.Pid, func() (openFile, error) { return fs.findOpen(l.Owner, files) }) {
		return true
	}
	still := false
	err := eachProcess(func(pid int) bool {
		if pid == l.Owner.Pid {
			return true
		}
		p, err := fs.procs.ByPid(pid)
		switch {
		case errors.Is(err, procid.ErrBusy) || procid.IsShort(err):
			still = true // it may be a holder
		case err == nil:
			_, holds, unsure := fs.table.HoldsBy(p, l.Token)
			still = (holds || unsure != nil) && open(pid, func() (openFile, error) { return fs.findOpen(p.ID(), files) })
		}
		return !still
	})
	return still || err != nil
}

// inoAt returns the inode number that the mount shows of a file.
func (fs *FS) inoAt(dir, name string) (uint64, error) {
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	var st unix.Statx_t
	if err := fs.statIn(dir, name, &st); err != nil {
		return 0, err
	}
	return fs.nodes.shownIno(identityOf(&st)), nil
}

// findOpen looks for one of some files among the descriptors of a process. With an error
// and none found it may have one open.
func (fs *FS) findOpen(id procid.ID, files []lockstate.FileID) (found openFile, err error) {
	fds, err := os.ReadDir("/proc/" + strconv.Itoa(id.Pid) + "/fd")
	err = unlessClosed(err)
	for _, fd := range fds {
		at := openFile{id, fd.Name()}
		shows, bad := fs.shows(at, files)
		if shows {
			return at, nil
		}
		err = cmp.Or(err, bad)
	}
	return found, err
}

// unlessClosed returns an error of a look at a descriptor, or nil if it says that this was
// closed, by its process's end perhaps.
func unlessClosed(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// shows reports whether a descriptor is one of a file among some. Neither a dead
// mount nor this one is asked: what the kernel knows is enough.
func (fs *FS) shows(at openFile, files []lockstate.FileID) (bool, error) {
	var fd int
	err := ignoringEINTR(func() (err error) {
		fd, err = unix.Open("/proc/"+strconv.Itoa(at.proc.Pid)+"/fd/"+at.fd, unix.O_PATH|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return false, unlessClosed(err)
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st); err != nil {
		return false, ifShort(err) // another user's FUSE mount, as one, tells nobody else
	}
	id := fs.identityOf(&st)
	for _, f := range files {
		// What has this mount's number now was open on one that is no more.
		if f.Ino == id.ino && f.Dev == uint64(id.dev) && f.Dev != fs.mountDev {
			return true, nil
		}
	}
	return false, nil
}

// forget forgets where the descriptor of a lock was that has ended.
func (k *lostKeys) forget(token uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.seen, token)
}
