//go:build linux

package client

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// L1: a lease that is renewed lasts: 64 renewals in a row, four TTLs.
func TestL1Renewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		time.Sleep(64*time.Second + time.Millisecond)
		if n := d.count("renew"); n != 64 {
			t.Errorf("%d renewals in 64 s, want 64", n)
		}
		if isLost(l) {
			t.Errorf("lost: %v", l.Err())
		}
		if err := l.Release(false); err != nil || isLost(l) {
			t.Errorf("Release = %v, lost: %v", err, isLost(l))
		}
		if n := d.count("release"); l.Release(true) != nil || n != 1 || d.count("release") != 1 {
			t.Errorf("%d releases were sent, want 1", d.count("release"))
		}
	})
}

// L1: the times of the other unit: a TTL of 1 s.
func TestL1ShortTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c", TTL: time.Second})
		time.Sleep(4*time.Second + time.Millisecond)
		if n := d.count("renew"); n != 64 || isLost(l) {
			t.Errorf("%d renewals in 4 s, want 64; lost: %v", n, l.Err())
		}
		l.Release(false)
	})
}

// L1: another one with the client's ID may give the lease another TTL: from the next
// renewal on, it is renewed as often as that one wants it.
func TestL1OtherTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		d.mu.Lock()
		for _, row := range d.rows {
			row.ttl = time.Second
		}
		d.mu.Unlock()
		time.Sleep(5*time.Second + time.Millisecond)
		if n := d.count("renew"); n != 65 || isLost(l) {
			t.Errorf("%d renewals in 5 s, want 65; lost: %v", n, l.Err())
		}
		l.Release(false)
	})
}

// L1: failed renewals do not lose a lease; only the deadline does, a TTL after
// the last renewal that succeeded.
func TestL1FailedRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		fail := func(on bool) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.refuse = nil
			if on {
				d.refuse = func(string) error { return unix.EIO }
			}
		}
		for range 5 {
			fail(true)
			time.Sleep(13500 * time.Millisecond)
			fail(false)
			time.Sleep(1500 * time.Millisecond)
			if isLost(l) {
				t.Fatalf("lost though a renewal came through in time: %v", l.Err())
			}
		}
		fail(true)
		synctest.Wait() // a renewal may be due at this moment, too
		l.mu.Lock()
		last := l.deadline
		l.mu.Unlock()
		time.Sleep(last - s.now() - time.Millisecond)
		synctest.Wait()
		if isLost(l) {
			t.Errorf("lost before the deadline: %v", l.Err())
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		wantLost(t, l, "expired")
		if err := l.Release(false); !errors.Is(err, ErrLost) {
			t.Errorf("Release of a lost lock = %v, want ErrLost", err)
		}
	})
}

// L1: a daemon that hangs in the renewal does not hide the deadline.
func TestL1Hangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		time.Sleep(time.Second + time.Millisecond)
		d.mu.Lock()
		d.hangs = true
		d.mu.Unlock()
		time.Sleep(16*time.Second - 2*time.Millisecond)
		synctest.Wait()
		if isLost(l) {
			t.Errorf("lost before the deadline: %v", l.Err())
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		wantLost(t, l, "expired")
		d.mu.Lock()
		d.hangs = false
		d.mu.Unlock()
		l.Release(false)
	})
}

