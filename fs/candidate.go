package fs

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A candidate is the temporary file of a link(2) protocol: the client makes it
// before it knows whether it will get the lock (A9). In a directory that
// somebody else holds it is private: it exists in the daemon's memory, for its
// creator alone, until it wins or goes. In a free directory it is an ordinary
// file that the creator may link and remove whatever happens meanwhile.
type candidate struct {
	fs     *FS
	parent *node // pinned while the candidate is registered
	name   string
	owner  *procid.Process
	node   *node    // pinned likewise; nil for an ordinary file
	key    identity // of an ordinary file

	won atomic.Bool // it is an ordinary file now, or was from the start

	// Protected by mu, for private ones.
	mu    sync.Mutex
	opens int               // handles
	fd    int               // their file, if they were open when it won; else -1
	lock  *lockstate.Handle // of fd
	data  []byte
	mode  uint32
	uid   uint32
	gid   uint32
	atime time.Time
	mtime time.Time
}

const (
	candidateSize  = 4096 // bytes in one
	candidatesEach = 16   // of one process at a time
)

// candidates are all that live, by place: everybody may have one of the same
// name.
type candidates struct {
	mu   sync.Mutex
	all  map[link][]*candidate
	each map[procid.ID]int
}

func (cs *candidates) init() {
	cs.all = make(map[link][]*candidate)
	cs.each = make(map[procid.ID]int)
}

// private reports whether c stands for a file that is not in the backing.
func (c *candidate) private() bool {
	return c != nil && !c.won.Load()
}

// add registers c and reports whether there is room.
func (cs *candidates) add(c *candidate) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	at, id := link{c.parent, c.name}, c.owner.ID()
	if cs.each[id] >= candidatesEach {
		return false
	}
	for _, o := range cs.all[at] {
		if o.owner.ID() == id {
			return false
		}
	}
	cs.all[at] = append(cs.all[at], c)
	cs.each[id]++
	c.parent.pin()
	if c.node != nil {
		c.node.pin()
	}
	return true
}

// drop forgets c.
func (cs *candidates) drop(c *candidate) {
	cs.mu.Lock()
	at, id := link{c.parent, c.name}, c.owner.ID()
	i := slices.Index(cs.all[at], c)
	if i < 0 {
		cs.mu.Unlock()
		return
	}
	if cs.all[at] = slices.Delete(cs.all[at], i, i+1); len(cs.all[at]) == 0 {
		delete(cs.all, at)
	}
	if cs.each[id]--; cs.each[id] == 0 {
		delete(cs.each, id)
	}
	cs.mu.Unlock()
	c.parent.unpin()
	if c.node != nil {
		c.node.unpin()
	}
	c.fs.unwatch(id)
}

// forget drops the ordinary candidate at a place that has lost its name.
func (cs *candidates) forget(parent *node, name string) {
	for _, c := range cs.here(parent, name) {
		if c.node == nil {
			cs.drop(c)
		}
	}
}

// here returns the candidates at a place.
func (cs *candidates) here(parent *node, name string) []*candidate {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.Clone(cs.all[link{parent, name}])
}

func (cs *candidates) has(id procid.ID) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.each[id] > 0
}

// at returns the candidate of the caller at a place.
func (cs *candidates) at(fs *FS, h *fuse.InHeader, parent *node, name string) *candidate {
	all := cs.here(parent, name)
	if len(all) == 0 {
		return nil
	}
	p := fs.process(h)
	for _, c := range all {
		if p != nil && (p.ID() == c.owner.ID() || p.Descends(c.owner.ID())) {
			return c
		}
	}
	return nil
}

// get returns the caller's private candidate at a place.
func (cs *candidates) get(fs *FS, h *fuse.InHeader, parent *node, name string) *candidate {
	if c := cs.at(fs, h, parent, name); c.private() && c.node != nil {
		return c
	}
	return nil
}

// owned reports whether the request is about a candidate of the caller's that
// is an ordinary file.
func (cs *candidates) owned(r *request) bool {
	c := cs.at(r.fs, r.header, r.parent, r.name)
	return c != nil && c.node == nil
}

// noteCandidate registers a file that the caller made under a candidate's name
// in a directory that it may write to. Only a name that carries the caller's
// own pid or host is believed: the file will be removed when the caller dies.
func (fs *FS) noteCandidate(r *request, h *handle, key identity) {
	p := r.process()
	if p == nil || !ownCandidateName(r.name, p.ID().Pid) {
		return
	}
	c := &candidate{fs: fs, parent: r.parent, name: r.name, owner: p, key: key, fd: -1}
	c.won.Store(true)
	if !fs.cands.add(c) {
		return
	}
	if err := fs.watch(p); err != nil {
		fs.cands.drop(c)
		return
	}
	h.candidate.Store(true)
}

// reap removes the candidates of a dead process.
func (cs *candidates) reap(fs *FS, id procid.ID) {
	cs.mu.Lock()
	var gone []*candidate
	if cs.each[id] > 0 {
		for _, here := range cs.all {
			for _, c := range here {
				if c.owner.ID() == id {
					gone = append(gone, c)
				}
			}
		}
	}
	cs.mu.Unlock()
	for _, c := range gone {
		if c.node == nil {
			err := fs.discard(c.name, func() (string, bool) { return c.place() })
			if err != nil {
				fs.log.Warn("cannot remove a dead process's candidate", "file", c.name, "err", err)
			}
		}
		cs.drop(c)
	}
}

