//go:build linux

package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A conn is one open ctl file. It is used by one goroutine at a time.
type conn interface {
	// command carries out one line and returns the daemon's answer, which
	// is there for refusals too. When ctx is done it gives up; if the
	// command succeeds after that, undo tells how it is taken back.
	command(ctx context.Context, line string, undo func(*reply) string) (*reply, error)
	// follow carries out a line that begins a watch; await blocks until what
	// is watched has ended. Meanwhile another goroutine may use command.
	follow(ctx context.Context, line string) error
	await(ctx context.Context) (*reply, error)
	// reopen opens it anew, at the next daemon.
	reopen(ctx context.Context) error
	close()
}

// A system is what this package uses of the machine.
type system struct {
	find func(dir string) (place, error)
	dial func(root string) (conn, error)
	rows func(root string) ([]Holder, error) // the mount's listing
	// names are those of lock files there, as patterns; none if the daemon does not tell.
	names func(root string) []string
	now   func() time.Duration // on a clock that counts sleep and that no one sets
}

func linux() *system {
	dial := func(root string) (conn, error) { return openControl(root) }
	return &system{find: find, dial: dial, rows: readRows, names: readNames, now: sinceBoot}
}

// reach is find, and open is dial, as long as ctx lasts.
func (s *system) reach(ctx context.Context, dir string) (place, error) {
	return orLeave(ctx, func() (place, error) { return s.find(dir) }, func(place) {})
}

func (s *system) open(ctx context.Context, root string) (conn, error) {
	return orLeave(ctx, func() (conn, error) { return s.dial(root) }, conn.close)
}

const (
	// nextDaemon is how long it is waited for another daemon. One that has a supervisor
	// is there by then.
	nextDaemon = 3 * time.Second
	// nextLook is how often it is looked for one.
	nextLook = 50 * time.Millisecond
)

// inLine sends a command that may stand in line. If the daemon dies meanwhile it stands in
// line at the next one, with what line is by then. Who was given the lock, but did not hear
// that, has it there still (S1), and is given it again.
func inLine(ctx context.Context, c conn, line func() string, undo func(*reply) string) (*reply, error) {
	for {
		r, err := c.command(ctx, line(), undo)
		if !daemonGone(err) || !awaitNext(ctx, c) {
			return r, err
		}
	}
}

// pause waits for d, or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// awaitNext opens c anew when the next daemon is there, and reports whether one is in time.
func awaitNext(ctx context.Context, c conn) bool {
	ctx, cancel := context.WithTimeout(ctx, nextDaemon)
	defer cancel()
	for {
		pause(ctx, nextLook)
		switch {
		case ctx.Err() != nil:
			return false
		case c.reopen(ctx) == nil:
			return true
		}
	}
}

// sinceBoot is the clock of leases (L4).
func sinceBoot() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // never fails with this clock
	return time.Duration(ts.Nano())
}

func readRows(root string) ([]Holder, error) {
	data, err := os.ReadFile(filepath.Join(root, controlDir, "locks.json"))
	if err != nil {
		return nil, err
	}
	var listing struct {
		Locks []Holder `json:"locks"`
	}
	return listing.Locks, json.Unmarshal(data, &listing)
}

// readNames returns the patterns that the mount's version file has.
func readNames(root string) (names []string) {
	data, _ := os.ReadFile(filepath.Join(root, controlDir, "version"))
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "lock-name "); ok {
			if name, err := strconv.Unquote(text); err == nil {
				names = append(names, name)
			}
		}
	}
	return names
}

// ctlFile is a conn on a real mount.
type ctlFile struct {
	fd   int
	root string
}

