package filestore_test

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// reserve opens the store, raises the mark to upTo, and closes it again.
func reserve(t *testing.T, dir string, upTo uint64) {
	t.Helper()
	s := open(t, dir)
	if err := s.Reserve(upTo); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestReserve(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if got := s.Tokens(); got != 0 {
		t.Errorf("Tokens() = %d on a new backing, want 0", got)
	}
	for _, step := range []struct{ upTo, want uint64 }{{10, 10}, {5, 10}, {10, 10}, {4106, 4106}} {
		if err := s.Reserve(step.upTo); err != nil {
			t.Fatal(err)
		}
		if got := s.Tokens(); got != step.want {
			t.Errorf("Tokens() = %d after Reserve(%d), want %d", got, step.upTo, step.want)
		}
	}
	s.Close()
	if err := s.Reserve(9999); !errors.Is(err, filestore.ErrClosed) {
		t.Errorf("Reserve() after Close = %v, want ErrClosed", err)
	}
	if got := open(t, dir).Tokens(); got != 4106 {
		t.Errorf("Tokens() = %d after another Open, want 4106", got)
	}
}

// TestDamage cuts the file off at every byte and flips every bit of it (S2):
// the store opens, says so, keeps the damaged file, and the mark never falls.
func TestDamage(t *testing.T) {
	const mark = 1234567
	dir := t.TempDir()
	reserve(t, dir, mark)
	file := filepath.Join(dir, "key.tokens")
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	var damaged [][]byte
	for n := range good {
		damaged = append(damaged, good[:n])
		for bit := range 8 {
			flipped := append([]byte(nil), good...)
			flipped[n] ^= 1 << bit
			damaged = append(damaged, flipped)
		}
	}
	damaged = append(damaged, append(good[:len(good):len(good)], 'x'), append(good[:len(good):len(good)], good...), make([]byte, 1<<16))

	last := uint64(mark)
	for _, bad := range damaged {
		if err := os.WriteFile(file, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := filestore.Open(dir, filestore.Options{Key: "key"})
		if err != nil {
			t.Fatalf("Open with %q = %v", bad, err)
		}
		if got := s.Tokens(); got < last {
			t.Errorf("Tokens() = %d with %q, want at least %d", got, bad, last)
		} else {
			last = got
		}
		if len(s.Warnings()) != 1 {
			t.Errorf("Warnings() = %q with %q, want one", s.Warnings(), bad)
		}
		s.Close()
	}
	aside, _ := filepath.Glob(file + ".damaged-*")
	if len(aside) != 8 {
		t.Errorf("%d files set aside, want the newest 8", len(aside))
	} else if got, err := os.ReadFile(aside[7]); string(got) != string(damaged[len(damaged)-1]) {
		t.Errorf("set aside last: %q, %v", got, err)
	}

	s := open(t, dir)
	if got := s.Tokens(); got != last || len(s.Warnings()) != 0 {
		t.Errorf("next Open: Tokens() = %d, Warnings() = %q, want %d and none", got, s.Warnings(), last)
	}
}

// A file that is gone is no new start: the lock file shows that there was one.
func TestMissing(t *testing.T) {
	dir := t.TempDir()
	reserve(t, dir, 77)
	if err := os.Remove(filepath.Join(dir, "key.tokens")); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if got := s.Tokens(); got <= 77 || got >= 1<<53 || len(s.Warnings()) != 1 {
		t.Errorf("Tokens() = %d, Warnings() = %q, want more than 77, below 2^53, and one warning", got, s.Warnings())
	}
}

// A mark that cannot be is none, however well it is written: tokens would run into other
// numbers, or begin anew. So is a time that cannot be.
func TestMarkTooHigh(t *testing.T) {
	for _, mark := range []uint64{1 << 60, math.MaxUint64 - 5, math.MaxUint64} {
		dir := t.TempDir()
		reserve(t, dir, 77)
		file := filepath.Join(dir, "key.tokens")
		line := "stagefs-tokens 1 " + strconv.FormatUint(mark, 10)
		sum := crc32.Checksum([]byte(line), crc32.MakeTable(crc32.Castagnoli))
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s %08x\n", line, sum), 0o600); err != nil {
			t.Fatal(err)
		}
		future := time.Date(200_000, 1, 1, 0, 0, 0, 0, time.UTC)
		_ = os.Chtimes(file, future, future) // where the file system can
		s := open(t, dir)
		if got := s.Tokens(); got <= 77 || got >= 1<<53 || len(s.Warnings()) != 1 {
			t.Errorf("mark %d: Tokens() = %d, Warnings() = %q, want more than 77, below 2^53, and one warning", mark, got, s.Warnings())
		}
	}
}

// With the clock set back, the times of the files still prove how far it was.
func TestDamageWithClockSetBack(t *testing.T) {
	dir := t.TempDir()
	reserve(t, dir, 77)
	file := filepath.Join(dir, "key.tokens")
	if err := os.WriteFile(file, []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	future := time.Now().Add(1000 * time.Hour)
	if err := os.Chtimes(file, future, future); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	if got, want := s.Tokens(), uint64(future.UnixMicro()); got <= want {
		t.Errorf("Tokens() = %d, want more than %d", got, want)
	}
}

// So does that of the lock file, where nothing else is left, and that of a journal.
func TestMissingWithClockSetBack(t *testing.T) {
	for _, left := range []string{"key.lock", "key.journal.1"} {
		dir := t.TempDir()
		reserve(t, dir, 77)
		for _, name := range []string{"key.tokens", "key.tokens.tmp"} {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		future := time.Now().Add(1000 * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, left), future, future); err != nil {
			t.Fatal(err)
		}
		if got, want := open(t, dir).Tokens(), uint64(future.UnixMicro()); got <= want {
			t.Errorf("%s: Tokens() = %d, want more than %d", left, got, want)
		}
	}
}

// A write that was cut off before its rename left a mark that is proven.
func TestTemporaryFileCounts(t *testing.T) {
	const high = 1 << 58
	dir := t.TempDir()
	reserve(t, dir, high)
	file := filepath.Join(dir, "key.tokens")
	if err := os.Rename(file, file+".tmp"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := open(t, dir).Tokens(); got < high {
		t.Errorf("Tokens() = %d, want at least %d", got, uint64(high))
	}
}
