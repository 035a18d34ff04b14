package fs

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// process returns the process that sent a request, or nil if it cannot be known
// (H4). With an error it is one that could be known, but not now, for want of
// descriptors or memory, or not soon: it may wait for an ancestor in execve(2). ok is
// false if the caller is being killed. The request pins the process: as long as it is
// not answered, its thread lives.
func (fs *FS) process(h *fuse.InHeader) (p *procid.Process, unknown error, ok bool) {
	type answer struct {
		p   *procid.Process
		err error
	}
	var a answer
	if a.p, a.err = fs.procs.Seen(h.Pid); !errors.Is(a.err, procid.ErrBusy) {
		return a.p, notYet(a.err), true
	}
	a, ok = awaited(h, func(stop <-chan struct{}) (a answer) {
		a.p, a.err = fs.procs.Lookup(h.Pid, stop)
		return a
	}, answer{nil, procid.ErrBusy})
	return a.p, notYet(a.err), ok
}

// errLate: whoever it depends on is in execve(2).
var errLate = fmt.Errorf("%w in time", lockstate.ErrNobody)

// notYet returns why it is not known who sent a request, or nil if that is known, or never
// will be.
func notYet(err error) error {
	if errors.Is(err, procid.ErrBusy) {
		return errLate
	}
	return ifShort(err)
}

// asCaller runs f with the file-system identity of the caller, so that what it
// creates belongs to the caller by the backing's own rules: setgid directories
// and default ACLs included (M2). Whether the caller may create it has been
// decided by the kernel (default_permissions), so the daemon's capabilities
// stay.
func (fs *FS) asCaller(h *fuse.InHeader, f func() error) error {
	return fs.asUser(h.Uid, h.Gid, f)
}

// asUser runs f with a user's fsuid and fsgid, and all that the daemon may do.
func (fs *FS) asUser(uid, gid uint32, f func() error) error {
	if !fs.privileged || uid == 0 && gid == fs.gid {
		return f()
	}
	if uid == procid.NoID || gid == procid.NoID {
		return unix.EOVERFLOW // as for who has no number there
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if gid != fs.gid { // root's daemon may have another group, as by sg(1)
		setFSID(unix.SYS_SETFSGID, gid)
		defer setFSID(unix.SYS_SETFSGID, fs.gid)
	}
	setFSID(unix.SYS_SETFSUID, uid)
	defer setFSID(unix.SYS_SETFSUID, 0)
	// Leaving uid 0 took the file capabilities of this thread away.
	if err := fs.caps.set(); err != nil {
		return err
	}
	return f()
}

func setFSID(call uintptr, id uint32) {
	unix.RawSyscall(call, uintptr(id), 0, 0) // returns the former id, never an error
}

// capabilities are the daemon's at start.
type capabilities struct {
	header unix.CapUserHeader
	data   [2]unix.CapUserData
}

func readCapabilities() (c capabilities, err error) {
	c.header.Version = unix.LINUX_CAPABILITY_VERSION_3
	err = unix.Capget(&c.header, &c.data[0])
	return c, err
}

// set gives them to the calling thread.
func (c *capabilities) set() error {
	h, d := c.header, c.data
	h.Pid = 0
	_, _, errno := unix.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&d[0])), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
