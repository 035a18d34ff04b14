package filestore_test

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagefs/stagefs/lockstate/filestore"
)

// A disk is what a power cut leaves of a state directory at the worst: of each
// file what was synced, under the names that were synced or those it has now.
type disk struct {
	dir    string
	synced map[uint64][]byte // by inode
	names  map[string]uint64 // in the directory, as it was synced
	nearly map[string][]byte // of files that are being synced, by name
	soon   map[string]uint64 // names that are being synced
}

func (d *disk) now(t *testing.T) map[string]uint64 {
	t.Helper()
	names := make(map[string]uint64)
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := os.Lstat(filepath.Join(d.dir, e.Name())); err == nil {
			names[e.Name()] = info.Sys().(*syscall.Stat_t).Ino
		}
	}
	return names
}

// step keeps up with a step of the store.
func (d *disk) step(t *testing.T, op, name string, done bool) {
	t.Helper()
	file := filepath.Join(d.dir, filepath.Base(name))
	switch {
	case op == "sync" && !done:
		d.nearly[file] = mustRead(t, file)
	case op == "sync":
		d.synced[d.now(t)[filepath.Base(name)]] = d.nearly[file]
	case op == "sync directory" && !done:
		d.soon = d.now(t)
	case op == "sync directory":
		d.names = d.soon
	}
}

