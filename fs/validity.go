package fs

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// The backing changes only through the mount, and the kernel is told of each
// change that was not its own. So how long it may keep names and attributes only
// bounds the harm if somebody gets at the backing all the same.
const (
	validFor     = time.Hour
	validForLess = time.Minute // others may change the backing, or the kernel can't be told of names
)

// attach is called before the first request.
func (fs *FS) attach(k transport.Kernel) {
	fs.kernel, fs.idmap = k, k.MapsIDs()
	fs.nodes.validFor = validity(fs.back.root, k)
}

// validity returns how long the kernel may keep what it is told of root.
func validity(root int, k transport.Kernel) time.Duration {
	if isLocal(root) && k.TellsNames() {
		return validFor
	}
	return validForLess
}

// isLocal reports whether dir is on a file system that no other machine changes, and no
// other file system that it shows, as far as that is known.
func isLocal(dir int) bool {
	switch fsType(dir) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC, unix.TMPFS_MAGIC:
		return true
	}
	return false
}
