package transport

import (
	"bufio"
	"fmt"
	"log"
	"os"
	"testing"

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
	q := &queue{conn: c, id: id, online: true}
	q.keeper = &keeper{uring: u, queue: q, bell: -1, places: make(map[uint64]*place)}
	return q
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
	t.Cleanup(func() { unmap(p.mem) })
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
