package filestore

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Sync is Flush, and waits for the disk.
func (s *Store) Sync() error { return s.journal.syncAll() }

func (j *journal) syncAll() error {
	j.mu.Lock()
	want := j.seq
	j.mu.Unlock()
	return j.sync(want)
}

// sync makes changes up to the one wanted outlive a power cut. Meanwhile others
// can be written.
func (j *journal) sync(want uint64) error {
	j.syncMu.Lock()
	defer j.syncMu.Unlock()
	j.writeMu.Lock()
	err := j.flushLocked(want)
	files := append(slices.Clone(j.behind), j.file)
	synced := j.synced
	mark := journalMark{j.gen, j.size}
	j.mu.Lock()
	written := j.written
	j.mu.Unlock()
	j.writeMu.Unlock()
	switch {
	case err != nil:
		return err
	case synced >= want:
		return nil
	case files[len(files)-1] == nil:
		return ErrClosed
	}
	for _, f := range files {
		err = errors.Join(err, j.store.datasync(f))
	}
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if err != nil {
		return j.failLocked(fmt.Errorf("syncing the journal: %w", err))
	}
	for _, f := range j.behind[:len(files)-1] {
		f.Close()
	}
	j.behind = j.behind[len(files)-1:]
	j.synced = max(j.synced, written)
	j.onDisk = mark
	return nil
}

// datasync is fdatasync(2).
func (s *Store) datasync(f *os.File) error {
	s.step(opSync, f.Name(), false)
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if bad := conn.Control(func(fd uintptr) { err = unix.Fdatasync(int(fd)) }); bad != nil {
		return bad
	}
	s.step(opSync, f.Name(), true)
	return err
}

// tend keeps the journal on disk, and small, until the store is closed.
func (j *journal) tend() {
	defer close(j.done)
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case <-j.stop:
			return
		case <-tick.C:
		}
		j.store.lookForFiles()
		if !j.due() || j.renew(j.stop) != nil {
			_ = j.syncAll() // who must know of it has asked for it
		}
		j.noteMark()
	}
}

// due reports whether a snapshot is to be made.
func (j *journal) due() bool {
	j.mu.Lock()
	live := j.bytes
	j.mu.Unlock()
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if j.failed != nil || j.stale {
		return true
	}
	return time.Now().After(j.notBefore) && (j.gen > j.base || j.size > compactAt && j.size > 4*int64(live))
}
