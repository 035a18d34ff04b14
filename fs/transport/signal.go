package transport

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// SignalTime is how long a request that came through a ring waits before its
// caller is looked at.
const SignalTime = time.Millisecond

// wait carries out a request that may wait without end and came through a ring.
//
// The kernel tells of a signal to the caller (FUSE_INTERRUPT) only if it came
// after the request was handed over, and forgets one that came while the
// request was on its way. So once, later, it is looked for.
func (c *conn) wait(at *slot, h *fuse.InHeader, in, out [][]byte) int {
	unique, pid := h.Unique, h.Pid
	c.threads.Add(1)
	look := time.AfterFunc(SignalTime, func() {
		defer c.threads.Done()
		if Signalled(pid) {
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

// Signalled reports whether a thread has a signal pending that it does not
// block. One for a process of several threads counts if it kills: else another
// thread may take it. A request that was not known to be one that may wait is to
// look once, [SignalTime] after it began to: it may not be told of a signal that
// came before.
func Signalled(tid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	return err == nil && tid != 0 && pendingSignal(string(b))
}

const sigkill = 1 << (9 - 1)

func pendingSignal(status string) bool {
	field := func(name string) (v uint64) {
		if _, rest, ok := strings.Cut(status, "\n"+name+":"); ok {
			line, _, _ := strings.Cut(rest, "\n")
			v, _ = strconv.ParseUint(strings.TrimSpace(line), 16, 64)
		}
		return v
	}
	own, shared := field("SigPnd"), field("ShdPnd")
	if (own|shared)&sigkill != 0 {
		return true
	}
	if field("Threads") == 1 {
		own |= shared
	}
	return own&^field("SigBlk") != 0
}
