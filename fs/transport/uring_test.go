package transport

import (
	"bufio"
	"bytes"
	"fmt"
	"log"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// noCore is the number of a core that no machine has: no thread can be added there.
const noCore = 900

// newTestQueue returns a queue whose kernel is a pipe, which knows no rings.
func newTestQueue(t *testing.T, id int) *queue {
	t.Helper()
	c, _ := newPipeConn(t)
	c.opts.Logger = log.New(testWriter{t}, "", 0)
	u := &uring{conn: c, room: minRead}
	return u.newQueue(id, true)
}

func mustPlace(t *testing.T, u *uring) *place {
	t.Helper()
	p, err := u.newPlace()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mapped returns how many places have their memory.
func mapped(t *testing.T, u *uring) int {
	t.Helper()
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	size := uint64(page + u.room)
	end := placesBase + u.given.Load()*size
	n := uint64(0)
	for s := bufio.NewScanner(f); s.Scan(); {
		var from, to uint64
		fmt.Sscanf(s.Text(), "%x-%x", &from, &to)
		if from, to = max(from, placesBase), min(to, end); from < to {
			n += to - from
		}
	}
	return int(n / size)
}

// A spare place outlives a thread that could not be added.
func TestSparePlaceOfNoThread(t *testing.T) {
	q := newTestQueue(t, noCore)
	u := q.keeper.uring
	p := mustPlace(t, u)
	t.Cleanup(func() { u.free(p) })
	q.keeper.keep(p)
	if err := u.growQueue(q, fuse.FUSE_ROOT_ID); err == nil {
		t.Fatalf("a thread was added on core %d", noCore)
	}
	u.conn.threads.Wait()
	if got := q.keeper.take(); got != p {
		t.Fatalf("take() = %p, want the spare place %p", got, p)
	}
	if n := mapped(t, u); n != 1 {
		t.Fatalf("%d places have their memory, want 1", n)
	}
	p.answerEmpty()
	if status := p.answer().Status; status != 0 {
		t.Errorf("the empty request is answered with %v", unix.Errno(-status))
	}
}

// newTestEntry returns a thread's entry with a ring of the calling thread.
func newTestEntry(t *testing.T, q *queue) *entry {
	t.Helper()
	r, err := newRing(1, 2)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(r.close)
	return &entry{uring: q.keeper.uring, queue: q, ring: r}
}

// A thread that asks again and again for a place which the kernel refuses, or which
// can't be offered to it, keeps none of them.
func TestRefusedPlaces(t *testing.T) {
	for name, prepare := range map[string]func(*entry){
		"by the kernel": func(*entry) {},
		"by the ring":   func(e *entry) { e.ring.enterFd, e.ring.enterFlags = 1<<20, 0 },
	} {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			e := newTestEntry(t, newTestQueue(t, 0))
			prepare(e)
			u := e.uring
			for range 3 {
				if _, _, _, err := e.another(); err == nil {
					t.Fatal("a pipe has taken a place")
				}
			}
			if got, n := u.places.Load(), mapped(t, u); got != 0 || n != 0 || e.place != nil {
				t.Errorf("%d places are counted, %d have their memory, the thread has %p, want none", got, n, e.place)
			}
			if n := *e.ring.sqTail - *e.ring.sqHead; n != 0 {
				t.Errorf("%d commands are left in the ring, want 0", n)
			}
		})
	}
}

// Places that the kernel has let go of count no more.
func TestFreedPlaces(t *testing.T) {
	q := newTestQueue(t, 0)
	k, u := q.keeper, q.keeper.uring
	held := func() *place {
		p := mustPlace(t, u)
		k.places[p.number()] = p
		return p
	}
	k.keep(mustPlace(t, u))
	k.answers = append(k.answers, mustPlace(t, u))
	held()
	refused := held()
	e := &entry{uring: u, queue: q, place: mustPlace(t, u)}
	late := mustPlace(t, u)
	for _, step := range []struct {
		name string
		do   func()
		want int32
	}{
		{"at first", func() {}, 6},
		{"one was refused", func() { k.came(ringCQE{userData: refused.number(), res: -int32(unix.ENOTCONN)}) }, 5},
		{"a thread has ended", e.close, 4},
		{"the keeper has ended", func() { u.conn.ended.Store(true); k.finish() }, 1},
		{"a late answer", func() { k.give(late, 1, outHeaderSize) }, 0},
	} {
		step.do()
		if got, n := u.places.Load(), mapped(t, u); got != step.want || n != int(step.want) {
			t.Errorf("%s: %d places are counted, %d have their memory, want %d", step.name, got, n, step.want)
		}
	}
}

