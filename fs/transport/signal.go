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
		if signalled(pid) {
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

// signalled reports whether a thread has a signal pending that it does not
// block. One for a process of several threads counts if it kills: else another
// thread may take it.
func signalled(tid uint32) bool { return pending(statusOf(tid)) }

// Killed reports whether a thread is about to end by a signal.
func Killed(tid uint32) bool { return killed(statusOf(tid)) }

// statusOf is empty for a thread that is gone.
func statusOf(tid uint32) procid.Status {
	s, _ := procid.ReadStatus(int(tid))
	return s
}

const sigkill = 1 << (9 - 1)

func killed(s procid.Status) bool { return (signals(s, "SigPnd")|signals(s, "ShdPnd"))&sigkill != 0 }

func pending(s procid.Status) bool {
	own := signals(s, "SigPnd")
	if s.Field("Threads") == "1" {
		own |= signals(s, "ShdPnd")
	}
	return killed(s) || own&^signals(s, "SigBlk") != 0
}

// signals returns a set of them.
func signals(s procid.Status, name string) uint64 {
	set, _ := strconv.ParseUint(s.Field(name), 16, 64)
	return set
}
