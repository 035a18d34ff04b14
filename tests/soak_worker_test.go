//go:build linux

package tests

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate"
)

// envWorker makes this binary a worker of TestSoakFaults; its value is a
// workerSpec.
const envWorker = "STAGEFS_TEST_WORKER"

// A workerSpec says what a worker does.
type workerSpec struct {
	Kind    string // how it takes its directory, or "rival"
	Mount   string
	Slots   []string // directories to take one after the other, below the mount
	Journal string   // outside the mount: what it did
	Witness string   // outside the mount: directory with a file for each slot
	Hasty   bool     // it takes directories and gives them up, and does nothing else
}

// A worker takes directories, writes numbered files to them, and notes outside
// the mount what was acknowledged. Each line of its journal begins with
//
//	w  it tries to get a directory           H  it has it, with a token
//	T  it is about to write a file           W  the write was acknowledged
//	d  it is about to remove a file          D  the removal was acknowledged
//	R  it has given the directory up         V  a violation
//	N  a rival's operations and refusals so far
//	E  a call failed with EIO or EINTR
//	X  an attack of a rival's that went through
type worker struct {
	workerSpec
	journal *os.File
	slot    string // the directory it works on, below the mount
	seq     int
	parent  int
	taken   time.Time
	lease   lease
}

// outage: a daemon died under the request, which may have been carried out. The
// kernel says EIO, or EINTR over io_uring, of one that was being handed over when
// its reader was killed.
func outage(err error) bool {
	for _, e := range []error{unix.ENOTCONN, unix.ECONNABORTED, unix.ECANCELED, unix.ESHUTDOWN} {
		if errors.Is(err, e) {
			return true
		}
	}
	if (errors.Is(err, unix.EIO) || errors.Is(err, unix.EINTR)) && heardKilled != nil {
		heardKilled()
		return true
	}
	return false
}

// heardKilled tells the harness, which knows how many of them there may be.
var heardKilled func()

func workerMain(spec string) int {
	os.Unsetenv(envWorker)
	w := &worker{parent: os.Getppid()}
	if err := json.Unmarshal([]byte(spec), &w.workerSpec); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 2
	}
	var err error
	if w.journal, err = os.OpenFile(w.Journal, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 2
	}
	heardKilled = func() { w.say("E") }
	unix.Umask(0)
	if w.Kind == "rival" {
		w.rival()
	}
	for {
		w.slot = w.Slots[rand.IntN(len(w.Slots))]
		w.say("w %s", w.slot)
		release, err := w.take()
		w.taken = time.Now()
		switch {
		case errors.Is(err, unix.EINTR):
			continue // a signal of Go's own came during a short wait; os.OpenFile would try again, too
		case outage(err):
			return 3 // its end gives up what it may have got (R4)
		case err != nil:
			w.say("V %s: to take %s: %v", w.Kind, w.slot, err)
			return 3
		case release != nil:
			if !w.Hasty {
				w.session()
			}
			release()
			w.say("R %s", w.slot)
		}
		if w.Kind == "run" {
			return 4 // not 0: nothing is handed over
		}
		if !w.Hasty {
			time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
		}
	}
}

func (w *worker) say(format string, args ...any) { fmt.Fprintf(w.journal, format+"\n", args...) }

// again repeats a call as long as the daemon is away.
func again(call func() error) error {
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		if err := call(); !outage(err) || time.Now().After(end) {
			return err
		}
	}
}

func (w *worker) at(name string) string { return filepath.Join(w.Mount, w.slot, name) }

// take tries to get the directory and returns how to give it up; nil if somebody
// else has it.
func (w *worker) take() (release func(), err error) {
	busy := func(err error) bool {
		return errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EAGAIN)
	}
	remove := func(name string, call func(string) error) func() {
		return func() {
			err := again(func() error { return call(w.at(name)) })
			// After an outage it may be gone already, and be another's.
			if err != nil && !busy(err) && !errors.Is(err, unix.ENOENT) {
				w.say("V %s: to release %s: %v", w.Kind, w.slot, err)
			}
		}
	}
	switch w.Kind {
	case "run":
		return func() {}, nil
	case "excl":
		var fd int
		if fd, err = unix.Open(w.at("devserver"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o666); err == nil {
			unix.Close(fd)
			return remove("devserver", unix.Unlink), nil
		}
	case "mkdir":
		if err = unix.Mkdir(w.at("devserver.lock"), 0o777); err == nil {
			return remove("devserver.lock", unix.Rmdir), nil
		}
	case "link":
		host, _ := os.Hostname()
		u := w.at(fmt.Sprintf("%s-7f00ab.%d77", host, os.Getpid()))
		if err = os.WriteFile(u, []byte("1"), 0o666); err == nil {
			err = unix.Link(u, w.at("devserver.lock"))
			if e := unix.Unlink(u); e != nil && !outage(e) && !errors.Is(e, unix.ENOENT) && err == nil {
				err = e
			}
			if err == nil {
				return remove("devserver.lock", unix.Unlink), nil
			}
		}
	case "flock", "flock waits":
		var fd int
		if fd, err = unix.Open(w.at("devserver"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o666); err == nil {
			how := unix.LOCK_EX
			if w.Kind == "flock" {
				how |= unix.LOCK_NB
			}
			for err = unix.EINTR; err == unix.EINTR; {
				err = unix.Flock(fd, how)
			}
			var gone bool
			if err == nil {
				gone, err = unlinked(fd)
			}
			if err == nil && !gone {
				return func() { unix.Close(fd) }, nil
			}
			unix.Close(fd)
		}
	case "lease":
		return w.takeLease()
	}
	if busy(err) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOSPC) {
		return nil, nil
	}
	return nil, err
}