// place says where an ordinary candidate is, if its name is still its own.
func (c *candidate) place() (dir string, ok bool) {
	n := c.fs.nodes.find(c.key)
	dir = c.fs.table.Path(c.parent.dir)
	if n != nil {
		return dir, slices.Contains(n.names(), link{c.parent, c.name})
	}
	fd, err := c.fs.openPath(dir)
	if err != nil {
		return dir, false
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	return dir, statAt(fd, c.name, &st) == nil && identityOf(&st) == c.key
}

// createCandidate serves the creation of a private candidate. It reports
// whether it did.
func (fs *FS) createCandidate(r *request, in *fuse.CreateIn, out *fuse.CreateOut) (done bool, status fuse.Status) {
	if fs.isLockName(r.parent, r.name) || !fs.isCandidateName(r.name) {
		return false, 0
	}
	fs.reapGoverning(r.parent.dir)
	_, held := fs.table.Governing(r.parent.dir)
	if !held && !fs.opts.DenyUnlocked {
		return false, 0
	}
	p := r.process()
	if p == nil || held && fs.table.Holds(p, r.parent.dir) {
		return false, 0
	}
	now := time.Now()
	c := &candidate{
		fs: fs, parent: r.parent, name: r.name, owner: p, opens: 1, fd: -1,
		mode: unix.S_IFREG | in.Mode&^in.Umask&07777, uid: in.Uid, gid: in.Gid, atime: now, mtime: now,
	}
	st := unix.Statx_t{Mode: uint16(c.mode), Nlink: 1}
	n := fs.nodes.anonymous(&st, -1, c)
	c.node = n
	if !fs.cands.add(c) {
		fs.nodes.forget(n.id, 1)
		return false, 0
	}
	if err := fs.watch(p); err != nil {
		fs.cands.drop(c)
		fs.nodes.forget(n.id, 1)
		return true, statusOf(err)
	}
	out.EntryOut.NodeId = n.id
	c.mu.Lock()
	c.fillLocked(&out.EntryOut.Attr)
	c.mu.Unlock()
	h := &handle{fd: -1, node: n, cand: c}
	out.OpenOut.Fh = fs.handles.add(h)
	out.OpenOut.OpenFlags = fuse.FOPEN_DIRECT_IO
	return true, fuse.OK
}

// reapGoverning reaps the owner of the lock that governs d if it is dead.
func (fs *FS) reapGoverning(d *lockstate.Dir) {
	if l, ok := fs.table.Governing(d); ok && !fs.procs.Alive(l.Owner) {
		fs.reap(l.Owner)
	}
}

// linkCandidate serves link(2) of a private candidate.
func (fs *FS) linkCandidate(m *making, src *node, out *fuse.EntryOut) fuse.Status {
	return fs.winCandidate(m, src.cand, out, true)
}

// renameCandidate serves rename(2) of a private candidate.
func (fs *FS) renameCandidate(m *renaming, c *candidate) fuse.Status {
	mk := &making{r: m.r, name: m.to.name, protocol: "rename"}
	m.r.header.NodeId = m.to.parent.id
	return fs.winCandidate(mk, c, nil, false)
}

// winCandidate makes a private candidate the lock file, if the directory can
// be acquired: only then does it reach the backing. With keep, its own name
// stays as a second link.
func (fs *FS) winCandidate(m *making, c *candidate, out *fuse.EntryOut, keep bool) fuse.Status {
	r := m.r
	if r.parent = fs.nodes.get(r.header.NodeId); r.parent == nil {
		return fuse.Status(unix.ESTALE)
	}
	m.parent, r.name = r.parent, m.name
	if !fs.isLockName(m.parent, m.name) || m.parent != c.parent {
		return fs.deny(r, &lockstate.HeldError{Err: lockstate.ErrHeld}, nil)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return fuse.Status(unix.ESTALE)
	}
	m.do = func(dir int) error { return c.writeOutLocked(r, dir, m.name, keep) }
	m.see = func(dir int) error {
		if err := statAt(dir, m.name, &m.st); err != nil {
			return err
		}
		links := []link{{m.parent, m.name}}
		if keep {
			links = append(links, link{m.parent, c.name})
		}
		fs.nodes.settle(c.node, &m.st, links)
		if c.lock != nil {
			c.node.addWriter(c.lock)
		}
		c.won.Store(true)
		return nil
	}
	status := fs.attempt(r, false, func() error { return fs.make(m) })
	if status != fuse.OK {
		return status
	}
	if out != nil {
		fs.nodes.again(c.node)
		fs.fillEntry(r.header, out, c.node, &m.st, true)
	}
	fs.cands.drop(c)
	return fuse.OK
}

// writeOutLocked writes the candidate to the backing, as the caller's. Handles
// that are open on it go on with the file there, as any write handle does.
func (c *candidate) writeOutLocked(r *request, dir int, name string, keep bool) error {
	first := name
	if keep {
		first = c.name
	}
	fd := -1
	err := c.fs.asCaller(r.header, func() (err error) {
		fd, err = openAt(dir, first, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, c.mode&07777)
		return err
	})
	if err != nil {
		return err
	}
	if _, err = unix.Write(fd, c.data); err == nil && keep {
		err = unix.Linkat(dir, first, dir, name, 0)
	}
	if err == nil && c.opens > 0 {
		c.lock, err = r.openForWrite(lockstate.Change{Dirs: []*lockstate.Dir{c.parent.dir}, Quiet: true}, name)
		if err == nil {
			c.fd = fd
			return nil
		}
		unix.Unlinkat(dir, name, 0)
	}
	unix.Close(fd)
	if err != nil && first != name {
		unix.Unlinkat(dir, first, 0)
	}
	return err
}

// closed takes note that a handle is gone.
func (c *candidate) closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.opens--; c.opens > 0 || c.fd < 0 {
		return
	}
	unix.Close(c.fd)
	c.node.removeWriter(c.lock)
	c.lock.Close()
	c.fd, c.lock = -1, nil
}

