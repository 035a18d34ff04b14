package fs

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Who walks a tree that is not in memory waits for the disk at each directory: the
// kernel reads files ahead, but no directories. So, when a walk is seen to wait, a
// goroutine reads those that come next. It only makes the kernel keep what it read:
// nothing of it is used, and nobody sees another content for it.

const (
	// slowRead is how long it takes at least to open and read a directory if the disk is
	// waited for, and slowByte how much longer for each byte of it, which ext4 takes
	// from memory, too.
	slowRead, slowByte = 50 * time.Microsecond, 16 * time.Nanosecond
	// aheadCredit is how many directories in a row are read ahead that the disk was
	// not waited for.
	aheadCredit = 16
	// aheadFirst is how many directories in one are read ahead before one of them
	// is listed, and aheadEach how many more for each that is.
	aheadFirst, aheadEach = 4, 2
	// aheadMisses is in how many directories in a row nobody listed one, until none is
	// read ahead before.
	aheadMisses = 4
	// maxAhead bounds the directories in which others are to be read ahead, and
	// maxAheadNames how many in each.
	maxAhead, maxAheadNames = 32, 1024
	// aheadStop is how long the end of a daemon, or its replacement, waits for what is
	// being read.
	aheadStop = 5 * time.Second
	// maxListed is among how many listings that of a directory's parent is looked
	// for.
	maxListed = 64
)

// A readahead knows which directories are to be read before they are listed.
type readahead struct {
	total atomic.Uint64 // that were read

	mu     sync.Mutex
	listed [maxListed]uint64 // the directories listed last, by their nodes' IDs; or 0
	next   int               // where in it the next one comes
	credit int
	misses int
	todo   []*aheadDir   // the last one comes first: walkers go down
	ends   chan struct{} // closed when who reads ahead ends; nil: nobody does
	paused bool
}

// An aheadDir is a directory in which others are to be read, or were.
type aheadDir struct {
	id     uint64 // of its node
	attrs  bool   // with the attributes of files
	names  []string
	read   int // of those in it
	listed int
}

// isSlow reports whether the disk was waited for, to read so many bytes of entries.
func isSlow(took time.Duration, bytes int) bool {
	return took >= slowRead+time.Duration(bytes)*slowByte
}

// begin takes note that a directory is listed, from its beginning or not, and reports
// whether that is part of a walk: the one that it is in, if any, was listed before.
func (a *readahead) begin(dir, parent uint64, first bool) (walk bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	walk = parent != 0 && slices.Contains(a.listed[:], parent)
	if first {
		a.listed[a.next] = dir
		a.next = (a.next + 1) % maxListed
		if i := a.findLocked(dir); i >= 0 {
			a.dropLocked(i) // what is in it now is told of next
		}
		if i := a.findLocked(parent); i >= 0 {
			a.todo[i].listed++
		}
	}
	return walk
}

func (a *readahead) findLocked(dir uint64) int {
	return slices.IndexFunc(a.todo, func(d *aheadDir) bool { return d.id == dir })
}

func (a *readahead) dropLocked(i int) {
	switch d := a.todo[i]; {
	case d.listed > 0:
		a.misses = 0
	case d.read > 0:
		a.misses++
	}
	a.todo = slices.Delete(a.todo, i, i+1)
}

// add says which directories are in one that was listed, and whether the disk was
// waited for. It reports whether somebody has to run now, and read them ahead.
func (a *readahead) add(dir uint64, slow, attrs bool, names []string) (run bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if slow {
		a.credit = aheadCredit
	}
	if a.credit == 0 || a.paused {
		return false
	}
	if len(names) > 0 {
		i := a.findLocked(dir)
		if i < 0 {
			if len(a.todo) == maxAhead {
				a.dropLocked(max(0, slices.IndexFunc(a.todo, func(d *aheadDir) bool { return len(d.names) == 0 })))
			}
			a.todo = append(a.todo, &aheadDir{id: dir, attrs: attrs})
			i = len(a.todo) - 1
		}
		d := a.todo[i]
		d.names = append(d.names, names[:min(len(names), maxAheadNames-len(d.names))]...)
	}
	if a.ends != nil || len(a.todo) == 0 {
		return false
	}
	a.ends = make(chan struct{})
	return true
}

