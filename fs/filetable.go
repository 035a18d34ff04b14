package fs

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// A file is the state of an inode while it is open, or while a mapping outlives
// its handle.
type file struct {
	mu   sync.Mutex
	dead bool // it was taken off its node

	fd int // O_RDONLY, or -1; valid as long as a handle is open; counts in FS.spare

	aside bool // it was put aside, and by its name the kernel finds it no more

	backing  int32 // the kernel's number of the backing file while handles pass
	passing  int   // handles, by mode
	cached   int
	direct   int
	writers  int // handles of which may change it without a request,
	mappable int // and of which by a mapping
	paging   int // cached handles of which a mapping may change the kernel's pages

	// mapped says whether it may be mapped writable past the daemon, for who does not wait:
	// the backing may take long for what is done with mu held. As when mu was given back.
	mapped atomic.Bool

	// writing counts the daemon's own descriptors that may write: as long
	// as there is one, the kernel cannot tell whether others do.
	writing int

	unwritten unwritten

	// cut is held for a write whose offset is the kernel's guess of the end, and alone
	// while O_TRUNC is carried out; cutting counts the handles in whose open(2) the kernel
	// may still be, inDoubt says that its size may be wrong since one of those, and unsized
	// either, for who does not wait. See cut.go.
	cut     sync.RWMutex
	cutting int
	inDoubt bool
	unsized atomic.Bool

	// replaced is when the content was last cut off through a handle that may still write
	// the new one (UnixNano), or 0, and late what is to be closed only after that one. See
	// late.go.
	replaced int64
	late     []lateFD

	hot       *hotDir   // while there are writers, or handles that linger
	lingering []*handle // closed, but perhaps still mapped
	watched   bool      // the node is pinned for them

	adopted atomic.Bool // an earlier daemon's are among them, for who does not wait
}

// fileTable holds the files of a node table.
type fileTable [tableShards]shard[*node, *file] // by node

func (t *fileTable) shard(n *node) *shard[*node, *file] { return &t[n.id%tableShards] }

// get returns the file of n, or nil.
func (t *fileTable) get(n *node) *file {
	s := t.shard(n)
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.of[n]
}

// need returns the file of n, which there was not perhaps.
func (t *fileTable) need(n *node) *file {
	s := t.shard(n)
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.of[n]
	if f == nil {
		if s.of == nil {
			s.of = make(map[*node]*file)
		}
		f = &file{fd: -1}
		s.of[n] = f
	}
	return f
}

// all returns all files at one moment.
func (t *fileTable) all() map[*node]*file {
	all := make(map[*node]*file)
	for i := range t {
		t[i].mu.RLock()
		defer t[i].mu.RUnlock()
		maps.Copy(all, t[i].of)
	}
	return all
}

func (t *fileTable) drop(n *node) {
	s := t.shard(n)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, n)
}

// lockFile returns the file of n with its mutex held. The caller gives it back
// with unlockFile.
func (n *node) lockFile() *file {
	for {
		f := n.tab.files.need(n)
		f.mu.Lock()
		if !f.dead {
			return f
		}
		f.mu.Unlock()
	}
}

// lockKnownFile is lockFile for a file that is known to the table, as each open one is; else
// it returns nil.
func (n *node) lockKnownFile() *file {
	if n.tab.files.get(n) == nil {
		return nil
	}
	return n.lockFile()
}

// handles is how many there are, however they reach the data.
func (f *file) handles() int { return f.passing + f.cached + f.direct }

// writtenPast reports whether it may be written to without a request: through a handle, or
// a mapping that has outlived one.
func (f *file) writtenPast() bool { return f.writers > 0 || len(f.lingering) > 0 }

// openToWrite reports whether we, or the kernel for a handle, have it open for writing.
func (f *file) openToWrite() bool { return f.writers > 0 || f.writing > 0 }

// isOpen reports whether there are handles of n.
func (n *node) isOpen() bool {
	f := n.tab.files.get(n)
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.handles() > 0
}

func (n *node) unlockFile(f *file) {
	if f.hot != nil && !f.writtenPast() {
		f.hot.leave()
		f.hot = nil
	}
	f.mapped.Store(f.mappable > 0 || len(f.lingering) > 0)
	f.adopted.Store(slices.ContainsFunc(f.lingering, func(h *handle) bool { return h.lock.Owner().ID().Pid == 0 }))
	if f.handles()+f.writing+len(f.lingering) == 0 {
		f.dead = true
		n.tab.files.drop(n)
	}
	f.mu.Unlock()
}

// count adds a handle, or takes it away.
func (f *file) count(h *handle, mode ioMode, n int) {
	switch {
	case mode.passes():
		f.passing += n
		if h.writesPast(mode) {
			f.writers += n
			if h.mapsWritable() {
				f.mappable += n
			}
		}
	case mode == ioDirect:
		f.direct += n
	default:
		f.cached += n
		if h.lock != nil && h.mapsWritable() {
			f.paging += n
		}
	}
}
