package fs

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// The templates by which link(2) protocols name their temporary files (A9):
//
//	host-hex.pid…          Python lockfile: host, thread, pid, hash
//	host.pid…              the same with threaded=False
//	host-hex.pid           Python lockfile before 0.10
//	host.hex-pid           before 0.9
//	host-hex-hex.pid       the same in nova, whose threads are green
//	host.pid               both with threaded=False
//	.host_pid_….lck        Ruby's lockfile: pid, program, time, a number
//	host.pid_….lck         before 2.0
//	.lk12345hexhost        liblockfile: pid, time, host
//	_xxx.xxxxxx.host       procmail: pid and time in its own digits, host
//
//	shlock123              shlock: pid
//
// Others begin with the lock name, see [FS.hasLockTemplate].
//
// Builds have names of the same form, app-1.0 among them. So a file is taken for a
// candidate only if its name tells the pid of who makes it, or has more of the form
// than a build's: a lock object may be older than the process that locks with it. And
// digits that are the time of day now tell of a build alone, whatever they begin with. The
// host is that of the caller's UTS namespace, which nobody can ask for.

// mayBeCandidate reports whether a name could be that of somebody's candidate.
func (fs *FS) mayBeCandidate(name string) bool {
	if fs.opts.NoLocking {
		return false
	}
	return hasTemplate(name) || fs.hasLockTemplate(name) || fs.isAddedName(name)
}

// isCandidateName reports whether a file that p makes is a candidate by its name.
func (fs *FS) isCandidateName(name string, p *procid.Process) bool {
	if fs.opts.NoLocking {
		return false
	}
	return isWholeCandidateName(name) || fs.ownCandidateName(name, p) || fs.isAddedName(name)
}

// isWholeCandidateName reports whether a name has all of a template: an address and a
// pid with a hash, the name of this host, or what no build's name begins with.
func isWholeCandidateName(name string) bool {
	if host, thread, digits, ok := cutPythonName(name); ok {
		if isPid(digits) && isThread(thread) && isNovaHost(host) {
			return true
		}
		// A date behind a commit's hash has 8 digits, with the time of day 14. The
		// hash of a path alone has 17 and more, nearly always.
		if len(thread) >= 5 && len(digits) >= 16 {
			return true
		}
		return (len(thread) >= 4 && len(digits) >= 7 || len(digits) >= 16) && isThisHost(host)
	}
	if host, thread, _, ok := cutOldPythonName(name); ok && isThread(thread) && isThisHost(host) {
		return true
	}
	if isLiblockfileName(name) {
		return true
	}
	pid, at, ok := cutProcmailName(name)
	return ok && isThisHost(name[len("_")+len(pid)+len(".")+len(at)+len("."):])
}

func isThisHost(name string) bool {
	here, err := os.Hostname()
	return err == nil && name == here
}

// isAddedName is for the patterns of the mount.
func (fs *FS) isAddedName(name string) bool {
	return fs.names.candidate.has(name)
}

func hasTemplate(name string) bool {
	if strings.IndexByte(name, '.') < 0 { // all but one have one
		return isShlockName(name)
	}
	return isPythonName(name) || isLiblockfileName(name) || isProcmailName(name) || isRubyName(name)
}

// ownCandidateName reports whether a candidate's name says that this very process
// made it, which may see itself under another pid than the daemon does.
func (fs *FS) ownCandidateName(name string, p *procid.Process) bool {
	if p == nil {
		return false
	}
	tells := func(told func(name string, pid int) bool) bool {
		return told(name, p.ID().Pid) || told(name, p.InnerPid())
	}
	return hasTemplate(name) && tells(tellsPid) || fs.hasLockTemplate(name) && tells(fs.lockNameTellsPid)
}

