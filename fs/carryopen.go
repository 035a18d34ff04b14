package fs

import (
	"fmt"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A carriedFile is an inode that is open.
type carriedFile struct {
	Node      uint64
	FD        int
	Kept      bool // of no account: it goes with the next HandoverFormat
	Backing   int32
	Aside     bool  // see file,
	InDoubt   bool  // likewise
	Lingering []int // indices of handles

	Unwritten      uint64      // how often it was heard, see unwritten,
	UnwrittenError fuse.Status // and what the last time
}

// A carriedHandle is a handle, open or lingering.
type carriedHandle struct {
	ID        uint64 // 0: lingering only
	Node      uint64
	FD        int
	Flags     uint32
	Mode      ioMode
	Tid       uint32
	Lock      *lockstate.CarriedHandle
	UID       uint32
	Fresh     bool
	Flushed   bool
	Heard     uint64
	Dying     *procid.ID
	Released  int64
	Candidate bool
	Opener    *carriedProc
	Private   int // index of a candidate; -1: none
	Rights    *rights
	As        uint64
	ByDir     uint64 // node; 0: it is not known by what name
	ByName    string
}

func (c *carried) carryHandles(fs *FS, cands *candidateList, fds *[]int) {
	t := &fs.handles
	index := make(map[*handle]int)
	keep := func(h *handle, id uint64) {
		index[h] = len(c.Handles)
		x := carriedHandle{
			ID: id, Node: h.node.id, FD: h.fd.get(), Flags: h.flags, UID: h.uid, Mode: h.mode, Tid: h.tid, Fresh: h.fresh, Flushed: h.wasFlushed(), Dying: h.dying.Load(),
			Released: h.released.Load(), Candidate: h.candidate.Load(), Opener: carryProc(h.opener), Private: cands.index(h.cand),
			Rights: h.rights, As: h.as, ByName: h.by.name, Heard: h.heard,
		}
		if h.by.parent != nil {
			x.ByDir = h.by.parent.id
		}
		if h.lock != nil {
			l := h.lock.Carry()
			x.Lock = &l
		}
		if fd := h.fd.get(); fd >= 0 {
			*fds = append(*fds, fd)
		}
		c.Handles = append(c.Handles, x)
	}
	c.NextHandle = t.next.Load()
	for _, h := range t.all() {
		keep(h, h.id)
	}
	for _, h := range t.writers() {
		if _, ok := index[h]; !ok {
			keep(h, 0)
		}
	}
	for n, f := range fs.nodes.files.all() {
		f.mu.Lock()
		x := carriedFile{
			Node: n.id, FD: f.fd, Backing: f.backing, Aside: f.aside, InDoubt: f.inDoubt,
			Unwritten: f.unwritten.times, UnwrittenError: statusOf(f.unwritten.err),
		}
		for _, h := range f.lingering {
			x.Lingering = append(x.Lingering, index[h])
		}
		f.mu.Unlock()
		if f.fd >= 0 {
			*fds = append(*fds, f.fd)
		}
		c.Files = append(c.Files, x)
	}
}

// takeUpHandles opens again what was open.
func (fs *FS) takeUpHandles(c *carried, cands []*candidate) error {
	all := make([]*handle, len(c.Handles))
	t, now := &fs.handles, time.Now().UnixNano()
	for i, x := range c.Handles {
		n := fs.nodes.get(x.Node)
		if n == nil || x.Private >= len(cands) {
			return fmt.Errorf("%w: a handle of node %d", errNodes, x.Node)
		}
		h := &handle{
			id: x.ID, node: n, flags: x.Flags, uid: x.UID, mode: x.Mode, tid: x.Tid, fresh: x.Fresh, opener: fs.procAgain(x.Opener), rights: x.Rights, as: x.As, heard: x.Heard,
		}
		h.fd.set(x.FD)
		if dir := fs.nodes.get(x.ByDir); dir != nil {
			h.by = link{dir, x.ByName}
		}
		if x.Flushed {
			h.flushed.Store(now) // the RELEASE may still be on its way
		}
		h.dying.Store(x.Dying)
		h.released.Store(x.Released)
		h.candidate.Store(x.Candidate)
		if x.Private >= 0 {
			h.cand = cands[x.Private]
			h.cand.handles = append(h.cand.handles, h)
		}
		if x.Lock != nil {
			h.lock = fs.takeUpLock(n, *x.Lock)
			if x.Flushed {
				h.lock.Closing()
			}
		}
		all[i] = h
		t.takeUp(h)
		if h.id == 0 || !h.isFile() {
			continue
		}
		f := n.lockFile()
		f.count(h, h.mode, 1)
		f.cutLocked(h, h.flags&unix.O_TRUNC != 0 && !x.Flushed)
		if h.fd.get() >= 0 {
			fs.spare.take()
			if h.flags&unix.O_ACCMODE != unix.O_RDONLY {
				f.writing++
			}
		}
		n.unlockFile(f)
	}
	t.next.Store(c.NextHandle)
	return fs.takeUpFiles(c.Files, all)
}

// takeUpFiles makes again what the handles of a file share.
func (fs *FS) takeUpFiles(files []carriedFile, handles []*handle) error {
	for _, x := range files {
		n := fs.nodes.get(x.Node)
		if n == nil {
			return fmt.Errorf("%w: an open file of node %d", errNodes, x.Node)
		}
		f := n.lockFile()
		f.fd, f.backing, f.aside = x.FD, x.Backing, x.Aside
		f.doubtLocked(f.inDoubt || x.InDoubt)
		f.unwritten.times, f.unwritten.err = x.Unwritten, errorOf(x.UnwrittenError)
		if f.fd >= 0 {
			fs.spare.take()
		}
		for _, i := range x.Lingering {
			f.lingering = append(f.lingering, handles[i])
		}
		fs.heatLocked(n, f)
		fs.keepLookingLocked(n, f)
		n.unlockFile(f)
	}
	return nil
}

// takeUpLock makes an entry for a handle of n in the lock table again.
func (fs *FS) takeUpLock(n *node, c lockstate.CarriedHandle) *lockstate.Handle {
	dirs, _ := n.covering()
	l := fs.table.TakeUpHandle(c, fs.procAgain(&carriedProc{c.Owner, c.UID, c.Chain}), dirs)
	n.addWriter(l)
	return l
}

// procAgain returns a process that the daemon before knew, or nobody (H4).
func (fs *FS) procAgain(c *carriedProc) *procid.Process {
	if c == nil {
		return nil
	}
	if c.ID == (procid.ID{}) {
		return new(procid.Process)
	}
	if p := fs.procs.Process(c.ID); p != nil {
		return p
	}
	if p := fs.alive(c.ID); p != nil {
		return p
	}
	lineage := make([]procid.Ancestor, len(c.Chain))
	for i, id := range c.Chain {
		lineage[i].ID = id
	}
	return procid.Recorded(c.ID, c.UID, lineage)
}

// A carriedCandidate is a candidate, registered or still open.
type carriedCandidate struct {
	Parent     uint64
	Name       string
	Owner      *carriedProc
	Key        [3]uint64 // see identity.carry
	LockFile   bool
	Won        bool
	Registered bool
	Node       uint64 // 0: an ordinary file
	Data       []byte
	Mode       uint32
	UID, GID   uint32
	ATime      time.Time
	MTime      time.Time
}

// A candidateList numbers the candidates.
type candidateList struct {
	all        []*candidate
	at         map[*candidate]int
	registered map[*candidate]bool
}

func (l *candidateList) add(c *candidate) {
	if c == nil {
		return
	}
	if _, ok := l.at[c]; !ok {
		l.at[c] = len(l.all)
		l.all = append(l.all, c)
	}
}

func (l *candidateList) index(c *candidate) int {
	if c == nil {
		return -1
	}
	return l.at[c]
}

func (fs *FS) collectCandidates() *candidateList {
	l := &candidateList{at: make(map[*candidate]int), registered: make(map[*candidate]bool)}
	fs.cands.mu.Lock()
	for _, here := range fs.cands.all {
		for _, c := range here {
			l.add(c)
			l.registered[c] = true
		}
	}
	fs.cands.mu.Unlock()
	fs.nodes.mu.RLock()
	for n := range fs.nodes.byID.all {
		l.add(n.candidate())
	}
	fs.nodes.mu.RUnlock()
	for _, h := range fs.handles.all() {
		l.add(h.cand)
	}
	return l
}

func (c *carried) carryCandidates(fs *FS, cands *candidateList) {
	for _, o := range cands.all {
		o.mu.Lock()
		x := carriedCandidate{
			Name: o.name, Owner: carryProc(o.owner), LockFile: o.lockFile, Won: o.won.Load(),
			Key: o.key.carry(), Registered: cands.registered[o],
			Data: o.data, Mode: o.mode, UID: o.uid, GID: o.gid, ATime: o.atime, MTime: o.mtime,
		}
		if fs.nodes.get(o.parent.id) == o.parent {
			x.Parent = o.parent.id
		}
		if o.node != nil && fs.nodes.get(o.node.id) == o.node {
			x.Node = o.node.id
		}
		o.mu.Unlock()
		c.Candidates = append(c.Candidates, x)
	}
}

// newCandidates makes the candidates again, before there are nodes.
func (fs *FS) newCandidates(all []carriedCandidate) []*candidate {
	cands := make([]*candidate, len(all))
	for i, x := range all {
		c := &candidate{
			fs: fs, name: x.Name, owner: fs.procAgain(x.Owner), lockFile: x.LockFile,
			key:  carriedIdentity(x.Key),
			data: x.Data, mode: x.Mode, uid: x.UID, gid: x.GID, atime: x.ATime, mtime: x.MTime,
		}
		c.won.Store(x.Won)
		cands[i] = c
	}
	return cands
}

// takeUpCandidates gives them their places.
func (fs *FS) takeUpCandidates(all []carriedCandidate, cands []*candidate) error {
	for i, x := range all {
		c := cands[i]
		if x.Parent == 0 { // it is gone, and nothing is found there any more
			c.parent = &node{tab: fs.nodes, kind: unix.S_IFDIR >> 12, dir: fs.table.GoneDir()}
			c.parent.more.Store(&nodeMore{fd: -1})
		} else {
			c.parent = fs.nodes.get(x.Parent)
		}
		if c.parent == nil || x.Node != 0 && c.node == nil {
			return fmt.Errorf("%w: a candidate in node %d", errNodes, x.Parent)
		}
		if x.Registered && c.node == nil {
			c.record = fs.cands.recordMade(c)
		}
		if x.Registered && !fs.cands.add(c) {
			return fmt.Errorf("%w: two candidates of one name", errNodes)
		}
	}
	return nil
}
