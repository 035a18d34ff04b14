package fs

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// xattrPrefix is what the attributes begin with that tell of a path's
// governing lock.
const xattrPrefix = "user.stagefs."

// GetXAttr is getxattr(2).
func (fs *FS) GetXAttr(cancel <-chan struct{}, h *fuse.InHeader, attr string, dest []byte) (uint32, fuse.Status) {
	n := fs.nodes.get(h.NodeId)
	if n == nil && fs.control.node(h.NodeId) == nil {
		return 0, fuse.Status(unix.ESTALE)
	}
	if n == nil || n.candidate().private() {
		return 0, fuse.ENODATA
	}
	if name, ok := strings.CutPrefix(attr, xattrPrefix); ok {
		v, ok := fs.lockAttr(n, name)
		if !ok {
			return 0, fuse.ENODATA
		}
		if len(dest) < len(v) {
			return uint32(len(v)), fuse.ERANGE
		}
		return uint32(copy(dest, v)), fuse.OK
	}
	if attr == capsAttr {
		fs.copyUps.ended(h.Pid)
	}
	if tellsPlain(attr) && fs.isPlain(n.plain.load()) {
		return 0, statusOf(fs.labels.missing(attr))
	}
	size := 0
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	err := fs.look(n, func(p place) (err error) {
		if tellsPlain(attr) && !fs.hasXattrs(n, p) {
			return unix.ENODATA
		}
		return fs.withAttr(h, attr, p, func(p place) (err error) {
			size, err = fs.back.getxattr(p, attr, dest)
			return err
		})
	})
	switch err {
	case nil:
		fs.labels.seen(attr)
		fs.copiedUp.read(h.Pid, n, attr)
	case unix.ENODATA:
		err = fs.labels.missing(attr)
	case unix.EOPNOTSUPP:
		// The kernel asks for it with each access, and refuses that for whatever
		// error; it does not tell when it asks for a caller of getxattr(2).
		if strings.HasPrefix(attr, "system.posix_acl_") {
			err = unix.ENODATA
		}
	}
	if err == nil && size > len(dest) {
		return uint32(size), fuse.ERANGE
	}
	return uint32(max(size, 0)), statusOf(err)
}

// withAttr calls f, which reads or changes an extended attribute, with the caller's rights where
// the kernel has asked for none: what there is in "system" beside ACLs of POSIX, such as those
// of NFS and NTFS, is the file system's own business. The directory above is the kernel's.
func (fs *FS) withAttr(h *fuse.InHeader, attr string, p place, f func(place) error) error {
	if !strings.HasPrefix(attr, "system.") || strings.HasPrefix(attr, "system.posix_acl_") {
		return f(p)
	}
	return p.withFD(func(fd int) error {
		return fs.withRightsOf(h, func() error { return f(place{fd: fd}) })
	})
}

// lockAttr tells one thing of the lock that governs n.
func (fs *FS) lockAttr(n *node, name string) (string, bool) {
	dirs, _ := n.covering()
	for _, d := range dirs {
		l, ok := fs.table.Governing(d)
		if !ok {
			continue
		}
		switch name {
		case "owner":
			return fmt.Sprintf("%d %d", l.Owner.Pid, l.Owner.Start), true
		case "since":
			return l.Since.UTC().Format(time.RFC3339Nano), true
		case "kind":
			return l.KindName(), true
		case "token":
			return strconv.FormatUint(l.Token, 10), true
		}
	}
	return "", false
}

// ListXAttr is listxattr(2). The attributes of locks are not listed, so that
// no copy of a tree takes them along.
func (fs *FS) ListXAttr(cancel <-chan struct{}, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	n := fs.nodes.get(h.NodeId)
	if n == nil || n.candidate().private() {
		return 0, fuse.OK
	}
	mark := n.plain.load()
	if fs.isPlain(mark) {
		return 0, fuse.OK
	}
	fs.ns.RLock()
	defer fs.ns.RUnlock()
	var list []byte
	err := fs.look(n, func(p place) (err error) {
		list, err = fs.back.listXattrs(p)
		return err
	})
	if err == nil && len(list) == 0 {
		fs.setPlain(&n.plain, mark)
	}
	if err != nil || len(list) == 0 {
		return 0, statusOf(err)
	}
	list = shownXattrs(h, list)
	if len(list) > len(dest) {
		return uint32(len(list)), fuse.ERANGE
	}
	return uint32(copy(dest, list)), fuse.OK
}

