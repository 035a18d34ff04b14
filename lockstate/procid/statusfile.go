//go:build linux

package procid

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// InitNamespace is what the link /proc/PID/ns/pid reads in the first PID namespace, whose
// inode number is fixed (PROC_PID_INIT_INO), see pid_namespaces(7).
const InitNamespace = "pid:[4026531836]"

// A Status is the text of /proc/TID/status, see proc_pid_status(5), for those who
// want more of it than this package does.
type Status string

// ReadStatus reads that of a process or thread, also while it is in execve(2).
func ReadStatus(tid int) (Status, error) {
	b, err := os.ReadFile(procPath(tid, "status"))
	return Status(b), err
}

// Field returns what a line says, "" if there is none: several words have tabs or
// blanks in between. The kernel escapes newlines in the name of the program, so no
// line can be forged.
func (s Status) Field(name string) string {
	for line := range strings.Lines(string(s)) {
		if value, ok := strings.CutPrefix(line, name); ok && strings.HasPrefix(value, ":") {
			return strings.TrimSpace(value[1:])
		}
	}
	return ""
}

// NoID stands for a user or a group that is not known. Nobody has it: chown(2).
const NoID = ^uint32(0)

// FSIDs returns the user and the group by which file systems decide what a thread may do,
// see credentials(7). Both are NoID if they are not known, or if the thread is the
// kernel's own, which may act for anybody.
func (s Status) FSIDs() (uid, gid uint32) {
	uid, known := s.fsID("Uid")
	gid, known2 := s.fsID("Gid")
	if !known || !known2 || s.Field("Kthread") == "1" {
		return NoID, NoID
	}
	return uid, gid
}

// fsID returns the last number of four: real, effective, saved and file system ID.
func (s Status) fsID(name string) (id uint32, known bool) {
	ids := strings.Fields(s.Field(name))
	if len(ids) != 4 {
		return 0, false
	}
	n, err := strconv.ParseUint(ids[3], 10, 32)
	return uint32(n), err == nil
}

// FSIDs reads those of a thread.
func FSIDs(tid uint32) (uid, gid uint32) {
	if tid == 0 {
		return NoID, NoID
	}
	s, _ := ReadStatus(int(tid))
	return s.FSIDs()
}

// WaitsAt returns the function of the kernel in which a thread waits, see wchan in
// proc_pid_wchan(5); "" where that is not known, or it does not wait. It waits for nobody.
func WaitsAt(tid int) string {
	var buf [128]byte
	b, err := readProc(tid, "wchan", buf[:])
	if err != nil || string(b) == "0" {
		return ""
	}
	return string(b)
}

// CallOf returns the number and the arguments of the system call in which a thread waits, as
// proc_pid_syscall(5) has them; none where they are not known, or if it does not wait within a
// time. It waits longer for one that is in execve(2) alone.
func CallOf(tid int, within time.Duration) []string {
	for end := time.Now().Add(within); ; time.Sleep(50 * time.Microsecond) {
		var buf [256]byte
		b, err := readProc(tid, "syscall", buf[:])
		call := strings.Fields(string(b))
		switch {
		case err != nil || len(call) == 0:
			return nil
		case call[0] != "running":
			return call
		case !time.Now().Before(end):
			return nil
		}
	}
}

// RunTime returns how long a thread has had the processor, see /proc/PID/schedstat in the
// kernel's documentation (sched-stats). It waits for nobody. ok is false where that is
// not known.
func RunTime(tid int) (ran time.Duration, ok bool) {
	var buf [128]byte
	b, err := readProc(tid, "schedstat", buf[:])
	if err != nil {
		return 0, false
	}
	first, _, _ := strings.Cut(string(b), " ")
	ns, err := strconv.ParseInt(first, 10, 64)
	return time.Duration(ns), err == nil
}

// HasMemory reports whether a process or thread has memory: one that ends gives it
// up before its descriptors. It waits for nobody, and takes a quarter of the time of
// [ReadStatus]. known is false if there is no such thread any more.
func HasMemory(tid int) (has, known bool) {
	has, err := hasMemory(tid)
	return has, err == nil
}

func hasMemory(tid int) (has bool, err error) {
	var buf [128]byte
	b, err := readProc(tid, "statm", buf[:])
	if err == nil && len(b) == 0 {
		err = unix.ESRCH
	}
	return err == nil && b[0] != '0', err
}
