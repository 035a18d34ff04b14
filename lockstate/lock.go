package lockstate

import (
	"maps"
	"slices"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// Kind tells where a lock comes from.
type Kind uint8

// The kinds of locks.
const (
	Implicit Kind = iota // made by mkdir (A1)
	Explicit             // made by a lock file or a command (A3, A4, A6, A7)
	Shared               // nobody writes while it lasts (A5)
)

func (k Kind) String() string {
	return [...]string{"implicit", "explicit", "shared"}[k]
}

// Reason tells why a lock ended.
type Reason string

// The ends of a lock.
const (
	Unlinked  Reason = "unlinked"  // R1
	Unlocked  Reason = "unlocked"  // R2
	Removed   Reason = "removed"   // R3
	Exited    Reason = "exited"    // R4
	Narrowed  Reason = "narrowed"  // A12
	Replaced  Reason = "replaced"  // A13
	Given     Reason = "released"  // R6, by a holder
	Failed    Reason = "failed"    // R6, by a holder who says that its work failed
	Broken    Reason = "broken"    // R6, by an admin
	Expired   Reason = "expired"   // R6, a lease whose deadline passed (L1)
	Abandoned Reason = "abandoned" // an acquisition that failed half-way
)

// A Lock is the state of one row at one moment.
type Lock struct {
	Dir      *Dir
	Path     string // relative to the root; "." for the root
	Kind     Kind
	Protocol string // how it was taken: mkdir, create, link …
	Owner    procid.ID
	UID      uint32
	Token    uint64
	Since    time.Time
	File     string   // the lock file that it was taken by, if any
	Files    []string // lock files that keep it (existence locks)
	Keys     []any    // descriptor locks that keep it
	LostKey  bool     // kept by a lock on a descriptor of a mount that has died,
	Opened   []FileID // of one of these files, as clients of that mount see them
	Command  bool     // a command took it, and only a command gives it back (A7)
	Why      string   // what its owner says that it is for
	OnCrash  string   // what becomes of the content if the owner crashes (R7); "": the mount's default
	Changed  bool     // something beneath was changed since the owner has it (R5)
	Scope    Scope    // who owns it together with Owner (H3)
	Heirless bool     // it ends with its owner: no scope has it, and the parent inherits none (R5)
	Sealed   bool     // its owner is no more, and what he left is being cleared away (R7)
	Crashed  bool     // its owner did so already when the last daemon died

	Client   string        // whose lease it is (L1); "": it is no lease
	TTL      time.Duration // of a lease
	Deadline time.Duration // of a lease, on the clock of the table
	Pending  bool          // it is about to be acquired: a lease has no deadline yet
}

// KindName names the kind of a lock as listings and events do.
func (l Lock) KindName() string {
	if l.Client != "" && l.Kind == Explicit {
		return "lease"
	}
	return l.Kind.String()
}

// An Ending tells how a lock ended.
type Ending struct {
	Reason Reason
	By     int    // the process that ended it, if it was another one's doing
	Why    string // what that one says
}

// row is a lock in the table. All fields are protected by Table.mu.
type row struct {
	dir      *Dir
	kind     Kind
	protocol string
	owner    *procid.Process
	heirs    []procid.Ancestor // the owner's lineage at acquisition (R5)
	ownedAt  int               // place in Table.owners
	size     int               // in Table.taken
	line     *line             // in Table.lines; nil: it passes to nobody
	token    uint64
	since    time.Time
	file     string // for listings
	inode    Inode  // what the backing calls the directory
	files    []lockFile
	keys     map[any][]FileID // the descriptor locks that keep it (R2), and what they are on
	opened   []openedFile     // all of that
	unsaid   int              // how many of those are in its record that are none any more
	lost     []FileID         // what those of a daemon that died were on, see lostKey
	command  bool             // kept until a command ends it (A7)
	why      string
	onCrash  string
	isNew    bool          // see Request.New
	pending  bool          // not committed
	decided  chan struct{} // closed when it is, or has ended before; nil: nobody waits for that
	changed  bool
	// lostKey: the lock on a descriptor that kept it was one of a daemon that
	// died. It counts until the owner ends it, or dies.
	lostKey bool
	move    *Move  // under way; never changed, but replaced
	sealed  bool   // holds for nobody any more
	crashed bool   // it was sealed when the last daemon died
	leaving bool   // what kept it is gone, and its end to come: see [Table.LeaveToExit], [Table.Doom]
	enders  int    // how many are about to end it, whoever takes it again: see [Table.Doom]
	remains bool   // it was doomed, and has not ended: see [Table.Remains]
	dying   bool   // its owner's death is being carried out: see [Table.DoomOf]
	instead uint64 // the token of one that was doomed when its owner took this one
	content content
	scope   Scope
	lease   *lease // nil: processes own it

	// members are descendants that were seen as holders. They stay holders
	// when their parents die (H2). The number is that of the store's record of
	// it, 0 if it has none.
	members map[procid.ID]uint64
	unnoted []procid.ID // members that are not written down yet
	noted   int         // how many are
	enough  int         // with so many more than few it is time to look who is dead
	// stagers have changed something in a directory that is its lock file.
	stagers map[procid.ID]struct{}

	ended   chan struct{} // closed when the row ends
	ending  Ending        // set before ended is closed
	settled chan struct{} // closed at the first change; nil when already

	narrowing bool // see Table.Narrow
	disturbed bool // an operation has begun under it since
}

// A lockFile keeps a lock.
type lockFile struct {
	name   string
	inode  Inode // what the backing calls it
	opened bool  // made by a plain open: it only waits for the lock on the descriptor (A6)
}

// fileAt returns where a lock file is in r.files, or -1.
func (r *row) fileAt(name string) int {
	return slices.IndexFunc(r.files, func(f lockFile) bool { return f.name == name })
}

// fileNames returns the names in r.files.
func (r *row) fileNames() (names []string) {
	for _, f := range r.files {
		names = append(names, f.name)
	}
	return names
}

// holds reports whether p may write under r. Under a shared lock nobody may
// (A5).
func (r *row) holds(p *procid.Process) bool { return r.kind != Shared && r.has(p) }

// has reports whether p is the owner or a descendant of it.
func (r *row) has(p *procid.Process) bool {
	if p == nil || r.sealed || r.expired() {
		return false
	}
	id := p.ID()
	if r.owner.ID() == id {
		return true
	}
	if r.member(id) {
		return true
	}
	for _, a := range p.Ancestors() {
		if r.member(a) || a == r.owner.ID() {
			r.remember(id)
			return true
		}
	}
	return false
}

// member reports whether a process was seen as a holder, or said that it is.
func (r *row) member(id procid.ID) bool {
	_, ok := r.members[id]
	if !ok && r.lease != nil {
		_, ok = r.lease.joined[id]
	}
	return ok
}

// kept reports whether anything keeps r: a lock file, a descriptor, a command.
func (r *row) kept() bool { return r.command || r.lostKey || len(r.files) > 0 || len(r.keys) > 0 }

// seen returns what the descriptors whose locks keep r are on.
func (r *row) seen() []FileID {
	all := slices.Clone(r.lost)
	for _, f := range r.opened {
		all = append(all, f.FileID)
	}
	return all
}

// An openedFile is what some of the descriptor locks of a row are on.
type openedFile struct {
	FileID
	keys int // how many of them
}

// open notes that one more descriptor lock is on some files.
func (r *row) open(files []FileID) {
	for _, id := range files {
		if i := r.openedAt(id); i >= 0 {
			r.opened[i].keys++
		} else {
			r.opened = append(r.opened, openedFile{id, 1})
		}
	}
}

// close notes that one of those is gone.
func (r *row) close(files []FileID) {
	for _, id := range files {
		i := r.openedAt(id)
		if r.opened[i].keys--; r.opened[i].keys == 0 {
			r.opened = slices.Delete(r.opened, i, i+1)
			r.unsaid++
		}
	}
}

func (r *row) openedAt(id FileID) int {
	return slices.IndexFunc(r.opened, func(f openedFile) bool { return f.FileID == id })
}

// lock returns r's state. The caller holds Table.mu.
func (r *row) lock() Lock {
	l := Lock{
		Dir: r.dir, Path: r.dir.path(), Kind: r.kind, Protocol: r.protocol,
		Owner: r.owner.ID(), UID: r.owner.UID(), Token: r.token, Since: r.since, File: r.file,
		Files: r.fileNames(), Keys: slices.Collect(maps.Keys(r.keys)),
		LostKey: r.lostKey, Opened: r.seen(), Command: r.command, Why: r.why, OnCrash: r.onCrash, Changed: r.changed,
		Scope: r.scope, Sealed: r.sealed, Crashed: r.crashed, Pending: r.pending,
		Heirless: r.lease == nil && r.scope.Kind == ProcessScope && (len(r.heirs) == 0 || r.heirs[0].Reaper),
	}
	if r.lease != nil {
		l.UID = r.lease.uid
		l.Client, l.TTL, l.Deadline = r.lease.client, r.lease.ttl, r.lease.deadline
	}
	return l
}

// touch notes that something beneath was changed.
func (r *row) touch() {
	r.changed = true
	r.settle()
}

// settle tells those who watch r that it was changed under, or has ended.
func (r *row) settle() {
	if r.settled != nil {
		close(r.settled)
		r.settled = nil
	}
}