// settle gives a node that was private its place in the backing.
func (t *nodeTable) settle(n *node, st *unix.Statx_t, links []link) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.key, n.nlink = identityOf(st), st.Nlink
	t.byKey[n.key] = n
	for _, l := range links {
		n.linkLocked(l.parent, l.name)
	}
}

// again counts one more time that the kernel is told of n.
func (t *nodeTable) again(n *node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n.lookups++
}

// The file operations of a private candidate follow.

func (c *candidate) fillLocked(a *fuse.Attr) {
	a.Ino = 1<<62 | c.node.id
	a.Mode, a.Nlink, a.Uid, a.Gid = c.mode, 1, c.uid, c.gid
	a.Size, a.Blocks, a.Blksize = uint64(len(c.data)), uint64(len(c.data)+511)/512, 4096
	a.SetTimes(&c.atime, &c.mtime, &c.mtime)
}

func (c *candidate) entry(fs *FS, out *fuse.EntryOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	fs.nodes.again(c.node)
	out.NodeId = c.node.id
	c.fillLocked(&out.Attr)
	return fuse.OK
}

func (c *candidate) attr(out *fuse.AttrOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fillLocked(&out.Attr)
	return fuse.OK
}

func (c *candidate) setAttr(in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if size, ok := in.GetSize(); ok {
		if size > candidateSize {
			return fuse.Status(unix.EFBIG)
		}
		c.resizeLocked(int(size))
	}
	if mode, ok := in.GetMode(); ok {
		c.mode = c.mode&unix.S_IFMT | mode
	}
	if uid, ok := in.GetUID(); ok {
		c.uid = uid
	}
	if gid, ok := in.GetGID(); ok {
		c.gid = gid
	}
	if t, ok := in.GetATime(); ok {
		c.atime = t
	}
	if t, ok := in.GetMTime(); ok {
		c.mtime = t
	}
	c.fillLocked(&out.Attr)
	return fuse.OK
}

func (c *candidate) resizeLocked(size int) {
	if size <= len(c.data) {
		c.data = c.data[:size]
		return
	}
	c.data = append(c.data, make([]byte, size-len(c.data))...)
}

func (c *candidate) open(fs *FS, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.won.Load() {
		return fuse.Status(unix.ESTALE) // the kernel asks again
	}
	if in.Flags&unix.O_TRUNC != 0 {
		c.data = nil
	}
	c.opens++
	out.Fh = fs.handles.add(&handle{fd: -1, node: c.node, cand: c})
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (c *candidate) read(in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		n, err := unix.Pread(c.fd, buf, int64(in.Offset))
		return fuse.ReadResultData(buf[:max(n, 0)]), statusOf(err)
	}
	if in.Offset >= uint64(len(c.data)) {
		return fuse.ReadResultData(nil), fuse.OK
	}
	return fuse.ReadResultData(buf[:copy(buf, c.data[in.Offset:])]), fuse.OK
}

func (c *candidate) write(in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		n, err := unix.Pwrite(c.fd, data, int64(in.Offset))
		return uint32(max(n, 0)), statusOf(err)
	}
	end := in.Offset + uint64(len(data))
	if end < in.Offset || end > candidateSize {
		return 0, fuse.Status(unix.EFBIG)
	}
	if int(end) > len(c.data) {
		c.resizeLocked(int(end))
	}
	copy(c.data[in.Offset:], data)
	c.mtime = time.Now()
	return uint32(len(data)), fuse.OK
}

func (c *candidate) lseek(in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd >= 0 {
		off, err := unix.Seek(c.fd, int64(in.Offset), int(in.Whence))
		out.Offset = uint64(off)
		return statusOf(err)
	}
	size := uint64(len(c.data))
	if in.Offset >= size {
		return fuse.Status(unix.ENXIO)
	}
	out.Offset = in.Offset
	if in.Whence == unix.SEEK_HOLE {
		out.Offset = size
	}
	return fuse.OK
}
