package fs

import (
	"bytes"
	"errors"
	"strconv"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// maxCommand bounds a line written to ctl, in bytes.
const maxCommand = 8 << 10

// command carries out what is written to the ctl file, a command a line. The
// write fails with the errno of the first that does.
func (fs *FS) command(h *fuse.InHeader, data []byte) fuse.Status {
	for line := range bytes.Lines(data) {
		if len(line) > maxCommand {
			return fuse.Status(unix.E2BIG)
		}
		s := strings.TrimSuffix(string(line), "\n")
		if strings.TrimSpace(s) == "" {
			continue
		}
		if status := fs.commandLine(h, s); status != fuse.OK {
			return status
		}
	}
	return fuse.OK
}

func (fs *FS) commandLine(h *fuse.InHeader, line string) fuse.Status {
	verb, rest, _ := strings.Cut(line, " ")
	if verb == "check" && rest == "" {
		return fs.check(h)
	}
	dir, why, err := cutDir(strings.TrimLeft(rest, " "))
	if err != nil {
		return fuse.EINVAL
	}
	switch verb {
	case "release":
		if why != "" {
			return fuse.EINVAL
		}
		return fs.releaseDir(h, dir)
	case "break":
		return fs.breakDir(h, dir, why)
	}
	return fuse.EINVAL
}

// check verifies the tables' invariants, for an admin: it stops them for a
// moment. EIO says that one does not hold; the log says which.
func (fs *FS) check(h *fuse.InHeader) fuse.Status {
	if h.Uid != 0 && h.Uid != fs.uid {
		return fuse.EPERM
	}
	if err := errors.Join(fs.table.Check(), fs.advisory.Check()); err != nil {
		fs.log.Error("the tables are damaged", "err", err)
		return fuse.EIO
	}
	return fuse.OK
}

var errBadPath = errors.New("not a path beneath the mount")

// cutDir takes the directory off the front of s: a word, or a Go string.
func cutDir(s string) (dir, rest string, err error) {
	if strings.HasPrefix(s, `"`) {
		q, err := strconv.QuotedPrefix(s)
		if err != nil {
			return "", "", err
		}
		if dir, err = strconv.Unquote(q); err != nil {
			return "", "", err
		}
		rest = strings.TrimSpace(s[len(q):])
	} else {
		dir, rest, _ = strings.Cut(s, " ")
		for _, c := range []byte(s) {
			if c < ' ' || c == 0x7f {
				return "", "", errBadPath
			}
		}
	}
	dir = strings.TrimSuffix(dir, "/")
	if dir == "" || strings.ContainsRune(dir, 0) || strings.HasPrefix(dir, "/") {
		return "", "", errBadPath
	}
	for _, name := range strings.Split(dir, "/") {
		if name == "" || name == ".." || name == "." && dir != "." || len(name) > 255 {
			return "", "", errBadPath
		}
	}
	return dir, strings.TrimSpace(rest), nil
}

// releaseDir ends the lock on a directory for a holder of it (R6). The lock
// files that keep it are removed.
func (fs *FS) releaseDir(h *fuse.InHeader, dir string) fuse.Status {
	d, ok := fs.table.Find(split(dir)...)
	if !ok {
		return fuse.ENOENT
	}
	defer fs.table.Forget(d)
	fs.reapOn(d)
	locks := fs.table.On(d)
	if len(locks) == 0 {
		return fuse.ENOENT
	}
	if p := fs.process(h); p == nil || !fs.table.Holds(p, d) {
		return fuse.EPERM
	}
	return fs.endLock(locks[len(locks)-1], lockstate.Given)
}

// breakDir ends all locks on a directory for an admin (R6), or removes its
// orphaned lock files (S3).
func (fs *FS) breakDir(h *fuse.InHeader, dir, why string) fuse.Status {
	if h.Uid != 0 && h.Uid != fs.uid {
		return fuse.EPERM
	}
	found := false
	if d, ok := fs.table.Find(split(dir)...); ok {
		defer fs.table.Forget(d)
		for _, l := range fs.table.On(d) {
			found = true
			fs.log.Warn("lock broken", "dir", l.Path, "pid", l.Owner.Pid, "token", l.Token, "by", h.Uid, "why", why)
			if status := fs.endLock(l, lockstate.Broken); status != fuse.OK {
				return status
			}
		}
	}
	for _, o := range fs.orphans.in(fs, dir) {
		found = true
		fs.log.Warn("orphaned lock file removed", "dir", dir, "file", o, "by", h.Uid, "why", why)
		err := fs.discard(o, func() (string, bool) { return dir, fs.isOrphan(dir, o) })
		if err != nil {
			return statusOf(err)
		}
	}
	if !found {
		return fuse.ENOENT
	}
	return fuse.OK
}

func (fs *FS) endLock(l lockstate.Lock, why lockstate.Reason) fuse.Status {
	fs.endKeys(l)
	if err := fs.cleanUp(l); err != nil {
		return statusOf(err)
	}
	if _, err := fs.table.End(l.Token, why); err != nil {
		return statusOf(err)
	}
	fs.unwatch(l.Owner)
	return fuse.OK
}
