package fs

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

// execTime bounds how long nobody is answered because of what the daemon does itself.
const execTime = 2 * time.Second

// tryLock tries for a time.
func tryLock(try func() bool, d time.Duration) bool {
	for began := time.Now(); !try(); time.Sleep(time.Millisecond) {
		if time.Since(began) > d {
			return false
		}
	}
	return true
}

// exec writes down what there is and runs the program. It returns only if that
// fails, and everything is as before.
func (s *Server) exec(q *replacement, t *transport.State) error {
	fs := s.fs
	// No exit, no lease's end and no rename from here on.
	// The backing may keep who has one of these waiting, and execve(2) waits for all threads.
	for _, mu := range []interface {
		TryLock() bool
		Unlock()
	}{&fs.reapMu, &fs.ns, &fs.back.awaiting} {
		if !tryLock(mu.TryLock, execTime) {
			return fmt.Errorf("%w for more than %v", transport.ErrBusy, execTime)
		}
		defer mu.Unlock()
	}
	if fs.table.Frozen() {
		return fmt.Errorf("%w: it is about to end: %w", ErrReplacing, unix.ESHUTDOWN)
	}
	c, fds, err := s.carry(t)
	if err != nil {
		return err
	}
	c.Replacing = q.unique
	fs.table.Flush()
	fd, err := unix.MemfdCreate("stagefs-state", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	state := os.NewFile(uintptr(fd), "state")
	defer state.Close()
	if err := c.write(state); err != nil {
		return err
	}
	if _, err := state.Seek(0, 0); err != nil {
		return err
	}
	fds = append(fds, fd)
	defer setInherited(fds, false)
	if err := setInherited(fds, true); err != nil {
		return err
	}
	fs.log.Info("hands over", "handles", len(c.Handles), "locks", fs.table.Len(), "parked", len(c.Transport.Parked))
	return fs.opts.Replace(q.program, state)
}
