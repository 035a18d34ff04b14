package fs

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
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

// A restoring puts back what an earlier daemon has recorded (S1). It is done
// before the mount answers.
//
// Only what is certain ends a lock. What this daemon cannot read makes it fail,
// and leaves all as it was for the next one.
type restoring struct {
	fs    *FS
	world string
	// covered: since the daemon died that recorded it, its dead mount has kept
	// everybody away. Else anything may have happened to the backing.
	covered bool
	owners  map[procid.ID]*recordedOwner
	dead    map[procid.ID]procid.Exit // owners that died meanwhile
	near    neighbours
	log     *burst
}

// A recordedOwner is who has a lock in the records. That it lives is looked at
// once: whoever dies meanwhile is carried out when all its locks are there.
type recordedOwner struct {
	proc    *procid.Process // nil: it is dead
	how     procid.Exit
	watched bool
}

// restore puts back locks of owners that live, with their tokens. The owners that
// died meanwhile are carried out as by R4 and R5. over are the records that the
// caller deletes when the mount answers: of locks that have ended otherwise, and
// of holders that are dead.
func (fs *FS) restore(store lockstate.Store, world string, covered bool) (over []uint64, err error) {
	x := &restoring{
		fs: fs, world: world, covered: covered,
		owners: make(map[procid.ID]*recordedOwner), dead: make(map[procid.ID]procid.Exit), near: neighbours{root: fs.back.root},
		log: newBurst(fs.log),
	}
	defer x.log.done()
	defer x.near.close()
	// The news of a death waits until all locks of the dead are there.
	fs.reapMu.Lock()
	defer fs.reapMu.Unlock()
	records := store.Load()
	locks := make([]storedRecord, 0, len(records))
	for number, data := range records {
		if number < lockstate.MemberBase {
			locks = append(locks, storedRecord{number, data})
		}
	}
	slices.SortFunc(locks, func(a, b storedRecord) int { return cmp.Compare(a.token, b.token) })
	here := make([]uint64, 0, len(locks)) // locks whose holders these processes may be, in order
	for s := range fs.lookAhead(locks) {
		if s.bad != nil {
			return nil, fmt.Errorf("%w: %w", ErrNewerState, s.bad)
		}
		l, ok, err := x.lock(*s)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: the lock of %s, token %d: %w", ErrState, plain(string(s.rec.Path)), s.token, err)
		case !ok:
			x.log.tell(slog.LevelInfo, "lock is over", "dir", string(s.rec.Path), "token", s.token)
			over = append(over, s.token)
		default:
			x.log.tell(slog.LevelInfo, "restored", "dir", l.Path, "protocol", l.Protocol, "pid", l.Owner.Pid, "token", l.Token)
			if s.rec.World == world {
				here = append(here, s.token)
			}
		}
	}
	for number, data := range records {
		if number < lockstate.MemberBase || number >= lockstate.MemberEnd {
			continue
		}
		m, err := lockstate.ParseMember(number, data)
		_, lives := slices.BinarySearch(here, m.Token)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: %w", ErrNewerState, err)
		case lives && fs.procs.Alive(m.Member):
			fs.table.KnowMember(number, m)
		default:
			over = append(over, number)
		}
	}
	fs.tidyMade(x.log)
	for id, how := range x.dead {
		if fs.table.Owns(id) { // else it was carried out with another one
			fs.carryOut(id, how)
		}
	}
	return over, nil
}

