package fs

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagefs/stagefs/lockstate"
)

// What is open for writing past the daemon goes on after its death, and the
// next daemon has to find it (adopt.go). So that it need not look through the
// whole backing, the staging directories in which something is open that way
// are recorded: before the first such open of a while is answered, until some
// time after the last.

// hotBase is above all tokens: the store keeps these records beside the locks.
const hotBase = 1 << 62

// coolTime is how long a directory stays recorded after the last close: who
// writes many files in turn pays for a record once in a while only.
const coolTime = time.Second

// A hotDir is one of them.
type hotDir struct {
	in    *hotDirs
	id    uint64
	kept  atomic.Bool // the record outlives the daemon
	files int         // protected by hotDirs.mu, as is since
	since time.Time   // when files fell to 0
}

// A hotPlace is where a file is: beneath a staging directory, or in a directory
// that only holds some.
type hotPlace struct {
	Dir  lockstate.Bytes `json:"hot"`
	Deep bool            `json:"deep"` // beneath it, too
}

// everywhere is where a file is that has names which nobody knows.
var everywhere = hotPlace{".", true}

// A hotRecord is a hotPlace as it outlives the daemon.
type hotRecord struct {
	hotPlace
	// Open: under this daemon, which enforced nothing, anybody could change whatever
	// the locks cover that are recorded. The place counts for nothing then; an older
	// version looks there.
	Open bool `json:"open,omitempty"`
}

type hotDirs struct {
	store lockstate.Store

	left []uint64 // records of an earlier daemon, until found

	mu   sync.Mutex
	dirs map[hotPlace]*hotDir
	next uint64

	stop chan struct{}
	done chan struct{}
}

// parseHot reads a record of a hot directory.
func parseHot(data []byte) (r hotRecord, err error) {
	if err = json.Unmarshal(data, &r); err == nil && r.Dir == "" {
		err = fmt.Errorf("record %q names no directory", data)
	}
	return r, err
}

// start begins with what an earlier daemon has recorded.
func (h *hotDirs) start(store lockstate.Store, next uint64) {
	h.store, h.dirs, h.next = store, make(map[hotPlace]*hotDir), max(next, hotBase)
	h.stop, h.done = make(chan struct{}), make(chan struct{})
	go h.cool()
}

// close leaves the records of what is open still, past an earlier daemon perhaps.
func (h *hotDirs) close() {
	if h.stop == nil {
		return
	}
	close(h.stop)
	<-h.done
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.dirs {
		if d.files == 0 {
			h.store.Delete(d.id)
		}
	}
}

// placeOf returns where a file in dir is, a path of the table.
func placeOf(dir string, depth int) hotPlace {
	end := 0
	for range depth {
		i := strings.IndexByte(dir[end:], '/')
		if i < 0 {
			return hotPlace{lockstate.Bytes(dir), dir != "." && strings.Count(dir, "/")+1 >= depth}
		}
		end += i + 1
	}
	return hotPlace{lockstate.Bytes(dir[:end-1]), true}
}

// enter records that a file is open in a place. It is the caller's to leave.
func (h *hotDirs) enter(p hotPlace) *hotDir {
	if h.store == nil {
		return nil
	}
	h.mu.Lock()
	d := h.dirs[p]
	if d != nil {
		d.files++
		h.mu.Unlock()
		if !d.kept.Load() {
			_ = h.store.Flush() // who was first has not come so far
		}
		return d
	}
	d = &hotDir{in: h, id: h.recordLocked(hotRecord{hotPlace: p}), files: 1}
	h.dirs[p] = d
	h.mu.Unlock()
	_ = h.store.Flush() // it tries again by itself, and tells who asks
	d.kept.Store(true)
	return d
}

// recordLocked writes a record, to be kept by the next flush.
func (h *hotDirs) recordLocked(r hotRecord) (id uint64) {
	id = h.next
	h.next++
	data, err := json.Marshal(r)
	if err == nil { // else: nothing in it can fail
		h.store.Put(id, data)
	}
	return id
}

// layOpen records that what locks of an earlier daemon cover is free to all from now
// on. Only a daemon that enforces locks forgets it.
func (h *hotDirs) layOpen() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recordLocked(hotRecord{hotPlace: everywhere, Open: true})
	return h.store.Flush()
}

// leave takes back one enter. nil is none.
func (d *hotDir) leave() {
	if d == nil {
		return
	}
	d.in.mu.Lock()
	defer d.in.mu.Unlock()
	if d.files--; d.files == 0 {
		d.since = time.Now()
	}
}

// cool takes back the records of directories in which nothing is open.
func (h *hotDirs) cool() {
	defer close(h.done)
	tick := time.NewTicker(coolTime)
	defer tick.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-tick.C:
		}
		h.mu.Lock()
		for p, d := range h.dirs {
			if d.files == 0 && time.Since(d.since) >= coolTime {
				delete(h.dirs, p)
				h.store.Delete(d.id)
			}
		}
		h.mu.Unlock()
	}
}

// leftHot returns where an earlier daemon has recorded that files are open past
// it: everywhere, if that cannot be read. What is found there will be recorded
// anew. open: what locks cover was laid open since they were recorded.
func (fs *FS) leftHot(store lockstate.Store) (left []hotPlace, open bool) {
	next := uint64(hotBase)
	var ids []uint64
	unknown := !store.Complete()
	for id, data := range store.Load() {
		if id < hotBase {
			continue
		}
		next, ids = max(next, id+1), append(ids, id)
		r, err := parseHot(data)
		switch {
		case err != nil:
			fs.log.Warn("cannot tell where files are still open", "err", err)
			unknown = true
		case r.Open:
			open = true
		default:
			left = append(left, r.hotPlace)
		}
	}
	fs.hot.start(store, next)
	if unknown {
		left = []hotPlace{everywhere}
	}
	fs.hot.left = ids
	return left, open
}

// found forgets what an earlier daemon recorded, when all that was still open
// is recorded by this one.
func (h *hotDirs) found() {
	for _, id := range h.left {
		h.store.Delete(id)
	}
	h.left = nil
	_ = h.store.Flush()
}

// near reports whether something open is recorded at, beneath or above dir.
func (h *hotDirs) near(dir string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p, d := range h.dirs {
		at := string(p.Dir)
		if d.files > 0 && (within(at, dir) || p.Deep && (at == "." || within(dir, at))) {
			return true
		}
	}
	return false
}
