package transport

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
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
	if h.Opcode == opSetlkw {
		c.waits.count(h.Uid, 1)
		defer c.waits.count(h.Uid, -1)
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
func signalled(tid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	return err == nil && tid != 0 && pendingSignal(string(b))
}

// Patient reports whether a request that was cancelled may go on waiting for a
// moment: its caller has a signal, which would not end a call of a local file
// system. Nobody kills him, nor is the transport about to stop.
func Patient(tid uint32) bool { return signalled(tid) && !Killed(tid) }

// Killed reports whether a thread is about to end by a signal.
func Killed(tid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	return err == nil && tid != 0 && (pendingOf(string(b), "SigPnd")|pendingOf(string(b), "ShdPnd"))&sigkill != 0
}

const sigkill = 1 << (9 - 1)

// pendingOf returns a set of signals in a status file.
func pendingOf(status, name string) (v uint64) {
	if _, rest, ok := strings.Cut(status, "\n"+name+":"); ok {
		line, _, _ := strings.Cut(rest, "\n")
		v, _ = strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	}
	return v
}

func pendingSignal(status string) bool {
	field := func(name string) uint64 { return pendingOf(status, name) }
	own, shared := field("SigPnd"), field("ShdPnd")
	if (own|shared)&sigkill != 0 {
		return true
	}
	if field("Threads") == 1 {
		own |= shared
	}
	return own&^field("SigBlk") != 0
}