// lock puts one lock back. It reports false for one that has ended with its
// directory or its lock file.
func (x *restoring) lock(s readRecord) (l lockstate.Lock, ok bool, err error) {
	fs, rec := x.fs, s.rec
	who := new(recordedOwner)
	if rec.World == x.world && rec.Lease == nil { // whether a client's process lives is of no account
		who = x.owner(&rec)
	}
	var files []string
	path, err := x.place(&rec, &s)
	if err == nil {
		files, err = x.files(&rec, path, who.proc != nil || rec.Lease != nil)
	}
	if isGone(err) {
		return l, false, nil // R3
	}
	if err != nil {
		return l, false, err
	}
	if rec.Kind == lockstate.Explicit && len(files) == 0 && len(rec.Files) > 0 && !rec.Keys && !rec.Command && !rec.Sealed {
		return l, false, nil // R1
	}
	if who.proc != nil {
		rec.Sealed = false // a holder was giving it back, and was not told that it is over
	}
	if rec.World != x.world {
		// Nobody survives a boot. Whoever is in a group, session or cgroup of
		// that name now, it is another one; and of what was recorded last, a
		// power cut may have left the half.
		rec.Scope, rec.OnCrash, rec.Sealed = nil, lockstate.Keep, false
	}
	if !x.covered {
		rec.Fresh, rec.Foreign = false, nil // others may have put something there
	}
	switch {
	case rec.Lease != nil:
		if bootOf(rec.World) != bootOf(x.world) {
			l := *rec.Lease // s.rec stays as it is kept
			l.Reboot(fs.table.Clock(), time.Now())
			rec.Lease = &l
			rec.Members = nil
		}
	case who.proc == nil:
		if !who.how.Known {
			who.how = procid.Exit{Missed: true} // nobody watched: it may have succeeded, or not (R5, R7)
		}
		if who.how.Success() && !who.watched {
			// Who inherits may be dead, too, and known to have succeeded.
			if err := fs.watchLine(procid.Recorded(rec.Owner, rec.UID, rec.Lineage)); err != nil {
				return l, false, err
			}
			who.watched = true
		}
		x.dead[rec.Owner] = who.how
	case !who.watched:
		if err := fs.watchLine(who.proc); err != nil {
			return l, false, err
		}
		who.watched = true
	}
	owner := who.proc
	if owner == nil {
		owner = procid.Recorded(rec.Owner, rec.UID, rec.Lineage)
	}
	l, err = fs.table.Restore(rec, &s.rec, split(path), owner, files)
	if err == nil && l.Crashed && x.covered {
		x.recall(l)
	}
	return l, err == nil, err
}

// recall goes on with what a killed daemon was clearing away.
func (x *restoring) recall(l lockstate.Lock) {
	if is, err := x.fs.recallMade(l.Token); err != nil {
		x.log.tell(slog.LevelWarn, "content that was being cleared away is kept in part: what was noted of it cannot be read", "dir", l.Path, "token", l.Token, "err", err)
	} else if is {
		x.log.tell(slog.LevelInfo, "content is cleared away further", "dir", l.Path, "token", l.Token)
	}
}

// owner returns the owner of a record of this world.
func (x *restoring) owner(rec *lockstate.Record) *recordedOwner {
	who := x.owners[rec.Owner]
	if who == nil {
		fs := x.fs
		who = &recordedOwner{proc: fs.alive(rec.Owner), how: fs.procs.ExitOf(rec.Owner)}
		if who.proc != nil && fs.procs.Process(rec.Owner) == nil {
			who.proc = procid.Recorded(rec.Owner, rec.UID, rec.Lineage) // in execve(2)
		}
		x.owners[rec.Owner] = who
	}
	return who
}

// place returns where the directory of a record is now, and notes in the record
// what the backing calls it. What cannot be looked at, on a bad disk perhaps,
// counts as there; where this daemon is short of something, it is an error.
func (x *restoring) place(rec *lockstate.Record, s *readRecord) (path string, err error) {
	fs := x.fs
	path = string(rec.Path)
	is, err := s.inode, s.err
	if rec.Move != nil {
		if path, err = fs.movedPlace(path, rec.Move); err != nil {
			return "", err
		}
		var st unix.Statx_t
		st, err = x.near.stat(path)
		is = fs.inodeOf(&st)
	}
	renumbered := x.covered && fs.nodes.reborn // see isReborn
	if err == nil && rec.Inode != (lockstate.Inode{}) && !rec.Inode.Is(is) && !renumbered {
		err = unix.ENOENT // what is there now is another one
	}
	if isGone(err) && !x.covered && rec.Inode != (lockstate.Inode{}) {
		was := path
		if path, err = x.renamed(was, rec.Inode); err == nil {
			x.log.tell(slog.LevelWarn, "the directory of a lock was renamed while it was not mounted", "dir", was, "now", path, "token", rec.Token)
			return path, nil
		}
		if isGone(err) {
			x.log.tell(slog.LevelWarn, "the directory of a lock was removed or replaced while it was not mounted", "dir", was, "token", rec.Token, "pid", rec.Owner.Pid)
		}
		return "", err
	}
	switch {
	case isGone(err) || procid.IsShort(err):
		return "", err
	case err != nil:
		x.log.tell(slog.LevelWarn, "a lock is restored as it was recorded: its directory cannot be looked at", "dir", path, "token", rec.Token, "err", err)
	default:
		rec.Inode = is
	}
	return path, nil
}