// A daemon that is stopped when it has just granted a lock keeps nobody waiting for long
// after his context is done, and hears that the lock is watched when it is back.
func TestAcquireStopped(t *testing.T) {
	for _, client := range []string{"", "c"} {
		synctest.Test(t, func(t *testing.T) {
			d, s := newFake()
			back := make(chan struct{})
			var dials atomic.Int32
			dial := s.dial
			s.dial = func(root string) (conn, error) {
				if dials.Add(1) > 1 {
					<-back
				}
				return dial(root)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			time.AfterFunc(10*time.Second, func() { close(back) })
			start := time.Now()
			l, err := s.acquire(ctx, "/mnt/D", Options{Client: client})
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > 6*time.Second {
				t.Errorf("%q: it took %v", client, took)
			}
			<-back
			time.Sleep(2 * time.Second)
			d.end("D", reply{Reason: "broken"})
			synctest.Wait()
			wantLost(t, l, "broken")
			l.Release(false)
		})
	}
}

// L1: a lease that runs out before it is known to be watched, as the daemon was stopped just
// after it granted that, is given to nobody; one that the daemon is slow with is renewed.
func TestL1Overdue(t *testing.T) {
	for name, c := range map[string]struct {
		slow   func(d *fakeDaemon)
		expect error
	}{
		"stopped": {func(d *fakeDaemon) { d.asleep.Add(int64(DefaultTTL)) }, ErrLost},
		"slow":    {func(*fakeDaemon) { time.Sleep(DefaultTTL + time.Second) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, s := newFake()
				dials, dial := 0, s.dial
				s.dial = func(root string) (conn, error) {
					if dials++; dials > 1 {
						c.slow(d)
					}
					return dial(root)
				}
				l, err := s.acquire(context.Background(), "/mnt/D", Options{Client: "c"})
				if !errors.Is(err, c.expect) || (l == nil) != (c.expect != nil) {
					t.Errorf("Acquire = %v, %v; want the error %v", l, err, c.expect)
				}
				if l == nil {
					return
				}
				if err := l.Release(false); err != nil {
					t.Errorf("Release = %v", err)
				}
			})
		})
	}
}

// L4: the time that the machine sleeps counts, though timers do not see it.
func TestL4Sleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		time.Sleep(500 * time.Millisecond)
		d.asleep.Store(int64(time.Hour))
		time.Sleep(time.Second) // it looks at least this often
		synctest.Wait()
		wantLost(t, l, "expired")
		l.Release(false)
	})
}

// The lock is lost as soon as the daemon says so, for whatever reason.
func TestLost(t *testing.T) {
	for _, client := range []string{"", "c"} {
		for _, tt := range []reply{
			{Reason: "broken", By: 7, Why: "it hangs"},
			{Reason: "released"},
			{Reason: "removed"},
			{Reason: "expired"},
		} {
			t.Run(client+" "+tt.Reason, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d, s := newFake()
					l := mustAcquire(t, s, Options{Client: client})
					time.Sleep(time.Minute)
					d.end("D", tt)
					// Somebody else has it at once.
					other, err := s.acquire(t.Context(), "/mnt/D", Options{Client: "thief"})
					if err != nil || other.Token() <= l.Token() {
						t.Errorf("acquire = %v; token %d after %d", err, other.Token(), l.Token())
					}
					synctest.Wait()
					wantLost(t, l, tt.Reason)
					var lost *LostError
					if errors.As(l.Err(), &lost); lost.By != tt.By || lost.Why != tt.Why || lost.Token != l.Token() {
						t.Errorf("%+v, want what the daemon said: %+v", lost, tt)
					}
					if err := l.Release(true); !errors.Is(err, ErrLost) {
						t.Errorf("Release = %v, want ErrLost", err)
					}
					if isLost(other) || other.Release(false) != nil {
						t.Error("the release of a lost lock ended its successor's")
					}
				})
			})
		}
	}
}

// A release that finds no lock says that it was lost, and why.
func TestLostDuringRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{})
		synctest.Wait() // it is watched
		d.refuse = func(line string) error {
			d.refuse = nil
			d.endLocked("D", reply{Reason: "broken"})
			return unix.ENOENT
		}
		if err := l.Release(false); !errors.Is(err, ErrLost) {
			t.Errorf("Release = %v, want ErrLost", err)
		}
		wantLost(t, l, "broken")
	})
}

// L1: the same ID re-enters; another one is refused, and hears who has it.
func TestL1Reentry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s := newFake()
		a := mustAcquire(t, s, Options{Client: "c"})
		b := mustAcquire(t, s, Options{Client: "c"})
		if a.Token() != b.Token() {
			t.Errorf("tokens %d and %d, want the same lock", a.Token(), b.Token())
		}
		_, err := s.acquire(t.Context(), "/mnt/D", Options{Client: "other"})
		var held *HeldError
		if !errors.Is(err, ErrFailedToLock) || !errors.As(err, &held) || held.Holder == nil || held.Holder.Client != "c" {
			t.Errorf("another ID: %v, want ErrFailedToLock with the holder", err)
		}
		// What one of them releases the other has lost.
		synctest.Wait()
		if err := a.Release(false); err != nil {
			t.Error(err)
		}
		<-b.Lost()
		wantLost(t, b, "released")
		b.Release(false)
	})
}