// standing tells what the mount says of the worker's lock now.
func (w *worker) standing() string {
	now, err := w.token()
	text := fmt.Sprintf("taken %v ago; its token now: %d, %v", time.Since(w.taken), now, err)
	if w.Kind == "lease" {
		at := monotonic() - w.lease.renewed.Load()
		_, err := w.ctl(fmt.Sprintf("renew %s client=%s", w.slot, w.lease.id))
		text += fmt.Sprintf("; acquired with token %d, renewed %v ago, and again now: %v", w.lease.token, time.Duration(at), err)
	}
	return text
}

// unlinked tells whether a locked file is no lock file any more: who made it has
// removed it, or has died before locking it, between the open and the lock. Then
// the lock is nobody's business, as on any file system, and whoever uses flock(2)
// on files that come and go has to look.
func unlinked(fd int) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_NLINK, &st)
	return err == nil && st.Nlink == 0, err
}

// session writes and removes files while it holds.
func (w *worker) session() {
	token, err := w.token()
	if err != nil {
		if !w.overdue(err) {
			w.say("V %s: holds %s, but its token: %v; %s", w.Kind, w.slot, err, w.standing())
		}
		return
	}
	defer w.witness(token)()
	w.say("H %s %d", w.slot, token)
	for range 1 + rand.IntN(8) {
		w.seq++
		name := fmt.Sprintf("f-%d-%d-%d", token, os.Getpid(), w.seq)
		size := 1 + rand.IntN(1<<(4+rand.IntN(13)))
		over := w.lease.over.Load()
		w.say("T %s/%s %d", w.slot, name, size)
		switch err := w.write(name, size); {
		case err == nil && over:
			w.say("V %s: wrote %s/%s after its lease had ended", w.Kind, w.slot, name)
		case err == nil:
			w.say("W %s/%s %d", w.slot, name, size)
		case outage(err):
			again(func() error { return unix.Access(w.Mount, unix.F_OK) })
		case errors.Is(err, unix.ENOSPC): // not acknowledged
		case w.overdue(err):
			return
		default:
			w.say("V %s: as holder of %s (token %d), to write %s: %v; %s", w.Kind, w.slot, token, name, err, w.standing())
			return
		}
	}
	w.tidy()
}

// token reads that of the lock that governs the directory.
func (w *worker) token() (uint64, error) {
	buf := make([]byte, 32)
	var n int
	err := again(func() (err error) {
		n, err = unix.Getxattr(filepath.Join(w.Mount, w.slot), "user.stagefs.token", buf)
		return err
	})
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(buf[:n]), 10, 64)
}

// witness makes sure that nobody else works on the directory, and that tokens
// grow. The kernel ends it with the process, before anybody knows of its death.
// A lease may end without its client's knowing: that one only leaves its token.
func (w *worker) witness(token uint64) (end func()) {
	path := filepath.Join(w.Witness, strings.ReplaceAll(w.slot, "/", "-"))
	none := func() {}
	if w.Kind == "lease" {
		if err := os.WriteFile(path+".lease", fmt.Appendf(nil, "%-20d", w.lease.token), 0o644); err != nil {
			w.say("V witness: %v", err)
		}
		return none
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		w.say("V witness: %v", err)
		return none
	}
	busy := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	// The command of a `stagefs run` that was killed may not have died yet: the
	// kernel kills it when run has died, and the lock is run's.
	for end := time.Now().Add(time.Second); busy != nil && time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		b := make([]byte, 64)
		n, _ := f.ReadAt(b, 0)
		if said := strings.Fields(string(b[:n])); len(said) != 2 || said[1] == "0" || running(atoi(said[1])) {
			break
		}
		busy = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if busy != nil {
		w.say("V %s: holds %s with token %d, and somebody else works on it", w.Kind, w.slot, token)
		return func() { f.Close() }
	}
	// Who closes its descriptor while there is no daemon, and locks again, goes on
	// with the lock that the next daemon has restored.
	if last := lastToken(path); token < last || token == last && !strings.HasPrefix(w.Kind, "flock") {
		w.say("V %s: token %d on %s after %d", w.Kind, token, w.slot, last)
	}
	orphaned := w.Kind == "run" && os.Getppid() != w.parent // that token is of who came next
	if last := lastToken(path + ".lease"); token <= last && !orphaned {
		w.say("V %s: token %d on %s after %d, of a lease", w.Kind, token, w.slot, last)
	}
	run := 0
	if w.Kind == "run" {
		run = w.parent
	}
	f.WriteAt(fmt.Appendf(nil, "%-20d %-10d\n", token, run), 0)
	return func() { f.Close() }
}

