package filestore_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/storetest"
)

// files is a backend in a directory.
type files struct{ dir string }

func (f files) Open(t *testing.T) lockstate.Store {
	t.Helper()
	s, err := filestore.Open(f.dir, filestore.Options{Key: "key"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// Killed opens a copy: a killed process leaves the files as they are.
func (f files) Killed(t *testing.T) lockstate.Store {
	t.Helper()
	return files{copyState(t, f.dir)}.Open(t)
}

// copyState copies the files of a store that goes on: it may just remove what a snapshot
// has replaced.
func copyState(t *testing.T, dir string) string {
	t.Helper()
	for {
		copied := t.TempDir()
		err := os.CopyFS(copied, os.DirFS(dir))
		if err == nil {
			return copied
		}
		if !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Backend { return files{t.TempDir()} })
}

// fill leaves a snapshot with three records and a journal with changes of them,
// as a killed daemon does, and returns their files.
func fill(t *testing.T) (dir string, state []string) {
	t.Helper()
	first := t.TempDir()
	s := open(t, first)
	for token := range uint64(3) {
		s.Put(token, fmt.Appendf(nil, `{"token":%d}`, token))
	}
	s.Close()
	s = open(t, first)
	s.Put(3, []byte(`{"token":3}`))
	s.Delete(1)
	s.Put(2, []byte(`{"token":2,"again":true}`))
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	dir = copyState(t, first)
	s.Close()
	for _, pattern := range []string{"key.locks.*", "key.journal.*"} {
		found, _ := filepath.Glob(filepath.Join(dir, pattern))
		state = append(state, found...)
	}
	if len(state) != 2 {
		t.Fatalf("state files %q, want a snapshot and a journal", state)
	}
	return dir, state
}

// TestS2 cuts each file off at every byte and flips every bit of it: the store
// opens, says so, keeps the damaged file, and has every record whose line is
// whole.
func TestS2(t *testing.T) {
	dir, state := fill(t)
	for _, file := range state {
		good, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		try := func(bad []byte, what string) {
			t.Helper()
			copied := t.TempDir()
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(copied, filepath.Base(file)), bad, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := filestore.Open(copied, filestore.Options{Key: "key"})
			if err != nil {
				t.Fatalf("%s: Open = %v", what, err)
			}
			defer s.Close()
			// A journal that ends with a whole line tells nothing of what
			// came after it.
			whole := strings.Contains(file, "journal") && (len(bad) == 0 || bad[len(bad)-1] == '\n') && bytes.HasPrefix(good, bad)
			aside, _ := filepath.Glob(filepath.Join(copied, "*.damaged-*"))
			if whole != (len(s.Warnings()) == 0) || whole != (len(aside) == 0) {
				t.Fatalf("%s: Warnings() = %q, set aside %q", what, s.Warnings(), aside)
			}
			if torn := strings.Contains(file, "journal") && bytes.HasPrefix(good, bad[:bytes.LastIndexByte(bad, '\n')+1]) && bytes.IndexByte(bad, 0) < 0; torn != s.Complete() {
				t.Fatalf("%s: Complete() = %v, want %v", what, s.Complete(), torn)
			}
			// Each record is one that was put, and at most one line is lost.
			got := s.Load()
			for token, r := range got {
				if want := fmt.Sprintf(`{"token":%d}`, token); string(r) != want && string(r) != `{"token":2,"again":true}` {
					t.Fatalf("%s: record %d is %q", what, token, r)
				}
			}
			if bytes.Count(bad, []byte("\n")) == bytes.Count(good, []byte("\n")) && len(got) < 2 {
				t.Fatalf("%s: one damaged line cost all but %d records", what, len(got))
			}
		}
		for n := range good {
			try(good[:n], fmt.Sprintf("%s cut off at %d", filepath.Base(file), n))
			flipped := bytes.Clone(good)
			flipped[n] ^= 1 << (n % 8)
			try(flipped, fmt.Sprintf("%s with bit %d of byte %d flipped", filepath.Base(file), n%8, n))
		}
		try(make([]byte, len(good)), filepath.Base(file)+" zeroed")
	}
}

// A daemon that died while it began a generation leaves both.
func TestGenerationCutOff(t *testing.T) {
	dir, _ := fill(t)
	s := open(t, dir)
	want := s.Load()
	if len(want) != 3 || string(want[2]) != `{"token":2,"again":true}` {
		t.Fatalf("Load() = %v", want)
	}
	s.Close()
	// The files of the earlier generation, beside those of the later.
	older, _ := fill(t)
	later, _ := filepath.Glob(filepath.Join(dir, "key.*"))
	for _, f := range later {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(older, filepath.Base(f)), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, older)
	if got := s.Load(); len(got) != len(want) {
		t.Errorf("Load() = %v, want %v", got, want)
	}
	if left, _ := filepath.Glob(filepath.Join(older, "key.journal.*")); len(left) != 1 {
		t.Errorf("journals %q, want one", left)
	}
}

// A daemon that was killed while it wrote a snapshot, and many damaged files,
// leave nothing for ever.
func TestTidy(t *testing.T) {
	dir, _ := fill(t)
	for i := range 20 {
		name := fmt.Sprintf("key.journal.%d.damaged-20260101T0000%02d.000000000Z", i%3, i)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"key.locks.2.tmp", "key.locks.99.tmp", "other.locks.1.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("half a snap"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, dir)
	if len(s.Load()) != 3 {
		t.Errorf("Load() = %v", s.Load())
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.locks.*.tmp")); len(left) != 1 {
		t.Errorf("half snapshots %q, want the other backing's", left)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*.damaged-*"))
	slices.Sort(left)
	if len(left) != 8 {
		t.Errorf("%d files set aside, want the newest 8: %q", len(left), left)
	}
	for _, name := range left {
		if _, when, _ := strings.Cut(name, ".damaged-20260101T0000"); when < "12" {
			t.Errorf("%s is kept", name)
		}
	}
}

// The journal does not grow with what is over.
func TestCompaction(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 8 MiB")
	}
	dir := t.TempDir()
	s := open(t, dir)
	long := bytes.Repeat([]byte("x"), 1<<10)
	for i := range uint64(8 << 10) {
		s.Put(i, long)
		if i > 0 {
			s.Delete(i - 1)
		}
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	for { // tended each second
		if size := stateSize(t, dir); size < 1<<20 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	s.Close()
	if got := open(t, dir).Load(); len(got) != 1 || len(got[8<<10-1]) != len(long) {
		t.Errorf("Load() has %d records, want the last one", len(got))
	}
}

func stateSize(t *testing.T, dir string) (size int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			size += info.Size()
		}
	}
	return size
}

// smallDisk is a file system of a megabyte that is mounted nowhere: it goes with the
// process, however that ends.
func smallDisk(t *testing.T) (dir string) {
	t.Helper()
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("needs root to mount a small file system: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	err = errors.Join(unix.FsconfigSetString(fs, "size", "1m"), unix.FsconfigSetString(fs, "mode", "700"), unix.FsconfigCreate(fs))
	if err != nil {
		t.Fatal(err)
	}
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(root) })
	return fmt.Sprintf("/proc/self/fd/%d", root)
}

// TestFullDisk fills the file system of the state: tokens go on, records are
// kept as soon as there is room, and nothing that was kept before is lost.
func TestFullDisk(t *testing.T) {
	dir := smallDisk(t)
	s, err := filestore.Open(dir, filestore.Options{Key: "key"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Reserve(10); err != nil {
		t.Fatal(err)
	}
	s.Put(1, []byte(`{"token":1}`))
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	fillUp(t, filepath.Join(dir, "ballast"))
	token := putUntilFull(t, s, 2)
	for i := range uint64(3) {
		if err := s.Reserve(5000 * (i + 1)); err != nil {
			t.Errorf("Reserve() on a full disk = %v", err)
		}
	}
	for i := uint64(3); i < token; i++ {
		s.Delete(i)
	}
	if err := os.Remove(filepath.Join(dir, "ballast")); err != nil {
		t.Fatal(err)
	}
	for s.Flush() != nil { // tried again each second
		time.Sleep(20 * time.Millisecond)
	}
	next := files{dir}.Killed(t)
	if got := next.Load(); len(got) != 2 || string(got[1]) != `{"token":1}` {
		t.Errorf("Load() has %d records, want 1 and 2", len(got))
	}
	if got := next.Tokens(); got < 15000 {
		t.Errorf("Tokens() = %d, want 15000", got)
	}
}

// putUntilFull puts records, from a token on, until the disk is full, and returns the next
// token: the last one was put, and is not on the disk.
func putUntilFull(t *testing.T, s lockstate.Store, token uint64) uint64 {
	t.Helper()
	long := bytes.Repeat([]byte("x"), 1<<10)
	var err error
	for ; err == nil && token < 2000; token++ {
		s.Put(token, long)
		err = s.Flush()
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Flush() on a full disk = %v, want ENOSPC", err)
	}
	return token
}

// TestFullDiskClosed: what there was no room for is kept when the store is closed, if there
// is room by then.
func TestFullDiskClosed(t *testing.T) {
	dir := smallDisk(t)
	s := open(t, dir)
	fillUp(t, filepath.Join(dir, "ballast"))
	token := putUntilFull(t, s, 1)
	if err := os.Remove(filepath.Join(dir, "ballast")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close() = %v", err)
	}
	if got := open(t, dir).Load(); len(got) != int(token)-1 {
		t.Errorf("Load() has %d records, want %d", len(got), token-1)
	}
}

// TestFullDiskRestart: a daemon that starts while there is no room for another
// generation keeps what it puts in the one that is there, also if that one was
// cut off: also if only the end of a line is missing, which becomes none by what follows.
func TestFullDiskRestart(t *testing.T) {
	deletion := fmt.Sprintf("%08x D 1", crc32.Checksum([]byte("D 1"), crc32.MakeTable(crc32.Castagnoli)))
	for _, tail := range []string{"", `1234abcd P 9 {"tok`, deletion} {
		dir := smallDisk(t)
		s := open(t, dir)
		s.Put(1, []byte(`{"token":1}`))
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		journals, _ := filepath.Glob(filepath.Join(dir, "key.journal.*"))
		f, err := os.OpenFile(journals[0], os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(tail); err != nil {
			t.Fatal(err)
		}
		f.Close()
		fillUp(t, filepath.Join(dir, "ballast"))
		for token := uint64(2); token < 5; token++ {
			s = open(t, dir)
			if got := s.Load(); len(got) != int(token)-1 {
				t.Errorf("Load() = %v before %d", got, token)
			}
			if len(s.Warnings()) == 0 {
				t.Error("it does not say that the disk is full")
			}
			s.Put(token, []byte(`{"token":7}`))
			if err := s.Flush(); err != nil {
				t.Errorf("Flush() = %v", err)
			}
			if err := s.Sync(); err != nil {
				t.Errorf("Sync() = %v", err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		s = open(t, dir)
		s.Put(5, []byte(`{"token":5}`))
		if err := os.Remove(filepath.Join(dir, "ballast")); err != nil {
			t.Fatal(err)
		}
		for { // tried again each second
			if now, _ := filepath.Glob(filepath.Join(dir, "key.journal.*[0-9]")); len(now) == 1 && now[0] != journals[0] {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if got := open(t, dir).Load(); len(got) != 5 {
			t.Errorf("Load() = %v, want 5 records", got)
		}
	}
}

// TestOpenWritesNothing: neither a daemon that starts nor who puts what is there
// already writes much, however many locks there are.
func TestOpenWritesNothing(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	record := func(i uint64) []byte {
		return fmt.Appendf(nil, `{"token":%d,"long":"%s"}`, i, strings.Repeat("x", int(i%5)*100_000))
	}
	for i := range uint64(50) {
		s.Put(i, record(i))
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	killed := func() *filestore.Store {
		t.Helper()
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
		dir = copyState(t, dir)
		return open(t, dir)
	}
	for range 3 {
		before := stateFiles(t, dir)
		s = killed()
		loaded := s.Load()
		if len(loaded) != 50 || len(s.Warnings()) > 0 {
			t.Fatalf("%d records, Warnings() = %q", len(loaded), s.Warnings())
		}
		for i := range uint64(50) {
			if string(loaded[i]) != string(record(i)) {
				t.Fatalf("record %d is %.40q", i, loaded[i])
			}
			s.Put(i, record(i))
		}
		if err := s.Sync(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, stateFiles(t, dir)); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
		if s.Unload(); s.Load() != nil {
			t.Error("Load() after Unload() is not empty")
		}
	}
	s.Put(7, []byte(`{"token":7}`))
	s = killed()
	if got := string(s.Load()[7]); got != `{"token":7}` {
		t.Errorf("what was changed is %.40q", got)
	}
}

// stateFiles returns the sizes of the files with records.
func stateFiles(t *testing.T, dir string) map[string]int64 {
	t.Helper()
	sizes := make(map[string]int64)
	for _, pattern := range []string{"key.locks.*", "key.journal.*"} {
		found, _ := filepath.Glob(filepath.Join(dir, pattern))
		for _, name := range found {
			info, err := os.Stat(name)
			if err != nil {
				t.Fatal(err)
			}
			sizes[filepath.Base(name)] = info.Size()
		}
	}
	return sizes
}

func fillUp(t *testing.T, name string) {
	t.Helper()
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 64 << 10; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

func FuzzJournal(f *testing.F) {
	f.Add([]byte("5d3a9ab1 P 1 {}\n"))
	f.Fuzz(func(t *testing.T, journal []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "key.journal.0"), journal, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := filestore.Open(dir, filestore.Options{Key: "key"})
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	})
}

func BenchmarkAcquisition(b *testing.B) {
	s, err := filestore.Open(b.TempDir(), filestore.Options{Key: "key"})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	record := bytes.Repeat([]byte("x"), 300)
	var token uint64
	for b.Loop() {
		token++
		s.Put(token, record)
		if err := s.Flush(); err != nil {
			b.Fatal(err)
		}
		s.Delete(token)
	}
}
