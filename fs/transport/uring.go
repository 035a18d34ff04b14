package transport

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

var errNoCompletion = errors.New("nothing has completed")

// FUSE over io_uring; see Documentation/filesystems/fuse/fuse-io-uring.rst of
// the kernel.
const (
	uringRegister       = 1
	uringCommitAndFetch = 2
)

// A uringHeader is what the kernel and the thread tell each other beside the
// payload.
type uringHeader struct {
	inOut [128]byte // fuse.InHeader, fuse.OutHeader
	opIn  [128]byte // the rest of the operation's fixed part
	entry struct {
		flags, commitID uint64
		payload         uint32
		_               uint32
		_               uint64
	}
}

// A uringCmd tells the kernel what to do with an entry of a queue.
type uringCmd struct {
	flags, commitID uint64
	queue           uint16
	_               [6]byte
}

const (
	// maxPlaces bounds the places of a mount. What waits and would need more is
	// refused.
	maxPlaces = 1 << 16
	// maxThreads is how many threads of a queue carry requests out. If all are
	// at something that takes long, goroutines do; see keeper.
	maxThreads = 4
)

// A queue is the requests that are made on one core.
type queue struct {
	crew
	conn   *conn
	id     int
	online atomic.Bool // requests may be made there
	short  sync.Once   // says that there are too few
	lost   sync.Once   // says that none can be on the core
	failed sync.Once   // says that one could not ask the kernel
	full   sync.Once   // says that the keeper can have no more places
	keeper *keeper
}

// uring serves all queues.
type uring struct {
	conn   *conn
	queues []*queue
	places atomic.Int32  // that there are
	given  atomic.Uint64 // addresses that were given to places
	fixed  atomic.Bool   // some place is where it may not be in another process
	room   int           // for a payload
	timed  bool          // no request may be left unanswered: see RequestTimeout
}

// prepare makes the threads of each queue, before the kernel is told anything: one, and the
// keeper's where requests may be made. So many are to be told by start.
func (u *uring) prepare(start <-chan bool) (entries []*entry, threads int, err error) {
	if err := u.list(); err != nil {
		return nil, 0, err
	}
	for _, q := range u.queues {
		e, err := u.spawn(q, start)
		if err != nil {
			return nil, 0, err
		}
		entries = append(entries, e)
		threads++
		if q.online.Load() {
			if err := q.keeper.prepare(start); err != nil {
				return nil, 0, err
			}
			threads++
		}
	}
	return entries, threads, nil
}

// list makes the queues, without threads.
func (u *uring) list() error {
	possible, err := readCPUs("possible")
	if err != nil {
		return err
	}
	online, err := readCPUs("online")
	if err != nil {
		return err
	}
	u.timed = RequestTimeout()
	for id := range len(possible) {
		q := u.newQueue(id, online[id])
		u.conn.keepers = append(u.conn.keepers, q.keeper)
		u.queues = append(u.queues, q)
		u.conn.watch.crews = append(u.conn.watch.crews, &q.crew)
	}
	return nil
}

func (u *uring) newQueue(id int, online bool) *queue {
	q := &queue{conn: u.conn, id: id}
	q.online.Store(online)
	q.watch = &u.conn.watch
	q.keeper = &keeper{uring: u, queue: q, bell: -1, places: make(map[uint64]*place)}
	q.open, q.aside, q.settle = &q.keeper.open, &q.keeper.busy, q.keeper.settle
	q.crew.grow = func() error { return u.relieve(q) }
	return q
}

// spawn makes a thread with a ring, which begins as soon as start says so. It
// registers a place, unless it has been given one with an answer by then.
func (u *uring) spawn(q *queue, start <-chan bool) (*entry, error) {
	e := &entry{uring: u, queue: q, ready: make(chan error, 1), registered: make(chan error, 1)}
	u.conn.threads.Add(1)
	go func() {
		defer u.conn.threads.Done()
		runtime.LockOSThread() // for good: the thread ends with the ring
		defer e.close()
		err := e.open()
		e.ready <- err
		if err == nil && <-start {
			e.run()
		}
	}()
	if err := <-e.ready; err != nil {
		return nil, err
	}
	return e, nil
}

// relieve adds a thread to a queue that has none to spare. If there are enough, or no
// more can be had, its keeper opens places, which takes no descriptor.
func (u *uring) relieve(q *queue) error {
	if q.threads.Load() < maxThreads {
		err := u.growQueue(q, fuse.FUSE_ROOT_ID)
		if err == nil {
			return nil
		}
		if !u.conn.Stopping() && !gone(err) {
			q.short.Do(func() {
				u.conn.opts.Logger.Printf("core %d has to do with %d threads: %v", q.id, q.threads.Load(), err)
			})
		}
		q.watch.look() // there may be no thread that will
	}
	return q.keeper.grow()
}

// growQueue adds a thread to a queue. node is a file that the kernel may know.
func (u *uring) growQueue(q *queue, node uint64) error {
	u.conn.growMu.Lock()
	defer u.conn.growMu.Unlock()
	if u.conn.Stopping() {
		return unix.ENODEV
	}
	start := make(chan bool, 1)
	e, err := u.spawn(q, start)
	if err != nil {
		return err
	}
	if e.place = q.keeper.take(); e.place != nil {
		e.place.answerEmpty()
	}
	e.kick = node
	start <- true
	return <-e.registered
}

// goesOn finds out whether another program can go on: it needs rings, and a request must be
// made on each core where others make some. One may have been switched on since the start,
// or taken from the daemon's cpuset.
func (u *uring) goesOn() error {
	answer := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread is tied to a core
		r, err := newRing(1, 2)
		if err != nil {
			answer <- err
			return
		}
		r.close()
		for _, q := range u.queues {
			err := q.pin()
			if err == nil {
				q.online.Store(true)
			} else if q.online.Load() || q.taken.Load() > 0 {
				answer <- err
				return
			}
		}
		answer <- nil
	}()
	return <-answer
}

// readCPUs returns the set in a file such as "possible": lists of ranges.
func readCPUs(name string) (map[int]bool, error) {
	b, err := os.ReadFile("/sys/devices/system/cpu/" + name)
	if err != nil {
		return nil, err
	}
	set := make(map[int]bool)
	for part := range strings.SplitSeq(strings.TrimSpace(string(b)), ",") {
		var from, to int
		n, _ := fmt.Sscanf(part, "%d-%d", &from, &to)
		if n == 0 {
			return nil, fmt.Errorf("%s cores: %q", name, b)
		}
		if n == 1 {
			to = from
		}
		for i := from; i <= to; i++ {
			set[i] = true
		}
	}
	return set, nil
}

// RequestTimeout reports whether the kernel aborts a connection that leaves a
// request unanswered for too long (Linux 6.15, off by default).
func RequestTimeout() bool {
	for _, name := range []string{"default_request_timeout", "max_request_timeout"} {
		b, err := os.ReadFile("/proc/sys/fs/fuse/" + name)
		if err == nil && strings.TrimSpace(string(b)) != "0" {
			return true
		}
	}
	return false
}

// TryUring makes what [Uring] needs of io_uring, on each core, and gives it
// back.
func TryUring() error {
	u := &uring{conn: &conn{}, room: minRead}
	start := make(chan bool)
	_, _, err := u.prepare(start)
	close(start)
	u.conn.threads.Wait()
	return err
}