// take returns which directory is to be read now: name in dir. ok is false if none is,
// and whoever ran is done.
func (a *readahead) take() (dir uint64, name string, attrs, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := len(a.todo) - 1; i >= 0 && a.credit > 0 && !a.paused; i-- {
		d := a.todo[i]
		if late := min(d.listed-d.read, len(d.names)); late > 0 {
			d.names, d.read = d.names[late:], d.listed // they were listed meanwhile
		}
		some := aheadEach * d.listed
		if a.misses < aheadMisses {
			some += aheadFirst
		}
		if len(d.names) > 0 && d.read < some {
			name = d.names[0]
			d.names = d.names[1:]
			d.read++
			return d.id, name, d.attrs, true
		}
	}
	if a.credit == 0 {
		a.todo = nil
	}
	close(a.ends)
	a.ends = nil
	return 0, "", false, false
}

// done says whether the disk was waited for to read one ahead.
func (a *readahead) done(slow bool) {
	a.total.Add(1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if slow {
		a.credit = aheadCredit
	} else {
		a.credit = max(a.credit-1, 0)
	}
}

// pause has nothing more read until resume is called, and waits, but not longer than d,
// for what is being read. It reports whether that has ended.
func (a *readahead) pause(d time.Duration) bool {
	a.mu.Lock()
	a.paused = true
	ends := a.ends
	a.mu.Unlock()
	if ends == nil {
		return true
	}
	select {
	case <-ends:
		return true
	case <-time.After(d):
		return false
	}
}

func (a *readahead) resume() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.paused = false
}

// An aheadListing is a listing, as readahead sees it.
type aheadListing struct {
	fs    *FS
	node  *node // nil: no part of a walk
	attrs bool
	begun time.Time
	took  time.Duration // until there was an entry
	bytes int
	names []string
}

// listingAhead begins a listing of n, which may be nil, from a position on. attrs: who
// lists asks for the attributes of files.
func (fs *FS) listingAhead(n *node, offset uint64, attrs bool) aheadListing {
	l := aheadListing{fs: fs}
	if n != nil && n.isDir() && fs.ahead.begin(n.id, n.parentID(), offset == 0) {
		l.node, l.attrs, l.begun = n, attrs && offset == 0, time.Now()
	}
	return l
}

// entry is called with each entry.
func (l *aheadListing) entry(e dirEntry) {
	if l.node == nil {
		return
	}
	if l.took == 0 {
		l.took = time.Since(l.begun)
	}
	l.bytes += direntSize + len(e.name)
	if e.typ == unix.DT_DIR && !e.isDot() {
		l.names = append(l.names, strings.Clone(e.name))
	}
}

// end is called when there are no more.
func (l *aheadListing) end() {
	if l.node != nil && l.fs.ahead.add(l.node.id, isSlow(l.took, l.bytes), l.attrs, l.names) {
		go l.fs.readAhead()
	}
}

// readAhead reads directories until none is left to be read.
func (fs *FS) readAhead() {
	room := direntBuffers.Get().(*[direntBuffer]byte)
	defer direntBuffers.Put(room)
	for {
		id, name, attrs, ok := fs.ahead.take()
		if !ok {
			return
		}
		if slow, ok := fs.readDirAhead(id, name, attrs, room[:]); ok {
			fs.ahead.done(slow)
		}
	}
}

// readDirAhead reads the beginning of name in a directory, and the attributes of the
// directories there, or of all files, and reports whether the disk was waited for. If
// it can't (ok is false), that is for who lists it to find out.
func (fs *FS) readDirAhead(id uint64, name string, attrs bool, buf []byte) (waited, ok bool) {
	n := fs.nodes.get(id)
	if n == nil || !n.isDir() { // another has the number by now, see numberLocked
		return false, false
	}
	parent := fs.back.dirs.get(n)
	if parent == nil {
		return false, false // it was listed long ago, or is gone
	}
	defer parent.release()
	begun := time.Now()
	fd, err := openHere(parent.fd, name, unix.O_NOATIME) // EPERM: not without a trace
	if err != nil {
		return false, false
	}
	defer unix.Close(fd)
	size, err := getdents(fd, buf)
	if err != nil {
		return false, false
	}
	waited = isSlow(time.Since(begun), size)
	for rest := buf[:size]; len(rest) > 0; {
		var e dirEntry
		e, rest = nextEntry(rest)
		if !e.isDot() && (attrs || e.typ == unix.DT_DIR) {
			var st unix.Statx_t
			unix.Statx(fd, e.name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, statxMask, &st)
		}
	}
	return waited, true
}
