package transport

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// newPipeConn returns a connection whose kernel is a pipe: what is written to it says
// nothing, and what the connection tells comes out of told.
func newPipeConn(t *testing.T) (c *conn, told int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Close(fds[0])
		unix.Close(fds[1])
	})
	return newConn(fds[0], &fuse.MountOptions{}, new(Options)), fds[1]
}

// A Stop gives up where the kernel waits for a page that it is to drop, and keeps
// nothing back.
func TestStopWhilePagesAreHeld(t *testing.T) {
	if err := callable(); err != nil {
		t.Fatal(err)
	}
	c, told := newPipeConn(t)
	synctest.Test(t, func(t *testing.T) {
		o := &own{conn: c}
		if !c.drops.begin(7) {
			t.Fatal("begin() = false, want true")
		}
		time.AfterFunc(time.Second, func() { c.DropPages(8, 0, 0) })
		began := time.Now()
		s, err := o.Stop(1, func() { t.Error("it was begun") })
		if s != nil || !errors.Is(err, ErrBusy) {
			t.Errorf("Stop() = %v, %v, want nil, %v", s, err, ErrBusy)
		}
		if took := time.Since(began); took < stopTime || took > stopTime+time.Second {
			t.Errorf("it took %v, want %v", took, stopTime)
		}
		if c.Stopping() {
			t.Error("the transport stops")
		}
		synctest.Wait()
		buf := make([]byte, 4096)
		n, _, err := unix.Recvfrom(told, buf, unix.MSG_DONTWAIT)
		if err != nil || n < outHeaderSize+8 || buf[outHeaderSize] != 8 {
			t.Errorf("the kernel is told %v, %v, want that node 8 is to be dropped", buf[:max(n, 0)], err)
		}
		c.drops.end()
		if !c.drops.begin(7) {
			t.Error("later ones are kept back")
		}
	})
}

// Threads that end for a Stop are idle no more: who comes back late from a request
// would be counted for good otherwise.
func TestStoppedThreadsAreNotIdle(t *testing.T) {
	if err := callable(); err != nil {
		t.Fatal(err)
	}
	c, _ := newPipeConn(t)
	l := c.newLoops(newGathering())
	for range 3 {
		if err := l.start(); err != nil {
			t.Fatal(err)
		}
	}
	if got := l.idle.Load(); got != 3 {
		t.Errorf("%d threads are idle, want 3", got)
	}
	c.stopping.Store(true)
	for !c.inflight.quiet() {
		c.inflight.call()
		time.Sleep(100 * time.Microsecond)
	}
	c.threads.Wait()
	if got := l.idle.Load(); got != 0 {
		t.Errorf("%d threads are idle when all have ended, want 0", got)
	}
}
