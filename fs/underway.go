package fs

import (
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// When rename(2) is answered, the kernel goes by the old names still until the thread
// that called it has run again; and when unlink(2) is, by the name that is gone. In a
// directory that somebody has acquired meanwhile, what is opened or made by such a name
// would come where the new one leads, or the file's other names (W3). So whoever comes to
// what has moved, or beneath it, while that may be so hears ESTALE, as with a file that
// has no name left (see staleFinds): the kernel looks again then, and waits for that
// thread.

const (
	// maxUnderWay is how many changes are remembered of which some are a second old.
	maxUnderWay = 1 << 12
	// answerTime is within which it is not worth a look.
	answerTime = 10 * time.Millisecond
	// flightTime is within which a request arrives of who was there before the caller
	// had returned.
	flightTime = 10 * time.Millisecond
	// runTime, of the processor, is more than a thread needs to return.
	runTime = time.Millisecond
	// unseenTime is after which a thread that can't be looked at counts as back, and one
	// that waits for some answer has had this one.
	unseenTime = time.Second
	// sweepTime is how often some are looked at of which nobody asks: sweepMost.
	sweepTime = 100 * time.Millisecond
	sweepMost = 16
	// mostNames bounds how many names of a file are followed.
	mostNames = 16
)

// changesUnderWay are the changes of names whose callers may not have returned yet.
type changesUnderWay struct {
	some   atomic.Bool  // there are any
	losing atomic.Int32 // of how many files one of several names is about to go
	mu     sync.Mutex
	byNode map[*node]*changeUnderWay
	byTid  map[uint32]*changeUnderWay // the last of a thread that the daemon has a number for
	swept  time.Time                  // when some were looked at
}

type changeUnderWay struct {
	tid      uint32
	nodes    [2]*node // what has moved, or lost a name, or nil
	loser    *node    // which of them has lost a name, and has others
	from, to *lockstate.Dir
	token    uint64 // the last that was given out when it was admitted
	at       time.Time
	over     time.Time // when the caller was found to have returned, or zero; protected by changesUnderWay.mu

	ran atomic.Int64 // how long the caller had run when it was looked at first, in ns; 0: it was not
}

// began takes note of a change that the backing has carried out. What it was admitted as
// has not ended: whoever acquires a directory for which that matters gets a later token.
func (t *changesUnderWay) began(u *changeUnderWay) {
	if u.nodes == [2]*node{} {
		return // the kernel knows neither
	}
	u.at = time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byTid == nil {
		t.byTid, t.byNode = make(map[uint32]*changeUnderWay), make(map[*node]*changeUnderWay)
	}
	if len(t.byNode) >= maxUnderWay {
		for _, older := range t.byNode {
			if !older.over.IsZero() || u.at.Sub(older.at) > unseenTime {
				t.forgetLocked(older)
			}
		}
	}
	for _, n := range u.nodes {
		if n != nil {
			t.overLocked(t.byNode[n], u.at) // the kernel changes one name of it at a time
			t.byNode[n] = u
		}
	}
	t.some.Store(true)
	if u.tid != 0 {
		t.overLocked(t.byTid[u.tid], u.at)
		t.byTid[u.tid] = u
	}
}

// countsDown reports whether the kernel may yet take one from the links of n that the backing
// tells of: it does so itself when a removal is answered.
func (t *changesUnderWay) countsDown(n *node, tid uint32) bool {
	if t.losing.Load() > 0 {
		return true
	}
	if !t.some.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	u := t.byNode[n]
	return u != nil && u.loser == n && (u.tid != tid || tid == 0) && u.over.IsZero() && time.Since(u.at) < unseenTime
}

// overLocked takes note that the caller has returned.
func (t *changesUnderWay) overLocked(u *changeUnderWay, now time.Time) {
	if u == nil {
		return
	}
	if u.over.IsZero() {
		u.over = now
	}
	if t.byTid[u.tid] == u {
		delete(t.byTid, u.tid)
	}
}

func (t *changesUnderWay) forgetLocked(u *changeUnderWay) {
	t.overLocked(u, u.at)
	for _, n := range u.nodes {
		if n != nil && t.byNode[n] == u {
			delete(t.byNode, n)
		}
	}
	t.some.Store(len(t.byNode) > 0)
}

// mislead reports whether a thread may have come to n by a name that is gone. Who does
// not acquire anything there may, as long as nobody has since.
func (t *changesUnderWay) mislead(fs *FS, n *node, tid uint32, acquires bool) (misled bool) {
	if !t.some.Load() {
		return false
	}
	now := time.Now()
	t.mu.Lock()
	if tid != 0 {
		t.overLocked(t.byTid[tid], now)
	}
	above, doubtful := t.aboveLocked(n, tid), t.sweepLocked(now)
	t.mu.Unlock()
	for _, u := range above {
		if misled = acquires || u.acquiredSince(fs, n); misled {
			doubtful = append(doubtful, u)
			break
		}
	}
	var over []*changeUnderWay
	for _, u := range doubtful {
		if !u.mayLast() {
			over = append(over, u)
		}
	}
	if len(over) > 0 {
		now = time.Now()
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, u := range over {
			t.overLocked(u, now)
		}
	}
	return misled
}

// sweepLocked forgets what is over, if it is time for that, and returns some of what may
// be.
func (t *changesUnderWay) sweepLocked(now time.Time) (doubtful []*changeUnderWay) {
	if now.Sub(t.swept) < sweepTime {
		return nil
	}
	t.swept = now
	for _, u := range t.byNode {
		switch {
		case u.over.IsZero():
			if len(doubtful) < sweepMost {
				doubtful = append(doubtful, u)
			}
		case now.Sub(u.over) > flightTime:
			t.forgetLocked(u)
		}
	}
	return doubtful
}

// aboveLocked returns the changes by others that have moved n, or what it is in.
func (t *changesUnderWay) aboveLocked(n *node, tid uint32) (all []*changeUnderWay) {
	if len(t.byNode) == 0 {
		return nil
	}
	now := time.Now()
	n.tab.mu.RLock()
	defer n.tab.mu.RUnlock()
	up := func(n *node) {
		for ; n != nil; n = n.parent {
			u := t.byNode[n]
			if u != nil && (u.tid != tid || tid == 0) && (u.over.IsZero() || now.Sub(u.over) < flightTime) {
				all = append(all, u)
			}
		}
	}
	up(n)
	if m := n.more.Load(); m != nil && m.links != nil {
		for _, l := range m.links.all[:min(len(m.links.all), mostNames)] {
			up(l.parent)
		}
	}
	return all
}

// acquiredSince reports whether a lock covers n, or where the name was or is, that was
// not there then.
func (u *changeUnderWay) acquiredSince(fs *FS, n *node) bool {
	dirs, _ := n.covering()
	for _, d := range append(dirs, u.from, u.to) {
		if l, ok := fs.table.Governing(d); ok && l.Token > u.token {
			return true
		}
	}
	return false
}

// mayLast reports whether the caller may not have returned yet. A thread that waits has,
// but for one that waits for an answer; so has one that has run for some time since.
func (u *changeUnderWay) mayLast() bool {
	age := time.Since(u.at)
	switch {
	case age < answerTime:
		return true
	case u.tid == 0:
		return age < unseenTime
	}
	status, err := procid.ReadStatus(int(u.tid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return false
	}
	switch state := status.Field("State"); {
	case state == "":
	case state[0] == 'Z' || state[0] == 'X':
		return false
	case state[0] == 'R':
		if ran, ok := procid.RunTime(int(u.tid)); ok {
			// At least 1: 0 says that nobody has looked.
			return u.ran.CompareAndSwap(0, int64(ran)+1) || int64(ran) < u.ran.Load()+int64(runTime)
		}
	default:
		// In some kernels the function is built into another one.
		if at := procid.WaitsAt(int(u.tid)); at != "" && at != "request_wait_answer" && !strings.Contains(at, "fuse") {
			return false
		}
	}
	return age < unseenTime
}
