package fs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// quarantined lists what was put aside, oldest first. What cannot be read is
// listed with its number alone.
func (fs *FS) quarantined() ([]lockstate.Quarantined, error) {
	fd, err := fs.openHidden(quarantineDir, false)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var all []lockstate.Quarantined
	err = eachEntry(fd, func(e dirEntry) bool {
		if mayHaveContent(fd, e.name) { // else it is being put there
			all = append(all, readAbout(fd, e.name))
		}
		return true
	})
	slices.SortFunc(all, func(a, b lockstate.Quarantined) int { return a.Time.Compare(b.Time) })
	return all, err
}

// mayHaveContent reports whether something may have been put aside: also if that
// cannot be found out.
func mayHaveContent(quarantine int, id string) bool {
	fd, err := openAt(quarantine, id, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err != unix.ENOENT && err != unix.ENOTDIR
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	return statAt(fd, contentName, &st) != unix.ENOENT
}

// readAbout returns what is written about something in quarantine, or at least
// when it came there.
func readAbout(quarantine int, id string) (q lockstate.Quarantined) {
	if fd, err := openAt(quarantine, id, unix.O_RDONLY|unix.O_DIRECTORY, 0); err == nil {
		q = aboutOf(readAll(fd, aboutFile))
		if q.Time.IsZero() {
			buf := make([]byte, maxAbout)
			if n, err := unix.Fgetxattr(fd, aboutAttr, buf); err == nil {
				q = aboutOf(buf[:n], nil)
			}
		}
		var st unix.Statx_t
		if q.Time.IsZero() && statAt(fd, "", &st) == nil {
			q.Time = time.Unix(st.Ctime.Sec, int64(st.Ctime.Nsec)).UTC()
		}
		unix.Close(fd)
	}
	q.ID = id
	return q
}

func aboutOf(text []byte, err error) (q lockstate.Quarantined) {
	if err != nil || json.Unmarshal(text, &q) != nil {
		return lockstate.Quarantined{}
	}
	return q
}

// maxAbout is how large a description may be.
const maxAbout = 64 << 10

func readAll(dir int, name string) ([]byte, error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxAbout))
}

// showQuarantine lists what was put aside, a line of JSON each.
func (fs *FS) showQuarantine() []byte {
	var b bytes.Buffer
	all, err := fs.quarantined()
	for _, q := range all {
		b.Write(encode(q))
	}
	if err != nil {
		fs.log.Warn("cannot list all that is in quarantine", "err", err)
	}
	return b.Bytes()
}

// restoreTime bounds how long a restore waits for what may just have been closed.
const restoreTime = 500 * time.Millisecond

// restore puts back what was put aside: `restore DIR id=N`. DIR must not be
// there if the directory itself was put aside; else what is missing in it is put
// back, and nothing is replaced.
func (c *command) restore() fuse.Status {
	if !c.admin() {
		return c.notAdmin()
	}
	fs := c.fs
	x := &puttingBack{r: &request{fs: fs, cancel: c.cancel, header: c.header, op: "restore", at: c.dir}}
	try := func() error { return c.putBack(x) }
	var closing time.Time
	status := fs.attempt(x.r, true, try)
	for x.isOpen && more(&closing, restoreTime) && sleep(c.cancel, time.Millisecond) {
		status = fs.attempt(x.r, true, try) // the kernel lets go a moment after close(2)
	}
	if x.touched != nil {
		fs.notifyDir(x.touched)
		fs.forgetNames()
	}
	fs.hiddenMu.Lock()
	fs.tidyHidden()
	fs.hiddenMu.Unlock()
	if status == fuse.OK {
		fs.log.Info("restored from quarantine", "dir", c.dir, "id", c.id, "by", c.by(), "uid", c.uid)
	} else {
		c.answer.Message = x.message
	}
	return status
}

// A puttingBack is what a try to put something back has found out.
type puttingBack struct {
	r       *request
	touched *node  // the directory that it comes into, if the kernel knows that
	message string // what is in the way
	isOpen  bool   // that is a descriptor or a mapping
}