// lastToken is that which a witness has written last; 0: none yet.
func lastToken(path string) (token uint64) {
	b, _ := os.ReadFile(path)
	fmt.Sscan(string(b), &token)
	return token
}

// content is what the file of a name holds.
func soakContent(name string, size int) []byte {
	return []byte(strings.Repeat(name+"\n", size/(len(name)+1)+1)[:size])
}

// write makes a file. It is acknowledged when the file is closed.
func (w *worker) write(name string, size int) error {
	data := soakContent(name, size)
	fd, err := unix.Open(w.at(name), unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o666)
	if err != nil {
		return err
	}
	how := rand.IntN(4)
	if how == 0 && w.Kind != "lease" {
		err = mapped(fd, data)
	} else {
		for rest := data; len(rest) > 0 && err == nil; {
			var n int
			n, err = unix.Write(fd, rest[:min(len(rest), 1+rand.IntN(len(rest)))])
			rest = rest[max(n, 0):]
		}
	}
	if how == 1 && err == nil {
		err = unix.Fsync(fd)
	}
	return errors.Join(err, unix.Close(fd))
}

func mapped(fd int, data []byte) error {
	// With room for it: a full disk is told by a signal otherwise.
	if err := unix.Fallocate(fd, 0, 0, int64(len(data))); err != nil {
		return err
	}
	m, err := unix.Mmap(fd, 0, len(data), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if errors.Is(err, unix.ENODEV) {
		_, err = unix.Pwrite(fd, data, 0)
		return err
	}
	if err != nil {
		return err
	}
	copy(m, data)
	return errors.Join(unix.Msync(m, unix.MS_SYNC), unix.Munmap(m))
}

// tidy keeps the directory small.
func (w *worker) tidy() {
	entries, err := os.ReadDir(filepath.Join(w.Mount, w.slot))
	if err != nil || len(entries) < 60 {
		return
	}
	for _, e := range entries[:20] {
		if !strings.HasPrefix(e.Name(), "f-") {
			continue
		}
		w.say("d %s/%s", w.slot, e.Name())
		switch err := unix.Unlink(w.at(e.Name())); {
		case err == nil:
			w.say("D %s/%s", w.slot, e.Name())
		case outage(err), errors.Is(err, unix.ENOENT):
			return
		case w.overdue(err):
			return
		default:
			w.say("V %s: as holder of %s, to remove %s: %v", w.Kind, w.slot, e.Name(), err)
			return
		}
	}
}

// A lease is what a worker knows of its own.
type lease struct {
	id      string
	token   uint64
	renewed atomic.Int64 // when the last renewal was sent that succeeded, in ns
	over    atomic.Bool  // the mount has said that it ended
}

const soakTTL = 2 * time.Second

// overdue tells whether a refusal may be because the lease has ended, or the
// lock of the `stagefs run` whose command this is: it is killed a moment after.
func (w *worker) overdue(err error) bool {
	return w.Kind == "run" && os.Getppid() != w.parent || w.Kind == "lease" && (errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODATA)) &&
		(w.lease.over.Load() || monotonic()-w.lease.renewed.Load() > int64(soakTTL*9/10))
}

func (w *worker) ctl(line string) (lockstate.Answer, error) {
	fd, err := unix.Open(filepath.Join(w.Mount, ".stagefs/ctl"), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return lockstate.Answer{}, err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(line))
	var a lockstate.Answer
	buf := make([]byte, 1<<16)
	if n, e := unix.Pread(fd, buf, 0); e == nil {
		json.Unmarshal(buf[:n], &a)
	}
	return a, err
}

