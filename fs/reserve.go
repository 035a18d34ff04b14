package fs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// ext4 and its like keep blocks back that only one user may have: root, unless
// tune2fs(8) was told another. They ask for the fsuid of who writes. That is
// the daemon's, and where files pass, of who registered the file with the
// kernel; so it does both in the name of who opened the file. The kernel
// knows one registration of a file at a time: the first opener's counts for all.

// entrySize is more than an entry in a directory takes, in bytes, or an extended attribute.
const entrySize = 1 << 20

// spending runs a change in the name of a user that may take so many bytes.
func (fs *FS) spending(uid uint32, size uint64, change func() error) error {
	// Changing the fsuid takes longer than asking whether it matters.
	if uid == 0 || !fs.privileged || !fs.isScarce(size) {
		return change()
	}
	return fs.asUser(uid, 0, change)
}

// callerSpends is spending by who sent a request.
func (fs *FS) callerSpends(h *fuse.InHeader, size uint64, change func() error) error {
	if fs.idmap && !fs.isScarce(size) {
		return change()
	}
	return fs.spending(fs.payerOf(h), size, change)
}

// isScarce reports whether so many bytes may be some that are kept back.
func (fs *FS) isScarce(size uint64) bool {
	var st unix.Statfs_t
	err := unix.Fstatfs(fs.back.root, &st)
	return err != nil || st.Bfree != st.Bavail && st.Bavail <= shortRoom(&st)+size/uint64(st.Bsize)
}

// keepsBack reports whether there are blocks that only one user may have.
func (fs *FS) keepsBack() bool {
	var st unix.Statfs_t
	err := unix.Fstatfs(fs.back.root, &st)
	return err != nil || st.Bfree != st.Bavail
}

// spender is in whose name a file is registered that h is the first to pass: who
// only reads it spends nothing, and the next to write is its owner most likely.
func (h *handle) spender(st *unix.Statx_t) uint32 {
	if h.lock == nil {
		return st.Uid
	}
	return h.uid
}
