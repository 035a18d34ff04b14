//go:build linux

package client

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A fakeDaemon carries out the protocol in memory, on the clock of a synctest
// bubble. Tests make it fail and lie.
type fakeDaemon struct {
	boot time.Time

	mu      sync.Mutex
	rows    map[string]*fakeRow
	token   uint64
	down    bool                    // nothing answers
	hangs   bool                    // requests wait until they are interrupted
	refuse  func(line string) error // instead of carrying a line out
	lines   []string                // that were carried out, or refused
	asleep  atomic.Int64            // ns for which the machine slept
	changed chan struct{}           // closed when a row ends
}

type fakeRow struct {
	client string
	token  uint64
	ttl    time.Duration
	end    time.Duration
	ended  chan struct{}
	reply  reply
}

// rename gives a lock's directory another name (R3).
func (d *fakeDaemon) rename(from, to string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rows[to] = d.rows[from]
	delete(d.rows, from)
}

func newFake() (*fakeDaemon, *system) {
	d := &fakeDaemon{boot: time.Now(), rows: map[string]*fakeRow{}, changed: make(chan struct{})}
	return d, &system{
		find: func(dir string) (place, error) {
			rel, err := filepath.Rel("/mnt", dir)
			return place{path: dir, root: "/mnt", rel: rel}, err
		},
		dial: func(string) (conn, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.down {
				return nil, unix.ENOTCONN
			}
			return &fakeConn{d: d}, nil
		},
		rows: func(string) ([]Holder, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			var all []Holder
			for dir, row := range d.rows {
				all = append(all, Holder{Dir: dir, Token: row.token})
			}
			return all, nil
		},
		names: func(string) []string { return []string{"devserver", "*.lock"} },
		now:   d.now,
	}
}

func (d *fakeDaemon) now() time.Duration { return time.Since(d.boot) + time.Duration(d.asleep.Load()) }

// endLocked ends the lock on dir as the daemon would.
func (d *fakeDaemon) endLocked(dir string, r reply) {
	if row := d.rows[dir]; row != nil {
		delete(d.rows, dir)
		row.reply = r
		close(row.ended)
		close(d.changed)
		d.changed = make(chan struct{})
	}
}

func (d *fakeDaemon) end(dir string, r reply) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endLocked(dir, r)
}

// count is how many lines with a verb there were.
func (d *fakeDaemon) count(verb string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, line := range d.lines {
		if strings.HasPrefix(line, verb+" ") {
			n++
		}
	}
	return n
}

type fakeConn struct {
	d      *fakeDaemon
	row    *fakeRow // that is watched
	ended  chan struct{}
	closed bool // protected by fakeDaemon.mu
}

func (c *fakeConn) reopen(context.Context) error {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.d.down {
		return unix.ENOTCONN
	}
	return nil
}

func (c *fakeConn) close() {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.closed = true
}

func (c *fakeConn) command(ctx context.Context, line string, _ func(*reply) string) (*reply, error) {
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.closed {
		return &reply{}, unix.EBADF
	}
	d.lines = append(d.lines, line)
	if d.hangs {
		d.mu.Unlock()
		<-ctx.Done()
		d.mu.Lock()
		return &reply{}, context.Cause(ctx)
	}
	if d.down {
		return &reply{}, unix.ENOTCONN
	}
	if d.refuse != nil {
		if err := d.refuse(line); err != nil {
			return &reply{}, err
		}
	}
	w := strings.Fields(line)
	verb, dir, opts := w[0], w[1], map[string]string{}
	for _, o := range w[2:] {
		k, v, _ := strings.Cut(o, "=")
		opts[k] = v
	}
	for d.waits(verb, dir, opts) {
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		d.mu.Lock()
		if ctx.Err() != nil {
			break
		}
	}
	row := d.rows[dir]
	if row != nil && row.client != "" && row.end <= d.now() {
		d.endLocked(dir, reply{Reason: "expired"})
		row = nil
	}
	switch {
	case verb == "acquire" && row == nil:
		d.token++
		row = &fakeRow{client: opts["client"], token: d.token, ended: make(chan struct{})}
		if row.ttl, _ = time.ParseDuration(opts["ttl"]); row.ttl == 0 {
			row.ttl = DefaultTTL
		}
		row.end = d.now() + row.ttl
		d.rows[dir] = row
	case verb == "acquire" && row.client != "" && row.client == opts["client"]:
		row.end = d.now() + row.ttl
	case verb == "acquire":
		return &reply{Message: "held", Held: &Holder{Dir: dir, Token: row.token, Client: row.client, Pid: 1}}, unix.EBUSY
	case row == nil, opts["token"] != "" && opts["token"] != strconv.FormatUint(row.token, 10):
		return &reply{}, unix.ENOENT
	case row.client != opts["client"]:
		return &reply{}, unix.EPERM
	case verb == "renew":
		row.end = d.now() + row.ttl
	case verb == "release":
		d.endLocked(dir, reply{Reason: "released"})
	}
	return &reply{Dir: dir, Token: row.token, Client: row.client, TTL: span(row.ttl)}, nil
}

func (d *fakeDaemon) waits(verb, dir string, opts map[string]string) bool {
	return verb == "acquire" && opts["wait"] == "forever" && d.rows[dir] != nil
}

func (c *fakeConn) follow(_ context.Context, line string) error {
	w := strings.Fields(line)
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	row := d.rows[w[1]]
	switch {
	case d.down:
		return unix.ENOTCONN
	case row == nil || "token="+strconv.FormatUint(row.token, 10) != w[2]:
		return unix.ENOENT
	}
	c.row, c.ended = row, row.ended
	return nil
}

func (c *fakeConn) await(ctx context.Context) (*reply, error) {
	row, ended := c.row, c.ended
	var expiry <-chan time.Time
	if row.client != "" {
		// As exact as the real one is, but only once in a while: the
		// client's own deadline has to work as well.
		timer := time.NewTicker(time.Hour)
		defer timer.Stop()
		expiry = timer.C
	}
	for {
		select {
		case <-ended:
			if row.reply.Message != "" {
				return nil, unix.ENOTCONN
			}
			return &row.reply, nil
		case <-expiry:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// mustAcquire acquires for a test that has other worries.
func mustAcquire(t *testing.T, s *system, opts Options) *Lock {
	t.Helper()
	l, err := s.acquire(context.Background(), "/mnt/D", opts)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func isLost(l *Lock) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

// wantLost expects that a lock was lost, and why.
func wantLost(t *testing.T, l *Lock, reason string) {
	t.Helper()
	var lost *LostError
	if !isLost(l) || !errors.As(l.Err(), &lost) || lost.Reason != reason || !errors.Is(l.Err(), ErrLost) {
		t.Errorf("lost: %v, %v; want the reason %q", isLost(l), l.Err(), reason)
	}
}