// takeLease takes a lease and renews it until it is released.
func (w *worker) takeLease() (release func(), err error) {
	id := fmt.Sprintf("soak-%d-%d", os.Getpid(), w.seq)
	w.lease.over.Store(false)
	w.lease.renewed.Store(monotonic())
	a, err := w.ctl(fmt.Sprintf("acquire %s client=%s ttl=%s", w.slot, id, soakTTL))
	if err != nil {
		if errors.Is(err, unix.EBUSY) {
			return nil, nil
		}
		return nil, err
	}
	w.lease.id, w.lease.token = id, a.Token
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for pause := soakTTL / 5; ; {
			select {
			case <-stop:
				return
			case <-time.After(pause):
			}
			sent := monotonic()
			switch _, err := w.ctl(fmt.Sprintf("renew %s client=%s", w.slot, id)); {
			case err == nil:
				w.lease.renewed.Store(sent)
				pause = soakTTL / 5
			case errors.Is(err, unix.ENOENT):
				// The answer counts: a daemon may be long in coming back.
				if lasted := monotonic() - w.lease.renewed.Load(); lasted < int64(soakTTL*9/10) {
					w.say("V lease: %s ended %v after a renewal", w.slot, time.Duration(lasted))
				}
				w.lease.over.Store(true)
				return
			default:
				pause = 20 * time.Millisecond
			}
		}
	}()
	return func() {
		close(stop)
		<-done
		err := again(func() error { _, err := w.ctl(fmt.Sprintf("release %s client=%s", w.slot, id)); return err })
		if err != nil && !errors.Is(err, unix.ENOENT) {
			w.say("V lease: to release %s: %v", w.slot, err)
		}
	}, nil
}

// rival attacks what others hold, and what is free: where writing needs a lock
// (W4), nothing that it does may ever succeed.
func (w *worker) rival() {
	own := filepath.Join(w.Mount, "b", fmt.Sprintf("rival%d", os.Getpid()))
	again(func() error { return unix.Mkdir(own, 0o777) })
	mine := filepath.Join(own, "mine")
	ops, refused := 0, 0
	heard := map[string]int{}
	for {
		w.slot = w.Slots[rand.IntN(len(w.Slots))]
		again(func() error { return os.WriteFile(mine, []byte("RIVAL"), 0o666) })
		file := w.at("none")
		if entries, _ := os.ReadDir(filepath.Join(w.Mount, w.slot)); len(entries) > 0 {
			if e := entries[rand.IntN(len(entries))]; strings.HasPrefix(e.Name(), "f-") {
				file = w.at(e.Name())
			}
		}
		fresh := w.at("RIVAL")
		open := func(path string, flags int) error {
			fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o666)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}
		attacks := []func() error{
			func() error { return open(file, unix.O_WRONLY) },
			func() error { return open(file, unix.O_RDWR|unix.O_TRUNC) },
			func() error { return open(file, unix.O_WRONLY|unix.O_APPEND) },
			func() error { return open(fresh, unix.O_WRONLY|unix.O_CREAT) },
			func() error { return open(filepath.Join(w.Mount, w.slot), unix.O_WRONLY|unix.O_TMPFILE) },
			func() error { return unix.Unlink(file) },
			func() error { return unix.Rename(file, fresh) },
			func() error { return unix.Rename(file, filepath.Join(own, "taken")) },
			func() error { return unix.Rename(mine, file) },
			func() error { return unix.Rename(mine, fresh) },
			func() error { return unix.Link(mine, fresh) },
			func() error { return unix.Link(file, filepath.Join(own, "alias")) },
			func() error { return unix.Symlink("RIVAL", fresh) },
			func() error { return unix.Mkfifo(fresh, 0o666) },
			func() error { return unix.Truncate(file, 1) },
			func() error { return unix.Chmod(file, 0o600) },
			func() error { return unix.Lchown(file, 1, 1) },
			func() error { return unix.Utimes(file, make([]unix.Timeval, 2)) },
			func() error { return unix.Setxattr(file, "user.rival", []byte("RIVAL"), 0) },
			func() error { return unix.Rename(filepath.Join(w.Mount, w.slot), filepath.Join(own, "slot")) },
		}
		i := rand.IntN(len(attacks))
		err := attacks[i]()
		ops++
		switch {
		case err == nil:
			rel, _ := filepath.Rel(w.Mount, file)
			if i == len(attacks)-1 {
				rel = w.slot
			}
			w.say("X %s %d", rel, i)
		case errors.Is(err, unix.EBUSY):
			refused++
		case errors.Is(err, unix.ENOENT), outage(err):
		default:
			if heard[err.Error()]++; heard[err.Error()] == 1 {
				w.say("V rival: attack %d on %s: %v, want EBUSY", i, file, err)
			}
		}
		if ops%100 == 0 {
			w.say("N %d %d", ops, refused)
		}
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	}
}
