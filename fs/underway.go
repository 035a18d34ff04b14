package fs

import (
	"errors"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// When rename(2) is answered, the kernel goes by the old names still until the thread
// that called it has run again. In a directory that somebody has acquired meanwhile, what
// is opened or made by an old name would come where the new one leads (W3). So whoever
// comes to what was renamed, or beneath it, while that may be so hears ESTALE, as of an
// unlink (see staleFinds): the kernel waits for that thread then.

const (
	// maxUnderWay is how many renames are remembered of which some are a second old.
	maxUnderWay = 1 << 12
	// answerTime is within which it is not worth a look.
	answerTime = 10 * time.Millisecond
	// unseenTime is after which a thread that can't be looked at counts as back.
	unseenTime = time.Second
	// sweepTime is how often some are looked at of which nobody asks: sweepMost.
	sweepTime = 100 * time.Millisecond
	sweepMost = 64
)

// renamesUnderWay are the renames whose callers may not have returned yet.
type renamesUnderWay struct {
	some   atomic.Bool // there are any
	mu     sync.Mutex
	byTid  map[uint32]*renameUnderWay // of its caller; all that the daemon has no number for are one
	byNode map[*node]*renameUnderWay
	swept  time.Time // when those were forgotten that are over
}

type renameUnderWay struct {
	tid      uint32
	nodes    [2]*node // what has moved, or nil
	from, to *node    // where the names are
	token    uint64   // the last that was given out
	at       time.Time
}

// began takes note of m, which the backing has carried out. The caller has FS.ns alone,
// and has not ended what m was admitted as: whoever acquires a directory for which that
// matters gets a later token.
func (t *renamesUnderWay) began(fs *FS, m *renaming) {
	u := &renameUnderWay{tid: m.r.header.Pid, from: m.from.parent, to: m.to.parent, token: fs.table.LastToken(), at: time.Now()}
	u.nodes[0] = m.src.node
	if m.dst != nil && m.fills() {
		u.nodes[1] = m.dst.node
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byTid == nil {
		t.byTid, t.byNode = make(map[uint32]*renameUnderWay), make(map[*node]*renameUnderWay)
	}
	if len(t.byTid) >= maxUnderWay {
		for older := range maps.Values(t.byTid) {
			if u.at.Sub(older.at) > unseenTime {
				t.overLocked(older)
			}
		}
	}
	t.overLocked(t.byTid[u.tid])
	for _, n := range u.nodes {
		if n != nil {
			t.overLocked(t.byNode[n]) // the kernel lets nobody rename it until then
			t.byNode[n] = u
		}
	}
	t.byTid[u.tid] = u
	t.some.Store(true)
}

// overLocked forgets a rename whose caller has returned.
func (t *renamesUnderWay) overLocked(u *renameUnderWay) {
	if u == nil {
		return
	}
	if t.byTid[u.tid] == u {
		delete(t.byTid, u.tid)
	}
	for _, n := range u.nodes {
		if n != nil && t.byNode[n] == u {
			delete(t.byNode, n)
		}
	}
	t.some.Store(len(t.byTid) > 0)
}

// mislead reports whether a thread may have come to n by a name that a rename has taken
// away. Who does not acquire anything there may, as long as nobody has since.
func (t *renamesUnderWay) mislead(fs *FS, n *node, tid uint32, acquires bool) bool {
	if !t.some.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if u := t.byTid[tid]; u != nil && tid != 0 {
		t.overLocked(u)
	}
	t.sweepLocked()
	u := t.aboveLocked(n)
	if u == nil || !acquires && !u.acquiredSince(fs, n) {
		return false
	}
	if !u.mayLast() {
		t.overLocked(u)
		return false
	}
	return true
}

// sweepLocked forgets some that are over.
func (t *renamesUnderWay) sweepLocked() {
	now := time.Now()
	if now.Sub(t.swept) < sweepTime {
		return
	}
	t.swept = now
	seen := 0
	for u := range maps.Values(t.byTid) {
		if seen++; seen > sweepMost {
			return
		}
		if !u.mayLast() {
			t.overLocked(u)
		}
	}
}

// aboveLocked returns the rename that has moved n, or what it is in.
func (t *renamesUnderWay) aboveLocked(n *node) *renameUnderWay {
	if len(t.byNode) == 0 {
		return nil
	}
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	for ; n != nil; n = n.parent {
		if u := t.byNode[n]; u != nil {
			return u
		}
	}
	return nil
}

// acquiredSince reports whether a lock covers n, or where the renamed was or is, that was
// not there then.
func (u *renameUnderWay) acquiredSince(fs *FS, n *node) bool {
	dirs, _ := n.covering()
	for _, d := range append(dirs, u.from.dir, u.to.dir) {
		if l, ok := fs.table.Governing(d); ok && l.Token > u.token {
			return true
		}
	}
	return false
}

// mayLast reports whether the caller may not have returned yet. A thread that waits has,
// but for one that waits for an answer.
func (u *renameUnderWay) mayLast() bool {
	age := time.Since(u.at)
	switch {
	case age < answerTime:
		return true
	case u.tid == 0:
		return age < unseenTime
	}
	status, err := procid.ReadStatus(int(u.tid))
	switch {
	case errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH):
		return false
	case err != nil:
		return age < unseenTime
	}
	if strings.HasPrefix(status.Field("State"), "R") {
		return true
	}
	at := procid.WaitsAt(int(u.tid))
	if at == "" {
		return age < unseenTime
	}
	return at == "request_wait_answer" || strings.Contains(at, "fuse") // which may be built into that
}
