package fs

import (
	"errors"
	"path"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Where the IDs of a mount may be mapped, a command that is refused may be right for all
// that: whose directory it is by the mapping of the caller's mount, the kernel alone knows.
// So the caller has it look, as it does for whoever makes an entry: it makes a file of the
// name that the answer tells, which the daemon makes a permit of instead, and sends the
// command again.

// permitFor is how long a permit lasts. The command follows at once.
const permitFor = 5 * time.Second

// A permit says that the kernel would let a process make an entry in a directory.
type permit struct {
	proc  procid.ID
	dir   identity
	as    rights // what it makes would be theirs
	until time.Time
}

// permits are those that were given last: a process that loses its own to a flood of others
// may ask again.
type permits struct {
	mu   sync.Mutex
	all  [256]permit
	next int
}

// give answers who makes a file of the name.
func (p *permits) give(fs *FS, h *fuse.InHeader) fuse.Status {
	parent := fs.nodes.get(h.NodeId)
	if parent == nil {
		return fs.notFound(h.NodeId)
	}
	proc, unknown, _ := fs.process(h)
	if proc == nil || unknown != nil {
		return fuse.EACCES
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all[p.next] = permit{
		proc: proc.ID(), dir: parent.key(), as: rights{UID: h.Uid, GID: h.Gid, Mapped: true}, until: time.Now().Add(permitFor),
	}
	p.next = (p.next + 1) % len(p.all)
	return fuse.Status(unix.EALREADY)
}

func (p *permits) find(proc procid.ID, dir identity) (as rights, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.all {
		if x := &p.all[i]; x.proc == proc && x.dir == dir && time.Now().Before(x.until) {
			as, ok = x.as, true
		}
	}
	return as, ok
}

// permit looks for one of the caller's for a directory, and for the nearest to it that is
// there if it is missing itself: then it returns ENOENT. Without one it returns EACCES, and
// the answer tells how to get it. The caller holds FS.ns.
func (c *command) permit(dir string) (rights, error) {
	if !c.fs.idmap {
		return rights{}, unix.EACCES
	}
	if p, _ := c.process(); p != nil {
		at, id, err := c.fs.nearest(dir)
		as, ok := c.fs.permits.find(p.ID(), id)
		switch {
		case err != nil || !ok:
		case at != dir:
			return rights{}, unix.ENOENT
		default:
			return as, nil
		}
	}
	c.answer.Permit = []byte(join(dir, lockstate.PermitName))
	return rights{}, unix.EACCES
}

// nearest returns a directory, or the nearest above it that is there.
func (fs *FS) nearest(dir string) (at string, id identity, err error) {
	for at = dir; ; at = path.Dir(at) {
		fd, err := fs.walk(at)
		if err == unix.ENOENT && at != "." {
			continue
		}
		if err != nil {
			return "", id, err
		}
		defer unix.Close(fd)
		var st unix.Statx_t
		err = statAt(fd, "", &st)
		return at, fs.identityOf(&st), err
	}
}

// mayCreate reports whether the caller could make an entry in the command's directory.
// The caller holds FS.ns.
func (c *command) mayCreate() error {
	err := c.fs.mayCreateIn(c.header, c.dir)
	if errors.Is(err, unix.EACCES) {
		_, err = c.permit(c.dir)
	}
	return err
}

// mayRemove reports whether the caller could remove a directory with all that is in it.
// The caller holds FS.ns.
func (c *command) mayRemove(dir string) error {
	x, err := c.fs.rightsOf(c.header)
	if err == nil {
		err = c.fs.mayRemove(&x, dir)
	}
	if !errors.Is(err, unix.EACCES) {
		return err
	}
	if x, err = c.permit(dir); err != nil {
		return err
	}
	return c.fs.mayRemove(&x, dir)
}