// A renewal that meets another lock of the same client does not take it for its
// own.
func TestReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c", RenewEvery: -1})
		d.mu.Lock()
		d.token++
		d.rows["D"].token = d.token
		d.mu.Unlock()
		if err := l.Renew(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("Renew = %v, want ErrLost", err)
		}
		l.Release(false)
	})
}

// RenewEvery below zero leaves the renewing to the program.
func TestRenewByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c", RenewEvery: -1})
		time.Sleep(15 * time.Second)
		if err := l.Renew(t.Context()); err != nil || d.count("renew") != 1 {
			t.Errorf("Renew = %v, %d renewals", err, d.count("renew"))
		}
		time.Sleep(16*time.Second - time.Millisecond)
		if isLost(l) {
			t.Error("lost before the deadline")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		wantLost(t, l, "expired")
		if err := l.Renew(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("Renew of a lost lease = %v, want ErrLost", err)
		}
		l.Release(false)
	})
}

// The death of the daemon alone does not lose a process's lock; a new daemon
// that does not know it does.
func TestDaemonDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{})
		d.mu.Lock()
		d.down = true
		row := d.rows["D"]
		d.mu.Unlock()
		d.end("D", reply{Message: "dead"})
		time.Sleep(time.Minute)
		synctest.Wait()
		if isLost(l) {
			t.Errorf("lost with the daemon: %v", l.Err())
		}
		d.mu.Lock()
		d.down = false
		d.mu.Unlock()
		row.ended = make(chan struct{}) // and the new one knows it
		d.mu.Lock()
		d.rows["D"] = row
		d.mu.Unlock()
		time.Sleep(2 * retryWatch)
		if isLost(l) {
			t.Errorf("lost though the new daemon knows it: %v", l.Err())
		}
		d.end("D", reply{Reason: "broken"})
		synctest.Wait()
		wantLost(t, l, "broken")
		l.Release(false)

		l = mustAcquire(t, s, Options{})
		synctest.Wait() // it is watched
		d.mu.Lock()
		d.down = true
		d.mu.Unlock()
		d.end("D", reply{Message: "dead"})
		d.mu.Lock()
		d.down = false
		d.mu.Unlock()
		time.Sleep(2 * retryWatch)
		synctest.Wait()
		wantLost(t, l, "unknown")
		l.Release(false)
	})
}

// R3: the lock goes with its directory when that is renamed.
func TestR3Renamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		d.rename("D", "E")
		time.Sleep(time.Minute)
		if isLost(l) {
			t.Errorf("lost by a rename: %v", l.Err())
		}
		if err := l.Release(false); err != nil || len(d.rows) != 0 {
			t.Errorf("Release = %v, rows left: %v", err, d.rows)
		}
	})
}

// R3: also where its client has taken the name that it had, or it gets that back in the
// moment in which it is looked for.
func TestR3RenamedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		first := mustAcquire(t, s, Options{Client: "c"})
		d.rename("D", "E")
		second := mustAcquire(t, s, Options{Client: "c"})
		away := false
		d.mu.Lock()
		d.refuse = func(line string) error {
			if away = !away; away && strings.HasPrefix(line, "re") {
				return unix.ENOENT
			}
			return nil
		}
		d.mu.Unlock()
		time.Sleep(time.Minute)
		for i, l := range []*Lock{first, second} {
			if isLost(l) {
				t.Errorf("lock %d was lost by a rename: %v", i+1, l.Err())
			}
			if err := l.Release(false); err != nil || len(d.rows) != 1-i {
				t.Errorf("Release of lock %d = %v, rows left: %v", i+1, err, d.rows)
			}
		}
	})
}

