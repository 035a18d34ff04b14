package fs

import (
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// identity tells one file of the backing from all others, also from a later
// one that got the same inode number: that has another birth time. A file
// system that keeps no lasting birth times leaves it 0.
type identity struct {
	dev   uint32 // as the kernel keeps it: 12 bits major, 20 bits minor
	ino   uint64
	birth int64
}

func identityOf(st *unix.Statx_t) identity {
	id := identity{dev: st.Dev_major<<20 | st.Dev_minor, ino: st.Ino}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.birth = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return id
}

// identityOf tells a file of the backing from all others.
func (t *nodeTable) identityOf(st *unix.Statx_t) identity {
	return identityIn(t.reborn, st)
}

func (fs *FS) identityOf(st *unix.Statx_t) identity { return fs.nodes.identityOf(st) }

// identityIn is identityOf in a file system of which isReborn is known.
func identityIn(reborn bool, st *unix.Statx_t) identity {
	id := identityOf(st)
	if reborn {
		id.birth = 0
	}
	return id
}

// shownIno returns the inode number that the mount shows of a file. All of the mount has
// one device number: what is on another file system than the root, such as a subvolume
// of btrfs, gets a number of its own, or two files would pass for one.
func (t *nodeTable) shownIno(id identity) uint64 { return id.ino ^ t.inosOf(id.dev) }

// inosOf tells the inode numbers of a file system from those of the root's.
func (t *nodeTable) inosOf(dev uint32) uint64 {
	if dev == t.dev {
		return 0
	}
	return uint64(dev*0x9e3779b1>>10) << 40 // bits 62 and 63: see privateIno and controlIno
}

// isReborn reports whether a file gets another birth time with its first change,
// because overlayfs copies it then. Where its layers are on several file systems, a
// directory also gets another inode number once the kernel has forgotten it.
func isReborn(dir int) bool { return fsType(dir) == unix.OVERLAYFS_SUPER_MAGIC }

// fileID is id as the lock table knows it.
func (id identity) fileID() lockstate.FileID {
	return lockstate.FileID{Dev: uint64(id.dev), Ino: id.ino, Birth: id.birth}
}

// carry is id as it is handed over, and carriedIdentity is the way back.
func (id identity) carry() [3]uint64 { return [3]uint64{uint64(id.dev), id.ino, uint64(id.birth)} }

func carriedIdentity(c [3]uint64) identity {
	return identity{dev: uint32(c[0]), ino: c[1], birth: int64(c[2])}
}

// inode is id from mount to mount.
func (id identity) inode() lockstate.Inode { return lockstate.Inode{Ino: id.ino, Birth: id.birth} }

func (fs *FS) inodeOf(st *unix.Statx_t) lockstate.Inode { return fs.identityOf(st).inode() }

func (fs *FS) fileID(st *unix.Statx_t) lockstate.FileID { return fs.identityOf(st).fileID() }
