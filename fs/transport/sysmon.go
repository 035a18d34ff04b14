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
	tid    string // "": not known
	barred bool   // only root may
	calm   bool
	procs  int // GOMAXPROCS

	made  int // threads there were when it was looked last
	looks int // how often those are still to be looked at that it may have made
}

// Values of timer slack, in ns; see proc_pid_timerslack_ns(5).
const (
	slackUsual = "50000" // the kernel's default
	slackCalm  = "5000000"
)

// sysmonTime is after which it is looked for again, or whether it has made threads, if nothing
// else calls for a look.
const sysmonTime = 5 * time.Second

// elsewhere is how many others may be in a system call: those that watch processes,
// write the state and clear up.
const elsewhere = 3

// find looks for the thread, unless it is known: the first one that the runtime has made.
// It has been woken by who looks, and sleeps for a moment again and again; but on a busy
// machine it may wait for its turn for so long that it is not recognized.
func (s *sysmon) find() {
	if s.tid != "" || s.barred {
		return
	}
	tids := threads()
	if len(tids) < 2 || tids[0] != strconv.Itoa(os.Getpid()) {
		return
	}
	const tries, sure = 60, 3
	asleep := strconv.Itoa(unix.SYS_NANOSLEEP) + " "
	for seen, try := 0, 0; try < tries; try++ {
		b, err := os.ReadFile("/proc/self/task/" + tids[1] + "/syscall")
		if err != nil {
			return
		}
		if !strings.HasPrefix(string(b), asleep) {
			pause(100 * time.Microsecond)
		} else if seen++; seen == sure {
			s.tid, s.procs = tids[1], runtime.GOMAXPROCS(0)
			return
		}
	}
}

// threads are the ids of this process's threads, in the order in which they were made.
func threads() []string {
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return nil
	}
	defer dir.Close()
	tids, _ := dir.Readdirnames(-1)
	return tids
}

// suit has it rest for longer if there is a P for each of that many threads.
func (s *sysmon) suit(threads int) {
	if s.tid == "" {
		return
	}
	const looks = 2 // the first may miss one that is just being made
	if calm := threads+elsewhere <= s.procs; calm != s.calm {
		slack := slackUsual
		if calm {
			slack = slackCalm
		}
		if setSlack(s.tid, slack) != nil {
			s.tid, s.barred = "", true
			return
		}
		s.calm, s.looks = calm, looks
	}
	if s.calm { // else those of a crowd, which are many, do not matter
		if made, _ := runtime.ThreadCreateProfile(nil); made != s.made {
			s.made, s.looks = made, looks
		}
	}
	if s.looks > 0 {
		s.looks--
		s.spare()
	}
}

// spare has all others rest no longer than usual: those that it has made do as it does.
func (s *sysmon) spare() {
	for _, tid := range threads() {
		if tid == s.tid {
			continue
		}
		if b, err := os.ReadFile(slackFile(tid)); err == nil && strings.TrimSpace(string(b)) == slackCalm {
			_ = setSlack(tid, slackUsual) // it may be gone
		}
	}
}

// slackFile is not below task.
func slackFile(tid string) string { return "/proc/" + tid + "/timerslack_ns" }

func setSlack(tid, slack string) error { return os.WriteFile(slackFile(tid), []byte(slack), 0) }
