package fs

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A candidate that is an ordinary file goes with its creator (R4), also when the
// daemon dies first. So it is recorded before it is made. What the backing did not let go of
// is recorded in the same way, lock files included, until it is gone.

// candBase is above all tokens and below hotBase: the store keeps these records
// beside the locks.
const candBase = 1 << 61

// A candRecord is a candidate as it outlives the daemon.
type candRecord struct {
	Dir   lockstate.Bytes `json:"candidate_in"` // path of the table,
	In    lockstate.Inode `json:"in,omitzero"`  // and what the backing calls that; zero in an older version's record
	To    lockstate.Bytes `json:"to,omitempty"` // its path if it was just being renamed
	Name  lockstate.Bytes `json:"name"`
	Is    lockstate.Inode `json:"is,omitzero"` // what the backing calls the file; zero before it is made
	World string          `json:"world"`       // see lockstate.Record
	Owner procid.ID       `json:"owner"`
	Since time.Time       `json:"since"` // a file from before is another one
	// Left: it is a leftover, of whatever type, and nobody's.
	Left bool `json:"left,omitempty"`
}

// coarse is by how much a file may seem older than the record that was made
// before it: the kernel's clock for files ticks at the latest after 10 ms.
const coarse = 100 * time.Millisecond

// start begins with what an earlier daemon has recorded, and returns it. The
// caller deletes it.
func (cs *candidates) start(store lockstate.Store, world string) (left map[uint64][]byte) {
	left = make(map[uint64][]byte)
	cs.store, cs.world, cs.next = store, world, candBase
	for id, data := range store.Load() {
		if id >= candBase && id < hotBase {
			left[id], cs.next = data, max(cs.next, id+1)
		}
	}
	return left
}

// record writes down that a process is about to make a candidate, to be kept by
// the next flush. It is the caller's to unrecord, or a candidate's.
func (cs *candidates) record(parent *node, name string, owner procid.ID) uint64 {
	return cs.recordFile(time.Now(), parent, name, owner, identity{})
}

// recordMade is record for a candidate that is there: one of before this daemon,
// maybe.
func (cs *candidates) recordMade(c *candidate) uint64 {
	return cs.recordFile(c.since(), c.parent, c.name, c.owner.ID(), c.key)
}

// since is a time at which c was not there yet, or long ago: see candRecord.
func (c *candidate) since() time.Time {
	if c.key.birth != 0 {
		return time.Unix(0, c.key.birth)
	}
	return time.Now()
}

