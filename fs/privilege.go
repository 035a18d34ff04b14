package fs

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Whoever changes a file's content without CAP_FSETID takes its suid and sgid
// bits away. The backing cannot know: the daemon, and the kernel on its behalf,
// write with all capabilities. So the kernel leaves it to the daemon
// (HANDLE_KILLPRIV_V2): with a flag on requests that change the content, and
// where the kernel writes past the daemon, with a SETATTR that sets nothing,
// before the first write. Capabilities in security.capability are dropped by
// the backing itself, whoever writes.
//
// The kernel gives a program the suid and sgid bits that it knows of, for as long
// as attributes are valid, and so does it answer a statx(2) that asks for no more
// than the mode. It is told that they are gone: the answer to a write or an open
// has no mode.

// killFD takes the privileges of n, which fd is open on, away.
func (fs *FS) killFD(n *node, fd int, h *fuse.InHeader) error {
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return err
	}
	mode := fs.withoutPrivileges(h, &st)
	if mode == uint32(st.Mode) {
		return nil
	}
	defer fs.notifyAttr(n)
	return unix.Fchmod(fd, mode&0o7777)
}

// killPrivileges takes the privileges of n away. st are its attributes. The
// caller holds FS.ns.
func (fs *FS) killPrivileges(n *node, h *fuse.InHeader, st *unix.Statx_t) error {
	mode := fs.withoutPrivileges(h, st)
	if mode == uint32(st.Mode) {
		return nil
	}
	fd, err := fs.openNode(n, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	defer fs.notifyAttr(n)
	st.Mode = uint16(mode)
	return unix.Fchmodat(fs.back.proc, procName(fd), mode&0o7777, 0)
}

// withoutPrivileges returns the mode of a file that is no directory after the caller,
// who has no CAP_FSETID, has changed its content or its owner. An sgid bit without the
// group's x bit goes only where the caller is not of the group.
func (fs *FS) withoutPrivileges(h *fuse.InHeader, st *unix.Statx_t) uint32 {
	mode := uint32(st.Mode)
	if mode&unix.S_IFMT == unix.S_IFDIR {
		return mode
	}
	mode &^= unix.S_ISUID
	if mode&unix.S_ISGID != 0 && (mode&unix.S_IXGRP != 0 || !inGroup(h, st.Gid)) {
		mode &^= unix.S_ISGID
	}
	return mode
}

// inGroup reports whether the caller is of a group. By an overlay, a request has the IDs of
// who mounted that, and by a mount with mapped IDs it may have none.
func inGroup(h *fuse.InHeader, gid uint32) bool {
	s, _ := procid.ReadStatus(int(h.Pid))
	_, own := s.FSIDs()
	if own == procid.NoID {
		own = h.Gid
	}
	return own == gid || slices.Contains(strings.Fields(s.Field("Groups")), strconv.FormatUint(uint64(gid), 10))
}

// mayKeepPrivileges reports whether the caller has CAP_FSETID, and that over a file
// with these attributes: user_namespaces(7), "Capabilities and IDs".
func mayKeepPrivileges(h *fuse.InHeader, st *unix.Statx_t) bool {
	return hasCapability(h, unix.CAP_FSETID) && hasID(h, "uid_map", st.Uid) && hasID(h, "gid_map", st.Gid)
}

// ownerOrCapable reports whether the caller may change the mode of a file with these
// attributes, as inode_owner_or_capable does in the kernel.
func (fs *FS) ownerOrCapable(h *fuse.InHeader, st *unix.Statx_t) bool {
	return fs.userOf(h) == st.Uid || hasCapability(h, unix.CAP_FOWNER) && hasID(h, "uid_map", st.Uid)
}

// asKeeper runs a change of the file that fd is open on, and by which the backing may
// take its suid and sgid bits away, as XFS does with FS_IOC_FSSETXATTR: if the caller
// has no CAP_FSETID, the daemon makes it without, too.
func (fs *FS) asKeeper(h *fuse.InHeader, fd int, change func() error) error {
	var st unix.Statx_t
	if err := statAt(fd, "", &st); err != nil {
		return err
	}
	if !fs.privileged || st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 || mayKeepPrivileges(h, &st) {
		return change()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	less := fs.caps
	less.data[0].Effective &^= 1 << unix.CAP_FSETID
	if err := less.set(); err != nil {
		return err
	}
	defer fs.caps.set()
	return change()
}

// hasID reports whether an id has a number in the caller's user namespace.
func hasID(h *fuse.InHeader, which string, id uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", h.Pid, which))
	if err != nil {
		return h.Uid == 0
	}
	for line := range strings.Lines(string(b)) {
		var inside, first, count uint32
		if _, err := fmt.Sscan(line, &inside, &first, &count); err == nil && id-first < count {
			return true
		}
	}
	return false
}

func hasCapability(h *fuse.InHeader, capability uint) bool {
	caps, err := strconv.ParseUint(statusField(h.Pid, "CapEff"), 16, 64)
	if err != nil {
		return h.Uid == 0
	}
	return caps>>capability&1 != 0
}

// isAdmin reports whether the caller has CAP_SYS_ADMIN, and not only among the
// users of a namespace of its own.
func isAdmin(h *fuse.InHeader) bool { return hasCapabilityHere(h, unix.CAP_SYS_ADMIN) }

func hasCapabilityHere(h *fuse.InHeader, capability uint) bool {
	if !hasCapability(h, capability) {
		return false
	}
	own, err := os.Readlink("/proc/self/ns/user")
	theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", h.Pid))
	return err == nil && err2 == nil && own == theirs
}

// statusField returns what a line of a thread's status says, see [procid.Status].
func statusField(tid uint32, name string) string {
	s, _ := procid.ReadStatus(int(tid))
	return s.Field(name)
}

// setAttrKills takes away what a SETATTR takes away of n's privileges: one that
// changes the size, or sets nothing at all, as the kernel asks for it before a
// write that passes the daemon. What chown(2) takes away, the backing does, but
// it does not know the groups of the caller. The caller holds FS.ns.
func (fs *FS) setAttrKills(n *node, in *fuse.SetAttrIn) error {
	const what = fuse.FATTR_MODE | fuse.FATTR_UID | fuse.FATTR_GID | fuse.FATTR_ATIME | fuse.FATTR_MTIME | fuse.FATTR_SIZE
	nothing := in.Valid&what == 0
	chown := in.Valid&(fuse.FATTR_UID|fuse.FATTR_GID) != 0
	flagged := in.Valid&fuse.FATTR_KILL_SUIDGID != 0 && in.Valid&fuse.FATTR_SIZE != 0
	if n.isDir() || !n.isFile() && !chown || !nothing && !chown && !flagged {
		return nil
	}
	var st unix.Statx_t
	if err := fs.statNode(n, &st); err != nil {
		return err
	}
	if st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 || !flagged && mayKeepPrivileges(&in.InHeader, &st) {
		return nil
	}
	if nothing && len(n.writers()) == 0 && fs.withoutPrivileges(&in.InHeader, &st) != uint32(st.Mode) && !fs.ownerOrCapable(&in.InHeader, &st) {
		return unix.EPERM // no write takes them away, but chown(2) to nobody new: the kernel lets all do that
	}
	return fs.killPrivileges(n, &in.InHeader, &st)
}

// A capsOff remembers which threads have just lost a file's capabilities: the
// kernel removes them before a write, and then sends a SETATTR that sets
// nothing.
type capsOff struct {
	mu   sync.Mutex
	last map[uint64]uint32 // thread by node
}

// maxCapsOff bounds what is never asked for.
const maxCapsOff = 128

func (c *capsOff) removed(node uint64, tid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil || len(c.last) >= maxCapsOff {
		c.last = make(map[uint64]uint32)
	}
	c.last[node] = tid
}

// take reports whether the thread has removed the node's capabilities, once.
func (c *capsOff) take(node uint64, tid uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	last, ok := c.last[node]
	if ok && last == tid {
		delete(c.last, node)
		return true
	}
	return false
}

// mayItself reports whether this process has a capability.
func mayItself(capability uint) bool {
	c, err := readCapabilities()
	return err == nil && c.data[capability/32].Effective&(1<<(capability%32)) != 0
}
