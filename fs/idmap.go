package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// With [Options.IDMap] the kernel lets a mount's IDs be mapped (mount_setattr(2),
// MOUNT_ATTR_IDMAP). Then a request that makes something says whose it is to be, by the
// mapping of the mount that the caller came by, and all others say nothing: the IDs are
// [procid.NoID] there, whether the caller's mount is mapped or not (FUSE_ALLOW_IDMAP in
// linux/fuse.h). Neither tells who the caller is; root of a container may well make what is
// root's here. So that is read from proc(5), where it matters, as it costs some system calls.
//
// Who is only allowed something in somebody else's name is taken for himself: proc(5) does not
// show the credentials of a personality that was registered with io_uring. What a thread of
// the kernel's does, as of the NFS server, is nobody's.

// overflowID is the user and group by which file systems call who has no number there.
const overflowID = 65534

// userOf returns the fsuid of who sent a request, procid.NoID if it is not known.
func (fs *FS) userOf(h *fuse.InHeader) uint32 {
	if !fs.idmap {
		return h.Uid
	}
	uid, _ := procid.FSIDs(h.Pid)
	return uid
}

// commanderOf is userOf for who gives commands, and is to be told if this daemon is too short
// of something to look at him.
func (fs *FS) commanderOf(h *fuse.InHeader) (uid uint32, err error) {
	if uid = fs.userOf(h); uid == procid.NoID && fs.idmap {
		_, err = procid.ReadStatus(int(h.Pid))
	}
	return uid, ifShort(err)
}

// payerOf returns in whose name blocks are taken for who sent a request, see spending. Who is
// not known may not have those that are kept back.
func (fs *FS) payerOf(h *fuse.InHeader) uint32 {
	if uid := fs.userOf(h); uid != procid.NoID {
		return uid
	}
	return overflowID
}

// openerOf is payerOf for an open file.
func (fs *FS) openerOf(h *fuse.InHeader, flags uint32) uint32 {
	if fs.idmap && (!writes(flags) || !fs.keepsBack()) {
		return overflowID
	}
	return fs.payerOf(h)
}

// mappedRights is rightsOf where IDs may be mapped.
func mappedRights(h *fuse.InHeader) (x rights, err error) {
	status, err := procid.ReadStatus(int(h.Pid))
	if err != nil {
		return x, err
	}
	x.UID, x.GID = status.FSIDs()
	if x.UID == procid.NoID {
		return x, unix.EACCES
	}
	if h.Uid != procid.NoID && (h.Uid != x.UID || h.Gid != x.GID) {
		// Of the caller's other groups it is not known what they are mapped to, and his
		// capabilities are not over what is mapped here.
		return rights{UID: h.Uid, GID: h.Gid, Mapped: true}, nil
	}
	if x.UID != 0 {
		x.Groups, err = groupsIn(status)
	}
	return x, err
}
