package fs

import (
	"encoding/gob"
	"fmt"
	"io"
	"reflect"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/advisory"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A daemon is replaced in place: it stops ([transport.Transport]'s Stop), writes down
// all that it knows, and runs another program by exec(2), in the same process. That
// keeps the connection to the kernel, every descriptor, the claim on the directory and
// the pid, so that nobody who uses the mount notices more than a short wait. See
// replace.go and exec.go, and continue.go for the other side.

// HandoverFormat is the number of the format in which a daemon writes down what
// it knows. A program can only go on from the same one. It changes with the format of
// the state, too.
const HandoverFormat = 5

// HandoverIDMap is what a program can also do that goes on where IDs may be mapped.
const HandoverIDMap = "idmap"

// carried is what a daemon knows.
type carried struct {
	Format     int
	Options    carriedOptions
	Mountpoint string
	Transport  transport.State
	MountID    int
	Root       int // descriptor
	State      filestore.Carried
	Replacing  uint64
	Started    time.Time
	Passing    bool
	PassDev    uint32

	Procs   []procid.Carried
	Births  []procid.CarriedBirth
	Watched []procid.ID

	NextNode, NextHandle uint64
	Nodes                []byte // see carrynode.go
	Settled              map[uint64]uint64
	Numbered             map[uint64][]uint64 // see hashes, by node
	Files                []carriedFile
	Handles              []carriedHandle
	Candidates           []carriedCandidate

	RowText   []byte // see lockstate.CarriedRows
	Rows      []lockstate.CarriedRow
	Keys      []carriedFDKey
	LastToken uint64
	Stats     lockstate.Stats
	Advisory  map[advisory.Key][]advisory.Lock

	Orphans   []carriedOrphan
	Scanned   bool // all orphans are known
	Denials   []lockstate.Denial
	Denied    map[string]uint64
	Control   carriedControlDir
	Events    []lockstate.Event
	NextEvent uint64
}

// carriedOptions are [Options] without what does not outlive a process.
type carriedOptions struct {
	Dir, Mountpoint                    string
	LockNames, SharedNames, Candidates []string
	Depth                              int
	Owner                              string
	DenyUnlocked, NoLocking            bool
	NoPassthrough, Observe, IDMap      bool
	StateDir                           string
	Strict, Compat                     bool
	OnCrash                            string
	Grace                              time.Duration
	Version, Transport                 string
	Debug                              bool
}

// copyFields sets the fields of *to that from has, by name.
func copyFields(to, from any) {
	dst, src := reflect.ValueOf(to).Elem(), reflect.ValueOf(from)
	for i := range dst.NumField() {
		if f := src.FieldByName(dst.Type().Field(i).Name); f.IsValid() {
			dst.Field(i).Set(f)
		}
	}
}

// A carriedProc is a process that may be dead by now.
type carriedProc struct {
	ID    procid.ID
	UID   uint32
	Chain []procid.ID
}

func carryProc(p *procid.Process) *carriedProc {
	if p == nil {
		return nil
	}
	return &carriedProc{p.ID(), p.UID(), p.Ancestors()}
}

type carriedFDKey struct {
	Token, Node uint64
	Flock       bool
	ID          uint64
	Files       []lockstate.FileID
}

type carriedOrphan struct {
	Dir, Name string
	Left      [3]uint64 // what is to be removed, see identity.carry; zero: nothing
}

// carry writes down what there is, and returns the descriptors that the next
// program needs. The transport has stopped; the caller holds FS.reapMu and FS.ns.
func (s *Server) carry(t *transport.State) (c *carried, fds []int, err error) {
	fs := s.fs
	c = &carried{
		Format: HandoverFormat, Mountpoint: s.mountpoint, MountID: fs.mountID, Transport: *t, Root: fs.back.root, Started: fs.started,
		Passing: fs.pass.on.Load(), PassDev: fs.pass.dev,
		Procs: fs.procs.Carry(), Births: fs.procs.CarryBirths(), Stats: fs.table.Stats(), LastToken: fs.table.LastToken(), Advisory: fs.advisory.Carry(),
	}
	copyFields(&c.Options, fs.opts)
	if c.State, err = s.store.Carry(); err != nil {
		return nil, nil, err
	}
	fds = append(fds, t.FD, c.Root, c.State.Dir, c.State.Guard)
	for _, p := range c.Procs {
		fds = append(fds, p.FD)
	}
	fs.watchMu.Lock()
	for id := range fs.watched {
		c.Watched = append(c.Watched, id)
	}
	fs.watchMu.Unlock()
	for id := range fs.unrepresented.owners {
		c.Watched = append(c.Watched, id)
	}
	var ok, busy bool
	fs.toClear.Range(func(any, any) bool { busy = true; return false })
	if c.RowText, c.Rows, ok = fs.table.CarryRows(); !ok || busy {
		return nil, nil, fmt.Errorf("what a crashed owner left is being cleared away; try again: %w", unix.EBUSY)
	}
	fs.table.EachKey(func(token uint64, k lockstate.CarriedKey) {
		key := k.Key.(fdKey)
		c.Keys = append(c.Keys, carriedFDKey{token, key.node, key.flock, key.id, k.Files})
	})
	cands := fs.collectCandidates()
	c.carryNodes(fs, cands, &fds)
	c.carryHandles(fs, cands, &fds)
	c.carryCandidates(fs, cands)
	c.carryOrphans(fs)
	c.Denials, c.Denied = fs.denials.carry()
	c.Control = fs.control.carry()
	c.Events, c.NextEvent = fs.events.carry()
	return c, fds, nil
}

func (c *carried) carryOrphans(fs *FS) {
	o := &fs.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	for at := range o.paths {
		c.Orphans = append(c.Orphans, carriedOrphan{Dir: at.dir, Name: at.name})
	}
	fs.leftovers.mu.Lock()
	for _, l := range fs.leftovers.all {
		c.Orphans = append(c.Orphans, carriedOrphan{Dir: fs.table.Path(l.dir), Name: l.name, Left: l.id.carry()})
	}
	fs.leftovers.mu.Unlock()
	c.Scanned = isClosed(o.done)
}

// write and readCarried are each other's opposite.
func (c *carried) write(w io.Writer) error { return gob.NewEncoder(w).Encode(c) }

func readCarried(r io.Reader) (*carried, error) {
	c := new(carried)
	if err := gob.NewDecoder(r).Decode(c); err != nil {
		return nil, fmt.Errorf("what the daemon before has written down: %w", err)
	}
	if c.Format != HandoverFormat {
		return nil, fmt.Errorf("what the daemon before has written down has format %d, not %d", c.Format, HandoverFormat)
	}
	return c, nil
}