// An answer that the kernel had no memory to take is delivered again, by a thread as by the
// keeper. A place that was to be registered, and has none, is not.
func TestAnswerAgain(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const unique = 7
	for _, registered := range []bool{true, false} {
		q := newTestQueue(t, 0)
		k, e := q.keeper, newTestEntry(t, q)
		k.ring = newTestEntry(t, q).ring
		answered := func() *place {
			p := mustPlace(t, k.uring)
			t.Cleanup(func() { unmap(p.mem) })
			if registered {
				p.header.entry.commitID = unique
				p.answered(unique, p.fail(unique, unix.EBUSY))
			}
			return p
		}
		wantCommit := func(who string, r *ring) {
			t.Helper()
			n, s := *r.sqTail-*r.sqHead, r.sqe0
			if !registered && n != 0 || registered && (n != 1 || s.cmd != uringCommitAndFetch || (*uringCmd)(unsafe.Pointer(&s.payload)).commitID != unique) {
				t.Errorf("registered %v, %s: there are %d commands, the first %+v", registered, who, n, s)
			}
		}
		e.place = answered()
		if got := e.again(unix.ENOMEM); got != registered {
			t.Errorf("registered %v: again() = %v", registered, got)
		}
		wantCommit("a thread", e.ring)

		p := answered()
		k.places[p.number()] = p
		if err := k.came(ringCQE{userData: p.number(), res: -int32(unix.ENOMEM)}); err != nil {
			t.Error(err)
		}
		wantCommit("the keeper", k.ring)
		if _, kept := k.places[p.number()]; kept != registered {
			t.Errorf("registered %v: the keeper has the place: %v", registered, kept)
		}
	}
}

// A queue that gets no more threads has its keeper open places, and says so once.
func TestRelieveWithoutThreads(t *testing.T) {
	q := newTestQueue(t, noCore)
	k := q.keeper
	k.running, k.rung = true, true
	var told bytes.Buffer
	q.conn.opts.Logger = log.New(&told, "", 0)
	for range 3 {
		k.more = 0
		if err := q.grow(); err != nil {
			t.Fatal(err)
		}
		if k.more != 1 {
			t.Errorf("%d places are to be opened, want 1", k.more)
		}
	}
	q.conn.threads.Wait()
	if got := strings.Count(told.String(), "\n"); got != 1 {
		t.Errorf("the log has %d lines, want 1: %s", got, told.String())
	}
	q.conn.stopping.Store(true)
	if err := q.grow(); err != unix.ENODEV {
		t.Errorf("while the transport stops: %v, want %v", err, unix.ENODEV)
	}
}

// A queue that goes on after a Stop and gets no thread at all is served by its keeper,
// and looked after.
// Also one whose core is off: it may be switched on.
func TestRunWithoutThreads(t *testing.T) {
	for _, online := range []bool{true, false} {
		q := newTestQueue(t, noCore)
		q.online.Store(online)
		k, c := q.keeper, q.conn
		k.running, k.rung = true, true
		u := k.uring
		u.queues = []*queue{q}
		o := &own{conn: c, uring: u, loops: c.newLoops(&gathering{})}
		o.run(nil)
		c.threads.Wait()
		if k.more != 1 || !c.watch.awake.Load() {
			t.Errorf("online %v: %d places are to be opened, and the watch is awake: %v, want 1, true", online, k.more, c.watch.awake.Load())
		}
	}
}

// What a Stop cannot call back keeps it from beginning: what waits on a core that the daemon may
// not use, but others do. A core that was switched on meanwhile is one like all others.
func TestGoesOn(t *testing.T) {
	newTestEntry(t, newTestQueue(t, 0)) // or no ring can be made
	for _, c := range []struct {
		name   string
		core   int
		online bool
		taken  uint32

		refused bool
	}{
		{"taken away", noCore, true, 0, true},
		{"said to be off", noCore, false, 1, true},
		{"off", noCore, false, 0, false},
		{"switched on", 0, false, 0, false},
	} {
		q := newTestQueue(t, c.core)
		q.online.Store(c.online)
		q.taken.Store(c.taken)
		u := q.keeper.uring
		u.queues = []*queue{q}
		if err := u.goesOn(); (err != nil) != c.refused {
			t.Errorf("%s: goesOn() = %v, want an error: %v", c.name, err, c.refused)
		}
		at := q.conn.inflight.addAt(q)
		if got, want := q.conn.inflight.quiet(), c.core == noCore && !c.online; got != want {
			t.Errorf("%s: a thread waits there, and all is quiet: %v, want %v", c.name, got, want)
		}
		q.conn.inflight.remove(at)
	}
}

// A place that there was no memory for is not where no other process can have it.
func TestNoMemoryForPlaces(t *testing.T) {
	u := &uring{room: 1 << 47}
	if p, err := u.newPlace(); err == nil {
		t.Fatalf("there is a place of %d bytes", len(p.mem))
	}
	if u.fixed.Load() || u.places.Load() != 0 {
		t.Errorf("some place cannot be moved: %v; %d places are counted, want none", u.fixed.Load(), u.places.Load())
	}
}

// A keeper whose ring fails goes on trying while places are wanted, but holds up no
// Stop.
func TestKeeperGoesOn(t *testing.T) {
	k := newTestQueue(t, 0).keeper
	k.running, k.more = true, 1
	if k.finish() || !k.running {
		t.Error("it has ended, and places are to be opened")
	}
	k.uring.conn.stopping.Store(true)
	if !k.finish() || k.running {
		t.Error("it goes on, and the transport stops")
	}
}
