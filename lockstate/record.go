package lockstate

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Record is a lock as it outlives the daemon (S1).
type Record struct {
	Token uint64 `json:"token"`
	// World is where the processes' ids mean anything: the boot and the pid
	// namespace.
	World string `json:"world"`
	Path  Bytes  `json:"path"` // of the directory, relative to the root
	Inode Inode  `json:"inode,omitzero"`
	Move  *Move  `json:"move,omitempty"`

	Kind      Kind              `json:"kind"`
	Protocol  string            `json:"protocol"`
	Owner     procid.ID         `json:"owner"`
	UID       uint32            `json:"uid"`
	Lineage   []procid.Ancestor `json:"lineage,omitempty"` // of the owner when it got the lock (R5)
	Members   []procid.ID       `json:"members,omitempty"` // see MemberRecord: here only by an earlier version, or when carried
	Stagers   []procid.ID       `json:"stagers,omitempty"` // which work in a directory that is the lock file
	Since     time.Time         `json:"since"`
	File      Bytes             `json:"file,omitempty"`
	Files     []Bytes           `json:"files,omitempty"`
	Inodes    []Inode           `json:"inodes,omitempty"` // of these files, if one is known
	Unlike    []Bytes           `json:"unlike,omitempty"` // those that a plain open made though Protocol says another call, or the reverse (A6)
	Keys      bool              `json:"keys,omitempty"`   // kept by a lock on a descriptor,
	Opened    []FileID          `json:"opened,omitempty"` // of one of these files, as clients of the mount see them
	Command   bool              `json:"command,omitempty"`
	Why       string            `json:"why,omitempty"`
	OnCrash   string            `json:"on_crash,omitempty"`
	New       bool              `json:"new,omitempty"`
	Changed   bool              `json:"changed,omitempty"`
	Revocable bool              `json:"revocable,omitempty"` // it has a Lease: for versions that go by it
	Instead   uint64            `json:"instead,omitempty"`   // the token of a lock that was about to end when its owner took this one
	Sealed    bool              `json:"sealed,omitempty"`    // R7: its owner crashed,
	Fresh     bool              `json:"fresh,omitempty"`     // the directory was made under the lock,
	Foreign   []FileID          `json:"foreign,omitempty"`   // and in it these came from elsewhere
	Scope     *Scope            `json:"scope,omitempty"`     // H3
	Lease     *LeaseRecord      `json:"lease,omitempty"`     // L1
}

// A LeaseRecord is what is recorded of a lease besides.
type LeaseRecord struct {
	Client   string        `json:"client"`
	UID      uint32        `json:"uid"`
	TTL      time.Duration `json:"ttl"`
	Deadline time.Duration `json:"deadline"` // after the boot that the record's world names
	Until    time.Time     `json:"until"`    // the same by the wall clock, for another boot
	Joined   []procid.ID   `json:"joined,omitempty"`
}

// Bytes is a name or a path. In JSON it is a string in which bytes that are not
// UTF-8 are escaped as in Go.
type Bytes string

// MarshalText implements [encoding.TextMarshaler].
func (b Bytes) MarshalText() ([]byte, error) {
	q := strconv.Quote(string(b))
	return []byte(q[1 : len(q)-1]), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler].
func (b *Bytes) UnmarshalText(text []byte) error {
	s, err := strconv.Unquote(`"` + string(text) + `"`)
	*b = Bytes(s)
	return err
}

// InodeOf returns what the backing calls one of the lock files, if it is known.
func (rec *Record) InodeOf(file string) Inode {
	if i := slices.Index(rec.Files, Bytes(file)); i >= 0 && i < len(rec.Inodes) {
		return rec.Inodes[i]
	}
	return Inode{}
}

// maxRecorded bounds the processes in a record.
const maxRecorded = 512

