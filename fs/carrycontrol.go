package fs

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// The control directory, and what was refused and happened, in another process.

type carriedControlDir struct {
	Since       time.Time
	Fresh, Next uint64
	Open        map[uint64]carriedControl
}

// A carriedControl is an open control file.
type carriedControl struct {
	Kind string // text, ctl or events
	Node uint64 // 0: not known, by a program before this was noted
	Text []byte // of a text; the answer of a ctl; the rest of a line of events

	Watched  bool // a ctl file waits for the end of a lock
	Watch    lockstate.Answer
	Ended    *lockstate.Ending
	Unique   uint64 // of the write that is under way,
	Done     int    // and how many bytes of it are carried out
	UID      uint32
	Next     uint64 // event
	Nonblock bool
}

func (d *controlDir) carry() carriedControlDir {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := carriedControlDir{Since: d.since, Fresh: d.fresh.Load(), Next: d.next, Open: make(map[uint64]carriedControl)}
	for fh, f := range d.opened {
		var x carriedControl
		switch f := f.controlFile.(type) {
		case *controlText:
			x = carriedControl{Kind: "text", Text: f.text, UID: f.uid}
		case *ctl:
			x = f.carry()
		case *eventReader:
			f.mu.Lock()
			x = carriedControl{Kind: "events", Text: f.rest, Next: f.next, Nonblock: f.nonblock}
			f.mu.Unlock()
		}
		x.Node = f.node
		c.Open[fh] = x
	}
	return c
}

func (f *ctl) carry() carriedControl {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := carriedControl{Kind: "ctl", Text: f.answer, UID: f.uid, Unique: f.unique, Done: f.done}
	if f.watch != nil {
		c.Watched, c.Watch = true, f.watch.answer
		if isClosed(f.watch.ended) {
			how := f.watch.how()
			c.Ended = &how
		}
	}
	return c
}

// takeUp opens again what was open. The locks are there already.
func (d *controlDir) takeUp(c carriedControlDir) {
	d.since, d.next = c.Since, c.Next
	d.fresh.Store(c.Fresh)
	for fh, x := range c.Open {
		switch x.Kind {
		case "text":
			t, _ := d.newText(x.Text, x.UID) // what was open stays so, counted or not
			d.add(fh, t, x.Node)
		case "ctl":
			d.add(fh, d.fs.ctlAgain(x), x.Node)
		case "events":
			r := d.fs.newEventReader(x.Nonblock)
			r.next, r.rest = x.Next, x.Text
			d.add(fh, r, x.Node)
		}
	}
}

func (fs *FS) ctlAgain(x carriedControl) *ctl {
	f := &ctl{fs: fs, uid: x.UID, answer: x.Text, unique: x.Unique, done: x.Done}
	if !x.Watched {
		return f
	}
	ended, how, ok := fs.table.Follow(x.Watch.Token)
	if x.Ended != nil || !ok {
		ended, how = over, func() lockstate.Ending {
			if x.Ended == nil {
				return lockstate.Ending{}
			}
			return *x.Ended
		}
	}
	f.watch = &watch{answer: x.Watch, ended: ended, how: how}
	return f
}

// carry returns the refusals that are kept, and how many there were.
func (d *denialLog) carry() ([]lockstate.Denial, map[string]uint64) {
	all := d.list()
	d.mu.Lock()
	defer d.mu.Unlock()
	return all, d.counts
}

func (d *denialLog) takeUp(all []lockstate.Denial, counts map[string]uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ring, d.counts, d.next = all, counts, len(all)%denialsKept
}

// carry returns the events that are kept, and the number of the next one.
func (g *eventLog) carry() ([]lockstate.Event, uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []lockstate.Event
	if g.readers > 0 {
		for i := g.next - min(g.next, eventsKept); i < g.next; i++ {
			all = append(all, g.ring[i%eventsKept])
		}
	}
	return all, g.next
}

func (g *eventLog) takeUp(all []lockstate.Event, next uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.next = next
	if len(all) == 0 || uint64(len(all)) > min(next, eventsKept) {
		return
	}
	g.ring = make([]lockstate.Event, eventsKept)
	for i, e := range all {
		g.ring[(next-uint64(len(all))+uint64(i))%eventsKept] = e
	}
}

// takeUp goes on with the list of orphans. If it was not complete, they are all
// looked for again.
func (o *orphanList) takeUp(fs *FS, all []carriedOrphan, scanned bool) {
	o.scan(fs, !scanned)
	for _, at := range all {
		if at.Left == [3]uint64{} {
			o.add(orphanAt{at.Dir, at.Name})
			continue
		}
		fs.leftovers.add(fs, at.Dir, at.Name, carriedIdentity(at.Left))
	}
}

// setInherited says whether descriptors outlive exec(2).
func setInherited(fds []int, inherited bool) error {
	flags := unix.FD_CLOEXEC
	if inherited {
		flags = 0
	}
	for _, fd := range fds {
		if fd < 0 {
			continue
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, flags); err != nil {
			return err
		}
	}
	return nil
}
