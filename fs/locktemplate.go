package fs

import (
	"fmt"
	"strconv"
	"strings"
)

// Temporary files whose names begin with that of the lock file, or of what that locks:
//
//	LOCK|host|pid|n            flufl.lock
//	LOCK.host.pid.n            Mailman
//	LOCK.host.hextime.hexpid   exim
//	LOCK.pid                   scripts, by $$
//	FILE.host.pid              mutt, whose LOCK is FILE.lock
//	FILE.tmp.n.pid.n           Perl's File::NFSLock, whose LOCK is FILE.NFSLock
//
// Such a file is a candidate if it tells the pid of who makes it.

// lockedSuffixes are what LOCK has and FILE has not.
var lockedSuffixes = []string{".lock", ".NFSLock"}

// lockedNames are the names FILE of those of lock files.
func lockedNames(lock []string) (files []string) {
	for _, l := range lock {
		for _, suffix := range lockedSuffixes {
			if file, ok := strings.CutSuffix(l, suffix); ok && file != "" {
				files = append(files, file)
			}
		}
	}
	return files
}

// hasLockTemplate reports whether a name is of one of these forms. Every lookup asks:
// most names do not end in a number.
func (fs *FS) hasLockTemplate(name string) bool {
	return fs.everyLockTemplate(name, func(string) bool { return true })
}

// lockNameTellsPid is tellsPid for these.
func (fs *FS) lockNameTellsPid(name string, pid int) bool {
	if pid <= 0 {
		return false
	}
	return fs.everyLockTemplate(name, func(told string) bool {
		return told == strconv.Itoa(pid) || len(told) == 8 && told == fmt.Sprintf("%08x", pid)
	})
}

// everyLockTemplate reports whether one of the forms fits a name, with a pid of which is
// says so.
func (fs *FS) everyLockTemplate(name string, is func(pid string) bool) bool {
	rest, last, sep := cutToken(name)
	if last == "" {
		return false
	}
	before, pid, at := cutToken(rest)
	switch {
	case sep == '|':
		return at == '|' && isPid(pid) && is(pid) && strings.LastIndexByte(before, '|') > 0 &&
			fs.names.lock.has(before[:strings.LastIndexByte(before, '|')])
	case isPid(last) && is(last) && (fs.beginsWithLock(rest) || fs.isLockedHere(rest)):
		return true
	case len(last) == 8 && len(pid) == 8 && is(last) && fs.beginsWithLock(before):
		return true
	}
	if !isPid(pid) || at != '.' || !is(pid) {
		return false
	}
	if fs.beginsWithLock(before) {
		return true
	}
	before, n, _ := cutToken(before)
	file, ok := strings.CutSuffix(before, ".tmp")
	return ok && len(last) <= 4 && n != "" && len(n) <= 4 && fs.names.locked.has(file)
}

// cutToken cuts off what stands behind the last separator, if that is a number, be it
// hexadecimal.
func cutToken(name string) (before, token string, sep byte) {
	i := len(name) - 1
	for i >= 0 && (name[i] >= '0' && name[i] <= '9' || name[i] >= 'a' && name[i] <= 'f') {
		i--
	}
	if i <= 0 || i == len(name)-1 || name[i] != '.' && name[i] != '|' {
		return name, "", 0
	}
	return name[:i], name[i+1:], name[i]
}

// beginsWithLock reports whether a name is a lock file's, or begins with one and a dot.
func (fs *FS) beginsWithLock(name string) bool {
	for i := 0; i <= len(name); i++ {
		if (i == len(name) || name[i] == '.') && fs.names.lock.has(name[:i]) {
			return true
		}
	}
	return false
}

// isLockedHere reports whether a name is FILE.host. The host may lack its domain.
func (fs *FS) isLockedHere(name string) bool {
	here := startedOn()
	short, _, _ := strings.Cut(here, ".")
	for _, host := range []string{here, short} {
		file, ok := strings.CutSuffix(name, host)
		if file, dot := strings.CutSuffix(file, "."); ok && dot && fs.names.locked.has(file) {
			return true
		}
	}
	return false
}

// mayBeLog reports whether a candidate is called as a program's log could be: host.pid or
// FILE.host.pid. Those who link such a file write nothing into it: it is a candidate only
// as long as it is empty.
func (fs *FS) mayBeLog(name string) bool {
	rest, last, sep := cutToken(name)
	return sep == '.' && isPid(last) && !fs.beginsWithLock(rest) && (rest == startedOn() || fs.isLockedHere(rest))
}
