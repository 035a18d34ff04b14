package fs

import (
	"errors"
	"slices"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// While a process is in execve(2), much of what the kernel shows of it cannot be
// read: its start time, environment and descriptors. And an execve(2) may wait:
// for our own answer to a FLUSH or a WRITE, or for any other file system, for
// ever. So nobody looks at a process for more than a moment (procid.Soon) while he
// keeps others waiting, but at the caller of the very request, which is in none.
// Who can't be known for a second is nobody (H4). The same goes for a process's
// memory, its environment and its command line, while it changes what it has mapped.

// errUnseen ends a try that needs to know more of processes than can be had
// with locks held. attempt finds it out, and tries again.
var errUnseen = errors.New("to be seen without locks")

// process returns the caller, once looked up. In a try it may be nil because
// unseen is set; then the try ends with errUnseen.
func (r *request) process() *procid.Process {
	switch {
	case r.proc != nil || r.asked:
	case !r.trying:
		r.ask()
	default:
		p, err := r.fs.procs.Seen(r.header.Pid)
		r.proc, r.unknown, r.unseen = p, notYet(err), errors.Is(err, procid.ErrBusy)
	}
	return r.proc
}

// must is process for a try that goes by nobody but the caller.
func (r *request) must() (*procid.Process, error) {
	p := r.process()
	if r.unseen {
		return nil, errUnseen
	}
	return p, nil
}

// opener is must for who opens a lock file, be it nobody (H4): what is written through
// that passes the gate.
func (r *request) opener() (*procid.Process, error) {
	p, err := r.must()
	if p == nil && err == nil {
		p = new(procid.Process)
	}
	return p, err
}

// ask looks the caller up, and reports false when the request was interrupted.
func (r *request) ask() bool {
	p, unknown, ok := r.fs.process(r.header)
	r.proc, r.unknown, r.asked = p, unknown, ok // or nobody (H4)
	return ok
}

// see finds out what a try could not. It reports false when the request was
// interrupted.
func (r *request) see() bool {
	if r.proc == nil && !r.asked && !r.ask() {
		return false
	}
	if p, kind := r.proc, r.scope(); p != nil && r.scoped == nil && kind != lockstate.ProcessScope {
		procs := r.fs.procs
		s, ok := awaited(r.header, func(stop <-chan struct{}) *scopeAnswer {
			s, err := scopeOf(procs, p, kind, stop)
			return &scopeAnswer{scope: s, err: err}
		}, &scopeAnswer{err: lockstate.ErrNobody, late: true})
		if !ok {
			return false
		}
		r.scoped = s
	}
	r.unseen = false
	return true
}

// seeClaims waits until it can be said what those carry on whom a refusal depends,
// or has been known for seeTime not to be: who has kept others waiting that long does
// so once. It reports false when the request was interrupted.
func (r *request) seeClaims(held *lockstate.HeldError) bool {
	r.sure = true
	procs, pids := r.fs.procs, r.unclear(held)
	stuck := func() bool {
		return slices.ContainsFunc(pids, func(pid int) bool {
			d := procs.StuckFor(pid)
			return d > 0 && d < seeTime
		})
	}
	for end := time.Now().Add(seeTime); stuck() && time.Now().Before(end); {
		if !r.rest(seePause) || transport.Killed(r.header.Pid) {
			return false
		}
	}
	return true
}

// unsure reports whether it has yet to be waited for what a refusal depends on.
func (r *request) unsure(err error) bool {
	var held *lockstate.HeldError
	return errors.As(err, &held) && held.Unsure != nil && !r.sure
}

// A scopeAnswer is what scopeOf says.
type scopeAnswer struct {
	scope lockstate.Scope
	err   error
	late  bool // it took too long to find out
}

const (
	// seeTime bounds how long a request waits to be known who sent it. The
	// kernel keeps others waiting for it meanwhile: all who change the names of
	// the same directory.
	seeTime = time.Second
	// seePause is how often it is looked whether what takes long is over.
	seePause = 10 * time.Millisecond
	// killTime is how often it is looked whether its caller is being killed. For
	// a request that was not expected to wait the transport may not say so.
	killTime = 50 * time.Millisecond
)

// anew forgets an answer that came late, or not, for a request that has waited since.
func (r *request) anew() {
	if r.scoped != nil && r.scoped.late {
		r.scoped = nil
	}
	r.sure = false
}

// awaited returns what look finds out, which may wait for an execve(2), or late if
// that takes too long. ok is false when the caller is being killed; another signal
// ends no call of a local file system. In the end the look is told to stop.
func awaited[T any](h *fuse.InHeader, look func(stop <-chan struct{}) T, late T) (v T, ok bool) {
	answer, stop := make(chan T, 1), make(chan struct{})
	defer close(stop)
	go func() { answer <- look(stop) }()
	t := time.NewTicker(killTime)
	defer t.Stop()
	// Ticks are counted, of which none comes while the daemon is stopped: it does not
	// look then, either.
	for waited := killTime; ; waited += killTime {
		select {
		case v = <-answer:
			return v, true
		case <-t.C:
		}
		switch {
		case transport.Killed(h.Pid):
			return v, false
		case waited > seeTime:
			return late, true
		}
	}
}

// glance returns the caller of a request that may be part of an execve(2), or is
// answered with locks held: nil also where it can't be said at once.
func (fs *FS) glance(h *fuse.InHeader) *procid.Process { return fs.procs.Glance(h.Pid) }
