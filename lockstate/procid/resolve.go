//go:build linux

package procid

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// A sighting is a thread that was found, and its process. It owns its
// descriptors.
type sighting struct {
	group      int  // pidfd of the thread group
	thread     int  // as thread.fd
	file       bool // as thread.file
	id         ID
	ppid       int
	euid       uint32
	leaderless bool // the first thread has ended
}

func (s *sighting) close() {
	if s.thread >= 0 {
		unix.Close(s.thread)
	}
	if s.group >= 0 {
		unix.Close(s.group)
	}
}

// current is [thread.current] for what is not in the cache yet.
func (s *sighting) current() bool {
	return (&thread{group: &group{fd: s.group}, fd: s.thread, file: s.file}).current()
}

// resolve finds the process of a thread, puts both into the cache and returns
// the process pinned. It is ErrBusy where it would have to wait longer. f is the
// flight that asks, if one does, and failed what is known of its parent.
func (r *Resolver) resolve(tid uint32, how patience, f *flight, failed *failure) (*group, error) {
	s, err := ask(r, int(tid), how, f, func() (*sighting, error) { return r.kernel.find(int(tid)) }, (*sighting).close)
	if err == ErrBusy {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("%w: thread %d: %w", ErrUnknown, tid, err)
	}
	r.tellApart(s)
	if g, ok := r.attach(tid, s, nil); ok {
		return g, nil
	}
	// Its first sighting. The ancestors are taken down now, not when somebody
	// asks for them: its parent may be gone by then (H2). That is cheap, since
	// the parent is in the cache mostly.
	parents, err := r.ancestors(s, how, f, failed)
	if err != nil {
		s.close()
		return nil, err
	}
	chain, born, epoch, err := r.made(s, parents, how, failed)
	if err != nil {
		s.close()
		return nil, err
	}
	p := &Process{id: s.id, uid: s.euid, chain: chain, from: r}
	p.adopted = len(parents) > 0 && len(chain) > 0 && (chain[0] != parents[0] || r.wasAdopted(born, epoch, parents[0]))
	g, ok := r.attach(tid, s, p)
	if !ok {
		s.close()
		return nil, fmt.Errorf("%w: %w", ErrUnknown, os.ErrClosed)
	}
	r.named(born, epoch, g.proc)
	return g, nil
}

// tellApart sees to it that no process has the ID of a dead one: of that, what becomes of
// its locks may not have been carried out yet, or it is known as a holder. The pid went
// round within one tick of the clock then.
func (r *Resolver) tellApart(s *sighting) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	g := r.pids[s.id.Pid]
	if g != nil && g.proc.id.Start == s.id.Start && !readable(g.fd) {
		s.id = g.proc.id
		return
	}
	// The last one before it counts for all: in a row they have ever higher numbers.
	last := r.brief.of(s.id.Pid)
	if g != nil {
		last = g.proc.id
	}
	if last.Pid == s.id.Pid && last.Start == s.id.Start {
		s.id.again = last.again + 1
	}
	for r.groups[s.id] != nil {
		s.id.again++
	}
}

// attach caches the thread of s as one of a process that is known already, or
// else of p. It reports false, and leaves the descriptors of s alone, when there
// is no process to attach it to.
func (r *Resolver) attach(tid uint32, s *sighting, p *Process) (*group, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, false
	}
	g := r.pids[s.id.Pid]
	switch {
	case g != nil && g.proc.id.Start == s.id.Start && !readable(g.fd):
		unix.Close(s.group)
	case p == nil:
		return nil, false
	default:
		if g != nil && isBrief(g.proc.id) {
			r.brief.add(g.proc.id)
		}
		g = &group{proc: p, fd: s.group, told: told{leader: s.leaderless}, before: r.mayBeToldLocked(g)}
		r.groups[s.id] = g
		r.pids[s.id.Pid] = g
	}
	g.pins++
	r.insertLocked(tid, &thread{group: g, fd: s.thread, file: s.file})
	return g, true
}

