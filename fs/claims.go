package fs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// What a process carries that may make it a holder: its group, session and
// cgroup (H3), and the client's ID in its environment (L2).

// clientVariable names the environment variable with a client's ID.
const clientVariable = "STAGEFS_CLIENT"

// claims reports whether a process holds a lock by what it carries now. Of one
// that is in execve(2) it is not known what it will carry; nor what is in the memory
// of one that another of its threads keeps locked; nor whether a scope is still the
// one that is meant while its leader can't be looked at. See unclear.
func claims(r *procid.Resolver, p *procid.Process, c lockstate.Claim) (holds bool, unsure error) {
	pid := p.ID().Pid
	if c.Scope.Kind != lockstate.ProcessScope {
		holds, unsure = inScope(r, pid, c.Scope)
		holds = holds && unsure == nil
	}
	if !holds && c.Client != "" {
		var err error
		holds, err = carriesFor(r, pid, c)
		unsure = cmp.Or(unsure, err)
	}
	return holds && r.Lives(p.ID()), unsure // after the look: it was at no later process
}

// carriesFor reports whether a process of a user's carries that one's client's ID, or why
// that can't be said now.
func carriesFor(r *procid.Resolver, pid int, c lockstate.Claim) (bool, error) {
	if is, err := hasUser(pid, c.UID); !is {
		return false, ifShort(err)
	}
	carries, err := soon(r, pid, func() (bool, error) { return carriesClient(pid, c.Client) })
	return carries, unsureBy(err)
}