// A Release that failed is repeated on another line, to which the directory may have got
// another name as well.
func TestR3RenamedUnreleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{})
		d.mu.Lock()
		d.refuse = func(string) error { return unix.EIO }
		d.mu.Unlock()
		if err := l.Release(false); !errors.Is(err, unix.EIO) {
			t.Errorf("Release = %v, want EIO", err)
		}
		d.rename("D", "E")
		d.mu.Lock()
		d.refuse = nil
		d.mu.Unlock()
		if err := l.Release(false); err != nil || len(d.rows) != 0 {
			t.Errorf("Release = %v, rows left: %v", err, d.rows)
		}
	})
}

// L1: a directory that has another name at each look costs no lease before its deadline.
func TestL1Renames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{Client: "c"})
		d.mu.Lock()
		d.refuse = func(string) error { return unix.ENOENT }
		d.mu.Unlock()
		time.Sleep(DefaultTTL - time.Millisecond)
		if isLost(l) {
			t.Errorf("lost before the deadline: %v", l.Err())
		}
		d.mu.Lock()
		d.refuse = nil
		d.mu.Unlock()
		if err := l.Release(false); err != nil {
			t.Errorf("Release = %v", err)
		}
	})
}

// Options.Wait stands in line until ctx is done.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s := newFake()
		l := mustAcquire(t, s, Options{})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		start := time.Now()
		_, err := s.acquire(ctx, "/mnt/D", Options{Wait: true})
		if !errors.Is(err, ErrFailedToLock) || !errors.Is(err, context.Canceled) || time.Since(start) != time.Minute {
			t.Errorf("acquire = %v after %v, want ErrFailedToLock when cancelled", err, time.Since(start))
		}
		time.AfterFunc(time.Minute, func() { l.Release(false) })
		l, err = s.acquire(t.Context(), "/mnt/D", Options{Wait: true})
		if err != nil || time.Since(start) != 2*time.Minute {
			t.Errorf("acquire = %v after %v", err, time.Since(start))
		}
		l.Release(false)
		if _, err := s.acquire(ctx, "/mnt/D", Options{}); !errors.Is(err, context.Canceled) {
			t.Errorf("acquire with a context that is done = %v", err)
		}
	})
}

// A Release without a daemon waits for the next one, for a while; then it can be
// repeated, by anybody, and is sent once more until one succeeds.
func TestReleaseDaemonDies(t *testing.T) {
	for _, client := range []string{"", "c"} {
		synctest.Test(t, func(t *testing.T) {
			d, s := newFake()
			down := func(is bool) {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.down = is
			}
			l := mustAcquire(t, s, Options{Client: client})
			down(true)
			start := time.Now()
			time.AfterFunc(2*time.Second, func() { down(false) })
			if err := l.Release(false); err != nil || time.Since(start) > 2*time.Second+nextLook {
				t.Errorf("Release = %v after %v, want none when the daemon is there", err, time.Since(start))
			}

			l = mustAcquire(t, s, Options{Client: client})
			down(true)
			for range 2 {
				start = time.Now()
				if err := l.Release(false); !errors.Is(err, unix.ENOTCONN) || time.Since(start) != nextDaemon {
					t.Errorf("Release = %v after %v, want ENOTCONN after %v", err, time.Since(start), nextDaemon)
				}
			}
			down(false)
			renewals := d.count("renew")
			time.Sleep(5 * time.Second)
			if isLost(l) || d.count("renew") != renewals {
				t.Errorf("lost: %v, %d renewals of what is to be released", l.Err(), d.count("renew")-renewals)
			}
			sent := d.count("release")
			errs := make(chan error)
			for range 4 {
				go func() { errs <- l.Release(false) }()
			}
			for range 4 {
				if err := <-errs; err != nil {
					t.Errorf("Release again = %v", err)
				}
			}
			if n := d.count("release") - sent; n != 1 || len(d.rows) != 0 {
				t.Errorf("sent %d times, rows left: %v", n, d.rows)
			}
		})
	}
}