// putBack is one try of restore.
func (c *command) putBack(x *puttingBack) error {
	fs := c.fs
	x.isOpen = false
	fs.hiddenMu.Lock()
	defer fs.hiddenMu.Unlock()
	quarantine, err := fs.openHidden(quarantineDir, false)
	if err != nil {
		return err
	}
	defer unix.Close(quarantine)
	from, err := openAt(quarantine, c.id, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	parent, name := cutLast(c.dir)
	var to int
	if to, x.touched, err = fs.openKnown(parent); err != nil {
		return err
	}
	defer unix.Close(to)
	d := fs.table.At(split(c.dir)...)
	defer fs.table.Forget(d)
	up := fs.table.At(split(parent)...)
	defer fs.table.Forget(up)
	op, err := x.r.admit(lockstate.Change{Dirs: []*lockstate.Dir{up, d}, Trees: []*lockstate.Dir{d}, Free: true})
	if err != nil {
		return err
	}
	defer op.End()
	w, err := newMerging(&fs.back, from, to)
	if err != nil {
		return err
	}
	defer w.close()
	if inTheWay, err := w.conflict(contentName, name); err != nil {
		return err
	} else if inTheWay != "" {
		x.message = inTheWay + " is in the way"
		return unix.EEXIST
	}
	open, lockFiles, err := fs.detachNodes(from, contentName, name)
	if err != nil {
		return err
	}
	if open != "" {
		x.message, x.isOpen = open+" is still open for writing, or mapped", true
		return unix.EBUSY
	}
	fs.table.Mixed(d) // before: a daemon that dies in between lost nothing
	if err := w.merge(contentName, name); err != nil {
		if err == unix.EXDEV {
			x.message = join(parent, strings.TrimSuffix(w.to.path(""), "/")) + " is on another file system"
		}
		return err
	}
	for _, f := range lockFiles {
		dir, name := cutLast(join(parent, f))
		fs.orphans.add(orphanAt{dir, name})
	}
	if err := removeEmpty(quarantine, c.id); err != nil {
		fs.log.Warn("cannot remove what is left in quarantine", "id", c.id, "err", err)
	}
	return nil
}

// discardQuarantined deletes something that was put aside, or all from a directory or
// beneath it that is older than so long: `discard . id=N` or `discard DIR older=0s`.
// Where something is from that is not known, it is from the root alone.
func (c *command) discardQuarantined() fuse.Status {
	if !c.admin() {
		return c.notAdmin()
	}
	fs := c.fs
	fs.hiddenMu.Lock()
	defer fs.hiddenMu.Unlock()
	from, err := fs.openHidden(quarantineDir, false)
	if err == unix.ENOENT && c.id == "" {
		return fuse.OK
	}
	if err != nil {
		return statusOf(err)
	}
	defer unix.Close(from)
	trash, err := fs.openHidden(trashDir, true)
	if err != nil {
		return statusOf(err)
	}
	defer unix.Close(trash)
	n := 0
	all, err := fs.quarantined()
	for _, q := range all {
		// What seems to come from the future was put there before the clock was set back.
		old := c.older == 0 || !q.Time.IsZero() && time.Since(q.Time) >= c.older
		here := c.dir == "." || within(string(q.Dir), c.dir)
		if c.id != "" && q.ID != c.id || c.id == "" && !(old && here) {
			continue
		}
		if fs.filling[quarantineDir+"/"+q.ID] { // more is to come
			if c.id != "" {
				return fuse.EBUSY
			}
			continue
		}
		if e := unix.Renameat2(from, q.ID, trash, "q"+q.ID, unix.RENAME_NOREPLACE); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", q.ID, e))
			continue
		}
		n++
		fs.log.Info("quarantine discarded", "id", q.ID, "dir", string(q.Dir), "by", c.by(), "uid", c.uid)
	}
	fs.clearings.Go(fs.emptyTrash)
	switch {
	case err != nil:
		return c.fail(err)
	case n == 0 && c.id != "":
		return fuse.ENOENT
	}
	return fuse.OK
}

// badID says whether text cannot be the number of something put aside.
func badID(id string) bool {
	return id == "" || len(id) > 64 || strings.Trim(id, "0123456789-") != "" || id[0] == '-'
}