func openControl(root string) (*ctlFile, error) {
	for {
		fd, err := unix.Open(filepath.Join(root, controlDir, "ctl"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err == unix.ENOENT || err == unix.ENOTDIR {
			return nil, notWhole(root)
		}
		if err != nil {
			return nil, notAnswering(root, &os.PathError{Op: "open", Path: filepath.Join(root, controlDir, "ctl"), Err: err})
		}
		return &ctlFile{fd, root}, nil
	}
}

func (f *ctlFile) reopen(ctx context.Context) error {
	next, err := orLeave(ctx, func() (*ctlFile, error) { return openControl(f.root) }, (*ctlFile).close)
	if err != nil {
		return err
	}
	f.close()
	f.fd = next.fd
	return nil
}

// close leaves an abandoned file alone: who uses it closes it. Nobody waits for it long:
// a daemon that is stopped would have to take note of it.
func (f *ctlFile) close() {
	if f.fd < 0 {
		return
	}
	fd, over := f.fd, make(chan struct{})
	f.fd = -1
	go func() {
		defer close(over)
		unix.Close(fd)
	}()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-over:
	case <-t.C:
	}
}

func (f *ctlFile) command(ctx context.Context, line string, undo func(*reply) string) (*reply, error) {
	r, err := f.once(ctx, line, undo)
	for range maxPermits {
		if !errors.Is(err, unix.EACCES) || len(r.Permit) == 0 || ctx.Err() != nil || !Permit(f.root, string(r.Permit)) {
			break
		}
		r, err = f.once(ctx, line, undo)
	}
	return r, err
}

// maxPermits is how often a permit may be lost before it is of use.
const maxPermits = 3

// Permit shows the daemon, which cannot know that where IDs are mapped (mount --idmap),
// that this process may make entries in a directory, or in the nearest to it that is there.
// What it answered to a command that failed with EACCES tells the file, relative to the
// root of the mount: in which directory, and by a name that it lets nobody make. Permit
// reports whether the command is worth another try. Who calls Acquire need not care.
func Permit(root, file string) bool {
	for dir, name := filepath.Dir(file), filepath.Base(file); ; dir = filepath.Dir(dir) {
		err := ignoringEINTR(func() error { return unix.Mknod(filepath.Join(root, dir, name), unix.S_IFIFO, 0) })
		if err != unix.ENOENT || dir == "." {
			return err == unix.EALREADY
		}
	}
}

// once is command without a permit.
func (f *ctlFile) once(ctx context.Context, line string, undo func(*reply) string) (*reply, error) {
	fd := f.fd
	late, err := f.interruptible(ctx, func() error {
		_, err := unix.Pwrite(fd, []byte(line+"\n"), 0)
		return err
	}, func(err error) {
		if err == nil && undo != nil {
			if r, err := readReply(fd); err == nil {
				unix.Pwrite(fd, []byte(undo(r)+"\n"), 0)
			}
		}
		unix.Close(fd)
	})
	if late {
		return &reply{}, err
	}
	if err == nil && silent(line) {
		return &reply{}, nil
	}
	r, failed := readReply(fd)
	if err == nil {
		err = failed
	}
	if r == nil {
		r = &reply{}
	}
	return r, err
}

// silent tells whether the success of a command is all that it has to say.
func silent(line string) bool {
	verb, _, _ := strings.Cut(line, " ")
	return verb == "release" || verb == "join" || verb == "wait"
}

func (f *ctlFile) follow(ctx context.Context, line string) error {
	fd := f.fd
	_, err := f.interruptible(ctx, func() error {
		_, err := unix.Pwrite(fd, []byte(line+"\n"), 0)
		return err
	}, func(error) { unix.Close(fd) })
	return err
}

func (f *ctlFile) await(ctx context.Context) (*reply, error) {
	var r *reply
	fd := f.fd
	late, err := f.interruptible(ctx, func() (err error) {
		r, err = readReply(fd)
		return err
	}, func(error) { unix.Close(fd) })
	if late || err != nil {
		return nil, err
	}
	return r, nil
}

// readReply reads what the daemon has to say of the last command.
func readReply(fd int) (*reply, error) {
	var text []byte
	buf := make([]byte, 4096)
	for {
		n, err := unix.Pread(fd, buf, int64(len(text)))
		if err != nil {
			return nil, err
		}
		text = append(text, buf[:n]...)
		if n < len(buf) || bytes.IndexByte(text, '\n') >= 0 {
			break
		}
		buf = make([]byte, 64<<10)
	}
	r := &reply{}
	if len(bytes.TrimSpace(text)) == 0 {
		return r, nil
	}
	return r, json.Unmarshal(text, r)
}

// lenient is ctx, but leaves it to the daemon for a while to say that its
// deadline has passed: the daemon knows who has what was waited for. The caller calls done
// when it does not wait any more.
func lenient(ctx context.Context) (late context.Context, done func()) {
	if _, ok := ctx.Deadline(); !ok {
		return ctx, func() {}
	}
	late, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			select {
			case <-time.After(patience):
			case <-late.Done():
			}
		}
		cancel(context.Cause(ctx))
	})
	return late, func() {
		stop()
		cancel(nil)
	}
}