// A lease that runs out while there is no daemon is lost, and none is looked for any
// more.
func TestLostWithoutDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		var dials atomic.Int64
		dial := s.dial
		s.dial = func(root string) (conn, error) {
			if dials.Add(1) > 1000 {
				panic("it dials without end")
			}
			return dial(root)
		}
		l := mustAcquire(t, s, Options{Client: "c"})
		synctest.Wait() // it is watched
		d.mu.Lock()
		d.down = true
		d.mu.Unlock()
		d.end("D", reply{Message: "dead"})
		time.Sleep(time.Minute)
		synctest.Wait()
		wantLost(t, l, "expired")
		l.Release(false)
	})
}

// A lease that nobody could be told to release ends at its deadline all the same,
// and nothing looks for a daemon then.
func TestReleaseLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		var dials atomic.Int64
		dial := s.dial
		s.dial = func(root string) (conn, error) {
			dials.Add(1)
			return dial(root)
		}
		for ttl, want := range map[time.Duration]error{2 * time.Second: ErrLost, 10 * time.Second: unix.ENOTCONN} {
			l := mustAcquire(t, s, Options{Client: "c", TTL: ttl})
			synctest.Wait() // it is watched
			d.mu.Lock()
			d.down = true
			d.mu.Unlock()
			d.end("D", reply{Message: "dead"})
			if err := l.Release(false); !errors.Is(err, want) {
				t.Errorf("Release = %v, want %v", err, want)
			}
			time.Sleep(ttl)
			synctest.Wait()
			wantLost(t, l, "expired")
			before := dials.Load()
			time.Sleep(time.Minute)
			if n := dials.Load() - before; n != 0 {
				t.Errorf("dialled %d times after it was lost", n)
			}
			for range 2 {
				if err := l.Release(false); !errors.Is(err, ErrLost) {
					t.Errorf("Release of what was lost = %v", err)
				}
			}
			d.mu.Lock()
			d.down = false
			d.mu.Unlock()
		}
	})
}

// What is refused can be asked for in another way.
func TestReleaseRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		l := mustAcquire(t, s, Options{})
		d.refuse = func(line string) error {
			if strings.HasSuffix(line, " destroy") {
				return unix.EPERM
			}
			return nil
		}
		if err := l.Release(true); !errors.Is(err, ErrNotHolder) {
			t.Errorf("Release = %v, want ErrNotHolder", err)
		}
		if err := l.Release(false); err != nil || len(d.rows) != 0 {
			t.Errorf("Release = %v, rows left: %v", err, d.rows)
		}
	})
}

// TryWithLock waits for no other daemon once its caller does not.
func TestReleaseContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		ctx, cancel := context.WithCancel(t.Context())
		var start time.Time
		err := s.tryWithLock(ctx, "/mnt/D", "c", func(context.Context) error {
			d.mu.Lock()
			d.down = true
			d.mu.Unlock()
			start = time.Now()
			time.AfterFunc(time.Second, cancel)
			return nil
		})
		if !errors.Is(err, unix.ENOTCONN) || time.Since(start) != time.Second {
			t.Errorf("TryWithLock = %v after %v, want ENOTCONN when cancelled", err, time.Since(start))
		}
		time.Sleep(time.Minute) // and all that it began ends at the lease's deadline
	})
}

// A countedContext knows how many wait for its end.
type countedContext struct {
	context.Context
	waiting atomic.Int64
}

func (*countedContext) Value(any) any { return nil } // nobody sees what is beneath

func (c *countedContext) AfterFunc(f func()) func() bool {
	c.waiting.Add(1)
	stop := context.AfterFunc(c.Context, f)
	return func() bool {
		c.waiting.Add(-1)
		return stop()
	}
}

// What was asked for under a context leaves nothing behind there, however long that lasts.
func TestContextLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s := newFake()
		ctx := &countedContext{Context: t.Context()}
		var cancel context.CancelFunc
		ctx.Context, cancel = context.WithTimeout(ctx.Context, time.Hour)
		defer cancel()
		for range 10 {
			l, err := s.acquire(ctx, "/mnt/D", Options{})
			if err != nil {
				t.Fatal(err)
			}
			l.Release(false)
			d := &Dir{s, place{"/mnt/D", "/mnt", "D"}}
			d.Check(ctx, "")
		}
		if n := ctx.waiting.Load(); n != 0 {
			t.Errorf("%d wait for the end of the context still", n)
		}
	})
}
