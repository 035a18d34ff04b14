//go:build linux

package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hands carries out an agent's commands: system calls by their own names, with
// file descriptors and mappings kept under names that the test chooses.
type hands struct {
	fds  map[string]int
	maps map[string][]byte

	client clientHands
	killed chan error // see killAfter
	flying []int
}

// do runs one command; the names of all of them are its cases.
func (h *hands) do(w []string) (out string, err error) {
	for len(w) < 6 {
		w = append(w, "")
	}
	fd := func(name string) int {
		if n, ok := h.fds[name]; ok {
			return n
		}
		return -1
	}
	switch w[0] {
	case "mkdir":
		return "", unix.Mkdir(w[1], number(w[2], 0o777))
	case "mknod": // mknod PATH fifo|sock|file|chr
		kind := map[string]uint32{"fifo": unix.S_IFIFO, "sock": unix.S_IFSOCK, "file": unix.S_IFREG, "chr": unix.S_IFCHR}[w[2]]
		return "", unix.Mknod(w[1], kind|0o666, 0)
	case "symlink":
		return "", unix.Symlink(w[1], w[2])
	case "link":
		return "", unix.Link(w[1], w[2])
	case "linkseen": // linkseen OLD NEW N: while so many threads look at the old name; they are done then
		return "", linkSeen(w[1], w[2], int(number(w[3], 1)))
	case "unlink":
		return "", unix.Unlink(w[1])
	case "rmdir":
		return "", unix.Rmdir(w[1])
	case "rename": // rename OLD NEW [noreplace|exchange|whiteout]
		flags := map[string]uint{"": 0, "noreplace": unix.RENAME_NOREPLACE, "exchange": unix.RENAME_EXCHANGE, "whiteout": unix.RENAME_WHITEOUT}[w[3]]
		return "", unix.Renameat2(unix.AT_FDCWD, w[1], unix.AT_FDCWD, w[2], flags)
	case "truncate":
		return "", unix.Truncate(w[1], int64(number(w[2], 0)))
	case "chmod":
		return "", unix.Chmod(w[1], number(w[2], 0))
	case "chown":
		return "", unix.Lchown(w[1], int(number(w[2], 0)), int(number(w[3], 0)))
	case "utimens": // utimens PATH [SECONDS], now without
		var at []unix.Timespec
		if w[2] != "" {
			ts := unix.Timespec{Sec: int64(number(w[2], 0))}
			at = []unix.Timespec{ts, ts}
		} else {
			at = []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
		}
		return "", unix.UtimesNanoAt(unix.AT_FDCWD, w[1], at, unix.AT_SYMLINK_NOFOLLOW)
	case "setxattr":
		return "", unix.Lsetxattr(w[1], w[2], []byte(w[3]), 0)
	case "getxattr":
		buf := make([]byte, 1024)
		n, err := unix.Lgetxattr(w[1], w[2], buf)
		return string(buf[:max(n, 0)]), err
	case "removexattr":
		return "", unix.Lremovexattr(w[1], w[2])
	case "setfacl": // setfacl PATH [default]
		kind := "system.posix_acl_" + map[string]string{"": "access", "default": "default"}[w[2]]
		return "", unix.Lsetxattr(w[1], kind, accessACL(), 0)
	case "setflags":
		return "", setFlags(w[1])
	case "stat":
		return describe(w[1])
	case "read":
		b, err := os.ReadFile(w[1])
		return string(b), err
	case "readdir":
		entries, err := os.ReadDir(w[1])
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " "), err

	case "open": // open NAME PATH FLAGS [MODE]
		n, err := unix.Open(w[2], openFlags(w[3])|unix.O_CLOEXEC, number(w[4], 0o666))
		if err == nil {
			h.fds[w[1]] = n
		}
		return "", err
	case "creat": // creat PATH FLAGS [MODE]: open and close
		n, err := unix.Open(w[1], openFlags(w[2])|unix.O_CLOEXEC, number(w[3], 0o666))
		if err == nil {
			err = unix.Close(n)
		}
		return "", err
	case "close":
		return "", unix.Close(fd(w[1]))
	case "dup": // dup NAME NEW
		n, err := unix.FcntlInt(uintptr(fd(w[1])), unix.F_DUPFD_CLOEXEC, 0)
		h.fds[w[2]] = n
		return "", err
	case "flight": // flight NAME: closed, but in a message that nobody has received, see land
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		h.flying = append(h.flying, pair[:]...)
		err = unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd(w[1])), nil, 0)
		return "", errors.Join(err, unix.Close(fd(w[1])))
	case "land": // nobody has any more what was in flight
		for _, n := range h.flying {
			unix.Close(n)
		}
		h.flying = nil
		return "", nil
	case "write":
		_, err := unix.Write(fd(w[1]), []byte(w[2]))
		return "", err
	case "put": // put PATH DATA FLAGS: open, write, close
		n, err := unix.Open(w[1], openFlags(w[3])|unix.O_WRONLY|unix.O_CLOEXEC, 0o666)
		if err != nil {
			return "", err
		}
		_, err = unix.Write(n, []byte(w[2]))
		return "", errors.Join(err, unix.Close(n))
	case "ctl": // ctl PATH LINE: prints what a read tells of it
		n, err := unix.Open(w[1], unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		defer unix.Close(n)
		err = goingOn(func() error {
			_, err := unix.Write(n, []byte(w[2]))
			return err
		})
		buf := make([]byte, 1<<16)
		m, rerr := unix.Pread(n, buf, 0)
		if rerr != nil {
			return "", fmt.Errorf("reading the answer: %v", rerr)
		}
		return string(buf[:m]), err
	case "fight": // fight CTL FILE DIR CLIENT SECONDS
		return h.fight(w[1], w[2], w[3], w[4], time.Duration(number(w[5], 1))*time.Second)
	case "fd": // its number, for paths below /proc/self/fd
		return strconv.Itoa(fd(w[1])), nil
	case "seek": // seek NAME hole|data OFFSET
		whence := map[string]int{"hole": unix.SEEK_HOLE, "data": unix.SEEK_DATA}[w[2]]
		off, err := unix.Seek(fd(w[1]), int64(number(w[3], 0)), whence)
		return strconv.FormatInt(off, 10), err
	case "pread": // pread NAME LENGTH OFFSET
		buf := alignedBuffer(int(number(w[2], 1)))
		var n int
		err := goingOn(func() (err error) {
			n, err = unix.Pread(fd(w[1]), buf, int64(number(w[3], 0)))
			return err
		})
		return string(buf[:max(n, 0)]), err
	case "pwrite": // pwrite NAME BYTE LENGTH OFFSET
		buf := alignedBuffer(int(number(w[3], 1)))
		copy(buf, strings.Repeat(w[2], len(buf)))
		_, err := unix.Pwrite(fd(w[1]), buf, int64(number(w[4], 0)))
		return "", err
	case "ftruncate":
		return "", unix.Ftruncate(fd(w[1]), int64(number(w[2], 0)))
	case "fgetxattr":
		_, err := unix.Fgetxattr(fd(w[1]), w[2], make([]byte, 1024))
		return "", err
	case "fstat":
		var st unix.Stat_t
		err := unix.Fstat(fd(w[1]), &st)
		return attributes(&st), err
	case "freaddir":
		unix.Seek(fd(w[1]), 0, unix.SEEK_SET)
		buf := make([]byte, 4096)
		n, err := unix.Getdents(fd(w[1]), buf)
		_, _, names := unix.ParseDirent(buf[:max(n, 0)], -1, nil)
		return strings.Join(names, " "), err
	case "fsync":
		return "", unix.Fsync(fd(w[1]))
	case "fchmod":
		return "", unix.Fchmod(fd(w[1]), number(w[2], 0))
	case "fallocate": // fallocate NAME MODE OFFSET LENGTH
		return "", unix.Fallocate(fd(w[1]), number(w[2], 0), int64(number(w[3], 0)), int64(number(w[4], 0)))
	case "copyrange": // copyrange FROM-PATH NAME
		from, err := unix.Open(w[1], unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		defer unix.Close(from)
		_, err = unix.CopyFileRange(from, nil, fd(w[2]), nil, 1<<16, 0)
		return "", err
	case "linkfd":
		return "", unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd(w[1])), unix.AT_FDCWD, w[2], unix.AT_SYMLINK_FOLLOW)
	case "flock": // flock NAME [un]
		how := unix.LOCK_EX | unix.LOCK_NB
		if w[2] == "un" {
			how = unix.LOCK_UN
		}
		return "", unix.Flock(fd(w[1]), how)
	case "flockw": // and wait
		return "", goingOn(func() error { return unix.Flock(fd(w[1]), unix.LOCK_EX) })
	case "mark": // mark NAME START: an OFD read lock on one byte
		at, err := strconv.ParseInt(w[2], 10, 64)
		if err != nil {
			return "", err
		}
		return "", unix.FcntlFlock(uintptr(fd(w[1])), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: at, Len: 1})
	case "setlk", "getlk", "ofdsetlk": // setlk NAME wr|un: a POSIX lock, or an OFD lock, on the whole file
		lk := unix.Flock_t{Type: map[string]int16{"wr": unix.F_WRLCK, "rd": unix.F_RDLCK, "un": unix.F_UNLCK}[w[2]]}
		switch w[0] {
		case "setlk":
			return "", unix.FcntlFlock(uintptr(fd(w[1])), unix.F_SETLK, &lk)
		case "ofdsetlk":
			return "", unix.FcntlFlock(uintptr(fd(w[1])), unix.F_OFD_SETLK, &lk)
		}
		err := unix.FcntlFlock(uintptr(fd(w[1])), unix.F_GETLK, &lk)
		return strconv.Itoa(int(lk.Type)), err

	case "mmap": // mmap MAP NAME: shared, writable, one page
		m, err := unix.Mmap(fd(w[2]), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		h.maps[w[1]] = m
		return "", err
	case "poke": // poke MAP DATA [unsynced]
		copy(h.maps[w[1]], w[2])
		if w[3] == "unsynced" {
			return "", nil
		}
		return "", unix.Msync(h.maps[w[1]], unix.MS_SYNC)
	case "munmap":
		return "", unix.Munmap(h.maps[w[1]])

	case "setgid": // of all threads
		return "", syscall.Setgid(int(number(w[1], 0)))
	case "umask":
		unix.Umask(int(number(w[1], 0)))
	case "chdir":
		return "", unix.Chdir(w[1])
	case "exit":
		os.Exit(int(number(w[1], 0)))
	case "subreaper": // adopts who of its descendants is left behind
		return "", unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	case "seize": // seize PID: traces it as a debugger that waits for nothing
		return "", seizeThreads(w[1])
	case "fork": // fork SOCKET [setsid]
		cmd := agentCmd(w[1])
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: w[2] == "setsid"}
		if err := cmd.Start(); err != nil {
			return "", err
		}
		go cmd.Wait()
	case "exec": // exec SCRIPT [NAME=VALUE]…: the agent becomes a shell
		return "", syscall.Exec("/bin/sh", []string{"sh", "-c", "exec " + w[1]}, append(os.Environ(), w[2:]...))
	case "sh": // sh SCRIPT: prints "STATUS OUTPUT"
		out, err := exec.Command("/bin/sh", "-c", w[1]).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return "", err
		}
		status := 0
		if exit != nil {
			status = exit.ExitCode()
		}
		return fmt.Sprintf("%d %s", status, out), nil
	case "until": // until COMMAND…: again and again until it succeeds; prints when
		for end := time.Now().Add(patience); ; {
			if _, err := h.do(w[1:]); err == nil || time.Now().After(end) {
				return strconv.FormatInt(monotonic(), 10), err
			}
		}
	case "all": // all COMMAND… ; COMMAND…: one after the other, while they succeed; prints what the last one does
		for len(w) > 0 && err == nil {
			n := slices.Index(w[1:], ";")
			if n < 0 {
				n = len(w) - 1
			}
			out, err = h.do(w[1 : 1+n : 1+n])
			w = w[1+n:]
		}
		return out, err
	case "crowd": // crowd PATH N: so many reads that wait; prints how the first ended
		done := make(chan error, number(w[2], 0))
		for range number(w[2], 0) {
			n, err := unix.Open(w[1], unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return "", err
			}
			go func() {
				done <- goingOn(func() error {
					_, err := unix.Read(n, make([]byte, 1024))
					return err
				})
			}()
		}
		return errnoName(<-done), nil
	case "line": // line flock|flockone|fcntl|mkdir|mkdirs PATH N: so many threads want it; tells how they fared
		return line(w[1], w[2], int(number(w[3], 0)))
	case "looks", "names": // looks PATH DURATION: opens it all the time; names makes and removes it, too; tell what they heard
		d, err := time.ParseDuration(w[2])
		if err != nil {
			return "", err
		}
		if w[0] == "looks" {
			return looks(w[1], d)
		}
		return names(w[1], d)
	case "crowded": // crowded KIND DIR DURATION: see crowd
		d, err := time.ParseDuration(w[3])
		if err != nil {
			return "", err
		}
		return joinCrowd(w[1], w[2], d)
	case "killafter": // killafter PID SYSCALL
		return "", h.killAfter(int(number(w[1], 0)), uint64(number(w[2], 0)))
	case "killed": // waits for that
		return "", <-h.killed
	case "probe": // probe NAME DIRECTORY
		return runProbe(w[1], w[2])
	case "client": // client COMMAND…: with the Go client, see client_test.go
		return h.client.do(w[1:])
	case "thread": // thread COMMAND…: on a thread of its own, not the leader
		return h.onThread(w[1:])
	default:
		return "", fmt.Errorf("no command %q", w[0])
	}
	return "", nil
}

// goingOn repeats a call that waits for as long as the signals of Go's scheduler end it.
func goingOn(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

func (h *hands) onThread(w []string) (out string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for unix.Gettid() == unix.Getpid() {
			// Two goroutines can't be locked to the leader at once.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			out, err = h.onThread(w)
			return
		}
		runtime.LockOSThread() // and the thread ends with the goroutine
		out, err = h.do(w)
	}()
	<-done
	return out, err
}
