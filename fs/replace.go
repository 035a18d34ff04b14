package fs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// A daemon is replaced by a command to its ctl file. The write waits until the
// next program answers it: like whatever else waits, it is parked meanwhile.

// replacing is the replacement that is under way, or was the last one.
type replacing struct {
	mu     sync.Mutex
	begin  func(*replacement) // set before the first request
	last   *replacement
	unique uint64 // of the request that led to this daemon's start
}

// A replacement is one request to be replaced.
type replacement struct {
	unique  uint64
	node    uint64 // of the ctl file, which the kernel knows
	program *os.File
	done    chan struct{} // closed when it has failed
	err     error
}

// ErrReplacing says that a daemon cannot be replaced now.
var ErrReplacing = errors.New("the daemon cannot be replaced")

// replace runs the caller's own program in place of the daemon.
func (c *command) replace() fuse.Status {
	if !c.admin() {
		return c.notAdmin()
	}
	r := &c.fs.replacing
	r.mu.Lock()
	if r.unique != 0 && r.unique == c.header.Unique {
		r.unique = 0
		r.mu.Unlock()
		return fuse.OK // this is the next one
	}
	q := r.last
	r.mu.Unlock()
	if q == nil || q.unique != c.header.Unique {
		var err error
		if q, err = c.beginReplace(); err != nil {
			return c.fail(err)
		}
	}
	select {
	case <-q.done:
		return c.fail(q.err)
	case <-c.cancel:
		return fuse.EINTR
	}
}

func (c *command) beginReplace() (*replacement, error) {
	fs := c.fs
	switch {
	case fs.replacing.begin == nil || fs.opts.Replace == nil:
		return nil, fmt.Errorf("%w: it was not started as one: %w", ErrReplacing, unix.EOPNOTSUPP)
	case fs.table.Frozen():
		return nil, fmt.Errorf("%w: it is about to end: %w", ErrReplacing, unix.ESHUTDOWN)
	}
	p, unknown := c.process()
	if p == nil {
		return nil, cmp.Or(unknown, error(unix.EPERM))
	}
	program, err := fs.openProgram(p.ID().Pid)
	if err != nil {
		return nil, err
	}
	q := &replacement{unique: c.header.Unique, node: c.header.NodeId, program: program, done: make(chan struct{})}
	r := &fs.replacing
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last != nil && !isClosed(r.last.done) {
		program.Close()
		return nil, fmt.Errorf("%w: it is being replaced already: %w", ErrReplacing, unix.EBUSY)
	}
	r.last = q
	go r.begin(q)
	return q, nil
}

// openProgram opens the program that a process runs, if only root or who mounted
// can have made it, and if it can go on from here.
func (fs *FS) openProgram(pid int) (*os.File, error) {
	exe := "/proc/" + strconv.Itoa(pid) + "/exe"
	fd, err := unix.Open(exe, unix.O_PATH|unix.O_CLOEXEC, 0) // which asks no file system
	if err != nil {
		return nil, fmt.Errorf("%w: the caller's program: %w", ErrReplacing, &os.PathError{Op: "open", Path: exe, Err: err})
	}
	defer unix.Close(fd)
	switch inside, err := fs.isMine(fd); {
	case err != nil:
		return nil, fmt.Errorf("%w: the caller's program: %w", ErrReplacing, err)
	case inside: // execve(2) would wait for this daemon
		return nil, fmt.Errorf("%w: the caller's program lies in the mount; copy it elsewhere: %w", ErrReplacing, unix.EOPNOTSUPP)
	}
	f, err := os.Open(procPath(fd))
	if err != nil {
		return nil, fmt.Errorf("%w: the caller's program: %w", ErrReplacing, err)
	}
	if err := fs.checkProgram(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: %w", ErrReplacing, err)
	}
	return f, nil
}

// isMine reports whether a file is in this daemon's mount, wherever that is mounted,
// and does not ask it (M4).
func (fs *FS) isMine(fd int) (bool, error) {
	var st unix.Statx_t
	err := ignoringEINTR(func() error { return unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st) })
	if err != nil {
		return false, os.NewSyscallError("statx", err)
	}
	return uint64(identityOf(&st).dev) == fs.mountDev, nil
}

// checkTime bounds how long a program takes to tell its formats.
const checkTime = 10 * time.Second

func (fs *FS) checkProgram(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("the caller's program is no regular file: %w", unix.EPERM)
	case st.Uid != 0 && st.Uid != fs.uid:
		return fmt.Errorf("the caller's program belongs to uid %d, not to root or who mounted: %w", st.Uid, unix.EPERM)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("the caller's program can be written by others (mode %04o); chmod go-w it: %w", st.Mode&0o7777, unix.EPERM)
	case st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0:
		return fmt.Errorf("the caller's program is set-id: %w", unix.EPERM)
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", "version", "--handover")
	cmd.Args[0] = "stagefs"
	cmd.ExtraFiles, cmd.Dir = []*os.File{f}, "/"
	var errs bytes.Buffer
	cmd.Stderr, cmd.WaitDelay = &errs, time.Second
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("the caller's program does not start: %w: %s", err, strings.TrimSpace(errs.String()))
	}
	can := strings.Fields(string(out))
	if !slices.Contains(can, strconv.Itoa(HandoverFormat)) {
		return fmt.Errorf("the caller's program cannot go on from format %d, but from %q; restart the daemon instead: %w", HandoverFormat, out, unix.EPROTONOSUPPORT)
	}
	if fs.idmap && !slices.Contains(can, HandoverIDMap) {
		return fmt.Errorf("the caller's program knows nothing of --idmap; restart the daemon without it instead: %w", unix.EPROTONOSUPPORT)
	}
	return nil
}

// replace carries out a replacement. If it fails, this daemon goes on. Who asks
// as soon as the mount answers waits until the daemon is whole.
func (s *Server) replace(q *replacement) {
	<-s.ready
	var t *transport.State
	err := fmt.Errorf("%w for more than %v", transport.ErrBusy, aheadStop)
	if s.fs.ahead.pause(aheadStop) { // execve(2) waits for a thread that the disk keeps
		t, err = s.transport.Stop(q.node, func() { s.fs.pauseLines(true) })
	}
	if err == nil {
		err = s.exec(q, t)
	}
	if t != nil {
		s.fs.pauseLines(false)
	}
	s.fs.ahead.resume()
	if errors.Is(err, transport.ErrBusy) {
		err = fmt.Errorf("%w: %w; try again when it answers", ErrReplacing, err)
	}
	s.fs.log.Error("the daemon was not replaced", "err", err)
	q.program.Close()
	q.err = err
	close(q.done)
	if t != nil {
		s.transport.Resume(t)
	}
}