// lay makes a directory of what may be found after a kill (power is false), or
// after a power cut.
func (d *disk) lay(t *testing.T, power, oldNames, oldContent bool) string {
	t.Helper()
	at := t.TempDir()
	names := d.now(t)
	if !power {
		if err := os.CopyFS(at, os.DirFS(d.dir)); err != nil {
			t.Fatal(err)
		}
		return at
	}
	current := make(map[uint64]string)
	for name, ino := range names {
		current[ino] = name
	}
	if oldNames {
		names = d.names
	}
	for name, ino := range names {
		content := d.synced[ino]                                       // or nothing
		if !oldContent || name == "key.tokens" || name == "key.lock" { // of which this test is not
			if is := current[ino]; is != "" {
				content = mustRead(t, filepath.Join(d.dir, is))
			}
		}
		if err := os.WriteFile(filepath.Join(at, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return at
}

func mustRead(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// A changed is one version of a record: how often a record was put or deleted
// before tells which.
type changed struct {
	token  uint64
	delete bool
}

// atOnce reports whether records are those that there were after some change.
func atOnce(history []changed, got map[uint64][]byte, found func(uint64, []byte) int) bool {
	last := 0
	for token, record := range got {
		last = max(last, found(token, record))
	}
	then := make(map[uint64]int)
	for i, c := range history {
		version := i + 1
		if version > last && !c.delete {
			return false // it would have been found
		}
		if c.delete {
			delete(then, c.token)
		} else {
			then[c.token] = version
		}
		if version >= last && len(then) == len(got) {
			same := true
			for token, record := range got {
				same = same && then[token] == found(token, record)
			}
			if same {
				return true
			}
		}
	}
	return len(got) == 0 && last == 0
}

// TestCrashWhileCompacting kills the store, and cuts the power, at each step of a
// compaction while records are put and deleted all the time: what is found then is
// all that was flushed, or synced.
func TestCrashWhileCompacting(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 20 MiB")
	}
	dir := t.TempDir()
	d := &disk{dir: dir, synced: make(map[uint64][]byte), nearly: make(map[string][]byte)}
	const tokens = 300
	var mu sync.Mutex              // the store's state does not change while it is held
	latest := make(map[uint64]int) // the version of each record; negative: it was deleted then
	safe := make(map[uint64]int)   // the same, as of the last sync
	var history []changed          // all of them
	committed, cuts, tried := 0, 0, map[string]int{}
	var s *filestore.Store

	text := func(token uint64, version int) []byte {
		return fmt.Appendf(nil, `{"token":%d,"version":%d,"pad":"%s"}`, token, version, bytes.Repeat([]byte("x"), 200))
	}
	found := func(token uint64, record []byte) (version int) {
		if _, err := fmt.Sscanf(string(record), fmt.Sprintf(`{"token":%d,"version":%%d,`, token), &version); err != nil {
			t.Fatalf("record %d is %.60q", token, record)
		}
		return version
	}
	check := func(what, at string, exactly bool) {
		t.Helper()
		next := open(t, at)
		defer next.Close()
		if exactly && len(next.Warnings()) > 0 {
			t.Errorf("%s: Warnings() = %q", what, next.Warnings())
		}
		if !next.Complete() {
			t.Errorf("%s: it is not complete: %q", what, next.Warnings())
		}
		got := next.Load()
		for token := range uint64(tokens) {
			version, there := 0, false
			if record, ok := got[token]; ok {
				version, there = found(token, record), true
			}
			is, was := latest[token], safe[token]
			switch {
			case exactly && there != (is > 0) || exactly && there && version != is:
				t.Errorf("%s: record %d has version %d (%v), want %d", what, token, version, there, is)
			case there && version < max(was, -was):
				t.Errorf("%s: record %d has version %d, which was replaced before the last sync (%d)", what, token, version, was)
			case !there && was > 0 && is == was:
				t.Errorf("%s: record %d is lost; version %d was synced", what, token, was)
			}
		}
		if !exactly && !atOnce(history, got, found) {
			t.Errorf("%s: what is found never was there at one moment", what)
		}
	}
	step := func(op, name string, done bool) {
		mu.Lock()
		defer mu.Unlock()
		d.step(t, op, name, done)
		if s == nil {
			return // it is being opened
		}
		what := fmt.Sprintf("%s %s (done: %v)", op, filepath.Base(name), done)
		if tried[what]++; tried[what] > 1 {
			return
		}
		cuts++
		check(what+", killed", d.lay(t, false, false, false), true)
		for i := range 4 {
			oldNames, oldContent := i&1 == 0, i&2 == 0
			check(fmt.Sprintf("%s, power cut, names synced: %v, content synced: %v", what, oldNames, oldContent), d.lay(t, true, oldNames, oldContent), false)
		}
		if op == "rename" {
			committed++
		}
	}
	opened, err := filestore.OpenWatched(dir, "key", step)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		mu.Lock()
		s = nil
		mu.Unlock()
		opened.Close()
	}()
	mu.Lock()
	s = opened
	mu.Unlock()

	version := 0
	change := func(i int) {
		mu.Lock()
		defer mu.Unlock()
		token := uint64(i*7919) % tokens
		version++
		history = append(history, changed{token, i%5 == 0})
		if i%5 == 0 {
			s.Delete(token)
			latest[token] = -version
		} else {
			s.Put(token, text(token, version))
			latest[token] = version
		}
		if err := s.Flush(); err != nil {
			t.Error(err)
		}
	}
	enough := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return committed >= 2
	}
	for i := 0; !enough() && !t.Failed(); i++ {
		change(i)
		if i%200 == 0 { // each reads the whole journal, which takes long under the race detector
			mu.Lock()
			now := maps.Clone(latest)
			mu.Unlock()
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
			mu.Lock()
			safe = now
			mu.Unlock()
		}
	}
	mu.Lock() // the last of the old files are being removed perhaps
	defer mu.Unlock()
	t.Logf("%d crashes, %d changes; steps %v", cuts, version, slices.Sorted(maps.Keys(tried)))
}

// TestPutWhileCompacting: who puts a record waits for no snapshot, however long
// the disk takes for it.
func TestPutWhileCompacting(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 8 MiB")
	}
	during := make(chan string)
	goOn := make(chan struct{})
	var armed sync.Once
	s, err := filestore.OpenWatched(t.TempDir(), "key", func(op, name string, done bool) {
		if op == "sync" && !done && filepath.Base(name) == "key.locks.2.tmp" {
			armed.Do(func() {
				during <- name
				<-goOn
			})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	long := bytes.Repeat([]byte("x"), 1<<10)
	for i := range uint64(8 << 10) {
		s.Put(i%8, append(fmt.Appendf(nil, "%d ", i), long...))
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	<-during
	put := make(chan error, 1)
	go func() {
		s.Put(1000, long)
		put <- s.Flush()
		s.Put(1001, long)
		put <- s.Sync()
	}()
	for range 2 {
		select {
		case err := <-put:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("it waits for the snapshot")
		}
	}
	close(goOn)
}
