package fs

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// What a process carries that may make it a holder: its group, session and
// cgroup (H3), and the client's ID in its environment (L2).

// clientVariable names the environment variable with a client's ID.
const clientVariable = "STAGEFS_CLIENT"

// claims reports whether a process holds a lock by what it carries now.
func claims(p *procid.Process, c lockstate.Claim) bool {
	st, ok := statOf(p.ID().Pid)
	if !ok || st.start != p.ID().Start {
		return false
	}
	if c.Scope.Kind != lockstate.ProcessScope && inScope(p.ID().Pid, st, c.Scope) {
		return true
	}
	return c.Client != "" && hasUser(p.ID().Pid, c.UID) && carriesClient(p.ID().Pid, c.Client)
}

// procStat is what proc(5) tells in a stat file.
type procStat struct {
	state          byte
	group, session string
	start          uint64 // clock ticks after boot
}

func statOf(pid int) (st procStat, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return st, false
	}
	// The name before may hold anything, and ends at the last parenthesis.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 || len(f[0]) != 1 {
		return st, false
	}
	start, err := strconv.ParseUint(string(f[19]), 10, 64)
	return procStat{f[0][0], string(f[2]), string(f[3]), start}, err == nil
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

// scopeOf returns the scope of a kind that a process is in.
func scopeOf(p *procid.Process, kind lockstate.ScopeKind) (lockstate.Scope, error) {
	s := lockstate.Scope{Kind: kind}
	st, ok := statOf(p.ID().Pid)
	switch {
	case kind == lockstate.ProcessScope:
		return s, nil
	case !ok || st.start != p.ID().Start:
		return s, lockstate.ErrNobody
	case kind == lockstate.GroupScope:
		s.ID = st.group
	case kind == lockstate.SessionScope:
		s.ID = st.session
	default:
		s.ID, ok = cgroupOf(p.ID().Pid)
		if !ok {
			return s, errNoCgroup
		}
		s.Born = cgroupBorn(s.ID)
		return s, nil
	}
	// "0": begun outside of the daemon's pid namespace, or by the kernel.
	leader, err := strconv.Atoi(s.ID)
	if err != nil || leader <= 0 {
		return s, &scopeError{fmt.Sprintf("the %s of the process is none that the daemon can see; "+
			"start the process with setsid(1)", kind)}
	}
	if st, ok := statOf(leader); ok {
		s.Born = st.start
	}
	return s, nil
}

// errNoCgroup: a lock for the cgroup would be everybody's.
var errNoCgroup = &scopeError{"the process is in no cgroup of its own"}

// A scopeError says why a lock can't be had for a wider scope than the process.
type scopeError struct{ why string }

func (e *scopeError) Error() string { return e.why }
func (e *scopeError) Unwrap() error { return unix.EOPNOTSUPP }

// inScope reports whether a process is in a scope.
func inScope(pid int, st procStat, s lockstate.Scope) bool {
	id := st.group
	switch s.Kind {
	case lockstate.SessionScope:
		id = st.session
	case lockstate.CgroupScope:
		if !inCgroup(pid, s.ID) {
			return false
		}
		// It may have been removed, and made anew by another step or service.
		born := cgroupBorn(s.ID)
		return s.Born == 0 || born == 0 || born == s.Born
	}
	if id != s.ID {
		return false
	}
	// As long as a group has members its number is no other process's. If it
	// is another's by now, this is another group.
	leader, _ := strconv.Atoi(id)
	first, ok := statOf(leader)
	return !ok || s.Born == 0 || first.start == s.Born
}

// member returns the oldest process that lives in a scope, or nil. Processes
// that are made while the list is read may be missed, so an empty one is read
// again.
func (fs *FS) member(s lockstate.Scope) *procid.Process {
	for range 2 {
		for _, pid := range membersOf(s) {
			p, err := fs.procs.ByPid(pid)
			if err == nil && fs.procs.Alive(p.ID()) {
				return p
			}
		}
	}
	return nil
}

// membersOf lists the processes in a scope, but for the daemon, oldest first.
func membersOf(s lockstate.Scope) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	type found struct {
		pid   int
		start uint64
	}
	var all []found
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if st, ok := statOf(pid); ok && inScope(pid, st, s) {
			all = append(all, found{pid, st.start})
		}
	}
	slices.SortFunc(all, func(a, b found) int {
		if a.start != b.start {
			return int(int64(a.start - b.start))
		}
		return a.pid - b.pid
	})
	pids := make([]int, len(all))
	for i, f := range all {
		pids[i] = f.pid
	}
	return pids
}

// hasUser reports whether a process is entirely a user's, or root's. A program
// that only works with root's rights for somebody else is not.
func hasUser(pid int, uid uint32) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(b, []byte("\nUid:"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	ids := bytes.Fields(line)
	for _, id := range ids {
		n, err := strconv.ParseUint(string(id), 10, 32)
		if err != nil || n != 0 && n != uint64(uid) {
			return false
		}
	}
	return ok && len(ids) == 4
}

// maxEnviron bounds what is read of an environment, in bytes: more than the
// kernel lets a program start with by default.
const maxEnviron = 8 << 20

// carriesClient reports whether a process was started with a client's ID in its
// environment. The first of several counts, as for getenv(3).
func carriesClient(pid int, client string) bool {
	f, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxEnviron))
	if err != nil {
		return false
	}
	for v := range bytes.SplitSeq(b, []byte{0}) {
		if value, ok := bytes.CutPrefix(v, []byte(clientVariable+"=")); ok {
			return string(value) == client
		}
	}
	return false
}