func tellsPid(name string, pid int) bool {
	if pid <= 0 {
		return false
	}
	told := strconv.Itoa(pid)
	if host, thread, digits, ok := cutPythonName(name); ok {
		return tellsPythonPid(host, thread, digits, told)
	}
	if host, thread, digits, ok := cutOldPythonName(name); ok {
		return digits == told && (thread == "" || isThread(thread) || isThisHost(host))
	}
	if digits, ok := cutRubyName(name); ok {
		return digits == told
	}
	if isShlockName(name) {
		return name[len(shlock):] == told
	}
	if isLiblockfileName(name) {
		rest, ok := strings.CutPrefix(name[3:], fmt.Sprintf("%05d", pid))
		return ok && len(rest) > 1 && isHex(rest[:1])
	}
	digits, at, ok := cutProcmailName(name)
	if !ok {
		return false
	}
	// Of what builds make no name tells the time of day as well.
	age := time.Since(time.Unix(fromProcmail(at), 0))
	return fromProcmail(digits) == int64(pid) && age.Abs() < 24*time.Hour
}

// tellsPythonPid: where a namespace makes a small pid, a version may begin with it.
// Then the host says what it is, or else the length of the other two: 32 bits of an
// address, and a hash.
func tellsPythonPid(host, thread, digits, pid string) bool {
	hash, ok := strings.CutPrefix(digits, pid)
	if ok && hash == "" && len(thread) >= 5 { // before 0.10
		return isThread(thread) || isNovaHost(host)
	}
	hash = strings.TrimPrefix(hash, "-")
	if !ok || hash == "" || strings.Trim(hash, "0123456789") != "" {
		return false
	}
	if len(thread) >= 5 && len(hash) >= 8 {
		return true
	}
	return isThisHost(host)
}

func isPythonName(name string) bool {
	if last := name[len(name)-1]; last > '9' || last < '-' {
		return false // as most names are
	}
	_, _, _, ok := cutPythonName(name)
	if !ok {
		_, _, _, ok = cutOldPythonName(name)
	}
	return ok
}

// isNovaHost: nova puts the number of a green thread behind that of the thread.
func isNovaHost(host string) bool {
	if isThisHost(host) {
		return true
	}
	i := strings.LastIndexByte(host, '-')
	return i > 0 && isHex(host[i+1:]) && isThisHost(host[:i])
}

// isThread reports whether hexadecimal digits could be the number of a thread of
// glibc's, or its lower half: an address that 64 divides. Of commits one in 64 could.
func isThread(hex string) bool {
	return len(hex) >= 7 && slices.Contains([]string{"00", "40", "80", "c0"}, hex[len(hex)-2:])
}

// cutOldPythonName is cutPythonName for versions before 0.9. Without a thread it is
// their name only for this host, as it was called when the daemon started: every lookup
// asks.
func cutOldPythonName(name string) (host, thread, pid string, ok bool) {
	i := len(name) - 1
	for i > 0 && name[i] >= '0' && name[i] <= '9' {
		i--
	}
	if i <= 0 || name[i] != '.' && name[i] != '-' || !isPid(name[i+1:]) {
		return "", "", "", false
	}
	if name[i] == '.' {
		return name[:i], "", name[i+1:], name[:i] == startedOn()
	}
	j := strings.LastIndexByte(name[:i], '.')
	if j <= 0 || i-j <= 5 || !isHex(name[j+1:i]) {
		return "", "", "", false
	}
	return name[:j], name[j+1 : i], name[i+1:], true
}

var startedOn = sync.OnceValue(func() string {
	here, _ := os.Hostname()
	return here
})

// isPid reports whether s could be a pid, which is below 1<<22.
func isPid(s string) bool {
	return s != "" && len(s) <= 7 && strings.Trim(s, "0123456789") == "" && s[0] != '0'
}

func isRubyName(name string) bool {
	_, ok := cutRubyName(name)
	return ok
}

// cutRubyName returns the pid. The program's name may hold anything.
func cutRubyName(name string) (pid string, ok bool) {
	rest, ok := strings.CutSuffix(name, ".lck")
	if !ok {
		return "", false
	}
	for range 3 {
		i := strings.LastIndexByte(rest, '_')
		if i < 0 || i+1 == len(rest) || strings.Trim(rest[i+1:], "0123456789") != "" {
			return "", false
		}
		rest = rest[:i]
	}
	host, rest, ok := strings.Cut(rest, "_")
	if strings.HasPrefix(host, ".") {
		pid, _, ok = strings.Cut(rest, "_")
		return pid, ok && len(host) > 1 && isPid(pid)
	}
	i := strings.LastIndexByte(host, '.')
	if !ok || i <= 0 || !isPid(host[i+1:]) {
		return "", false
	}
	return host[i+1:], true
}

