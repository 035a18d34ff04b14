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
	// slowRead is how long it takes to open and read a directory if the disk is
	// waited for.
	slowRead = 50 * time.Microsecond
	// aheadCredit is how many directories in a row are read ahead that the disk was
	// not waited for.
	aheadCredit = 16
	// aheadFirst is how many directories in one are read ahead before one of them
	// is listed, and aheadEach how many more for each that is.
	aheadFirst, aheadEach = 4, 2
	// maxAhead bounds the directories in which others are to be read ahead, and
	// maxAheadNames how many in each.
	maxAhead, maxAheadNames = 32, 4096
	// maxListed is among how many listings that of a directory's parent is looked
	// for.
	maxListed = 64
)

// A readahead knows which directories are to be read before they are listed.
type readahead struct {
	total atomic.Uint64 // that were read

	mu      sync.Mutex
	listed  [maxListed]uint64 // the directories listed last, by their nodes' IDs
	next    int               // where in it the next one comes
	credit  int
	todo    []*aheadDir // the last one comes first: walkers go down
	running bool
}

// An aheadDir is a directory in which others are to be read.
type aheadDir struct {
	id     uint64 // of its node
	attrs  bool   // with the attributes of files
	names  []string
	read   int // of those in it
	listed int
}

// begin takes note that a directory is listed, from its beginning or not, and reports
// whether that is part of a walk: the one that it is in was listed before.
func (a *readahead) begin(dir, parent uint64, first bool) (walk bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	walk = slices.Contains(a.listed[:], parent)
	if first {
		a.listed[a.next] = dir
		a.next = (a.next + 1) % maxListed
		if i := slices.IndexFunc(a.todo, func(d *aheadDir) bool { return d.id == parent }); i >= 0 {
			a.todo[i].listed++
		}
	}
	return walk
}

// add says which directories are in one that was listed, and how long that took to
// read. It reports whether somebody has to run now, and read them ahead.
func (a *readahead) add(dir uint64, took time.Duration, attrs bool, names []string) (run bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if took >= slowRead {
		a.credit = aheadCredit
	}
	if a.credit == 0 {
		return false
	}
	if len(names) > 0 {
		i := slices.IndexFunc(a.todo, func(d *aheadDir) bool { return d.id == dir })
		if i < 0 {
			if len(a.todo) == maxAhead {
				a.todo = slices.Delete(a.todo, 0, 1)
			}
			a.todo = append(a.todo, &aheadDir{id: dir})
			i = len(a.todo) - 1
		}
		d := a.todo[i]
		d.attrs = attrs
		d.names = append(d.names, names[:min(len(names), maxAheadNames-len(d.names))]...)
	}
	run = !a.running && len(a.todo) > 0
	a.running = a.running || run
	return run
}

// take returns which directory is to be read now: name in dir. ok is false if none is,
// and whoever ran is done.
func (a *readahead) take() (dir uint64, name string, attrs, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := len(a.todo) - 1; i >= 0 && a.credit > 0; i-- {
		d := a.todo[i]
		if late := min(d.listed-d.read, len(d.names)); late > 0 {
			d.names, d.read = d.names[late:], d.listed // they were listed meanwhile
		}
		if len(d.names) == 0 {
			a.todo = slices.Delete(a.todo, i, i+1)
			continue
		}
		if d.read < aheadFirst+aheadEach*d.listed {
			name = d.names[0]
			d.names = d.names[1:]
			d.read++
			return d.id, name, d.attrs, true
		}
	}
	if a.credit == 0 {
		a.todo = nil
	}
	a.running = false
	return 0, "", false, false
}

// done says how long it took to read one ahead.
func (a *readahead) done(took time.Duration) {
	a.total.Add(1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if took >= slowRead {
		a.credit = aheadCredit
	} else {
		a.credit = max(a.credit-1, 0)
	}
}

// A walked is a listing, as readahead sees it.
type walked struct {
	fs    *FS
	node  *node // nil: no part of a walk
	begun time.Time
	took  time.Duration // until there was an entry
	names []string
}

// walked begins a listing of n, which may be nil, from a position on.
func (fs *FS) walked(n *node, offset uint64) walked {
	w := walked{fs: fs}
	if n == nil || !n.isDir() {
		return w
	}
	if fs.ahead.begin(n.id, n.parentID(), offset == 0) {
		w.node, w.begun = n, time.Now()
	}
	return w
}

// entry is called with each entry.
func (w *walked) entry(e dirEntry) {
	if w.node == nil {
		return
	}
	if w.took == 0 {
		w.took = time.Since(w.begun)
	}
	if e.typ == unix.DT_DIR && e.name != "." && e.name != ".." {
		w.names = append(w.names, strings.Clone(e.name))
	}
}

// end is called when there are no more. attrs: who lists asks for the attributes of
// files.
func (w *walked) end(attrs bool) {
	if w.node != nil && w.fs.ahead.add(w.node.id, w.took, attrs, w.names) {
		go w.fs.readAhead()
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
		fs.ahead.done(fs.readDirAhead(id, name, attrs, room[:]))
	}
}

// readDirAhead reads the beginning of name in a directory, and the attributes of the
// directories there, or of all files. It returns how long it took to read the entries,
// or 0 if it can't: that is for who lists it to find out.
func (fs *FS) readDirAhead(id uint64, name string, attrs bool, buf []byte) (took time.Duration) {
	n := fs.nodes.get(id)
	if n == nil {
		return 0
	}
	parent := fs.back.dirs.get(n)
	if parent == nil {
		return 0 // it was listed long ago, or is gone
	}
	defer parent.release()
	begun := time.Now()
	fd, err := openHere(parent.fd, name, unix.O_NOATIME) // EPERM: not without a trace
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	size, err := getdents(fd, buf)
	if err != nil {
		return 0
	}
	took = time.Since(begun)
	for rest := buf[:size]; len(rest) > 0; {
		var e dirEntry
		e, rest = nextEntry(rest)
		if e.name != "." && e.name != ".." && (attrs || e.typ == unix.DT_DIR) {
			var st unix.Statx_t
			unix.Statx(fd, e.name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, statxMask, &st)
		}
	}
	return took
}
