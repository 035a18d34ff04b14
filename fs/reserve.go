package fs

import "golang.org/x/sys/unix"

// ext4 and its like keep blocks back that only one user may have: root, unless
// tune2fs(8) was told another. They ask for the fsuid of who writes. That is
// the daemon's, and where files pass, of who registered the file with the
// kernel; so it does both in the name of who opened the file. The kernel
// knows one registration of a file at a time: the first opener's counts for all.

// entrySize is more than an entry in a directory takes, in bytes, or an extended attribute.
const entrySize = 1 << 20

// spending runs a change in the name of a user that may take so many bytes.
func (fs *FS) spending(uid uint32, size uint64, change func() error) error {
	if uid == 0 || !fs.privileged {
		return change()
	}
	// Changing the fsuid takes longer than asking whether it matters.
	var st unix.Statfs_t
	if unix.Fstatfs(fs.back.root, &st) == nil && (st.Bfree == st.Bavail || st.Bavail > shortRoom(&st)+size/uint64(st.Bsize)) {
		return change()
	}
	return fs.asUser(uid, 0, change)
}

// spender is in whose name a file is registered that h is the first to pass: who
// only reads it spends nothing, and the next to write is its owner most likely.
func (h *handle) spender(st *unix.Statx_t) uint32 {
	if h.lock == nil {
		return st.Uid
	}
	return h.uid
}
