package lockstate

import (
	"cmp"
	"iter"
	"maps"
	"slices"
)

// What becomes of the content when the owner of a lock crashes (R7).
const (
	Keep       = "keep"
	Destroy    = "destroy"
	Quarantine = "quarantine"
)

// A FileID names one file or directory of the backing, as long as it lives.
type FileID struct {
	Dev, Ino uint64
	Birth    int64
}

// An Inode names a file or directory of the backing from mount to mount: the
// device has another number then, perhaps. The zero Inode is not known.
type Inode struct {
	Ino   uint64 `json:"ino"`
	Birth int64  `json:"birth"` // 0: the backing keeps none
}

// Is reports whether two names are of the same thing, as far as both are known.
func (i Inode) Is(o Inode) bool {
	return i.Ino == o.Ino && (i.Birth == o.Birth || i.Birth == 0 || o.Birth == 0)
}

// content is what a row knows of what was made under it (R7). All fields are
// protected by Table.mu.
type content struct {
	// fresh: the directory itself was made under the lock, and all that is in
	// it but what came from elsewhere.
	fresh bool
	known map[FileID]struct{} // what came from elsewhere, or what was made if not fresh
	// unknown: too much happened, or an earlier daemon saw it. Nothing of it
	// can be proven to be this lock's.
	unknown bool
}

const (
	// maxKnown bounds the memory of a row: about 50 B each.
	maxKnown = 4 << 20
	// maxForeign bounds what is recorded for the next daemon.
	maxForeign = 1024
)

// policyOf returns what becomes of r's content when its owner crashes.
func (t *Table) policyOf(r *row) string { return cmp.Or(r.onCrash, t.onCrash) }

// tracksLocked reports whether it matters what is made under r.
func (t *Table) tracksLocked(r *row) bool {
	return t.policyOf(r) != Keep && r.kind != Shared && !r.sealed && !r.content.unknown
}

// Tracks reports whether Made, Entered and Gone have anything to note anywhere.
func (t *Table) Tracks() bool {
	return t.rows.Load() > 0 && (t.onCrash != Keep || t.crashers.Load() > 0)
}

// Made notes that id was made in d.
func (t *Table) Made(d *Dir, id FileID) {
	if !t.Tracks() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := range d.above() {
		if t.tracksLocked(r) && !r.content.fresh {
			r.content.note(id)
		}
	}
}

// Entered notes that id comes into d from another directory, or from nowhere
// that is known: a rename or a link. above are the directories that it was in
// before, from the nearest one up: what was in one that came from elsewhere did
// so too. from is nil for what a stranger makes (W5). quiet: it is no change of the
// holder's (R5), so that nobody could say later that it came, where it does not matter
// yet what was made by whom.
func (t *Table) Entered(d *Dir, id FileID, from *Dir, above []FileID, quiet bool) {
	if !t.Tracks() && (!quiet || t.Len() == 0) {
		return
	}
	t.mu.Lock()
	defer t.unlockFlush()
	for r := range d.above() {
		tracks := t.tracksLocked(r)
		switch {
		case !r.content.fresh || r.sealed || !tracks && !quiet:
		case from != nil && from.within(r.dir) && !r.content.knowsAny(above):
		case tracks:
			r.content.note(id)
			t.noteLocked(r)
		default:
			r.mixLocked()
			t.noteLocked(r)
		}
	}
}

// Gone notes that id, which had its last name in d, is no more: who makes and removes files
// for as long as a lock lives is not to fill its memory.
func (t *Table) Gone(d *Dir, id FileID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := range d.above() {
		if t.tracksLocked(r) { // what is sealed reads it
			delete(r.content.known, id)
		}
	}
}

// Mixed tells that things are about to come into d, or beneath, of which is not known
// under which lock they were made: under one that is in force there still, perhaps, and
// yet they are nobody's now. So nothing can be said any more of what is there.
func (t *Table) Mixed(d *Dir) {
	t.mu.Lock()
	defer t.unlockFlush()
	mix := func(r *row) bool {
		if !r.content.unknown {
			r.mixLocked()
			t.noteLocked(r)
		}
		return true
	}
	d.walkRows(mix)
	for r := range d.parent.above() {
		mix(r)
	}
}

// mixLocked tells that nothing is known any more of what was made under r.
func (r *row) mixLocked() { r.content = content{unknown: true} }

func (c *content) knowsAny(ids []FileID) bool {
	return slices.ContainsFunc(ids, func(id FileID) bool { _, known := c.known[id]; return known })
}

func (c *content) note(id FileID) {
	if len(c.known) >= maxKnown {
		c.known, c.unknown = nil, true
		return
	}
	if c.known == nil {
		c.known = make(map[FileID]struct{})
	}
	c.known[id] = struct{}{}
}