// renamed looks for a directory beside the place where it was.
func (x *restoring) renamed(path string, is lockstate.Inode) (string, error) {
	parent, _ := cutLast(path)
	fd, err := x.fs.openPath(parent)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var found string
	var bad error
	err = eachEntry(fd, func(e dirEntry) bool {
		if e.ino != is.Ino {
			return true
		}
		var st unix.Statx_t
		switch bad = statAt(fd, e.name, &st); {
		case bad == nil && is.Is(x.fs.inodeOf(&st)) && isDirectory(&st):
			found = strings.Clone(e.name)
			return false
		case isGone(bad):
			bad = nil
		}
		return bad == nil
	})
	switch {
	case found != "":
		return join(parent, found), nil
	case bad != nil:
		return "", bad
	case err != nil:
		return "", err
	}
	return "", unix.ENOENT
}

// files returns which lock files of a record are there, and notes in the record
// what the backing calls them. Where anybody could have made them meanwhile, only
// those count that were recorded; of those of which that is not known, only those
// whose owner lives.
func (x *restoring) files(rec *lockstate.Record, path string, lives bool) (files []string, err error) {
	if len(rec.Files) == 0 {
		return nil, nil
	}
	inodes := make([]lockstate.Inode, len(rec.Files))
	fd, err := x.near.open(path)
	if isGone(err) || procid.IsShort(err) {
		return nil, err
	}
	if err == nil {
		defer unix.Close(fd)
	}
	for i, f := range rec.Files {
		var st unix.Statx_t
		was := rec.InodeOf(string(f))
		inodes[i] = was
		if err == nil {
			bad := statAt(fd, string(f), &st)
			switch {
			case isGone(bad):
				continue
			case procid.IsShort(bad):
				return nil, bad
			case bad != nil:
				x.log.tell(slog.LevelWarn, "a lock file counts as there: it cannot be looked at", "dir", path, "file", string(f), "token", rec.Token, "err", bad)
			case !x.covered && (was == lockstate.Inode{} && !lives || was != lockstate.Inode{} && !was.Is(x.fs.inodeOf(&st))):
				x.log.tell(slog.LevelWarn, "a lock file is left alone: it may have been made by somebody else while it was not mounted", "dir", path, "file", string(f), "token", rec.Token, "pid", rec.Owner.Pid)
				continue
			default:
				inodes[i] = x.fs.inodeOf(&st)
			}
		}
		files = append(files, string(f))
	}
	rec.Inodes = inodes
	return files, nil
}

// isGone reports whether an error says that there is nothing by that name.
func isGone(err error) bool {
	return err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP
}

// movedPlace returns where a directory is that was recorded with a path while a
// rename was under way. Both places may exist, before and after. If one of them
// cannot be looked at, it is there unless it is in the other.
func (fs *FS) movedPlace(path string, m *lockstate.Move) (string, error) {
	is := func(dir string) error {
		var st unix.Statx_t
		err := fs.statIn(dir, "", &st)
		if err == nil && (lockstate.Inode{Ino: m.ID.Ino, Birth: m.ID.Birth}) != fs.inodeOf(&st) {
			err = unix.ENOENT
		}
		return err
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
	case procid.IsShort(before) || procid.IsShort(after):
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