// soon is [procid.Soon] for a look that may fail: ErrBusy where it takes too long.
func soon[T any](r *procid.Resolver, pid int, look func() (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	a, known := procid.Soon(r, pid, func() (a answer) {
		a.v, a.err = look()
		return a
	}, nil)
	if !known {
		a.err = procid.ErrBusy
	}
	return a.v, a.err
}

// unsureBy returns why what soon has looked at can't be told now, if that is why it failed.
func unsureBy(err error) error {
	if errors.Is(err, procid.ErrBusy) {
		return err
	}
	return ifShort(err)
}

// ifShort returns an error that says more of this daemon than of what it has looked at, or
// nil.
func ifShort(err error) error {
	if procid.IsShort(err) {
		return err
	}
	return nil
}

// unclear returns the processes that claims may not have been able to look at when a
// request was refused: the caller, those who have something open, and the leaders of
// the scopes that the request and the lock in its way are for.
func (r *request) unclear(held *lockstate.HeldError) (pids []int) {
	if r.proc != nil {
		pids = append(pids, r.proc.ID().Pid)
	}
	for _, h := range held.Handles {
		pids = append(pids, h.Owner.Pid)
	}
	scopes := []lockstate.Scope{held.Lock.Scope}
	if r.scoped != nil {
		scopes = append(scopes, r.scoped.scope)
	}
	for _, s := range scopes {
		if s.Kind != lockstate.GroupScope && s.Kind != lockstate.SessionScope {
			continue
		}
		if leader, err := strconv.Atoi(s.ID); err == nil {
			pids = append(pids, leader)
		}
	}
	return pids
}

// A membership is what status of proc(5) tells of a process, also while it is
// in execve(2). The first number of several is as the daemon sees it.
type membership struct{ group, session string }

func membershipOf(pid int) (m membership, err error) {
	status, err := procid.ReadStatus(pid)
	if err != nil {
		return m, err
	}
	first := func(key string) string {
		number, _, _ := strings.Cut(status.Field(key), "\t")
		return number
	}
	return membership{first("NSpgid"), first("NSsid")}, nil
}

// startOf returns when a process started, in clock ticks after boot. unsure: that can't be
// said now.
func startOf(r *procid.Resolver, pid int) (start uint64, unsure error, ok bool) {
	if p := r.Known(uint32(pid)); p != nil && p.ID().Pid == pid {
		return p.ID().Start, nil, true
	}
	start, err := soon(r, pid, func() (uint64, error) { return procid.StartOf(pid) })
	return start, unsureBy(err), err == nil
}

// scopeNamed returns the kind of scope with a name.
func scopeNamed(name string) (lockstate.ScopeKind, bool) {
	for k := lockstate.ProcessScope; k <= lockstate.CgroupScope; k++ {
		if name == k.String() {
			return k, true
		}
	}
	return lockstate.ProcessScope, false
}

// scopeOf returns the scope of a kind that a process is in; with an error, that of
// the process alone. It waits for the leader of that scope if it is in execve(2),
// until stop is closed.
func scopeOf(r *procid.Resolver, p *procid.Process, kind lockstate.ScopeKind, stop <-chan struct{}) (lockstate.Scope, error) {
	s := lockstate.Scope{Kind: kind}
	m, err := membershipOf(p.ID().Pid)
	switch {
	case kind == lockstate.ProcessScope:
		return s, nil
	case procid.IsShort(err):
		return lockstate.Scope{}, err
	case err != nil || !r.Lives(p.ID()):
		return lockstate.Scope{}, lockstate.ErrNobody
	case kind == lockstate.GroupScope:
		s.ID = m.group
	case kind == lockstate.SessionScope:
		s.ID = m.session
	default:
		if s.ID, err = cgroupOf(p.ID().Pid); err == nil {
			s.Born, err = cgroupBorn(s.ID)
			err = ifShort(err)
		} else if !procid.IsShort(err) {
			err = errNoCgroup
		}
		if err != nil {
			return lockstate.Scope{}, err
		}
		return s, nil
	}
	// "0": begun outside of the daemon's pid namespace, or by the kernel.
	leader, err := strconv.Atoi(s.ID)
	if err != nil || leader <= 0 {
		return lockstate.Scope{}, &scopeError{fmt.Sprintf("the %s of the process is none that the daemon can see; "+
			"start the process with setsid(1)", kind)}
	}
	for {
		born, unsure, _ := startOf(r, leader)
		switch s.Born = born; {
		case unsure == nil:
			return s, nil
		case procid.IsShort(unsure):
			return lockstate.Scope{}, unsure
		}
		select {
		case <-stop:
			return lockstate.Scope{}, lockstate.ErrNobody
		case <-time.After(killTime):
		}
	}
}

// errNoCgroup: a lock for the cgroup would be everybody's.
var errNoCgroup = &scopeError{"the process is in no cgroup of its own"}

// A scopeError says why a lock can't be had for a wider scope than the process.
type scopeError struct{ why string }

func (e *scopeError) Error() string { return e.why }
func (e *scopeError) Unwrap() error { return unix.EOPNOTSUPP }

// inScope reports whether a process is in a scope. unsure: it may not be in it, or, if it
// is, that may be one of the same name.
func inScope(r *procid.Resolver, pid int, s lockstate.Scope) (in bool, unsure error) {
	if s.Kind == lockstate.CgroupScope {
		if in, err := inCgroup(pid, s.ID); !in {
			return false, ifShort(err)
		}
		// It may have been removed, and made anew by another step or service.
		born, err := cgroupBorn(s.ID)
		return s.Born == 0 || born == 0 || born == s.Born, ifShort(err)
	}
	m, err := membershipOf(pid)
	id := m.group
	if s.Kind == lockstate.SessionScope {
		id = m.session
	}
	if err != nil || id != s.ID {
		return false, ifShort(err)
	}
	// As long as a group has members its number is no other process's. If it
	// is another's by now, this is another group: also where the leader was gone
	// when the group took a lock (0), as that of a program in the background is.
	leader, _ := strconv.Atoi(id)
	start, unsure, ok := startOf(r, leader)
	return !ok || start == s.Born, unsure
}

// member returns the oldest process that lives in a scope, or nil. Processes
// that are made while the list is read may be missed, so an empty one is read
// again, more often where it is known that there was one, if only a dead one. busy:
// there is one, but only such as can't be looked at now; or there may have been one
// that was gone before it was, and has made another.
func (fs *FS) member(s lockstate.Scope) (p *procid.Process, busy bool) {
	gone := false
	dead := make(map[int]bool) // zombies, of which all that they made was there at the last try
	for try := range 8 {
		if s.Kind == lockstate.GroupScope && groupIsGone(s.ID) || s.Kind != lockstate.GroupScope && try >= 2 && !gone {
			return nil, busy
		}
		var pids []int
		var err error
		pids, gone, err = membersOf(fs.procs, s)
		busy = busy || err != nil
		for _, pid := range pids {
			p, err := fs.procs.ByPid(pid)
			if err == nil && fs.procs.Alive(p.ID()) {
				return p, false
			}
			busy = busy || err != nil && !errors.Is(err, unix.ESRCH)
			gone = gone || !dead[pid]
			dead[pid] = true
		}
	}
	return nil, busy || gone
}

// groupIsGone reports whether a process group has no members at all, dead ones that
// nobody has waited for included.
func groupIsGone(id string) bool {
	leader, err := strconv.Atoi(id)
	return err == nil && leader > 1 && unix.Kill(-leader, 0) == unix.ESRCH
}

// mayBeIn reports whether a process may be in a scope. It takes a hundredth of the time
// of inScope.
func mayBeIn(pid int, s lockstate.Scope) bool {
	of := unix.Getpgid
	switch s.Kind {
	case lockstate.SessionScope:
		of = unix.Getsid
	case lockstate.GroupScope:
	default:
		return true
	}
	id, err := of(pid)
	return err == nil && strconv.Itoa(id) == s.ID
}

// membersOf lists the processes in a scope, but for the daemon, oldest first. gone:
// some of which it is not known were gone too soon.
func membersOf(r *procid.Resolver, s lockstate.Scope) (pids []int, gone bool, err error) {
	type found struct {
		pid   int
		start uint64
	}
	var all []found
	var unsure error
	err = eachProcess(func(pid int) bool {
		in := mayBeIn(pid, s)
		if in {
			in, unsure = inScope(r, pid, s)
		}
		switch {
		case in:
			start, _, _ := startOf(r, pid)
			all = append(all, found{pid, start})
		case unsure != nil:
			return false
		default:
			gone = gone || unix.Kill(pid, 0) == unix.ESRCH
		}
		unsure = nil
		return true
	})
	if err = cmp.Or(err, unsure); err != nil {
		return nil, false, err
	}
	slices.SortFunc(all, func(a, b found) int {
		return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid))
	})
	for _, f := range all {
		pids = append(pids, f.pid)
	}
	return pids, gone, nil
}

