//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// Whoever asks a daemon that is stopped waits for it, and over io_uring not even
// SIGKILL ends that: a process could not exit that has a thread in there. So what
// must end in any case has a child ask, which is left behind if need be.

// envAsk makes this program that child. Its value is the mountpoint; behind a
// leading "?", which no absolute path has, the tables are to be verified, too.
const envAsk = "STAGEFS_ASK"

// answerTime is how long a daemon may take to answer.
const answerTime = 2 * time.Second

// errSilent: a daemon does not answer.
var errSilent = errors.New("does not answer")

// ask returns what the mount at path answers within a time: nil, an errno, or
// errSilent.
func ask(path string, check bool, within time.Duration) error {
	q, err := askMount(path, check)
	if err != nil {
		return err
	}
	defer q.leave()
	return q.answer(within)
}

// A question is a child that asks a mount.
type question struct {
	cmd   *exec.Cmd
	reply *os.File
	over  bool
}

func askMount(path string, check bool) (*question, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	if check {
		path = "?" + path
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "stagefs"
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), envAsk+"="+path)
	cmd.Stdout = w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // who waits for our group does not wait for it
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return nil, err
	}
	return &question{cmd: cmd, reply: r}, nil
}

// answer waits for the answer, for so long. After errSilent it can be called again.
func (q *question) answer(within time.Duration) error {
	q.reply.SetReadDeadline(time.Now().Add(within))
	answer := make([]byte, 16)
	n, err := q.reply.Read(answer)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errSilent
	}
	q.over = true
	q.cmd.Wait()
	errno, err := strconv.Atoi(string(answer[:n]))
	if err != nil || errno == 0 {
		return nil // a child that fails says nothing of the mount
	}
	return syscall.Errno(errno)
}

// leave lets go of the child, whether it has an answer or not.
func (q *question) leave() {
	q.reply.Close()
	if !q.over {
		q.cmd.Process.Kill()
		q.cmd.Process.Release()
	}
}

// answerAsked is what the child does.
func (c *command) answerAsked(path string) int {
	closeInherited(nil)
	path, check := strings.CutPrefix(path, "?")
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if err == nil && check {
		err = checkTables(path)
	}
	var errno syscall.Errno
	errors.As(err, &errno)
	fmt.Fprint(c.out, int(errno))
	return exitOK
}