// find opens what proves the identity of a thread and its process, and then
// reads the rest. All of it belongs to that process if it still lives at the
// end, because the numbers could not be used again meanwhile.
func (k kernel) find(tid int) (*sighting, error) {
	s := &sighting{group: -1, thread: -1}
	err := k.open(tid, s)
	if err == nil {
		err = k.read(s)
	}
	if err == nil && !s.current() {
		err = unix.ESRCH
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// open fills in the descriptors and the pid.
func (k kernel) open(tid int, s *sighting) (err error) {
	s.id.Pid = tid
	s.group, err = pidfdOpen(tid, 0)
	if err != unix.EINVAL && err != unix.ENOENT { // what older and newer kernels say of a thread that leads no group
		return err
	}
	if k.threads {
		if s.thread, err = pidfdOpen(tid, pidfdThread); err != nil {
			return err
		}
	}
	if k.threads && k.info {
		in, err := info(s.thread, 0)
		if err != nil {
			return err
		}
		s.id.Pid = int(in.tgid)
	} else {
		st, err := readStatus(tid)
		if err != nil {
			return err
		}
		s.id.Pid = st.tgid
	}
	if s.group, err = pidfdOpen(s.id.Pid, 0); err != nil {
		return err
	}
	if !k.threads {
		s.file = true
		s.thread, err = openProc("/proc/" + strconv.Itoa(s.id.Pid) + "/task/" + strconv.Itoa(tid) + "/comm")
	}
	return err
}

// read fills in the start time, the parent and the user.
func (k kernel) read(s *sighting) error {
	st, err := readLeaderStat(s.id.Pid)
	if err != nil {
		return err
	}
	s.id.Start, s.ppid, s.leaderless = st.start, st.ppid, st.state == 'Z'
	if k.info {
		in, err := info(s.group, 0)
		s.euid = in.euid
		return err
	}
	status, err := readStatus(s.id.Pid)
	s.euid = status.euid
	return err
}

// parent reads a living process's parent anew.
func (r *Resolver) parent(s *sighting, how patience, f *flight) (int, error) {
	if r.kernel.info {
		in, err := info(s.group, 0)
		return int(in.ppid), err
	}
	pid := s.id.Pid
	return ask(r, pid, how, f, func() (int, error) {
		st, err := readLeaderStat(pid)
		return st.ppid, err
	}, func(int) {})
}

// ancestors returns the ancestors of a process that is seen for the first time.
// Those of a parent that was seen before are the recorded ones, whatever became
// of them since (H2).
func (r *Resolver) ancestors(s *sighting, how patience, f *flight, failed *failure) ([]ID, error) {
	const tries = 8 // each but the first follows the death of a parent in between
	ppid := s.ppid
	for range tries {
		if ppid == 0 { // pid 1, or the parent is outside of the pid namespace
			return nil, nil
		}
		parent, err := r.ancestor(ppid, false, how, failed)
		if errors.Is(err, ErrBusy) || IsShort(err) {
			return nil, fmt.Errorf("an ancestor of pid %d: %w", s.id.Pid, err)
		}
		now, errNow := r.parent(s, how, f)
		if errNow == ErrBusy || IsShort(errNow) {
			return nil, errNow
		}
		if errNow != nil {
			return nil, nil // gone; so is what it descended from, for all that matters
		}
		// Still its parent after the look at the parent: then the number meant
		// the parent all the time. A parent is never the younger one.
		if err == nil && now == ppid && parent.id.Start <= s.id.Start {
			return r.prune(append([]ID{parent.id}, parent.chain...)), nil
		}
		// A dead parent would have lost its child by the time that it shows as
		// dead: this one is hidden from us (hidepid in proc(5)).
		if err != nil && now == ppid {
			return nil, nil
		}
		ppid = now
	}
	return nil, nil
}

// ancestor returns the process with a pid that another one descends from, or a maker of
// it. The error is a busyError where it has to be waited for, and how says not to, and
// what it failed with before where that was tried.
func (r *Resolver) ancestor(pid int, maker bool, how patience, failed *failure) (*Process, error) {
	p, err := r.checkPid(pid, r.cached(uint32(pid)))
	switch {
	case err != nil || p != nil:
		return p, err
	case failed != nil && failed.pid == pid:
		return nil, failed.err
	case how == impatient:
		return nil, &busyError{pid: pid, maker: maker}
	}
	return r.ByPid(pid)
}

const (
	// maxChain is how many ancestors are remembered without a look which of them live:
	// a program that forks and exits again and again has ever more.
	maxChain = 64
	// maxLiving bounds those that live. Else n processes, each the child of the one
	// before, would take memory by the square of n, here and where it is written down.
	maxLiving = 512
)

func (r *Resolver) prune(chain []ID) []ID {
	if len(chain) <= maxChain {
		return chain
	}
	living := chain[:0]
	for _, id := range chain {
		if r.Alive(id) {
			living = append(living, id)
		}
	}
	return living[:min(len(living), maxLiving)]
}
