package fs

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// isCandidateName reports whether a name fits one of the templates by which
// link(2) protocols name their temporary files (A9):
//
//	host-hex.pid…          Python lockfile: host, thread, pid, hash
//	.lk12345hexhost        liblockfile: pid, time, host
//	_xxx.xxxxxx.host       procmail: time and pid in its own digits, host
func (fs *FS) isCandidateName(name string) bool {
	if fs.opts.NoLocking {
		return false
	}
	return isPythonName(name) || isLiblockfileName(name) || isProcmailName(name) ||
		len(fs.opts.Candidates) > 0 && fs.matches(fs.opts.Candidates, name)
}

// isPythonName: the host may hold dots and dashes itself, so the last dash is
// looked for that hexadecimal digits, a dot and a digit follow.
func isPythonName(name string) bool {
	_, _, ok := cutPythonName(name)
	return ok
}

func cutPythonName(name string) (host, pid string, ok bool) {
	for i := len(name) - 1; i > 0; i-- {
		if name[i] != '-' {
			continue
		}
		thread, rest, found := strings.Cut(name[i+1:], ".")
		if found && isHex(thread) && rest != "" && isNumber(rest) {
			return name[:i], rest, true
		}
	}
	return "", "", false
}

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

// isProcmailName: the pid takes one digit or more.
func isProcmailName(name string) bool {
	_, ok := cutProcmailName(name)
	return ok
}

func cutProcmailName(name string) (host string, ok bool) {
	rest, ok := strings.CutPrefix(name, "_")
	if !ok {
		return "", false
	}
	for pid := 1; pid <= 6 && len(rest) > pid+8; pid++ {
		if strings.IndexByte(".,+", rest[pid]) >= 0 && rest[pid+7] == '.' {
			return rest[pid+8:], true
		}
	}
	return "", false
}

// ownCandidateName reports whether a candidate's name says that this very
// process, on this host, made it.
func ownCandidateName(name string, pid int) bool {
	host, err := os.Hostname()
	if err != nil {
		return false
	}
	if h, digits, ok := cutPythonName(name); ok {
		return h == host && strings.HasPrefix(digits, strconv.Itoa(pid))
	}
	if isLiblockfileName(name) {
		return strings.HasPrefix(name[3:], fmt.Sprintf("%05d", pid)) && strings.HasSuffix(name, host)
	}
	h, ok := cutProcmailName(name)
	return ok && h == host
}
