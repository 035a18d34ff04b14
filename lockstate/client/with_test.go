//go:build linux

package client

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The context ends when the lock is lost; the function's own error comes back.
func TestTryWithLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, s := newFake()
		own := errors.New("the function's own")
		try := func(id string, f func(context.Context) error) error {
			return s.tryWithLock(t.Context(), "/mnt/D", id, f)
		}
		never := func(context.Context) error { t.Error("called without a lock"); return nil }
		if err := try("", never); !errors.Is(err, ErrEmptyClientID) {
			t.Errorf("empty ID: %v", err)
		}
		err := try("c", func(ctx context.Context) error {
			if err := try("other", never); !errors.Is(err, ErrFailedToLock) {
				t.Errorf("another ID: %v", err)
			}
			time.Sleep(time.Hour)
			return ctx.Err()
		})
		if err != nil {
			t.Errorf("TryWithLock = %v", err)
		}
		if err := try("c", func(context.Context) error { return own }); err != own {
			t.Errorf("TryWithLock = %v, want %v", err, own)
		}
		if last := d.lines[len(d.lines)-1]; !strings.HasSuffix(last, " failed") {
			t.Errorf("the end of what failed: %q", last)
		}

		// Lost: the context ends, and tells why. The function's own error
		// comes first.
		for _, tt := range []struct{ returns, want error }{{nil, ErrLost}, {own, own}} {
			err := try("c", func(ctx context.Context) error {
				d.end("D", reply{Reason: "broken"})
				<-ctx.Done()
				if !errors.Is(context.Cause(ctx), ErrLost) {
					t.Errorf("cause: %v, want ErrLost", context.Cause(ctx))
				}
				return tt.returns
			})
			if !errors.Is(err, tt.want) {
				t.Errorf("TryWithLock = %v, want %v", err, tt.want)
			}
		}

		func() {
			defer func() {
				if recover() != "oops" {
					t.Error("the panic is lost")
				}
			}()
			try("c", func(context.Context) error { panic("oops") })
		}()
		if len(d.rows) != 0 {
			t.Errorf("left over: %v", d.rows)
		}
	})
}

func TestOptions(t *testing.T) {
	_, s := newFake()
	for name, opts := range map[string]Options{
		"ID too long": {Client: strings.Repeat("x", 257)},
		"TTL alone":   {TTL: time.Second},
		"two owners":  {Client: "c", Owner: Session},
		"TTL below 0": {Client: "c", TTL: -1},
	} {
		if l, err := s.acquire(t.Context(), "/mnt/D", opts); err == nil {
			t.Errorf("%s: acquired", name)
			l.Release(false)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	for want, opts := range map[string]Options{
		"acquire D":                          {},
		"acquire D client=c":                 {Client: "c"},
		`acquire D client="a b" ttl=1s`:      {Client: "a b", TTL: time.Second},
		"acquire D owner=cgroup shared":      {Owner: Cgroup, Shared: true},
		`acquire D on-crash=destroy`:         {OnCrash: Destroy},
		`acquire D why="a \"b\" c\nd"`:       {Why: "a \"b\" c\nd"},
		`acquire D why="plain" wait=forever`: {Why: "plain", Wait: true},
	} {
		if got := opts.line(t.Context(), "D", false); got != want {
			t.Errorf("%+v: %q, want %q", opts, got, want)
		}
	}
	if got := (&Options{Wait: true}).line(ctx, "a\nb\xff", true); !strings.HasPrefix(got, `acquire "a\nb\xff" wait=59m59.`) || !strings.HasSuffix(got, "s new") {
		t.Errorf("line = %q", got)
	}
}