// closeInherited closes what was open already when this program began, but for
// the standard descriptors, and those that an argument names, as bash's >(…) does.
// What Go opens is closed by exec(2).
func closeInherited(args []string) {
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, e := range fds {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 || slices.ContainsFunc(args, func(a string) bool { return namesDescriptor(a, e.Name()) }) {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

// namesDescriptor tells whether an argument has a path by way of a descriptor.
func namesDescriptor(arg, fd string) bool {
	return strings.Contains(arg+"/", "/dev/fd/"+fd+"/") || strings.Contains(arg+"/", "/proc/self/fd/"+fd+"/")
}

// together calls look for each of all at once, or for some at a time if they are many: each
// may have to wait for a daemon that does not answer.
func together[T, R any](all []T, look func(T) R) (seen []R) {
	const most = 16
	for some := range slices.Chunk(all, most) {
		var looks sync.WaitGroup
		at := len(seen)
		seen = append(seen, make([]R, len(some))...)
		for i, of := range some {
			looks.Go(func() { seen[at+i] = look(of) })
		}
		looks.Wait()
	}
	return seen
}

// awake makes sure that the daemons answer whose mounts a path leads into. A path
// that leads into none is for others to judge.
func awake(path string, within time.Duration) (err error) {
	fs.LeadsThrough(path, func(mount *fs.MountEntry, _ bool) bool {
		err = answers(mount, within)
		return err == nil
	})
	return err
}

// answers makes sure that a daemon answers, or is dead, which others tell.
func answers(mount *fs.MountEntry, within time.Duration) error {
	if errors.Is(ask(mount.Path, false, within), errSilent) {
		return exitf(exitUnavailable, "%s", silence(mount))
	}
	return nil
}

// notStopped waits until the daemons answer whose mounts a path leads into, however
// long it takes, unless one is stopped or dying: nobody would know what he waits for.
func notStopped(path string) (err error) {
	fs.LeadsThrough(path, func(mount *fs.MountEntry, _ bool) bool {
		err = goesOn(mount)
		return err == nil
	})
	return err
}

// goesOn is notStopped for one mount.
func goesOn(mount *fs.MountEntry) error {
	q, err := askMount(mount.Path, false)
	if err != nil {
		return nil // as good as an answer: who asks the mount itself hears what is wrong
	}
	defer q.leave()
	for {
		err := q.answer(answerTime)
		if !noAnswer(err) {
			return nil
		}
		if pid := suspect(mount); pid != 0 && (stopped(pid) || dying(pid)) {
			return exitf(exitUnavailable, "%s", silence(mount))
		}
		if err != errSilent {
			return nil
		}
	}
}

// silence says whose daemon does not answer, and what can be done.
func silence(mount *fs.MountEntry) string {
	pid := suspect(mount)
	if pid == 0 {
		return fmt.Sprintf("the daemon of %s does not answer", quote(mount.Path))
	}
	text := fmt.Sprintf("the daemon of %s, process %d, does not answer", quote(mount.Path), pid)
	if how := halt(pid); how != "" {
		return text + ": " + how
	}
	if dying(pid) {
		return text + ": it was killed, and cannot end; help it, as root, with: stagefs umount " + shellWord(mount.Path)
	}
	return text + fmt.Sprintf("; if it hangs, end it with: kill -9 %d, and mount again", pid)
}

// daemonOf returns the process that serves a mount: the one that has its connection
// open. It is 0 where that can't be seen. The kernel uses the number of a connection again
// when its mount is gone, though its daemon may not have ended: so of several it is the one
// that was started last, and one that is dying counts if there is no other.
func daemonOf(mount *fs.MountEntry) int {
	type daemon struct {
		pid, start int
		dies       bool
	}
	connection := mount.Connection()
	var mu sync.Mutex // a look that took too long may still be under way
	var last daemon
	findProcess(func(proc string) bool {
		if !slices.Contains(connections(proc), connection) {
			return false
		}
		var d daemon
		d.pid, _ = strconv.Atoi(filepath.Base(proc))
		stat, _ := os.ReadFile(proc + "/stat")
		d.start, _ = strconv.Atoi(procid.StatField(stat, statStart))
		d.dies = dying(d.pid)
		mu.Lock()
		defer mu.Unlock()
		if last.pid == 0 || last.dies && !d.dies || last.dies == d.dies && last.start < d.start {
			last = d
		}
		return false
	})
	mu.Lock()
	defer mu.Unlock()
	return last.pid
}

// connections returns the kernel's numbers of the FUSE connections that a process has
// open (proc_pid_fdinfo(5)), also if its first thread has ended, but not another.
func connections(proc string) (numbers []string) {
	threads := []string{proc}
	if stat, _ := os.ReadFile(proc + "/stat"); procid.StatField(stat, statState) == "Z" {
		threads, _ = filepath.Glob(proc + "/task/[0-9]*")
	}
	for _, thread := range threads {
		fds, _ := os.ReadDir(thread + "/fd")
		for _, fd := range fds {
			link := thread + "/fd/" + fd.Name()
			if file, err := os.Readlink(link); err != nil || file != "/dev/fuse" {
				continue
			}
			if number, ok := fs.DescriptorInfo(link)["fuse_connection"]; ok {
				numbers = append(numbers, number)
			}
		}
		if len(fds) > 0 {
			break // all have the same
		}
	}
	return numbers
}

// findProcess returns a process for which is reports true, or 0. proc is its
// directory in /proc. A look that takes longer than insideTime counts as false: what
// /proc tells of a process in execve(2) may have to wait for a daemon that is stopped.
func findProcess(is func(proc string) bool) (pid int) {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	within := insideTime
	for _, proc := range procs {
		found, inTime := procid.Within(within, func() bool { return is(proc) })
		if found {
			pid, _ = strconv.Atoi(filepath.Base(proc))
			return pid
		}
		if !inTime {
			within = lessTime(within)
		}
	}
	return 0
}

// suspect is daemonOf for a daemon that does not answer. Who may not see what
// another's daemon has open finds one by its command line, if it is stopped or dying:
// one that has the directory's or the mount's whole path there, or else, if it can't be
// seen what it has open, its last part.
func suspect(mount *fs.MountEntry) int {
	if pid := daemonOf(mount); pid != 0 {
		return pid
	}
	likely := 0
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range procs {
		pid, _ := strconv.Atoi(filepath.Base(proc))
		status, _ := procid.ReadStatus(pid)
		uid, _, _ := strings.Cut(status.Field("Uid"), "\t")
		if uid != strconv.Itoa(mountedBy(mount)) || !strings.HasPrefix(status.Field("Name"), "stagefs") {
			continue
		}
		if !stopped(pid) && !dying(pid) {
			continue
		}
		args, _ := procid.Within(insideTime, func() []string { return commandLine(proc) })
		switch has := func(is func(string) bool) bool { return slices.ContainsFunc(args, is) }; {
		case !slices.Contains(args, "mount"):
		case has(func(a string) bool { return a == mount.Source || a == mount.Path }):
			return pid
		case likely == 0 && hidden(proc) && has(func(a string) bool { return filepath.Base(a) == filepath.Base(mount.Source) }):
			likely = pid
		}
	}
	return likely
}

// hidden reports whether it can't be seen what a process has open.
func hidden(proc string) bool {
	seen, _ := procid.Within(insideTime, func() bool {
		_, err := os.ReadDir(proc + "/fd")
		return err == nil
	})
	return !seen
}

// commandLine returns that of a process, also if its first thread has ended, but not
// another. It waits as long as the process has its memory locked.
func commandLine(proc string) []string {
	line, _ := os.ReadFile(proc + "/cmdline")
	if len(line) == 0 {
		threads, _ := filepath.Glob(proc + "/task/[0-9]*")
		for i := 0; i < len(threads) && len(line) == 0; i++ {
			line, _ = os.ReadFile(threads[i] + "/cmdline")
		}
	}
	return strings.Split(string(line), "\x00")
}

// Fields of /proc/PID/stat, see proc_pid_stat(5).
const (
	statState   = 3
	statFlags   = 9
	statStart   = 22
	statPending = 31
)

// stopped reports whether a process was stopped, by a signal or with its cgroup.
func stopped(pid int) bool { return halt(pid) != "" }

// halt says what keeps a process from running, and how it goes on, or "".
func halt(pid int) string {
	stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if procid.StatField(stat, statState) == "T" {
		return fmt.Sprintf("it is stopped; continue it with: kill -CONT %d", pid)
	}
	if file, thaw := fs.Frozen(pid); file != "" {
		return fmt.Sprintf("it is frozen, as with docker pause; thaw it with: echo %s >%s", thaw, shellWord(file))
	}
	return ""
}
