package transport

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A sysmon is the thread of Go's runtime that takes a P, of which there are GOMAXPROCS,
// from a thread that a system call keeps, for others that need one. It looks every 20 µs,
// and less often only when there was nothing to take for a while. But every 10 ms there
// is: from each thread that serves requests, as these never yield. Where timers are
// expensive, as in a virtual machine, all that was a fifth of the processors' time that
// the daemon took.
//
// So the kernel is asked to wake it late, as long as there is a P for each thread. Only
// root may do so. The zero value does nothing.
type sysmon struct {
	slack string // the file with its timer slack; see proc_pid_timerslack_ns(5)
	calm  bool
	procs int // GOMAXPROCS
}

const (
	slackUsual = 50 * time.Microsecond // the kernel's default
	slackCalm  = 5 * time.Millisecond
	// elsewhere is how many others may be in a system call: those that watch processes,
	// write the state and clear up.
	elsewhere = 3
)

// findSysmon finds the thread: the first one that the runtime has made. Each time that
// it is looked at, it has been woken by who looks, and sleeps for 20 µs.
func findSysmon() (s sysmon) {
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return s
	}
	defer dir.Close()
	tids, err := dir.Readdirnames(2) // in the order in which they were made
	if err != nil || len(tids) < 2 || tids[0] != strconv.Itoa(os.Getpid()) {
		return s
	}
	asleep := strconv.Itoa(unix.SYS_NANOSLEEP) + " "
	for seen, tries := 0, 0; tries < 200; tries++ {
		b, err := os.ReadFile("/proc/self/task/" + tids[1] + "/syscall")
		if err != nil {
			return s
		}
		if strings.HasPrefix(string(b), asleep) {
			if seen++; seen == 3 {
				return sysmon{slack: "/proc/" + tids[1] + "/timerslack_ns", procs: runtime.GOMAXPROCS(0)}
			}
		}
	}
	return s
}

// suit has it rest for longer if there is a P for each of that many threads.
func (s *sysmon) suit(threads int) {
	if s.slack == "" {
		return
	}
	calm := threads+elsewhere <= s.procs
	if s.calm == calm {
		return
	}
	slack := slackUsual
	if calm {
		slack = slackCalm
	}
	if os.WriteFile(s.slack, strconv.AppendInt(nil, int64(slack), 10), 0) != nil {
		s.slack = "" // not root's
		return
	}
	s.calm = calm
}
