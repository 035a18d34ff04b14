//go:build linux

package procid

import (
	"bytes"
	"fmt"
	"iter"
	"strconv"

	"golang.org/x/sys/unix"
)

// A stat is what this package needs of /proc/PID/stat, see proc(5).
type stat struct {
	state byte
	ppid  int
	start uint64 // field 22
	code  int    // field 52, a wait status; 0 also where the reader may not know
}

// A status is what this package needs of /proc/TID/status.
type status struct {
	name    string
	state   byte
	tgid    int
	euid    uint32
	threads int
	nsPid   int // in the innermost pid namespace
}

// procPath returns /proc/pid/name.
func procPath(pid int, name string) string {
	b := make([]byte, 0, 48)
	b = append(b, "/proc/"...)
	b = strconv.AppendInt(b, int64(pid), 10)
	b = append(b, '/')
	return string(append(b, name...))
}

// readProc reads at most len(buf) bytes of /proc/pid/name.
func readProc(pid int, name string, buf []byte) ([]byte, error) {
	fd, err := openProc(procPath(pid, name))
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for n < len(buf) {
		m, err := unix.Read(fd, buf[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if m == 0 {
			break
		}
		n += m
		if buf[n-1] == '\n' && m < len(buf)-(n-m) { // /proc hands out a small file whole: save the call that says so
			break
		}
	}
	return buf[:n], nil
}

func openProc(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err == unix.ENOENT {
			err = unix.ESRCH // one word for "gone"
		}
		return fd, err
	}
}

func readStat(pid int) (stat, error) {
	return readStatFile(pid, "stat")
}

// readLeaderStat is readStat for those who need no exit status. The kernel adds
// up all threads of a process for its own file; the first thread's has the same
// parent and start time.
func readLeaderStat(pid int) (stat, error) {
	return readStatFile(pid, "task/"+strconv.Itoa(pid)+"/stat")
}

// StartOf returns when a process started, in clock ticks after boot, as in proc(5).
// It waits for one that is in execve(2).
func StartOf(pid int) (uint64, error) {
	st, err := readLeaderStat(pid)
	return st.start, err
}

func readStatFile(pid int, name string) (stat, error) {
	var buf [1024]byte
	b, err := readProc(pid, name, buf[:])
	if err != nil {
		return stat{}, err
	}
	return parseStat(b)
}

// StatFields yields the fields of a line of /proc/PID/stat after the name, with
// their numbers in proc_pid_stat(5): the first is 3, the state. The name is the
// process's to choose, spaces, newlines and parentheses included: only what comes
// after the last ')' can be trusted.
func StatFields(line []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		end := bytes.LastIndexByte(line, ')')
		if end < 0 {
			return
		}
		number := 3
		for f := range bytes.FieldsSeq(line[end+1:]) {
			if !yield(number, f) {
				return
			}
			number++
		}
	}
}

// StatField returns one field of a line of /proc/PID/stat, see [StatFields], or ""
// if there is none of that number.
func StatField(line []byte, number int) string {
	for n, f := range StatFields(line) {
		if n == number {
			return string(f)
		}
	}
	return ""
}

// parseStat reads a line of /proc/PID/stat.
func parseStat(b []byte) (stat, error) {
	var st stat
	last := 0
	for number, f := range StatFields(b) {
		var err error
		switch last = number; number {
		case 3:
			st.state = f[0]
		case 4:
			st.ppid, err = strconv.Atoi(string(f))
		case 22:
			st.start, err = strconv.ParseUint(string(f), 10, 64)
		case 52:
			st.code, err = strconv.Atoi(string(f))
		}
		if err != nil {
			return stat{}, fmt.Errorf("malformed stat line %.80q", b)
		}
	}
	if last < 52 {
		return stat{}, fmt.Errorf("malformed stat line %.80q", b)
	}
	return st, nil
}

func readStatus(tid int) (status, error) {
	var buf [4096]byte
	b, err := readProc(tid, "status", buf[:])
	if err != nil {
		return status{}, err
	}
	return parseStatus(b)
}

// parseStatus reads /proc/TID/status. The kernel escapes newlines in the name,
// so no line can be forged.
func parseStatus(b []byte) (status, error) {
	st := status{tgid: -1, nsPid: -1}
	var err error
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		fields := bytes.Fields(value)
		if len(fields) == 0 {
			continue
		}
		switch string(key) {
		case "Name":
			st.name = string(bytes.TrimSpace(value))
		case "State":
			st.state = fields[0][0]
		case "Tgid":
			st.tgid, err = strconv.Atoi(string(fields[0]))
		case "Uid":
			if len(fields) < 2 {
				return status{}, fmt.Errorf("malformed status line %.80q", line)
			}
			var uid uint64
			uid, err = strconv.ParseUint(string(fields[1]), 10, 32)
			st.euid = uint32(uid)
		case "Threads":
			st.threads, err = strconv.Atoi(string(fields[0]))
		case "NSpid":
			st.nsPid, err = strconv.Atoi(string(fields[len(fields)-1]))
		}
		if err != nil {
			return status{}, fmt.Errorf("malformed status line %.80q", line)
		}
	}
	if st.tgid <= 0 {
		return status{}, fmt.Errorf("no Tgid in %.80q", b)
	}
	return st, nil
}
