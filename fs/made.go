package fs

import (
	"bufio"
	"encoding/gob"
	"errors"
	"io"
	"log/slog"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// What was made under a lock in a directory that was there before is known in memory
// alone. So it is written down before any of it is moved aside: a daemon that is killed
// must not leave the half of it (R7). Each file in madeDir says whether all was made but the
// things that follow, or these alone.

// writeMade writes down what was made under the lock. No power cut is thought of: after
// a boot nothing is cleared away.
func (c *clearing) writeMade() error {
	if c.spoils.IsRecorded() {
		return nil
	}
	name := strconv.FormatUint(c.spoils.Lock.Token, 10)
	fd := -1
	err := c.fs.inMade(true, func(dir int) (err error) {
		fd, err = openAt(dir, name+".new", unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	w := bufio.NewWriter(f)
	enc := gob.NewEncoder(w)
	err = enc.Encode(c.spoils.Fresh)
	for id := range c.spoils.Known() {
		if err == nil {
			err = enc.Encode(id)
		}
	}
	err = errors.Join(err, w.Flush(), f.Close())
	return c.fs.inMade(false, func(dir int) error {
		if err == nil {
			err = unix.Renameat(dir, name+".new", dir, name)
		}
		if err != nil {
			unix.Unlinkat(dir, name+".new", 0)
		}
		return err
	})
}

// removeMade removes what writeMade has written, when the lock is over.
func (c *clearing) removeMade() {
	_ = c.fs.inMade(false, func(dir int) error {
		return unix.Unlinkat(dir, strconv.FormatUint(c.spoils.Lock.Token, 10), 0)
	})
}

// inMade calls f with madeDir, which is there only while something is in it.
func (fs *FS) inMade(make bool, f func(dir int) error) error {
	fs.hiddenMu.Lock()
	defer fs.hiddenMu.Unlock()
	dir, err := fs.openHidden(madeDir, make)
	if err != nil {
		return err
	}
	err = f(dir)
	unix.Close(dir)
	fs.tidyHidden()
	return err
}

// recallMade tells the table what a killed daemon has written down of what was made under
// a lock, and reports whether that one has.
func (fs *FS) recallMade(token uint64) (is bool, err error) {
	err = fs.inMade(false, func(dir int) error {
		fd, err := openAt(dir, strconv.FormatUint(token, 10), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), madeDir)
		defer f.Close()
		fresh, known, err := readMade(bufio.NewReader(f))
		if err == nil {
			fs.table.RecallContent(token, fresh, known)
			is = true
		}
		return err
	})
	if err == unix.ENOENT {
		err = nil
	}
	return is, err
}

func readMade(r io.Reader) (fresh bool, known []lockstate.FileID, err error) {
	dec := gob.NewDecoder(r)
	err = dec.Decode(&fresh)
	for err == nil {
		var id lockstate.FileID
		if err = dec.Decode(&id); err == nil {
			known = append(known, id)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return fresh, known, err
}

// tidyMade removes what was written down for locks that are no more.
func (fs *FS) tidyMade(log *burst) {
	err := fs.inMade(false, func(dir int) error {
		names, err := entryNames(dir)
		for _, n := range names {
			if token, bad := strconv.ParseUint(n, 10, 64); bad != nil || !fs.table.HasToken(token) {
				err = errors.Join(err, unix.Unlinkat(dir, n, 0))
			}
		}
		return err
	})
	if err != nil && err != unix.ENOENT && !errors.Is(err, errForeignHidden) {
		log.tell(slog.LevelWarn, "cannot remove what was noted of content that was being cleared away", "err", err)
	}
}
