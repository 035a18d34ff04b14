package filestore

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Renewing replaces all files by a snapshot and a journal that goes on from it.
// Who puts, flushes or syncs meanwhile waits for no more than a moment of it.
// These are its steps; after each of them the files add up to all that they are
// to hold after a kill, or after a power cut:
//
//  1. There is an empty journal of the next generation.
//  2. Lines go into that one; the journals before are on disk when it is synced.
//  3. The snapshot is written under another name. It has each record as it is
//     when its turn comes; the new journal has what is changed later.
//  4. The new journal is synced. The snapshot has each record as of another moment;
//     with the lines up to the last of them, all are as of one.
//  5. The snapshot gets its name, which is synced. What is older counts no more,
//  6. and is removed.
//
// One goroutine at a time does so.

const (
	// retryAfter is when a snapshot is tried again that nobody waits for.
	retryAfter = time.Minute
	// syncSize is how much of a snapshot is written before it is synced, in bytes:
	// who syncs another file of the same disk may have to wait for that.
	syncSize = 4 << 20
)

var errStopped = errors.New("the store is being closed")

// renew begins a generation with all that is live, until stop is closed. If that
// cannot be done, what is there goes on.
func (j *journal) renew(stop <-chan struct{}) error {
	s := j.store
	if s.dir == nil {
		return ErrClosed
	}
	j.writeMu.Lock()
	if j.removed {
		defer j.writeMu.Unlock()
		return j.failed
	}
	gen := j.gen
	_, damaged := s.damaged[s.journalName(gen)]
	next := gen == j.base || j.file == nil || j.broken || damaged // else: steps 1 and 2 were done before
	if next {
		gen++
	}
	j.writeMu.Unlock()

	part := s.snapshotName(gen) + ".tmp"
	snapshot, err := j.room(part)
	if err == nil && next {
		err = j.advance(gen)
	}
	if err == nil {
		err = j.writeSnapshot(snapshot, stop)
	}
	if snapshot != nil {
		snapshot.Close()
	}
	if err == nil {
		err = j.commit(part, gen)
	}
	if err == nil {
		s.removeGenerations(gen)
		return nil
	}
	_ = s.dir.Remove(part)
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	j.notBefore = time.Now().Add(retryAfter) // it costs much to try
	if j.failed != nil {
		j.failed = err
	}
	if j.file == nil {
		return j.failLocked(err)
	}
	return err
}

// room makes the file for a snapshot, and has a full disk noticed at once.
func (j *journal) room(name string) (*os.File, error) {
	f, err := j.store.create(name)
	if err != nil {
		return nil, fmt.Errorf("writing a snapshot: %w", err)
	}
	j.mu.Lock()
	size := j.bytes + (len(j.live)+2)*lineOverhead
	j.mu.Unlock()
	if err := allocate(f, 0, int64(size)); err != nil {
		return f, fmt.Errorf("writing a snapshot: %w", err)
	}
	return f, nil
}

// advance goes on with an empty journal of another generation.
func (j *journal) advance(gen uint64) error {
	s := j.store
	name := s.journalName(gen)
	file, err := s.create(name)
	if err == nil {
		err = allocate(file, 0, ahead)
	}
	if err == nil && j.file != nil { // else: nobody relies on its lines before the snapshot is there
		err = s.syncDir()
	}
	if err != nil {
		if file != nil {
			file.Close()
			_ = s.dir.Remove(name)
		}
		return fmt.Errorf("beginning a journal: %w", err)
	}
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.file != nil {
		_, _ = j.writeLocked() // what could not be written will be in the snapshot
		j.behind = append(j.behind, j.file)
	}
	j.file, j.gen, j.size, j.allocated, j.broken = file, gen, 0, ahead, false
	return nil
}