// inheritLocked passes on what old knew to the row that takes its place. What was
// done under old while nobody noted it is not known.
func (t *Table) inheritLocked(r, old *row) {
	switch {
	case old.content.unknown || old.changed && !t.tracksLocked(old):
	case r.content.fresh:
	case old.content.fresh || len(r.content.known) == 0: // what r has made is part of what is fresh
		r.content = old.content
	}
}

// Spoils is what a crashed owner leaves.
type Spoils struct {
	Lock    Lock
	Fresh   bool // the directory itself is part of it
	Unknown bool // nothing is known
	InUse   bool // somebody else holds the directory itself, by a lock in front (C2)
	// Others are the directories beneath, relative to the root, that somebody
	// else holds.
	Others []string

	known map[FileID]struct{}
}

// Made reports whether a thing beneath the directory was made under the lock.
func (s *Spoils) Made(id FileID) bool {
	_, known := s.known[id]
	return known != s.Fresh
}

// Whole reports whether the directory can go with all that is in it.
func (s *Spoils) Whole() bool { return s.Fresh && len(s.known) == 0 && len(s.Others) == 0 }

// IsRecorded reports whether the lock's record has what was made, as long as it is sealed.
func (s *Spoils) IsRecorded() bool { return s.Fresh && len(s.known) <= maxForeign }

// Known returns what was made under the lock, or what was not if the directory itself was.
func (s *Spoils) Known() iter.Seq[FileID] { return maps.Keys(s.known) }

// All makes the whole directory part of it: its holder says so.
func (s *Spoils) All() { s.Fresh, s.Unknown, s.known = true, false, nil }

// Other returns a lock of somebody else in front of the one with the given token,
// or beneath its directory (C2).
func (t *Table) Other(token uint64) (other Lock, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		return Lock{}, false
	}
	r.dir.walkRows(func(o *row) bool {
		if o.key() != r.key() && (o.dir != r.dir || o.token > r.token) {
			other, ok = o.lock(), true
		}
		return !ok
	})
	return other, ok
}

// RecallContent tells what Seal said, to an earlier table, of a lock that it had restored since.
func (t *Table) RecallContent(token uint64, fresh bool, known []FileID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.tokens[token]
	if r == nil {
		return
	}
	r.content = content{fresh: fresh}
	for _, id := range known {
		r.content.note(id)
	}
}

// Seal makes the lock with the given token nobody's: it stays in force, so that
// what its owner left can be cleared away. It reports false if that was done
// before.
func (t *Table) Seal(token uint64) (s Spoils, ok bool) {
	t.mu.Lock()
	defer t.unlockFlush()
	r := t.tokens[token]
	if r == nil || r.sealed {
		return s, false
	}
	r.sealed = true
	t.unleaseLocked(r) // it holds for nobody: its deadline is of no account
	t.noteLocked(r)    // the next daemon goes on with it
	s = Spoils{Lock: r.lock(), Fresh: r.content.fresh, Unknown: r.content.unknown, known: r.content.known}
	r.dir.walkRows(func(o *row) bool {
		switch {
		case o.isInsteadOf(r), o.pending && o.dir == r.dir: // by another one of its scope: it is not about what that one makes
			s.InUse = true
		case o.key() == r.key() && o.dir == r.dir && o.token > r.token && o.kind != Shared && !o.doomed() && !o.sealed && !o.dying:
			s.InUse = true // its owner has it by that one, too
		case o.key() == r.key():
		case o.dir != r.dir:
			s.Others = append(s.Others, o.dir.path())
		case o.token > r.token:
			s.InUse = true
		}
		return true
	})
	slices.Sort(s.Others)
	return s, true
}

// Sealed reports whether a lock on d or above is sealed.
func (t *Table) Sealed(d *Dir) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := range d.above() {
		if r.sealed {
			return true
		}
	}
	return false
}

func (t *Table) setOnCrashLocked(r *row, policy string) {
	// What was made before was not noted.
	r.content.unknown = r.content.unknown || r.changed && t.policyOf(r) == Keep
	if r.onCrash == "" {
		t.crashers.Add(1)
	}
	r.onCrash = policy
}

// Policy returns what becomes of a lock's content when its owner crashes.
func (t *Table) Policy(l Lock) string { return cmp.Or(l.OnCrash, t.onCrash) }

// Cleared notes what became of a lock's content.
func (t *Table) Cleared(l Lock, policy string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stats.Cleared[policy]++
	if t.notify == nil || t.listeners.Load() == 0 {
		return
	}
	event := EventQuarantined
	if policy == Destroy {
		event = EventDestroyed
	}
	t.notify(Event{Event: event, Dir: l.Path, Token: l.Token, Pid: l.Owner.Pid, Client: l.Client, Kind: l.KindName(), Protocol: l.Protocol})
}
