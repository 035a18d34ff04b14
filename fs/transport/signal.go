package transport

import (
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// signalTime is how long a request that came through a ring waits before its
// caller is looked at.
const signalTime = time.Millisecond

// sharedTime is how long a signal to a process of several threads is left to the others.
const sharedTime = 50 * time.Millisecond

// wait carries out a request that may wait without end and came through a ring.
//
// The kernel tells of a signal to the caller (FUSE_INTERRUPT) only if it came
// after the request was handed over, and forgets one that came while the
// request was on its way. So once, later, it is looked for.
func (c *conn) wait(at *slot, h *fuse.InHeader, in, out [][]byte) int {
	unique, pid := h.Unique, h.Pid
	c.threads.Add(1)
	look := time.AfterFunc(signalTime, func() {
		defer c.threads.Done()
		s := statusOf(pid)
		due := pending(s)
		if !due && shared(s) {
			time.Sleep(sharedTime)
			due = c.inflight.has(unique) && shared(statusOf(pid))
		}
		if due {
			c.interrupt(unique)
		}
	})
	if h.Opcode == OpSetlkw {
		uid := c.userOf(h)
		c.waits.count(uid, 1)
		defer c.waits.count(uid, -1)
	}
	n := c.handle(at, unique, in, out)
	if look.Stop() {
		c.threads.Done()
	}
	return n
}

// Killed reports whether a thread is about to end by a signal.
func Killed(tid uint32) bool { return killed(statusOf(tid)) }

// statusOf is empty for a thread that is gone.
func statusOf(tid uint32) procid.Status {
	s, _ := procid.ReadStatus(int(tid))
	return s
}

const sigkill = 1 << (9 - 1)

func killed(s procid.Status) bool { return (signals(s, "SigPnd")|signals(s, "ShdPnd"))&sigkill != 0 }

// pending reports whether a thread has a signal pending that it does not block. One for
// a process of several threads counts if it kills: else another thread may take it.
func pending(s procid.Status) bool {
	own := signals(s, "SigPnd")
	if s.Field("Threads") == "1" {
		own |= signals(s, "ShdPnd")
	}
	return killed(s) || own&^signals(s, "SigBlk") != 0
}

// shared reports whether a process of several threads has a signal pending that is its
// first thread's, whose status is s, unless another one takes it soon: the kernel gives it
// to that thread if it can. (SIGCHLD is given to whoever has made the child.)
func shared(s procid.Status) bool {
	const sigchld = 1 << (17 - 1)
	pid := s.Field("Pid")
	return pid != "" && pid == s.Field("Tgid") && signals(s, "ShdPnd")&^signals(s, "SigBlk")&^sigchld != 0
}

// signals returns a set of them.
func signals(s procid.Status, name string) uint64 {
	set, _ := strconv.ParseUint(s.Field(name), 16, 64)
	return set
}