// writeSnapshot writes all that is live to the disk.
func (j *journal) writeSnapshot(f *os.File, stop <-chan struct{}) error {
	w := bufio.NewWriterSize(f, 256<<10)
	w.WriteString(snapshotHeader)
	var line []byte
	var records uint64
	unsynced, synced := 0, time.Now()
	err := j.each(func(token uint64, record []byte) error {
		line = appendLine(line[:0], opPut, token, record)
		records++
		if _, err := w.Write(line); err != nil {
			return err
		}
		if unsynced += len(line); unsynced < syncSize {
			return nil
		}
		unsynced = 0
		select {
		case <-stop:
			return errStopped
		default:
		}
		if time.Since(synced) >= syncEvery {
			_ = j.syncAll() // as tend does
			synced = time.Now()
		}
		return errors.Join(w.Flush(), j.store.datasync(f))
	})
	if err == nil {
		_, err = w.Write(appendLine(line[:0], opEnd, records, nil))
	}
	if err == nil {
		err = errors.Join(w.Flush(), giveBack(f), j.store.datasync(f))
	}
	if err != nil {
		return fmt.Errorf("writing a snapshot: %w", err)
	}
	return nil
}

// each calls f with every record that is there all the while, and with some of
// the others: with j.mu held for a few of them at a time only, and not while f
// is called.
func (j *journal) each(f func(token uint64, record []byte) error) (err error) {
	type kept struct {
		token  uint64
		record []byte
	}
	some := make([]kept, 0, 256)
	tell := func() {
		j.mu.Unlock()
		defer j.mu.Lock()
		for _, r := range some {
			if err == nil {
				err = f(r.token, r.record)
			}
		}
		some = some[:0]
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for token, record := range j.live {
		if some = append(some, kept{token, record}); len(some) == cap(some) {
			if tell(); err != nil {
				return err
			}
		}
	}
	tell()
	return err
}

// commit has the snapshot of a generation count, with the journal that is in use.
func (j *journal) commit(part string, gen uint64) error {
	s := j.store
	j.syncMu.Lock() // the journals behind are synced no more
	defer j.syncMu.Unlock()
	j.writeMu.Lock()
	seq, err := j.writeLocked()
	file, size, behind := j.file, j.size, j.behind
	j.writeMu.Unlock()
	if err != nil {
		return err
	}
	if size > 0 {
		for _, f := range behind {
			_ = s.datasync(f) // the snapshot is to replace it
		}
		err = s.datasync(file)
	}
	if err != nil {
		j.writeMu.Lock()
		defer j.writeMu.Unlock()
		return j.failLocked(fmt.Errorf("syncing the journal: %w", err))
	}
	if err := s.nameSnapshot(part, s.snapshotName(gen)); err != nil {
		return fmt.Errorf("writing a snapshot: %w", err)
	}
	// If this fails the snapshot is right all the same, whether it outlives a
	// power cut or not; but then what it replaces has to stay.
	if err := s.syncDir(); err != nil {
		return fmt.Errorf("writing a snapshot: %w", err)
	}
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	for _, f := range j.behind {
		f.Close()
	}
	j.behind, j.base, j.stale, j.notBefore = nil, gen, false, time.Time{}
	j.snapshot, _ = s.dir.Lstat(s.snapshotName(gen))
	j.synced = max(j.synced, seq)
	if j.broken {
		return j.failed // since then
	}
	if j.failed != nil {
		j.failed = nil
		j.tell(nil)
	}
	j.mu.Lock()
	j.written = max(j.written, seq)
	j.mu.Unlock()
	return nil
}

// allocate gives a file room without changing its size, where the file system can.
func allocate(f *os.File, from, room int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, from, room)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return os.NewSyscallError("fallocate", err)
	}
	return nil
}

// giveBack frees the room that a file has beyond its end.
func giveBack(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return f.Truncate(info.Size())
}

// What changes the files when a generation is begun, as tests see it.
const (
	opCreate  = "create"
	opSync    = "sync"
	opRename  = "rename"
	opSyncDir = "sync directory"
	opRemove  = "remove"
)

// step tells a test what is about to be done, and what has been.
func (s *Store) step(op, name string, done bool) {
	if s.steps != nil {
		s.steps(op, name, done)
	}
}

func (s *Store) create(name string) (*os.File, error) {
	f, err := s.dir.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	s.step(opCreate, name, true)
	return f, err
}

func (s *Store) nameSnapshot(from, to string) error {
	err := s.dir.Rename(from, to)
	s.step(opRename, to, true)
	return err
}

func (s *Store) syncDir() error {
	s.step(opSyncDir, "", false)
	err := s.self.Sync()
	s.step(opSyncDir, "", true)
	return err
}

func (s *Store) remove(name string) {
	_ = s.dir.Remove(name) // the next daemon tries again
	s.step(opRemove, name, true)
}