const shlock = "shlock"

func isShlockName(name string) bool {
	pid, ok := strings.CutPrefix(name, shlock)
	return ok && isPid(pid)
}

// cutPythonName: the host may hold dots and dashes itself, so the last dash is
// looked for that hexadecimal digits, a dot and a digit follow. Without a thread
// there are more digits than versions have.
func cutPythonName(name string) (host, thread, digits string, ok bool) {
	for i := len(name) - 1; i > 0; i-- {
		if name[i] != '-' {
			continue
		}
		thread, digits, found := strings.Cut(name[i+1:], ".")
		if found && isHex(thread) && digits != "" && isNumber(digits) {
			return name[:i], thread, digits, !isStamp(digits)
		}
	}
	if i := strings.LastIndexByte(name, '.'); i > 0 && len(name)-i > minPythonDigits && isNumber(name[i+1:]) {
		return name[:i], "", name[i+1:], !isStamp(name[i+1:])
	}
	return "", "", "", false
}

// A time that a name tells may be that of a commit, but for one in microseconds or less.
const (
	stampAge     = 366 * 24 * time.Hour
	fineStampAge = 7 * 24 * time.Hour
)

// isStamp reports whether digits are the time at which somebody builds: since the epoch,
// in seconds or a part of them, or as date and time of day, perhaps with such a part. A
// pid may well be how it begins, 17 or 2026, and a hash what is left.
func isStamp(digits string) bool {
	const minute, second, part = "200601021504", "20060102150405", "000000000"
	age := stampAge
	var at time.Time
	var err error
	switch n := len(digits); {
	case strings.IndexByte(digits, '-') >= 0:
		return false
	case n == 10 || n == 13 || n == 16 || n == 19:
		if n > 13 {
			age = fineStampAge
		}
		var ns int64
		ns, err = strconv.ParseInt((digits + part)[:19], 10, 64)
		at = time.Unix(0, ns)
	case n == len(minute):
		at, err = time.Parse(minute, digits)
	case n >= len(second) && n <= len(second+part):
		at, err = time.Parse(second, digits[:len(second)])
	default:
		return false
	}
	return err == nil && time.Since(at).Abs() < age
}

// minPythonDigits is how long a pid with the hash of a path is at least, but for one
// in a thousand million names.
const minPythonDigits = 10

// isNumber accepts a pid with a hash behind it that may have a sign.
func isNumber(s string) bool {
	if s[0] < '0' || s[0] > '9' {
		return false
	}
	return strings.Trim(s, "0123456789-") == "" && strings.Count(s, "-") <= 1
}

func isHex(s string) bool {
	return s != "" && strings.Trim(s, "0123456789abcdef") == ""
}

func isLiblockfileName(name string) bool {
	rest, ok := strings.CutPrefix(name, ".lk")
	return ok && len(rest) > 6 && strings.Trim(rest[:5], "0123456789") == "" && isHex(rest[5:6])
}

func isProcmailName(name string) bool {
	_, _, ok := cutProcmailName(name)
	return ok
}

// procmailDigits are those of procmail, of which the first is the lowest.
const procmailDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

// cutProcmailName returns the digits of the pid, which is below 1<<22, and of the
// time. What is between them counts the names of one second.
func cutProcmailName(name string) (pid, at string, ok bool) {
	rest, ok := strings.CutPrefix(name, "_")
	if !ok {
		return "", "", false
	}
	for n := 1; n <= 4 && len(rest) > n+8; n++ {
		if strings.IndexByte(".,+%", rest[n]) < 0 || rest[n+7] != '.' {
			continue
		}
		pid, at = rest[:n], rest[n+1:n+7]
		if strings.Trim(pid, procmailDigits) == "" && strings.Trim(at, procmailDigits) == "" {
			return pid, at, true
		}
	}
	return "", "", false
}

func fromProcmail(digits string) (n int64) {
	for i := len(digits) - 1; i >= 0; i-- {
		n = n<<6 | int64(strings.IndexByte(procmailDigits, digits[i]))
	}
	return n
}
