package filestore

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The journal is a file of lines that are only ever appended to; a snapshot
// holds what a journal would add up to. Generation N is the snapshot of that
// number and the journal that goes on from it.

const (
	// syncEvery is how long a record may be lost to a power cut.
	syncEvery = time.Second
	// ahead is how much room is allocated before it is needed, in bytes: so a
	// disk that fills up is noticed before a record is cut off.
	ahead = 256 << 10
	// compactAt is the size from which a journal is replaced by a snapshot,
	// in bytes, if less than a quarter of it is still true.
	compactAt = 4 << 20
)

// journal is the part of a [Store] that keeps records.
type journal struct {
	store *Store

	mu      sync.Mutex
	live    map[uint64][]byte // every record, as the lines below add up to
	bytes   int               // size of live
	pending []byte            // lines not written yet
	seq     uint64            // number of the last line
	written uint64            // number of the last change that the kernel has

	// writeMu is held while the files are written. It is taken before mu.
	writeMu   sync.Mutex
	file      *os.File
	gen       uint64
	size      int64 // of file
	allocated int64
	synced    uint64 // number of the last change that is on disk
	failed    error  // why nothing can be written; a new generation ends it
	stale     bool   // the file is an earlier daemon's, for want of room for another
	compactAt int64  // size of file from which it may be replaced by a snapshot
	notify    func(error)

	// syncMu is held while somebody waits for the disk. It is taken before
	// writeMu: who only writes does not wait for it.
	syncMu sync.Mutex

	loaded map[uint64][]byte // protected by mu
	stop   chan struct{}
	done   chan struct{}
}

// Load returns the records that the store held when it was opened, by token;
// after Unload, none.
func (s *Store) Load() map[uint64][]byte {
	j := &s.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.loaded
}

// Unload tells that nobody needs what Load returns any more.
func (s *Store) Unload() {
	j := &s.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	j.loaded = nil
}

// Put keeps the record of a lock: one line of text, which the caller changes no
// more. One that is kept already is not written again.
func (s *Store) Put(token uint64, record []byte) {
	j := &s.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	old, ok := j.live[token]
	if ok && bytes.Equal(old, record) {
		return
	}
	j.bytes += len(record) - len(old)
	j.live[token] = record
	j.seq++
	j.pending = appendLine(j.pending, opPut, token, record)
}

// Delete forgets the record of a lock.
func (s *Store) Delete(token uint64) {
	j := &s.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	old, ok := j.live[token]
	if !ok {
		return
	}
	delete(j.live, token)
	j.bytes -= len(old)
	j.seq++
	j.pending = appendLine(j.pending, opDelete, token, nil)
}

// Flush hands all records to the kernel: from then on they outlive this
// process. Who finds a flush under way shares the next one.
func (s *Store) Flush() error {
	j := &s.journal
	j.mu.Lock()
	want := j.seq
	have := j.written
	j.mu.Unlock()
	if have >= want {
		return nil
	}
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	return j.flushLocked(want)
}

// flushLocked writes what is pending, unless the change wanted is written already.
// The caller holds writeMu.
func (j *journal) flushLocked(want uint64) error {
	j.mu.Lock()
	if j.written >= want {
		j.mu.Unlock()
		return nil
	}
	if j.failed != nil {
		// The next generation is made of live.
		j.pending = j.pending[:0]
		j.mu.Unlock()
		return j.failed
	}
	lines, seq := j.pending, j.seq
	j.pending = nil
	j.mu.Unlock()

	err := j.append(lines)
	if err != nil {
		return j.failLocked(fmt.Errorf("writing the journal: %w", err))
	}
	j.mu.Lock()
	j.written = seq
	if j.pending == nil {
		j.pending = lines[:0]
	}
	j.mu.Unlock()
	return nil
}

func (j *journal) append(lines []byte) error {
	if j.file == nil {
		return ErrClosed
	}
	if need := j.size + int64(len(lines)); need > j.allocated {
		if err := j.makeRoomLocked(need + ahead); err != nil {
			return err
		}
	}
	n, err := j.file.WriteAt(lines, j.size)
	j.size += int64(n)
	return err
}

// makeRoomLocked gives the file room for so many bytes in all. The caller holds
// writeMu.
func (j *journal) makeRoomLocked(room int64) error {
	if room <= j.allocated {
		return nil
	}
	err := unix.Fallocate(int(j.file.Fd()), unix.FALLOC_FL_KEEP_SIZE, j.allocated, room-j.allocated)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return os.NewSyscallError("fallocate", err)
	}
	j.allocated = room
	return nil
}

// failLocked takes note of why nothing can be written. The caller holds writeMu.
func (j *journal) failLocked(err error) error {
	if j.failed == nil {
		j.tell(err)
	}
	j.failed = err
	return err
}

func (j *journal) tell(err error) {
	if j.notify != nil {
		j.notify(err)
	}
}

// Notify has fn called with the reason when records cannot be kept any more,
// and with nil when they can again; at once, if they cannot be now. fn calls no
// method of the store.
func (s *Store) Notify(fn func(error)) {
	j := &s.journal
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	j.notify = fn
	if j.failed != nil {
		j.tell(j.failed)
	}
}

