package fs

import (
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// victim is an entry that is about to lose its name.
type victim struct {
	st   unix.Statx_t
	node *node // nil: the kernel does not know it
	fd   int   // stands for the node afterwards, if it was its last name
}

// take looks at the entry called name below dir. If it is to lose its name, the
// caller calls lost when that is gone, or spared when it is not.
func (fs *FS) take(dir int, name string, lose bool) (*victim, error) {
	v := &victim{fd: -1}
	if err := statAt(dir, name, &v.st); err != nil {
		return nil, err
	}
	v.node = fs.nodes.find(fs.identityOf(&v.st))
	if lose && (v.node == nil || v.st.Nlink <= 1 || v.node.isDir() || v.node.known() <= 1) {
		// Somebody may have it open, or be in it: the kernel goes on
		// asking for it.
		fd, err := openAt(dir, name, unix.O_PATH, 0)
		for began := time.Now(); err == unix.EMFILE && time.Since(began) < keptTime; {
			time.Sleep(time.Millisecond)
			fd, err = openAt(dir, name, unix.O_PATH, 0)
		}
		if err != nil {
			return nil, err
		}
		v.fd = fd
	}
	return v, nil
}

// keptTime is how long a removal waits for a descriptor: others that were
// removed may have them until the kernel forgets them, and can be removed faster
// than the backing gives back what they held.
const keptTime = time.Second

// bigBlocks, of 512 bytes, are what somebody may miss who has removed a file to
// make room: a megabyte.
const bigBlocks = 1 << 11

// spared gives back what stands for the node. nil is none.
func (v *victim) spared() {
	if v != nil {
		drop(v.fd)
	}
}

// lost takes note that the name at l is gone, as the kernel has asked for.
func (fs *FS) lost(v *victim, l link) { fs.nameGone(v, l, true) }

// lostUntold is lost for a name that the kernel does not know to be gone. It drops the
// file when it looks at the name again, whenever that is.
func (fs *FS) lostUntold(v *victim, l link) { fs.nameGone(v, l, false) }

func (fs *FS) nameGone(v *victim, l link, told bool) {
	fs.noteGone(v, l.parent.dir)
	n := v.node
	if n == nil {
		// The kernel may have been told of it since.
		n = fs.nodes.find(fs.identityOf(&v.st))
	}
	if n == nil {
		v.spared()
		fs.nodes.removed(l.parent)
		return
	}
	if v.fd >= 0 && !n.keep(v.fd, v.st.Blocks >= bigBlocks, told) {
		unix.Close(v.fd)
	}
	n.relink(l, link{})
}

// noteGone tells the table what is no more (R7). v still has it open, if nobody else does:
// so no other file has its inode number yet.
func (fs *FS) noteGone(v *victim, d *lockstate.Dir) {
	if v.fd < 0 || !fs.table.Tracks() {
		return
	}
	var st unix.Statx_t
	if err := statAt(v.fd, "", &st); err == nil && st.Nlink == 0 { // else it was linked meanwhile
		fs.table.Gone(d, fs.fileID(&v.st))
	}
}

// Unlink is unlink(2). Unlinking the lock file ends the lock (R1).
func (fs *FS) Unlink(cancel <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return fs.remove(cancel, h, name, "unlink", 0)
}

// Rmdir is rmdir(2). Removing a locked directory ends its lock (R3).
func (fs *FS) Rmdir(cancel <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return fs.remove(cancel, h, name, "rmdir", unix.AT_REMOVEDIR)
}

func (fs *FS) remove(cancel <-chan struct{}, h *fuse.InHeader, name, op string, flags int) fuse.Status {
	parent := fs.nodes.get(h.NodeId)
	if parent == nil || fs.reserved(parent, name) {
		return notInControl
	}
	if c := fs.cands.get(fs, h, parent, name); c != nil {
		if flags != 0 {
			return fuse.ENOTDIR
		}
		fs.cands.drop(c)
		return fuse.OK
	}
	if fs.namedStale(h, false, "", parent) {
		return fuse.Status(unix.ESTALE)
	}
	r := &request{fs: fs, cancel: cancel, header: h, op: op, parent: parent, name: name}
	lockFile := fs.isLockName(parent, name)
	return fs.attempt(r, false, func() error {
		d, err := fs.back.dir(parent)
		if err != nil {
			return err
		}
		defer d.release()
		c := lockstate.Change{
			Dirs:  []*lockstate.Dir{parent.dir},
			Quiet: lockFile || fs.isCandidate(parent, name) || fs.isLinkedLockFile(d.fd, parent, name),
		}
		var child *lockstate.Dir
		if flags == unix.AT_REMOVEDIR {
			child = fs.table.Dir(parent.dir, name)
			defer fs.table.Forget(child)
			c.Trees, c.Named = []*lockstate.Dir{child}, child
		}
		token := fs.table.LastToken() // before, since who acquires waits for this afterwards
		admitted, err := fs.admitRemoval(r, c)
		if err != nil {
			return err
		}
		defer admitted.End()
		v, err := fs.take(d.fd, name, true)
		if err != nil {
			return err
		}
		if child != nil && v.node != nil && v.node.isDir() && v.node.dir != child {
			// The table has it under another name, see tableDir.
			other := fs.tableDir(v, link{parent, name})
			defer fs.table.Forget(other)
			c.Trees, c.Named = []*lockstate.Dir{other}, other
			also, err := r.admit(c)
			if err != nil {
				v.spared()
				return err
			}
			defer also.End()
			child = other
		}
		defer fs.heatElsewhere(v, link{parent, name}).leave()
		if v.fd < 0 {
			fs.underWay.losing.Add(1)
			defer fs.underWay.losing.Add(-1)
		}
		if err := fs.unlink(d.fd, link{parent, name}, v, flags); err != nil {
			return err
		}
		if v.node != nil && v.fd < 0 { // it has a name left
			fs.underWay.began(&changeUnderWay{tid: h.Pid, nodes: [2]*node{v.node}, loser: v.node, from: parent.dir, to: parent.dir, token: token})
		}
		if child != nil {
			fs.table.Remove(child)
		}
		if lockFile {
			fs.released(parent.dir, name)
		}
		fs.cands.forget(parent, name)
		return nil
	})
}

// isLinkedLockFile reports whether an entry is the lock file by another name: the temporary
// file of a link(2) protocol, whatever that calls it, which is no content (R5).
func (fs *FS) isLinkedLockFile(dir int, parent *node, name string) bool {
	files := fs.table.LinkedFiles(parent.dir)
	if len(files) == 0 {
		return false
	}
	var st unix.Statx_t
	return statAt(dir, name, &st) == nil && slices.ContainsFunc(files, fs.inodeOf(&st).Is)
}

// admitRemoval is admit, but for a candidate that its creator made while the
// directory was free: the creator may remove it whoever holds the directory
// now (A9).
func (fs *FS) admitRemoval(r *request, c lockstate.Change) (*lockstate.Op, error) {
	op, err := r.admit(c)
	if err != nil && fs.cands.owned(r) {
		return r.admit(lockstate.Change{Quiet: true, Free: true})
	}
	return op, err
}

// released carries out R1.
func (fs *FS) released(d *lockstate.Dir, name string) {
	if l, ok := fs.table.ReleaseFile(d, name); ok {
		fs.logReleased(l, lockstate.Unlinked)
	}
}

func (fs *FS) logReleased(l lockstate.Lock, reason lockstate.Reason) {
	fs.log.Debug("released", "dir", l.Path, "reason", reason, "pid", l.Owner.Pid, "token", l.Token)
}
