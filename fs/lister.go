package fs

import (
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The kernel asks for attributes with the beginning of every listing, for it
// cannot know whether its reader will want them. Many never do, such as find(1)
// without a test that needs them, and on a cold tree the attributes are most of
// the work. So the daemon watches: now and then it leaves those of one file out,
// and sees whether the reader asks for them. Who did not several times in a row
// gets those of directories only, until it asks for a file. Nobody sees another
// content for it.

const (
	// leanAfter is how many files in a row a reader has not asked for.
	leanAfter = 4
	// maxListers bounds how many readers are remembered.
	maxListers = 256
	// maxTrust is for how many listings a reader who asked is not tried.
	maxTrust = 64
)

// A lister is a thread that reads directories.
type lister struct {
	left    string // the file that was left out in the listing before, or ""
	in      uint64 // the directory that it is in
	unasked int    // how many were left out and not asked for
	trust   int    // listings until one is left out again
	trusted int    // that many it was at last
}

type listers struct {
	watching atomic.Bool // there are some
	mu       sync.Mutex
	byTid    map[uint32]*lister
}

// begin takes note that a thread begins to read a directory. lean: it will not
// ask for files. try: leave one out, and call leave.
func (t *listers) begin(tid uint32) (lean, try bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.byTid[tid]
	if l == nil {
		if t.byTid == nil || len(t.byTid) >= maxListers {
			t.byTid = make(map[uint32]*lister)
		}
		// Most read a single directory.
		t.byTid[tid] = &lister{trusted: 1}
		t.watching.Store(true)
		return false, false
	}
	if l.left != "" {
		l.left = ""
		l.unasked++
	}
	if l.trust > 0 {
		l.trust--
		return false, false
	}
	lean = l.unasked >= leanAfter
	return lean, !lean
}

// leave notes which file was left out.
func (t *listers) leave(tid uint32, parent *node, name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.byTid[tid]; l != nil {
		l.in, l.left = parent.id, name
	}
}

// asked takes note that a thread asked for a file.
func (t *listers) asked(tid uint32, parent *node, name string) {
	if !t.watching.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.byTid[tid]
	if l == nil || l.unasked < leanAfter && (l.left != name || l.in != parent.id) {
		return
	}
	l.trusted = min(2*l.trusted, maxTrust)
	l.left, l.unasked, l.trust = "", 0, l.trusted
}

// wanted tells which entries of a listing come with their attributes.
type wanted struct {
	lean, try bool
	leave     func(name string)
}

// wanted begins a listing.
func (fs *FS) wanted(tid uint32, n *node, offset uint64) wanted {
	if n == nil || offset != 0 {
		return wanted{}
	}
	lean, try := fs.listers.begin(tid)
	return wanted{lean, try, func(name string) { fs.listers.leave(tid, n, name) }}
}

// want reports whether an entry comes with attributes.
func (w *wanted) want(e dirEntry) bool {
	if e.typ == unix.DT_DIR || e.typ == unix.DT_UNKNOWN {
		return true // who reads a tree goes there
	}
	if w.try {
		w.try = false
		w.leave(strings.Clone(e.name))
		return false
	}
	return !w.lean
}