// recordLocked returns r as it outlives the daemon.
func (t *Table) recordLocked(r *row) Record {
	rec := Record{
		Token: r.token, World: t.world, Path: Bytes(r.dir.path()), Inode: r.inode, Move: r.move,
		Kind: r.kind, Protocol: r.protocol, Owner: r.owner.ID(), UID: r.owner.UID(), Lineage: r.heirs,
		Since: r.since, File: Bytes(r.file), Keys: len(r.keys) > 0 || r.lostKey || r.leaving, Opened: r.seen(), Command: r.command,
		Why: r.why, OnCrash: r.onCrash, New: r.isNew, Changed: r.changed, Revocable: r.lease != nil, Instead: r.instead,
		Sealed: r.sealed || r.crashed,
	}
	// The next daemon may have another policy: what nobody notes now it cannot know then.
	unnoted := r.changed && t.policyOf(r) == Keep
	if c := &r.content; c.fresh && !c.unknown && !unnoted && len(c.known) <= maxForeign {
		rec.Fresh = true
		for id := range c.known {
			rec.Foreign = append(rec.Foreign, id)
		}
	}
	for i, f := range r.files {
		rec.Files = append(rec.Files, Bytes(f.name))
		if f.inode != (Inode{}) && rec.Inodes == nil {
			rec.Inodes = make([]Inode, len(r.files))
		}
		if rec.Inodes != nil {
			rec.Inodes[i] = f.inode
		}
		if f.opened != (r.protocol == byOpen) {
			rec.Unlike = append(rec.Unlike, Bytes(f.name))
		}
	}
	if r.scope.Kind != ProcessScope {
		rec.Scope = &r.scope
	}
	if r.lease != nil {
		rec.Lease = &LeaseRecord{Client: r.lease.client, UID: r.lease.uid, TTL: r.lease.ttl, Deadline: r.lease.deadline, Until: r.lease.until}
		for id := range r.lease.joined {
			if rec.Lease.Joined = append(rec.Lease.Joined, id); len(rec.Lease.Joined) == maxRecorded {
				break
			}
		}
	}
	for id := range r.stagers {
		if rec.Stagers = append(rec.Stagers, id); len(rec.Stagers) == maxRecorded {
			break
		}
	}
	return rec
}

// noteLocked writes r down, to be kept by the next flush.
func (t *Table) noteLocked(r *row) {
	t.resizeLocked(r)
	r.unsaid = 0
	if t.store == nil {
		return
	}
	rec := t.recordLocked(r)
	data, err := rec.encode(t.text[:0], &t.lineage)
	if err == nil { // else: nothing in a record can fail
		t.store.Put(r.token, data)
		t.text = data
	}
}

// flush makes what was noted outlive the daemon. What cannot be kept now is
// still in force: the store tries again, and tells who asks it.
func (t *Table) flush() {
	if t.store != nil {
		_ = t.store.Flush()
	}
}

// sync makes it outlive a power cut.
func (t *Table) sync() {
	if t.store != nil {
		_ = t.store.Sync()
	}
}

// unlockFlush ends what began with t.mu.Lock and is worth keeping.
func (t *Table) unlockFlush() {
	t.mu.Unlock()
	t.flush()
}

// Restore puts a lock back that an earlier table has recorded, at the given
// path: with its token, for owner, who is the process that the record names.
// Files are the lock files that are still there. The store has the lock as kept, or,
// if that is nil, in some other way: it is written down unless it is in force as it
// was kept. Locks on one directory are restored in the order of their tokens.
func (t *Table) Restore(rec Record, kept *Record, path []string, owner *procid.Process, files []string) (Lock, error) {
	if owner == nil || owner.ID() != rec.Owner {
		return Lock{}, ErrNobody
	}
	d := t.At(path...)
	defer t.Forget(d)
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.restoreLocked(rec, d, owner, files)
	if err != nil {
		return Lock{}, err
	}
	for _, old := range d.rows { // who died before that ended has said so by nothing else
		old.remains = old.remains || old.token == r.instead
	}
	merged := t.mergeTwinLocked(r)
	if merged || kept == nil || !t.isKept(r, kept) {
		t.noteLocked(r)
	}
	return r.lock(), nil
}

// mergeTwinLocked ends those that r has taken the place of, and reports whether there
// are any: its owner took it again while they were being ended (see [Table.Doom]), and they
// were not, as that failed or the daemon died. The lock files that are left are r's. What was
// made under the others is not: to break them would have kept that.
func (t *Table) mergeTwinLocked(r *row) (merged bool) {
	for _, old := range slices.Clone(r.dir.rows) {
		if !old.remains || old.doomed() || !r.isInsteadOf(old) {
			continue
		}
		merged = true
		for _, f := range old.files {
			if r.fileAt(f.name) < 0 {
				r.files = append(r.files, f)
			}
		}
		if old.command && !r.command { // A7
			r.command, r.why = true, old.why
			if old.onCrash != "" {
				t.setOnCrashLocked(r, old.onCrash)
			}
		}
		if r.kept() {
			r.stay()
		}
		for h := range t.revocable[old.token] {
			t.revokeByLocked(h, r.token) // L3
		}
		t.endLocked(old, Ending{Reason: Replaced})
	}
	return merged
}

// isInsteadOf reports whether the owner of old has taken r while that was being ended, or
// while another one was that it had taken so.
func (r *row) isInsteadOf(old *row) bool {
	return old.token == r.instead || old.token < r.instead && old.kind == r.kind && old.key() == r.key()
}

// standInstead notes that r is taken while another one of its owner is about to end, which
// was not when it was asked for, and reports whether there is one.
func (r *row) standInstead() (news bool) {
	for _, old := range r.dir.rows {
		if old.token < r.token && old.token > r.instead && (old.doomed() || old.bereft()) && old.kind == r.kind && old.key() == r.key() {
			r.instead, news = old.token, true
		}
	}
	return news
}

