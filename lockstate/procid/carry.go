//go:build linux

package procid

import "golang.org/x/sys/unix"

// A Carried is what a resolver knows of a process, for the daemon that goes on
// in its place (in the same process, by exec(2)).
type Carried struct {
	ID    ID
	UID   uint32
	Chain []ID
	// FD is the pidfd. How the process ends is learnt through it even if
	// that is between the two daemons.
	FD         int
	Leaderless bool
}

// Carry returns all processes that are known. Nothing changes meanwhile: the
// caller sees to it that there is no request.
func (r *Resolver) Carry() []Carried {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Carried, 0, len(r.groups))
	for id, g := range r.groups {
		// Of two with the same pid and start time, the next daemon knows the later one.
		last := r.pids[id.Pid]
		later := last != nil && last != g && last.proc.id.Start == id.Start
		if g.fd >= 0 && !later {
			all = append(all, Carried{ID: id, UID: g.proc.uid, Chain: g.proc.chain, FD: g.fd, Leaderless: g.told.leader})
		}
	}
	return all
}

// TakeUp makes a new resolver know what an earlier one did. It owns the
// descriptors from then on, and makes them close-on-exec.
func (r *Resolver) TakeUp(all []Carried) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var living []Carried
	for _, c := range all {
		unix.CloseOnExec(c.FD)
		if readable(c.FD) {
			r.takeUpLocked(c)
		} else {
			living = append(living, c)
		}
	}
	// Who has the number of a dead one displaces it.
	for _, c := range living {
		r.takeUpLocked(c)
	}
}

func (r *Resolver) takeUpLocked(c Carried) {
	if r.groups[c.ID] != nil {
		unix.Close(c.FD)
		return
	}
	g := &group{proc: &Process{id: c.ID, uid: c.UID, chain: c.Chain, from: r}, fd: c.FD, told: told{leader: c.Leaderless}}
	r.groups[c.ID] = g
	r.pids[c.ID.Pid] = g
	r.insertLocked(uint32(c.ID.Pid), &thread{group: g, fd: -1})
}