// shownXattrs leaves out of a list what the backing shows to the daemon alone:
// xattr(7), trusted attributes.
func shownXattrs(h *fuse.InHeader, list []byte) []byte {
	const trusted = "trusted."
	if !bytes.Contains(list, []byte(trusted)) || isAdmin(h) {
		return list
	}
	shown := list[:0]
	for name := range bytes.SplitAfterSeq(list, []byte{0}) {
		if !bytes.HasPrefix(name, []byte(trusted)) {
			shown = append(shown, name...)
		}
	}
	return shown
}

// SetXAttr is setxattr(2), and how an ACL is set.
func (fs *FS) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	status := fs.changeXAttr(cancel, &in.InHeader, "setxattr", attr, func(p place) error {
		err := fs.callerSpends(&in.InHeader, entrySize, func() error {
			return fs.withAttr(&in.InHeader, attr, p, func(p place) error { return fs.back.setxattr(p, attr, data, int(in.Flags)) })
		})
		if err != nil || attr != "system.posix_acl_access" {
			return err
		}
		if fs.idmap && in.SetXAttrFlags&fuse.SETXATTR_ACL_KILL_SGID == 0 {
			return nil // the kernel knows the mapping
		}
		return fs.dropSetgid(&in.InHeader, p)
	})
	if status == fuse.OK && attr == capsAttr {
		if n := fs.nodes.get(in.NodeId); n != nil {
			fs.copyUps.given(in.Pid, n)
		}
	}
	return status
}

// dropSetgid takes the setgid bit away when somebody outside the file's group
// has set its ACL, which chmod(2) would not have let them keep either. To the
// backing it was the daemon that set it.
func (fs *FS) dropSetgid(h *fuse.InHeader, p place) error {
	var st unix.Statx_t
	if err := p.stat(&st); err != nil || st.Mode&unix.S_ISGID == 0 {
		return err
	}
	if !fs.idmap && (inGroup(h, st.Gid) || mayKeepPrivileges(h, &st)) {
		return nil
	}
	return fs.back.chmod(p, uint32(st.Mode)&0o7777&^unix.S_ISGID)
}

// RemoveXAttr is removexattr(2).
func (fs *FS) RemoveXAttr(cancel <-chan struct{}, h *fuse.InHeader, attr string) fuse.Status {
	status := fs.changeXAttr(cancel, h, "removexattr", attr, func(p place) error {
		return fs.withAttr(h, attr, p, func(p place) error { return fs.back.removexattr(p, attr) })
	})
	if status == fuse.OK && attr == capsAttr {
		if n := fs.nodes.get(h.NodeId); n != nil {
			fs.capsOff.removed(n.id, h.Pid)
		}
	}
	return status
}

func (fs *FS) changeXAttr(cancel <-chan struct{}, h *fuse.InHeader, name, attr string, f func(place) error) fuse.Status {
	n := fs.nodes.get(h.NodeId)
	if n == nil || n.candidate().private() || strings.HasPrefix(attr, xattrPrefix) {
		return fuse.EPERM
	}
	if fs.changedStale(n, h, false) {
		return fuse.Status(unix.ESTALE)
	}
	r := &request{fs: fs, cancel: cancel, header: h, op: name, node: n}
	return fs.attempt(r, false, func() error {
		op, err := r.admitAttrs(n)
		if err != nil {
			return err
		}
		defer op.End()
		p, err := fs.back.place(n)
		if err != nil {
			return err
		}
		defer p.done()
		defer n.plain.changed()
		fs.labels.seen(attr)
		if err = f(p); err == nil {
			fs.notifyAttr(n) // a block may have come or gone; the kernel drops the ctime only
		}
		return err
	})
}
