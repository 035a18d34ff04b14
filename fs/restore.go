package fs

import (
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
// and its pid namespace.
func world() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	ns, _ := os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(boot)) + " " + ns
}

// bootOf returns which boot a world is of.
func bootOf(world string) string {
	boot, _, _ := strings.Cut(world, " ")
	return boot
}

// restore puts back what an earlier daemon recorded (S1): locks of owners that
// live, with their tokens. The owners that died meanwhile are carried out as by
// R4 and R5. It is called before the mount answers.
func (fs *FS) restore(store lockstate.Store, world string) (warnings []string) {
	records := store.Load()
	dead := make(map[procid.ID]procid.Exit)
	for _, token := range slices.Sorted(maps.Keys(records)) {
		if token >= candBase {
			break // no lock
		}
		rec, err := lockstate.ParseRecord(token, records[token])
		var l lockstate.Lock
		if err == nil {
			var ok bool
			if l, ok, err = fs.restoreLock(rec, world, dead); err == nil && !ok {
				fs.log.Info("lock is over", "dir", string(rec.Path), "token", token)
			}
		}
		switch {
		case err != nil:
			fs.log.Error("cannot restore a lock", "token", token, "err", err, "record", string(records[token]))
			warnings = append(warnings, "cannot restore a lock: "+err.Error())
			store.Delete(token)
		case l.Token == 0:
			store.Delete(token)
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
	return warnings
}

// restoreLock puts one lock back. It reports false for one that has ended with
// its directory or its lock file.
func (fs *FS) restoreLock(rec lockstate.Record, world string, dead map[procid.ID]procid.Exit) (l lockstate.Lock, ok bool, err error) {
	path, files, err := fs.recordedPlace(rec)
	if err != nil {
		return l, false, nil // R3
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
// lock files are there.
func (fs *FS) recordedPlace(rec lockstate.Record) (path string, files []string, err error) {
	path = string(rec.Path)
	if rec.Move != nil {
		if path, err = fs.movedPlace(path, rec.Move); err != nil {
			return "", nil, err
		}
	}
	fd, err := fs.openPath(path)
	if err != nil {
		return "", nil, err
	}
	defer unix.Close(fd)
	for _, f := range rec.Files {
		var st unix.Statx_t
		if statAt(fd, string(f), &st) == nil {
			files = append(files, string(f))
		}
	}
	return path, files, nil
}

// movedPlace returns where a directory is that was recorded with a path while a
// rename was under way. Both places may exist, before and after.
func (fs *FS) movedPlace(path string, m *lockstate.Move) (string, error) {
	is := func(dir string) bool {
		fd, err := fs.openPath(dir)
		if err != nil {
			return false
		}
		defer unix.Close(fd)
		var st unix.Statx_t
		if statAt(fd, "", &st) != nil {
			return false
		}
		// Without the device: another boot may give it another number.
		id := fileID(&st)
		return id.Ino == m.ID.Ino && id.Birth == m.ID.Birth
	}
	switch {
	case is(m.From(path)):
		return path, nil
	case m.To != "" && is(string(m.To)):
		return m.After(), nil
	}
	return "", unix.ENOENT
}
