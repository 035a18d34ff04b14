package lockstate

import (
	"cmp"
	"errors"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A ScopeKind says which processes own a lock together (H3).
type ScopeKind uint8

// The scopes.
const (
	ProcessScope ScopeKind = iota // one process alone
	GroupScope                    // a process group
	SessionScope                  // a session
	CgroupScope                   // a control group, and those within it
)

func (k ScopeKind) String() string {
	return [...]string{"process", "group", "session", "cgroup"}[k]
}

// A Scope is a set of processes that owns a lock (H3). The zero Scope is the
// owning process alone.
type Scope struct {
	Kind ScopeKind
	// ID names it among those of its kind: the number of a group or session,
	// the path of a cgroup.
	ID string
	// Born tells it from a later one with the same ID: the start time of the
	// leader, the inode number of the cgroup. 0: the leader was gone, the number is not known.
	Born uint64
}

// A Claim is what a process may hold a lock by although it does not descend
// from the owner: it is in the scope now (H3), or carries the client's ID (L2).
type Claim struct {
	Scope  Scope
	Client string
	UID    uint32 // only root's processes and this user's may claim a lease
}

// claim returns what others may hold r by.
func (r *row) claim() Claim {
	c := Claim{Scope: r.scope}
	if r.lease != nil {
		c.Client, c.UID = r.lease.client, r.lease.uid
	}
	return c
}

// asking is what is known of a process's claims while something is decided
// about it: claims are looked up with system calls, so without Table.mu.
type asking struct {
	open    []*row // a decision would change if the process claimed these
	refuted map[*row]struct{}
	unsure  error                  // why not all was known of them, or of who has something open
	friends map[procid.ID]struct{} // other processes that claim what is to be acquired
}

// hasLocked is row.has, and notes in a if the answer may be found out.
func (t *Table) hasLocked(r *row, p *procid.Process, a *asking) bool {
	switch {
	case r.has(p):
		if len(r.unnoted) > 0 {
			t.noteMembersLocked(r)
		}
		return true
	case p == nil || a == nil || t.claims == nil || r.sealed || r.expired() || r.claim() == (Claim{}): // what holds for nobody, no claim changes
		return false
	}
	if _, ok := a.refuted[r]; !ok {
		a.open = append(a.open, r)
	}
	return false
}

// holdsLocked is row.holds, likewise.
func (t *Table) holdsLocked(r *row, p *procid.Process, a *asking) bool {
	return r.kind != Shared && t.hasLocked(r, p, a)
}

// ask decides about p under Table.mu, again once it is known what p claims. unsure is why
// that did not come out.
func (t *Table) ask(p *procid.Process, decide func(*asking) bool) (yes bool, unsure error) {
	var a asking
	for {
		t.mu.Lock()
		yes = decide(&a)
		t.mu.Unlock()
		if yes || !t.resolve(p, &a) {
			return yes, a.unsure
		}
	}
}

// resolve looks up the claims that a decision depended on and reports whether
// it is to be made again.
func (t *Table) resolve(p *procid.Process, a *asking) bool {
	if len(a.open) == 0 {
		return false
	}
	again := false
	for _, r := range a.open {
		t.mu.Lock()
		claim := r.claim()
		t.mu.Unlock()
		holds, unsure := t.claims(p, claim)
		if holds {
			t.mu.Lock()
			r.remember(p.ID())
			t.mu.Unlock()
			again = true
			continue
		}
		if a.refuted == nil {
			a.refuted = make(map[*row]struct{})
		}
		a.refuted[r] = struct{}{}
		a.unsure = cmp.Or(a.unsure, unsure)
	}
	a.open = nil
	return again
}

// mark says of a refusal whether it may be for want of knowledge alone.
func (a *asking) mark(err error) error {
	if a.unsure == nil {
		return err
	}
	var held *HeldError
	if errors.As(err, &held) {
		held.Unsure = a.unsure
	}
	return err
}

// resolveOpeners finds out who of those that have something open beneath a
// directory belongs to the scope or client that wants it (C3d).
func (t *Table) resolveOpeners(q *Request, held *HeldError) bool {
	claim := Claim{Scope: q.Scope, Client: q.Client, UID: q.UID}
	if t.claims == nil || claim == (Claim{UID: q.UID}) {
		return false
	}
	again := false
	for _, h := range held.Handles {
		p := h.Handle.proc
		if _, known := q.asked.friends[p.ID()]; known || p.ID() == (procid.ID{}) {
			continue
		}
		holds, unsure := t.claims(p, claim)
		if !holds {
			q.asked.unsure = cmp.Or(q.asked.unsure, unsure)
			continue
		}
		if q.asked.friends == nil {
			q.asked.friends = make(map[procid.ID]struct{})
		}
		q.asked.friends[p.ID()] = struct{}{}
		again = true
	}
	return again
}

// An ownerKey tells owners apart: processes, scopes and clients.
type ownerKey struct {
	process procid.ID
	scope   Scope
	client  string
	uid     uint32
}

func (r *row) key() ownerKey {
	switch {
	case r.lease != nil:
		return ownerKey{client: r.lease.client, uid: r.lease.uid}
	case r.scope.Kind != ProcessScope:
		return ownerKey{scope: r.scope}
	}
	return ownerKey{process: r.owner.ID()}
}

func (q *Request) key() ownerKey {
	switch {
	case q.Client != "":
		return ownerKey{client: q.Client, uid: q.UID}
	case q.Scope.Kind != ProcessScope:
		return ownerKey{scope: q.Scope}
	}
	return ownerKey{process: q.Process.ID()}
}

// adoptLocked makes root's request for a client one for the user whose client
// has a lease there already.
func (q *Request) adoptLocked() {
	if q.Client == "" || q.UID != 0 {
		return
	}
	if r := clientRowLocked(q.Dir, q.Client); r != nil {
		q.UID = r.lease.uid
	}
}

// replaces reports whether the owner of r is the one of old, which it replaces
// (A13): a process that takes a lease, or a lock for its scope, gives up what
// it had by itself; and what its scope got when it made the directory for r.
func (r *row) replaces(old *row) bool {
	return r.isOf(old, r.owner.ID()) || r.isNew && old.kind == Implicit && old.owner.ID() == r.owner.ID()
}

// isOf reports whether old is of r's owner, or of the process alone that has r.
func (r *row) isOf(old *row, by procid.ID) bool {
	return old.key() == r.key() || old.key() == ownerKey{process: by}
}
