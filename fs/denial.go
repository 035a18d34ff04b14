package fs

import (
	"bytes"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// denialLog keeps the last refusals and counts all (W6). What is refused again, as to who
// tries every now and then until it may, is kept once: else it would soon be the only one.
type denialLog struct {
	mu     sync.Mutex
	ring   []lockstate.Denial // each as it was the last time
	next   int
	counts map[string]uint64 // by operation
	lines  lineLimit
}

const (
	denialsKept = 512
	// A refusal that comes again before this time is over is not logged again.
	sameRefusal = time.Minute
)

// A lineLimit keeps users from filling the log with lines of one kind.
type lineLimit struct {
	mu      sync.Mutex
	second  int64 // of the last line
	lines   int   // in that second
	skipped int   // since the last line
}

// linesASecond is how many there are of one kind at the most.
const linesASecond = 5

// pass reports whether a line may be written now, and how many were not since the
// last one.
func (l *lineLimit) pass(now time.Time) (unlogged []any, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := now.Unix(); s != l.second {
		l.second, l.lines = s, 0
	}
	if l.lines++; l.lines > linesASecond {
		l.skipped++
		return nil, false
	}
	if l.skipped > 0 {
		unlogged = []any{"unlogged", l.skipped}
	}
	l.skipped = 0
	return unlogged, true
}

// add notes one refusal.
func (d *denialLog) add(fs *FS, r *request, status fuse.Status, err error, held *lockstate.HeldError) {
	x := lockstate.Denial{
		Time: time.Now(), Times: 1, Op: r.op, Path: r.path(), UID: fs.userOf(r.header), Reason: err.Error(),
		Errno: unix.ErrnoName(syscall.Errno(status)),
	}
	if p := r.process(); p != nil {
		x.Pid, x.Start, x.Cmd = p.ID().Pid, p.ID().Start, fs.procs.Cmdline(p.ID())
	}
	e := lockstate.Event{
		Event: lockstate.EventRefused, Dir: x.Path, Pid: x.Pid, Protocol: x.Op, Reason: x.Errno, Why: x.Reason,
	}
	if held != nil {
		x.Lock, x.LockPid = held.Lock.Path, held.Lock.Owner.Pid
		if len(held.Handles) > 0 {
			x.Lock, x.LockPid = held.Handles[0].Path, held.Handles[0].Owner.Pid
		}
		e.Token = held.Lock.Token
		if held.Lock.Client == "" { // else the owner may be gone; Why names the client
			e.By = x.LockPid
		}
	}
	fs.table.Tell(nil, e)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.counts == nil {
		d.counts = make(map[string]uint64)
	}
	d.counts[x.Op]++
	again := slices.IndexFunc(d.ring, func(y lockstate.Denial) bool {
		return y.Pid == x.Pid && y.Start == x.Start && y.Op == x.Op && y.Path == x.Path && y.Errno == x.Errno && y.Reason == x.Reason
	})
	switch {
	case again >= 0:
		last := d.ring[again].Time
		x.Times += d.ring[again].Times
		d.ring[again] = x
		if x.Time.Sub(last) < sameRefusal {
			return
		}
	case len(d.ring) < denialsKept:
		d.ring = append(d.ring, x)
		d.next = len(d.ring) % denialsKept
	default:
		d.ring[d.next] = x
		d.next = (d.next + 1) % denialsKept
	}
	if unlogged, ok := d.lines.pass(x.Time); ok {
		fs.log.Info("refused", append([]any{"op", x.Op, "path", x.Path, "pid", x.Pid, "cmd", x.Cmd, "errno", x.Errno, "reason", x.Reason}, unlogged...)...)
	}
}

// path returns what the request is about, relative to the root.
func (r *request) path() string {
	if r.at != "" {
		return r.at
	}
	if r.parent != nil {
		return join(r.fs.table.Path(r.parent.dir), r.name)
	}
	return r.fs.pathOfNode(r.node)
}

// list returns the refusals that are kept, oldest first.
func (d *denialLog) list() []lockstate.Denial {
	d.mu.Lock()
	all := slices.Concat(d.ring[d.next:], d.ring[:d.next])
	d.mu.Unlock()
	slices.SortStableFunc(all, func(x, y lockstate.Denial) int { return x.Time.Compare(y.Time) })
	return all
}

func (fs *FS) showDenials() []byte {
	var b bytes.Buffer
	for _, x := range fs.denials.list() {
		x.Path, x.PathBytes = text(x.Path)
		x.Lock, x.LockBytes = text(x.Lock)
		b.Write(encode(x))
	}
	return b.Bytes()
}