func (cs *candidates) recordFile(since time.Time, parent *node, name string, owner procid.ID, key identity) uint64 {
	if cs.store == nil {
		return 0
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	id := cs.next
	cs.next++
	cs.putLocked(id, since, parent, "", name, owner, key)
	return id
}

func (cs *candidates) putLocked(id uint64, since time.Time, parent *node, to, name string, owner procid.ID, key identity) {
	cs.put(id, candRecord{
		Dir: lockstate.Bytes(cs.table.Path(parent.dir)), In: parent.key().inode(), To: lockstate.Bytes(to), Name: lockstate.Bytes(name),
		Is: key.inode(), World: cs.world, Owner: owner, Since: since,
	})
}

func (cs *candidates) put(id uint64, rec candRecord) {
	if data, err := json.Marshal(rec); err == nil { // nothing in it can fail
		cs.store.Put(id, data)
	}
}

// recordLeft writes down what is to be removed yet, and returns the number of the record, or
// 0: of what could not be looked at, the next daemon could not tell whether it is that.
func (cs *candidates) recordLeft(l leftover) uint64 {
	if cs.store == nil || l.id.ino == 0 {
		return 0
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	id := cs.next
	cs.next++
	cs.left[id] = l
	cs.putLeft(id, l, "")
	return id
}

func (cs *candidates) putLeft(id uint64, l leftover, to string) {
	cs.put(id, candRecord{
		Dir: lockstate.Bytes(cs.table.Path(l.dir)), In: l.in, To: lockstate.Bytes(to), Name: lockstate.Bytes(l.name),
		Is: l.id.inode(), World: cs.world, Left: true,
	})
}

// unrecordLeft is called before the reference of l to its directory is given up.
func (cs *candidates) unrecordLeft(l leftover) {
	cs.mu.Lock()
	delete(cs.left, l.record)
	cs.mu.Unlock()
	cs.unrecord(l.record)
}

// moving writes down where the candidates and leftovers beneath a directory are once it is
// renamed, if the daemon dies before it calls moved.
func (cs *candidates) moving(from, to string) {
	cs.rerecord(func(dir string) (string, bool) {
		rest, beneath := strings.CutPrefix(dir+"/", from+"/")
		return strings.TrimSuffix(to+"/"+rest, "/"), beneath
	})
}

// moved writes down where they are, as a directory was renamed.
func (cs *candidates) moved() { cs.rerecord(func(string) (string, bool) { return "", true }) }

// rerecord writes down anew what is in directories for which to reports true, and where those
// are going.
func (cs *candidates) rerecord(to func(dir string) (string, bool)) {
	cs.mu.Lock()
	news := false
	for at, here := range cs.all {
		for _, c := range here {
			if c.record == 0 {
				continue
			}
			if next, ok := to(cs.table.Path(at.parent.dir)); ok {
				cs.putLocked(c.record, c.since(), at.parent, next, at.name, c.owner.ID(), c.key)
				news = true
			}
		}
	}
	for id, l := range cs.left {
		if next, ok := to(cs.table.Path(l.dir)); ok {
			cs.putLeft(id, l, next)
			news = true
		}
	}
	cs.mu.Unlock()
	if news {
		cs.keep()
	}
}

// takingName is called before something else gets a name: if that is a candidate's, it is
// written down which file the candidate is, or that it is gone, or else the next daemon
// would take the other one for it.
func (fs *FS) takingName(l link) {
	if !fs.mayBeCandidate(l.name) {
		return
	}
	cs := &fs.cands
	cs.mu.Lock()
	for _, c := range cs.all[l] {
		if c.record != 0 {
			cs.putLocked(c.record, c.since(), l.parent, "", l.name, c.owner.ID(), c.key)
		}
	}
	cs.mu.Unlock()
	cs.keep()
}

// keep makes what was recorded outlive the daemon.
func (cs *candidates) keep() {
	if cs.store != nil {
		_ = cs.store.Flush() // it tries again by itself, and tells who asks
	}
}

func (cs *candidates) unrecord(id uint64) {
	if id != 0 {
		cs.store.Delete(id)
	}
}

// restoreCandidates removes what dead processes left, and registers again what
// others may want. It is called before the mount answers; covered: see restoring.
func (fs *FS) restoreCandidates(store lockstate.Store, world string, covered bool) error {
	fs.reapMu.Lock() // whose locks they are of stays as it is
	defer fs.reapMu.Unlock()
	for id, data := range fs.cands.start(store, world) {
		var rec candRecord
		if err := json.Unmarshal(data, &rec); err != nil {
			return fmt.Errorf("%w: a candidate: %w", ErrNewerState, err)
		}
		switch err := fs.restoreCandidate(&rec, covered); {
		case procid.IsShort(err):
			return fmt.Errorf("a candidate in %s: %w", plain(string(rec.Dir)), err)
		case err != nil && !isGone(err):
			// The next daemon may know.
			fs.log.Warn("cannot look after a candidate", "dir", string(rec.Dir), "file", string(rec.Name), "err", err)
			fs.cands.put(id, rec)
			continue
		}
		store.Delete(id)
	}
	fs.cands.keep()
	return nil
}

func (fs *FS) restoreCandidate(rec *candRecord, covered bool) error {
	name := string(rec.Name)
	fd, dir, err := fs.openCandidateDir(*rec)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := statAt(fd, name, &st); err != nil {
		return err
	}
	key := fs.identityOf(&st)
	isOther := rec.Is != (lockstate.Inode{}) && !rec.Is.Is(key.inode())
	if rec.Left {
		// Where nothing tells a file that was made meanwhile from this one, it stays.
		if !isOther && (covered || rec.Is.Birth != 0) {
			fs.leftovers.add(fs, dir, name, key)
		}
		return nil
	}
	if isOther || uint32(st.Mode)&unix.S_IFMT != unix.S_IFREG || fs.isContent(name, &st) || identityOf(&st).birth < rec.Since.Add(-coarse).UnixNano() {
		return nil // or nobody knows
	}
	var owner *procid.Process
	if rec.World == fs.cands.world {
		owner = fs.alive(rec.Owner)
	}
	if owner == nil {
		owner = fs.restoredOwner(dir, key)
	}
	if owner == nil {
		err := fs.discard(&discarding{name: name, place: func() (string, bool) { return dir, true }})
		if err != nil && !procid.IsShort(err) {
			fs.leftCandidate(dir, name, key, err)
			return nil
		}
		return err
	}
	return fs.nodeAt(dir, func(parent *node) {
		fs.registerCandidate(&candidate{fs: fs, parent: parent, name: name, owner: owner, key: key})
	})
}

// restoredOwner is ownerBy for a file that is not registered yet: where nobody can be told to
// stand for a scope, the lock is the dead owner's, and so is its candidate (H3). The caller
// holds FS.reapMu.
func (fs *FS) restoredOwner(dir string, file identity) *procid.Process {
	l, ok := fs.lockBy(dir, file)
	if _, later := fs.unrepresented.tokens.Load(l.Token); ok && later {
		return procid.Recorded(l.Owner, l.UID, nil)
	}
	return fs.ownerBy(dir, file)
}

// openCandidateDir opens the directory of a candidate, whether a rename that was under way
// was carried out or not. ENOENT: it has another name by now.
func (fs *FS) openCandidateDir(rec candRecord) (fd int, dir string, err error) {
	err = unix.ENOENT
	for _, dir := range []string{string(rec.Dir), string(rec.To)} {
		if dir == "" {
			continue
		}
		var st unix.Statx_t
		fd, bad := fs.openPath(dir)
		if bad == nil {
			if bad = statAt(fd, "", &st); bad == nil && (rec.In == (lockstate.Inode{}) || rec.In.Is(fs.inodeOf(&st))) {
				return fd, dir, nil
			}
			unix.Close(fd)
		}
		if bad != nil && !isGone(bad) {
			err = bad
		}
	}
	return -1, "", err
}

// nodeAt calls f with the node of an entry of the backing, which stays only if f pins it.
func (fs *FS) nodeAt(path string, f func(*node)) error {
	n := fs.root
	var st unix.Statx_t
	for _, name := range split(path) {
		d, err := fs.back.dir(n)
		if err != nil {
			return err
		}
		child, err := fs.nodes.lookAt(d.fd, n, name, &st)
		d.release()
		if err != nil {
			return err
		}
		defer fs.nodes.forget(child.id, 1) // the kernel was not told
		n = child
	}
	f(n)
	return nil
}