// Sync is Flush, and waits for the disk.
func (s *Store) Sync() error {
	j := &s.journal
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
	file, synced := j.file, j.synced
	j.writeMu.Unlock()
	switch {
	case err != nil:
		return err
	case synced >= want:
		return nil
	case file == nil:
		return ErrClosed
	}
	j.mu.Lock()
	written := j.written
	j.mu.Unlock()

	err = datasync(file)

	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	switch {
	case j.file != file:
		return j.failed // the snapshot of the next generation has it
	case err != nil:
		return j.failLocked(fmt.Errorf("syncing the journal: %w", err))
	}
	j.synced = max(j.synced, written)
	return nil
}

// datasync is fdatasync(2), also of a file that is closed meanwhile.
func datasync(f *os.File) (err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if bad := conn.Control(func(fd uintptr) { err = unix.Fdatasync(int(fd)) }); bad != nil {
		return bad
	}
	return err
}

// Err tells why records cannot be kept at the moment, or nil.
func (s *Store) Err() error {
	j := &s.journal
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	return j.failed
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
		j.mu.Lock()
		seq, live := j.seq, j.bytes
		j.mu.Unlock()

		j.writeMu.Lock()
		full := j.size > j.compactAt && j.size > 4*int64(live)
		renewed := (j.failed != nil || j.stale || full) && j.renewLocked() == nil
		j.writeMu.Unlock()
		if !renewed {
			_ = j.sync(seq) // who must know of it has asked for it
		}
	}
}

// renewLocked begins the next generation, with all that is live. Until it is
// whole, the present one counts, and goes on if that cannot be done. The caller
// holds writeMu: what is put meanwhile waits for the new journal.
func (j *journal) renewLocked() error {
	if j.store.dir == nil {
		return ErrClosed
	}
	j.mu.Lock()
	seq, lines := j.seq, j.pending
	live := maps.Clone(j.live)
	j.pending = nil
	j.mu.Unlock()

	gen := j.gen + 1
	file, err := j.store.begin(gen, live)
	if err != nil {
		j.mu.Lock()
		j.pending = append(lines, j.pending...)
		j.mu.Unlock()
		j.compactAt = max(j.compactAt, 2*j.size) // it costs much to try
		if j.failed != nil || j.file == nil {
			return j.failLocked(err)
		}
		return err
	}
	if j.file != nil {
		j.file.Close()
	}
	j.store.removeGenerations(gen)
	j.file, j.gen, j.size, j.allocated, j.synced = file, gen, 0, 0, seq
	j.stale, j.compactAt = false, compactAt
	if j.failed != nil {
		j.failed = nil
		j.tell(nil)
	}
	j.mu.Lock()
	j.written = max(j.written, seq)
	j.mu.Unlock()
	return nil
}

// extendLocked goes on with the journal of the present generation. The caller
// holds writeMu.
func (j *journal) extendLocked() error {
	file, err := j.store.dir.OpenFile(j.store.journalName(j.gen), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("going on with a journal: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		file.Close()
		return os.NewSyscallError("fstat", err)
	}
	j.file, j.size, j.allocated, j.failed = file, st.Size, max(st.Size, st.Blocks*512), nil
	// What was cut off ends here: it takes no line with it, nor becomes one.
	last := []byte{'\n'}
	if st.Size > 0 {
		_, err = file.ReadAt(last, st.Size-1)
	}
	if err == nil && last[0] != '\n' {
		err = j.append([]byte("~\n"))
	}
	if err != nil {
		file.Close()
		j.file = nil
		return fmt.Errorf("going on with a journal: %w", err)
	}
	return nil
}

// begin writes the snapshot of a generation and makes its journal.
func (s *Store) begin(gen uint64, live map[uint64][]byte) (*os.File, error) {
	journal, snapshot := s.journalName(gen), s.snapshotName(gen)
	file, err := s.dir.OpenFile(journal, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("beginning a journal: %w", err)
	}
	err = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, ahead)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	if err == nil {
		err = s.writeSnapshot(snapshot+".tmp", live)
	}
	if err == nil {
		err = s.dir.Rename(snapshot+".tmp", snapshot)
	}
	if err == nil {
		err = s.syncDir()
	}
	if err != nil {
		file.Close()
		s.dir.Remove(snapshot + ".tmp")
		s.dir.Remove(snapshot)
		s.dir.Remove(journal)
		return nil, fmt.Errorf("writing a snapshot: %w", err)
	}
	return file, nil
}

// writeSnapshot writes a snapshot to the disk.
func (s *Store) writeSnapshot(name string, live map[uint64][]byte) error {
	f, err := s.dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 256<<10)
	w.WriteString(snapshotHeader)
	var line []byte
	for _, token := range slices.Sorted(maps.Keys(live)) {
		line = appendLine(line[:0], opPut, token, live[token])
		w.Write(line)
	}
	w.Write(appendLine(line[:0], opEnd, uint64(len(live)), nil))
	return errors.Join(w.Flush(), f.Sync(), f.Close())
}

// close writes what is left.
func (j *journal) close() error {
	close(j.stop)
	<-j.done
	j.mu.Lock()
	seq := j.seq
	j.mu.Unlock()
	err := j.sync(seq)
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	if err != nil {
		err = j.renewLocked() // perhaps there is room again
	}
	if j.file != nil {
		err = errors.Join(err, j.file.Close())
		j.file = nil
	}
	return err
}