// isKept reports whether the record of r is kept, as the store has it.
func (t *Table) isKept(r *row, kept *Record) bool {
	now := t.recordLocked(r)
	return now.same(kept)
}

// isSpecial reports whether there is more in a record than most have.
func (rec *Record) isSpecial() bool {
	return rec.Move != nil || len(rec.Unlike) > 0 || len(rec.Opened) > 0 || len(rec.Members) > 0 || len(rec.Stagers) > 0 || len(rec.Foreign) > 0 || rec.Lease != nil
}

// same reports whether two records mean the same. It may report false for those that
// are not of the few fields that most are of.
func (rec *Record) same(o *Record) bool {
	if rec.isSpecial() || o.isSpecial() {
		return false
	}
	if rec.Scope != o.Scope && (rec.Scope == nil || o.Scope == nil || *rec.Scope != *o.Scope) {
		return false
	}
	return rec.Token == o.Token && rec.World == o.World && rec.Path == o.Path && rec.Inode == o.Inode &&
		rec.Kind == o.Kind && rec.Protocol == o.Protocol && rec.Owner == o.Owner && rec.UID == o.UID &&
		slices.Equal(rec.Lineage, o.Lineage) && rec.Since.Equal(o.Since) && rec.File == o.File &&
		slices.Equal(rec.Files, o.Files) && slices.Equal(rec.Inodes, o.Inodes) && rec.Keys == o.Keys &&
		rec.Command == o.Command && rec.Why == o.Why && rec.OnCrash == o.OnCrash && rec.New == o.New &&
		rec.Changed == o.Changed && rec.Revocable == o.Revocable && rec.Instead == o.Instead && rec.Sealed == o.Sealed && rec.Fresh == o.Fresh
}

// restoreLocked is Restore without writing anything down.
func (t *Table) restoreLocked(rec Record, d *Dir, owner *procid.Process, files []string) (*row, error) {
	switch {
	case rec.Token == 0 || rec.Token > t.token || t.tokens[rec.Token] != nil:
		return nil, fmt.Errorf("record of token %d: %w", rec.Token, errBadToken)
	case d == t.root:
		return nil, ErrRoot
	case len(d.rows) > 0 && d.top().token > rec.Token:
		return nil, fmt.Errorf("record of token %d: %w", rec.Token, errBadToken)
	}
	r := &row{
		dir: d, kind: rec.Kind, protocol: rec.Protocol, owner: owner, heirs: rec.Lineage,
		token: rec.Token, since: rec.Since, file: string(rec.File), inode: rec.Inode,
		command: rec.Command, why: rec.Why, onCrash: rec.OnCrash, isNew: rec.New,
		instead: rec.Instead, lostKey: rec.Keys, lost: slices.Clone(rec.Opened), crashed: rec.Sealed,
	}
	for _, name := range files {
		opened := (rec.Protocol == byOpen) != slices.Contains(rec.Unlike, Bytes(name))
		r.files = append(r.files, lockFile{name, rec.InodeOf(name), opened})
	}
	// What was made in a directory that was there before, nobody knows now.
	r.content = content{fresh: rec.Fresh, unknown: !rec.Fresh}
	for _, id := range rec.Foreign {
		r.content.note(id)
	}
	for _, id := range rec.Members {
		r.remember(id)
	}
	t.noteMembersLocked(r)
	for _, id := range rec.Stagers {
		if rec.World != t.world {
			break // nobody lives on in another one
		}
		if r.stagers == nil {
			r.stagers = make(map[procid.ID]struct{})
		}
		r.stagers[id] = struct{}{}
	}
	if rec.Scope != nil {
		r.scope = *rec.Scope
	}
	if rec.Lease != nil {
		r.lease = &lease{
			client: rec.Lease.Client, uid: rec.Lease.UID, ttl: rec.Lease.TTL, deadline: rec.Lease.Deadline, until: rec.Lease.Until,
			at: -1, clock: t.clock,
		}
		for _, id := range rec.Lease.Joined {
			r.join(id)
		}
		heap.Push(&t.leases, r)
	}
	t.insertLocked(r)
	if rec.Changed {
		r.touch()
	}
	return r, nil
}

var errBadToken = errors.New("its token was used already, or never given out")

// Reboot makes the record of a lease one of this boot, whose clock shows
// boottime. The wall clock is all that tells how long the machine was off; if
// it was set back meanwhile, the lease has its whole time again and no more.
func (l *LeaseRecord) Reboot(boottime time.Duration, now time.Time) {
	l.Deadline = boottime + min(l.Until.Sub(now), l.TTL)
	l.Joined = nil
}