// eachProcess calls f with all pids but the daemon's own until it returns false. Few are
// read at a time, so that hardly any of them is gone before it is looked at.
func eachProcess(f func(pid int) bool) error {
	fd, err := unix.Open("/proc", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var buf [128]byte
	return eachEntryIn(buf[:], fd, func(e dirEntry) bool {
		pid, err := strconv.Atoi(e.name)
		return err != nil || pid == os.Getpid() || f(pid)
	})
}

// hasUser reports whether a process is entirely a user's, or root's. A program
// that only works with root's rights for somebody else is not.
func hasUser(pid int, uid uint32) (bool, error) {
	status, err := procid.ReadStatus(pid)
	if err != nil {
		return false, err
	}
	ids := strings.Fields(status.Field("Uid"))
	for _, id := range ids {
		n, err := strconv.ParseUint(id, 10, 32)
		if err != nil || n != 0 && n != uint64(uid) {
			return false, nil
		}
	}
	return len(ids) == 4, nil
}

// maxEnviron bounds what is read of an environment, in bytes: more than the
// kernel lets a program start with by default.
const maxEnviron = 8 << 20

// carriesClient reports whether a process was started with a client's ID in its
// environment. The first of several counts, as for getenv(3).
func carriesClient(pid int, client string) (bool, error) {
	b, err := readEnviron(fmt.Sprintf("/proc/%d/environ", pid))
	if len(b) == 0 && !procid.IsShort(err) { // as of a thread that has ended
		var tid int
		if tid, err = procid.RunningThread(pid); tid != 0 && tid != pid {
			b, err = readEnviron(fmt.Sprintf("/proc/%d/task/%d/environ", pid, tid))
		}
	}
	if err != nil {
		return false, err
	}
	for v := range bytes.SplitSeq(b, []byte{0}) {
		if value, ok := bytes.CutPrefix(v, []byte(clientVariable+"=")); ok {
			return string(value) == client, nil
		}
	}
	return false, nil
}

func readEnviron(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxEnviron))
}
