//go:build linux

package procid

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Shelf has the pidfds of watched processes in the buffer of a pair of sockets, which
// outlives a daemon that is killed if another process has the sockets open, too: from them
// the next one learns how processes have ended that nobody has waited for (R5). Only the
// daemon reads and writes it. It is full some time, and then the oldest goes.
type Shelf struct {
	Put, Take int // the two sockets
}

const (
	// shelfMost is how many pidfds there are at most. The cache has room for them.
	shelfMost = maxThreads / 2
	// shelfSlack is how many more there are than twice what is watched, when those that
	// are not watched any more are taken off.
	shelfSlack = 32
	// shelfLine bounds the text that comes with a pidfd: some hundred ancestors.
	shelfLine = 8 << 10
)

// NewShelf returns an empty one. The descriptors are close-on-exec.
func NewShelf() (*Shelf, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair(2): %w", err)
	}
	const room = shelfMost << 10
	if unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room) != nil {
		_ = unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUF, room) // what an ordinary user may have
	}
	return &Shelf{Put: pair[0], Take: pair[1]}, nil
}

// Files returns what another process is to have open: Put, then Take.
func (s *Shelf) Files() []*os.File {
	return []*os.File{os.NewFile(uintptr(s.Put), "shelf"), os.NewFile(uintptr(s.Take), "shelf")}
}

// clear takes everything off, and returns it, the oldest first. The caller owns the pidfds.
func (s *Shelf) clear() (all []Carried) {
	for {
		c, err := s.take()
		switch {
		case err != nil:
			return all
		case c.FD >= 0:
			all = append(all, c)
		}
	}
}

// put adds a process.
func (s *Shelf) put(c Carried) error {
	line := fmt.Appendf(make([]byte, 0, 256), "%d", c.UID)
	for _, id := range append([]ID{c.ID}, c.Chain...) {
		line = fmt.Appendf(line, " %d:%d", id.Pid, id.Start)
	}
	return unix.Sendmsg(s.Put, line, unix.UnixRights(c.FD), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// take takes off the oldest one. Its FD is -1 if it is not to be used.
func (s *Shelf) take() (c Carried, err error) {
	line, control := make([]byte, shelfLine), make([]byte, unix.CmsgSpace(4))
	n, controls, flags, _, err := unix.Recvmsg(s.Take, line, control, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err == nil && n == 0 {
		err = unix.EAGAIN // nobody has the other end
	}
	if err != nil {
		return Carried{FD: -1}, err
	}
	c.FD = -1
	if messages, err := unix.ParseSocketControlMessage(control[:controls]); err == nil && len(messages) == 1 {
		if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
			c.FD = fds[0]
		}
	}
	if !c.parse(string(line[:n])) || flags&unix.MSG_TRUNC != 0 {
		if c.FD >= 0 {
			unix.Close(c.FD)
		}
		c.FD = -1
	}
	return c, nil
}

func (c *Carried) parse(line string) bool {
	uid, ids, _ := strings.Cut(line, " ")
	n, err := strconv.ParseUint(uid, 10, 32)
	if err != nil {
		return false
	}
	c.UID = uint32(n)
	for i, f := range strings.Fields(ids) {
		p, s, _ := strings.Cut(f, ":")
		pid, bad := strconv.Atoi(p)
		start, err := strconv.ParseUint(s, 10, 64)
		if bad != nil || err != nil {
			return false
		}
		id := ID{Pid: pid, Start: start}
		if i == 0 {
			c.ID = id
		} else {
			c.Chain = append(c.Chain, id)
		}
	}
	return c.ID.Pid > 0
}

// KeepOn has the processes that are watched on a shelf from now on. Before Linux 6.15 a
// pidfd tells nothing of a process that was reaped, and so none is.
//
// What is there already was left by an earlier daemon, and a new resolver is to know of
// it: recall says so. Of the dead it learns of those who succeeded: what becomes of what
// others have made is decided as if nothing were known (R7). It all stays there, in case
// this daemon ends before it could do anything about it.
func (r *Resolver) KeepOn(s *Shelf, recall bool) {
	if s == nil || !r.kernel.exits {
		return
	}
	left := s.clear()
	var known []Carried
	r.mu.Lock()
	r.shelf = s
	for _, c := range left {
		if s.put(c) == nil {
			r.shelved++
		}
		dead := recall && readable(c.FD)
		if e := (Exit{}); dead {
			e, _ = r.kernel.tryExitStatus(c.ID, c.FD)
			dead = !e.Success()
		}
		if recall && !dead {
			known = append(known, c)
		} else {
			unix.Close(c.FD)
		}
	}
	r.mu.Unlock()
	r.TakeUp(known)
}

// shelveLocked puts a process on the shelf that is watched from now on.
func (r *Resolver) shelveLocked(g *group) {
	if r.shelf == nil {
		return
	}
	if r.shelved >= min(2*len(r.watched)+shelfSlack, shelfMost) && len(r.watched) < shelfMost*3/4 {
		r.tidyShelfLocked() // a quarter of what there is goes, at least
	}
	c := Carried{ID: g.proc.id, UID: g.proc.uid, Chain: g.proc.chain, FD: g.fd}
	for r.shelved >= shelfMost && r.dropOldestLocked() {
	}
	err := r.shelf.put(c)
	for err == unix.EAGAIN && r.dropOldestLocked() {
		err = r.shelf.put(c)
	}
	if err == nil {
		r.shelved++
	}
}

// tidyShelfLocked takes those off whose end is known, and was carried out: then nobody
// has a use for them.
func (r *Resolver) tidyShelfLocked() {
	for n := r.shelved; n > 0; n-- {
		c, err := r.shelf.take()
		if err != nil {
			r.shelved = 0
			return
		}
		r.shelved--
		if g := r.groups[c.ID]; g != nil && (g.serial != 0 || g.pins > 0) && c.FD >= 0 && r.shelf.put(c) == nil {
			r.shelved++
		}
		if c.FD >= 0 {
			unix.Close(c.FD)
		}
	}
}

// dropOldestLocked reports whether there was one.
func (r *Resolver) dropOldestLocked() bool {
	c, err := r.shelf.take()
	if err != nil {
		r.shelved = 0
		return false
	}
	r.shelved--
	if c.FD >= 0 {
		unix.Close(c.FD)
	}
	return true
}
