// Package storetest is the conformance suite of [lockstate.Store].
package storetest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/stagefs/stagefs/lockstate"
)

// A Backend is where a store under test keeps things.
type Backend interface {
	// Open opens what an earlier store left that was closed.
	Open(t *testing.T) lockstate.Store
	// Killed opens what the store would have left if its process had been
	// killed now. The store goes on.
	Killed(t *testing.T) lockstate.Store
}

// Run tests the stores of the backends that fresh makes, all empty.
func Run(t *testing.T, fresh func(t *testing.T) Backend) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Backend)
	}{
		{"Empty", testEmpty},
		{"Reopen", testReopen},
		{"Killed", testKilled},
		{"Tokens", testTokens},
		{"Concurrent", testConcurrent},
		{"Random", testRandom},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, fresh(t)) })
	}
}

func record(token uint64, version int) []byte {
	long := strings.Repeat("x", version*version*37%1500)
	return fmt.Appendf(nil, `{"token":%d,"version":%d,"dir":"a b/\n\u00e9%s"}`, token, version, long)
}

func checkLoad(t *testing.T, s lockstate.Store, want map[uint64][]byte) {
	t.Helper()
	got := s.Load()
	if len(got) == 0 && len(want) == 0 {
		return
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("Load() (-want +got):\n%s", d)
	}
}

func closeStore(t *testing.T, s lockstate.Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatalf("Close() = %v", err)
	}
}

func testEmpty(t *testing.T, b Backend) {
	s := b.Open(t)
	defer closeStore(t, s)
	checkLoad(t, s, nil)
	if n := s.Tokens(); n != 0 {
		t.Errorf("Tokens() = %d, want 0", n)
	}
	if w := s.Warnings(); len(w) != 0 || !s.Complete() {
		t.Errorf("Warnings() = %q, Complete() = %v, want none, true", w, s.Complete())
	}
	s.Delete(7) // that was never there
	if err := s.Flush(); err != nil {
		t.Errorf("Flush() = %v", err)
	}
}

func testReopen(t *testing.T, b Backend) {
	s := b.Open(t)
	s.Put(1, record(1, 1))
	s.Put(2, record(2, 1))
	s.Put(1, record(1, 2))
	s.Put(3, record(3, 1))
	s.Delete(2)
	closeStore(t, s)
	want := map[uint64][]byte{1: record(1, 2), 3: record(3, 1)}
	for range 2 { // Load is what was there, whatever happens since
		s = b.Open(t)
		checkLoad(t, s, want)
		s.Put(9, record(9, 1))
		s.Delete(9)
		s.Delete(3)
		s.Put(1, record(1, 5))
		checkLoad(t, s, want)
		s.Put(1, record(1, 2))
		s.Put(3, record(3, 1))
		checkLoad(t, s, want)
		closeStore(t, s)
	}
	s = b.Open(t)
	s.Delete(1)
	s.Delete(3)
	closeStore(t, s)
	s = b.Open(t)
	checkLoad(t, s, nil)
	closeStore(t, s)
}

func testKilled(t *testing.T, b Backend) {
	s := b.Open(t)
	defer closeStore(t, s)
	s.Put(1, record(1, 1))
	s.Put(2, record(2, 1))
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	next := b.Killed(t)
	checkLoad(t, next, map[uint64][]byte{1: record(1, 1), 2: record(2, 1)})
	closeStore(t, next)
	s.Delete(1)
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	next = b.Killed(t)
	checkLoad(t, next, map[uint64][]byte{2: record(2, 1)})
	if !next.Complete() {
		t.Errorf("Complete() = false after a kill; Warnings() = %q", next.Warnings())
	}
	closeStore(t, next)
}

func testTokens(t *testing.T, b Backend) {
	s := b.Open(t)
	defer closeStore(t, s)
	for _, step := range []struct{ upTo, want uint64 }{{10, 10}, {4, 10}, {5000, 5000}} {
		if err := s.Reserve(step.upTo); err != nil {
			t.Fatal(err)
		}
		if n := s.Tokens(); n != step.want {
			t.Errorf("Tokens() = %d after Reserve(%d), want %d", n, step.upTo, step.want)
		}
		next := b.Killed(t)
		if n := next.Tokens(); n < step.want {
			t.Errorf("Tokens() = %d after a kill, want at least %d", n, step.want)
		}
		closeStore(t, next)
	}
}

// testConcurrent has several goroutines put and delete records of their own;
// what each had flushed is there after a kill.
func testConcurrent(t *testing.T, b Backend) {
	s := b.Open(t)
	defer closeStore(t, s)
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			for i := range uint64(200) {
				token := g<<32 | i
				s.Put(token, record(token, 1))
				if i%2 == 1 {
					s.Delete(token - 1)
				}
				if err := s.Flush(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	want := make(map[uint64][]byte)
	for g := range uint64(8) {
		for i := uint64(1); i < 200; i += 2 {
			want[g<<32|i] = record(g<<32|i, 1)
		}
	}
	next := b.Killed(t)
	checkLoad(t, next, want)
	closeStore(t, next)
}

// testRandom kills the store at random moments. What is found then is what
// there was at the last flush or at some moment since.
func testRandom(t *testing.T, b Backend) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	s := b.Open(t)
	model := make(map[uint64][]byte)
	since := []map[uint64][]byte{maps.Clone(model)} // the states since the last flush
	for version := range 400 {
		token := 1 + rng.Uint64N(20)
		switch rng.IntN(10) {
		default:
			s.Put(token, record(token, version))
			model[token] = record(token, version)
			since = append(since, maps.Clone(model))
		case 5, 6, 7:
			s.Delete(token)
			delete(model, token)
			since = append(since, maps.Clone(model))
		case 8:
			if err := s.Flush(); err != nil {
				t.Fatal(err)
			}
			since = []map[uint64][]byte{maps.Clone(model)}
		case 9:
			switch rng.IntN(10) {
			case 0:
				next := b.Killed(t)
				found := false
				for _, state := range since {
					found = found || maps.EqualFunc(state, next.Load(), func(a, b []byte) bool { return string(a) == string(b) })
				}
				if !found {
					t.Fatalf("step %d: Load() = %v is none of the %d states since the last flush", version, next.Load(), len(since))
				}
				closeStore(t, next)
			case 1:
				closeStore(t, s)
				s = b.Open(t)
				checkLoad(t, s, model)
				since = []map[uint64][]byte{maps.Clone(model)}
			}
		}
	}
	closeStore(t, s)
}
