package filestore

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The journal is a file of lines that are only ever appended to; a snapshot
// holds what a journal would add up to. Generation N is the snapshot of that
// number and the journal that goes on from it. While the snapshot of the last
// one is not there yet, the generations before it count as well (compact.go).

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
	gen       uint64     // of file
	base      uint64     // of the last snapshot
	behind    []*os.File // journals since then, but for file, that may not be on disk
	size      int64      // of file
	allocated int64
	synced    uint64      // number of the last change that is on disk
	onDisk    journalMark // likewise
	noted     journalMark // what is written down of that
	failed    error       // why a restart would not find all; a new snapshot ends it
	broken    bool        // file takes no lines any more
	removed   bool        // the state directory, with all that is in it
	snapshot  os.FileInfo // of base, if it is known
	stale     bool        // the file is an earlier daemon's, for want of room for another
	notBefore time.Time   // when a snapshot may be tried again that is not urgent
	notify    func(error)

	// syncMu is held while somebody waits for the disk to have the journal. It is
	// taken before writeMu: who only writes does not wait for it.
	syncMu sync.Mutex

	loaded map[uint64][]byte // protected by mu
	shared bool              // likewise: loaded is live, and must stay as it is
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
	j.loaded, j.shared = nil, false
}

// changeLocked is called before live is changed. The caller holds mu.
func (j *journal) changeLocked() {
	if j.shared {
		j.live, j.shared = maps.Clone(j.live), false
	}
}

// Put keeps the record of a lock: one line of text, which it copies. One that is
// kept already is not written again.
func (s *Store) Put(token uint64, record []byte) {
	j := &s.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	old, ok := j.live[token]
	if ok && bytes.Equal(old, record) {
		return
	}
	j.changeLocked()
	j.bytes += len(record) - len(old)
	j.live[token] = bytes.Clone(record)
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
	j.changeLocked()
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
	written := j.written
	j.mu.Unlock()
	if written >= want {
		return nil
	}
	seq, err := j.writeLocked()
	if err != nil || j.failed != nil {
		return j.failed
	}
	j.mu.Lock()
	j.written = seq
	j.mu.Unlock()
	return nil
}

// writeLocked appends what is pending to the journal, up to the change that it
// returns. The caller holds writeMu.
func (j *journal) writeLocked() (seq uint64, err error) {
	j.mu.Lock()
	if j.broken {
		// The next snapshot is made of live.
		j.pending = j.pending[:0]
		j.mu.Unlock()
		return 0, j.failed
	}
	lines, seq := j.pending, j.seq
	j.pending = nil
	j.mu.Unlock()

	err = j.append(lines)
	if err != nil {
		return 0, j.failLocked(fmt.Errorf("writing the journal: %w", err))
	}
	j.mu.Lock()
	if j.pending == nil {
		j.pending = lines[:0]
	}
	j.mu.Unlock()
	return seq, nil
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
	if err != nil { // the part of a line that had room would pass for a crash's
		n = bytes.LastIndexByte(lines[:n], '\n') + 1
		_ = j.file.Truncate(j.size + int64(n))
	}
	j.size += int64(n)
	return err
}

// makeRoomLocked gives the file room for so many bytes in all. The caller holds
// writeMu.
func (j *journal) makeRoomLocked(room int64) error {
	if room <= j.allocated {
		return nil
	}
	if err := allocate(j.file, j.allocated, room-j.allocated); err != nil {
		return err
	}
	j.allocated = room
	return nil
}

// failLocked takes note of why the journal cannot be written. The caller holds
// writeMu.
func (j *journal) failLocked(err error) error {
	err = j.store.named(err)
	j.broken = true
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

// Err tells why records cannot be kept at the moment, or nil.
func (s *Store) Err() error {
	j := &s.journal
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	return j.failed
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
	j.file, j.size, j.allocated = file, st.Size, max(st.Size, st.Blocks*512)
	j.failed, j.broken = nil, false
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

// close writes what is left. The caller holds Store.mu.
func (j *journal) close() error {
	close(j.stop)
	<-j.done
	j.store.lookForFilesLocked()
	err := j.syncAll()
	if err != nil || j.store.Err() != nil {
		err = j.renew(nil) // perhaps there is room again
	}
	j.noteMark()
	j.syncMu.Lock()
	defer j.syncMu.Unlock()
	j.writeMu.Lock()
	defer j.writeMu.Unlock()
	for _, f := range j.behind {
		f.Close()
	}
	j.behind = nil
	if j.file != nil {
		err = errors.Join(err, j.file.Close())
		j.file = nil
	}
	return err
}