// patience is how long an interrupted request may take to end. Only a daemon
// that hangs, or is stopped, does not answer by then.
const patience = time.Second

// orLeave makes a call that no signal ends as long as the daemon is stopped. If it is not
// back a while after ctx is done it is left behind; what it returns at last is dropped.
func orLeave[T any](ctx context.Context, call func() (T, error), drop func(T)) (T, error) {
	if ctx.Done() == nil {
		return call()
	}
	type result struct {
		v   T
		err error
	}
	back, left := make(chan result), make(chan struct{})
	go func() {
		v, err := call()
		select {
		case back <- result{v, err}:
		case <-left:
			if err == nil {
				drop(v)
			}
		}
	}()
	select {
	case r := <-back:
		return r.v, r.err
	case <-ctx.Done():
	}
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case r := <-back:
		return r.v, r.err
	case <-t.C:
		close(left)
		return result{}.v, fmt.Errorf("the daemon does not answer: %w", context.Cause(ctx))
	}
}

// interruptible runs a system call that may block, until ctx is done: then the
// thread that is in it gets a signal, which makes the kernel take the request
// back. The signal is the one that Go's own scheduler uses and everyone has to
// expect. If even that does not help, the call is abandoned: late is true, the
// file is not to be used any more, and after is called when it ends at last.
func (f *ctlFile) interruptible(ctx context.Context, call func() error, after func(error)) (late bool, err error) {
	if ctx.Done() == nil {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before := blockSignals()
		defer unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
		return false, ignoringEINTR(call)
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	tid := make(chan int, 1)
	ended := make(chan error)
	given := make(chan struct{}) // up
	go func() {
		// The thread is kept, for the next call: there may be none to be had then, which
		// ends the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		before := blockSignals(unix.SIGURG)
		defer unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
		tid <- unix.Gettid()
		err := call()
		for err == unix.EINTR && ctx.Err() == nil {
			err = call()
		}
		select {
		case <-given:
			after(err)
		case ended <- err:
		}
	}()
	thread := <-tid
	select {
	case err := <-ended:
		return false, err
	case <-ctx.Done():
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		unix.Tgkill(unix.Getpid(), thread, unix.SIGURG)
		select {
		case err := <-ended:
			if err == nil || !errors.Is(err, unix.EINTR) {
				return false, err
			}
			return false, context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
	f.fd = -1
	close(given)
	return true, context.Cause(ctx)
}

const (
	cancelSignal = unix.Signal(32)
	setxidSignal = unix.Signal(33) // also Go's sigPerThreadSyscall
)

// blockSignals has this thread take no signals but some, and returns its mask. Others'
// signals must not cost a waiter its place in the line: another thread takes them. But
// those by which Go, or the C library, has all threads do something, such as change their
// user, are each thread's own: whoever calls setuid(2) waits until it has taken them.
func blockSignals(but ...unix.Signal) (before unix.Sigset_t) {
	var mask unix.Sigset_t
	for i := range mask.Val {
		mask.Val[i] = ^mask.Val[i]
	}
	for _, s := range append(but, cancelSignal, setxidSignal) {
		mask.Val[0] &^= 1 << (uint(s) - 1)
	}
	unix.PthreadSigmask(unix.SIG_SETMASK, &mask, &before)
	return before
}
