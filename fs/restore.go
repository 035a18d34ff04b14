package fs

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// world names where process ids mean what they mean to this daemon: the boot,
// and its pid namespace. Where that cannot be read no record can be judged.
func world() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(boot)) + " " + ns, nil
}

// bootOf returns which boot a world is of.
func bootOf(world string) string {
	boot, _, _ := strings.Cut(world, " ")
	return boot
}

// restore puts back what an earlier daemon recorded (S1): locks of owners that
// live, with their tokens. The owners that died meanwhile are carried out as by
// R4 and R5. It is called before the mount answers; over are the locks that have
// ended otherwise, whose records the caller deletes when it does.
//
// Only what is certain ends a lock. What this daemon cannot read makes it fail,
// and leaves all as it was for the next one.
func (fs *FS) restore(store lockstate.Store, world string) (over []uint64, err error) {
	records := store.Load()
	dead := make(map[procid.ID]procid.Exit)
	for _, token := range slices.Sorted(maps.Keys(records)) {
		if token >= candBase {
			break // no lock
		}
		rec, err := lockstate.ParseRecord(token, records[token])
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNewerState, err)
		}
		l, ok, err := fs.restoreLock(rec, world, dead)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: the lock of %s, token %d: %w", ErrState, plain(string(rec.Path)), token, err)
		case !ok:
			fs.log.Info("lock is over", "dir", string(rec.Path), "token", token)
			over = append(over, token)
		default:
			fs.log.Info("restored", "dir", l.Path, "protocol", l.Protocol, "pid", l.Owner.Pid, "token", l.Token)
		}
	}
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	for id, how := range dead {
		if fs.table.Owns(id) { // else it was carried out with another one
			fs.carryOut(id, how)
		}
	}
	return over, nil
}

// restoreLock puts one lock back. It reports false for one that has ended with
// its directory or its lock file.
func (fs *FS) restoreLock(rec lockstate.Record, world string, dead map[procid.ID]procid.Exit) (l lockstate.Lock, ok bool, err error) {
	path, files, err := fs.recordedPlace(rec)
	if isGone(err) {
		return l, false, nil // R3
	}
	if err != nil {
		return l, false, err
	}
	if rec.Kind == lockstate.Explicit && len(files) == 0 && len(rec.Files) > 0 && !rec.Keys && !rec.Command {
		return l, false, nil // R1
	}
	var owner *procid.Process
	var how procid.Exit
	if rec.World == world {
		if owner, how = fs.alive(rec.Owner), fs.procs.ExitOf(rec.Owner); owner != nil && fs.procs.Process(rec.Owner) == nil {
			owner = procid.Recorded(rec.Owner, rec.UID, rec.Lineage) // in execve(2)
		}
	} else {
		// Nobody survives a boot. Whoever is in a group, session or cgroup of
		// that name now, it is another one; and of what was recorded last, a
		// power cut may have left the half.
		rec.Scope, rec.OnCrash, rec.Sealed = nil, lockstate.Keep, false
	}
	switch {
	case rec.Lease != nil:
		if bootOf(rec.World) != bootOf(world) {
			rec.Lease.Reboot(fs.table.Clock(), time.Now())
			rec.Members = nil
		}
		owner = procid.Recorded(rec.Owner, rec.UID, rec.Lineage) // whether it lives is of no account
	case owner == nil:
		if !how.Known {
			how = procid.Exit{Missed: true} // nobody watched: it may have succeeded, or not (R5, R7)
		}
		dead[rec.Owner] = how
		owner = procid.Recorded(rec.Owner, rec.UID, rec.Lineage)
	default:
		if err := fs.watchLine(owner); err != nil {
			return l, false, err
		}
	}
	l, err = fs.table.Restore(rec, split(path), owner, files)
	return l, err == nil, err
}

// recordedPlace returns where the directory of a record is, and which of its
// lock files are there. What cannot be looked at, on a bad disk perhaps, counts
// as there; where this daemon is short of something, it is an error.
func (fs *FS) recordedPlace(rec lockstate.Record) (path string, files []string, err error) {
	path = string(rec.Path)
	if rec.Move != nil {
		if path, err = fs.movedPlace(path, rec.Move); err != nil {
			return "", nil, err
		}
	}
	for _, f := range rec.Files {
		files = append(files, string(f))
	}
	fd, err := fs.openPath(path)
	if isGone(err) || isShort(err) {
		return "", nil, err
	}
	if err != nil {
		fs.log.Warn("a lock is restored as it was recorded: its directory cannot be looked at", "dir", path, "token", rec.Token, "err", err)
		return path, files, nil
	}
	defer unix.Close(fd)
	for _, f := range slices.Clone(files) {
		var st unix.Statx_t
		err := statAt(fd, f, &st)
		switch {
		case isGone(err):
			files = slices.DeleteFunc(files, func(name string) bool { return name == f })
		case isShort(err):
			return "", nil, err
		case err != nil:
			fs.log.Warn("a lock file counts as there: it cannot be looked at", "dir", path, "file", f, "token", rec.Token, "err", err)
		}
	}
	return path, files, nil
}

// isGone reports whether an error says that there is nothing by that name.
func isGone(err error) bool {
	return err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP
}

// isShort reports whether an error says more about this daemon than about what
// it looked at: the next one may do better.
func isShort(err error) bool {
	return err == unix.EMFILE || err == unix.ENFILE || err == unix.ENOMEM
}

// movedPlace returns where a directory is that was recorded with a path while a
// rename was under way. Both places may exist, before and after. If one of them
// cannot be looked at, it is there unless it is in the other.
func (fs *FS) movedPlace(path string, m *lockstate.Move) (string, error) {
	is := func(dir string) error {
		fd, err := fs.openPath(dir)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		var st unix.Statx_t
		if err := statAt(fd, "", &st); err != nil {
			return err
		}
		// Without the device: another boot may give it another number.
		id := fileID(&st)
		if id.Ino != m.ID.Ino || id.Birth != m.ID.Birth {
			return unix.ENOENT
		}
		return nil
	}
	before := is(m.From(path))
	if before == nil {
		return path, nil
	}
	after := error(unix.ENOENT)
	if m.To != "" {
		if after = is(string(m.To)); after == nil {
			return m.After(), nil
		}
	}
	switch {
	case isShort(before) || isShort(after):
		return "", errors.Join(before, after)
	case !isGone(before) && !isGone(after):
		return "", fmt.Errorf("it is at %s or at %s: %w", plain(path), plain(m.After()), errors.Join(before, after))
	case !isGone(before):
		return path, nil
	case !isGone(after):
		return m.After(), nil
	}
	return "", unix.ENOENT
}
