package fs

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// leftovers are lock files and candidates of dead processes that the backing did
// not let go of: it was read-only, or its disk failed. Until they are gone it is
// tried again, whenever something was changed and now and then (R4).
type leftovers struct {
	n atomic.Int32 // len(all)

	mu   sync.Mutex
	all  []leftover
	wake chan struct{}
	stop chan struct{}
	runs sync.WaitGroup
}

// A leftover is one of them. Its directory may be renamed; another file of its
// name is none.
type leftover struct {
	dir    *lockstate.Dir  // with a reference
	in     lockstate.Inode // what the backing calls that; zero: it could not be looked at
	name   string
	id     identity // ino 0: it could not be looked at, and was there at birth
	record uint64   // see candidates.recordLeft; 0: none
}

// Between two tries lies leftoverPause at first, then twice that, and so on up
// to longestLeftoverPause.
const (
	leftoverPause        = 100 * time.Millisecond
	longestLeftoverPause = 5 * time.Second
)

func (o *leftovers) init() {
	o.wake, o.stop = make(chan struct{}, 1), make(chan struct{})
}

// add notes that a file could not be removed.
func (o *leftovers) add(fs *FS, dir, name string, id identity) {
	if id == (identity{}) {
		// Not even looked at: what is made from now on is another one, but for what is made
		// within a tick of the clock that times of birth are from, and beneath the mount.
		id.birth = time.Now().UnixNano()
	}
	d := fs.table.At(split(dir)...)
	l := leftover{dir: d, name: name, id: id}
	var st unix.Statx_t
	if fs.statIn(dir, "", &st) == nil {
		l.in = fs.inodeOf(&st)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, o := range o.all {
		if o.dir == d && o.name == name && (o.id == id || o.id.ino == 0 && id.ino == 0) {
			fs.table.Forget(d)
			return
		}
	}
	l.record = fs.cands.recordLeft(l)
	o.all = append(o.all, l)
	if o.n.Add(1) == 1 {
		o.runs.Go(func() { o.run(fs) })
	}
}

// changed tells that the backing has carried something out.
func (o *leftovers) changed() {
	if o.n.Load() == 0 {
		return
	}
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// run tries until nothing is left.
func (o *leftovers) run(fs *FS) {
	for pause := leftoverPause; ; pause = min(2*pause, longestLeftoverPause) {
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-o.wake:
			t.Stop()
		case <-o.stop:
			t.Stop()
			return
		}
		if writable(fs.back.root) == nil && o.try(fs) {
			return
		}
	}
}

// try tries once and reports whether nothing is left.
func (o *leftovers) try(fs *FS) bool {
	o.mu.Lock()
	all := slices.Clone(o.all)
	o.mu.Unlock()
	for _, l := range all {
		x := &discarding{name: l.name, only: &l.id, place: func() (string, bool) { return fs.table.Path(l.dir), true }}
		err := errOther
		if !fs.table.IsGone(l.dir) {
			err = fs.discard(x)
		}
		switch {
		case err == nil && x.id == (identity{}), err == unix.ENOENT: // gone already
		case err == nil:
			fs.log.Info("removed what a dead process left", "dir", fs.table.Path(l.dir), "file", l.name)
		case errors.Is(err, errOther):
		default:
			continue
		}
		o.mu.Lock()
		o.all = slices.DeleteFunc(o.all, func(x leftover) bool { return x == l })
		o.mu.Unlock()
		fs.cands.unrecordLeft(l)
		fs.table.Forget(l.dir)
		if o.n.Add(-1) == 0 {
			return true
		}
	}
	return false
}

func (o *leftovers) close() {
	close(o.stop)
	o.runs.Wait()
}

var (
	// errOther: the file is gone already, or is another one.
	errOther = errors.New("not the file that was left")
	// errInUse: somebody holds the directory, by this very file perhaps.
	errInUse = errors.New("the directory is locked")
)

// mayRemove reports why a file that was left is not to be removed now. The
// caller holds FS.ns alone.
func (id *identity) mayRemove(fs *FS, dir string, st *unix.Statx_t) error {
	found := fs.identityOf(st)
	if id.ino == 0 {
		found = identityOf(st) // a copy of what was there before is only younger
	}
	if !id.is(found) {
		return errOther
	}
	d, ok := fs.table.Find(split(dir)...)
	if !ok {
		return nil
	}
	defer fs.table.Forget(d)
	if len(fs.table.On(d)) > 0 {
		return errInUse
	}
	return nil
}

// is reports whether a file is the one that was left.
func (id *identity) is(found identity) bool {
	if id.ino == 0 {
		return found.birth != 0 && found.birth < id.birth
	}
	return found == *id
}
