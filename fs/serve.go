package fs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// serve answers requests until the kernel lets go.
func (s *Server) serve() {
	s.transport.Serve()
	s.fs.expiry.close()
	s.fs.orphans.close()
	s.fs.control.shutDown()
	s.fs.stopRepresenting()
	s.fs.ahead.pause(aheadStop)
	err := s.fs.procs.Close()
	s.fs.clearings.Wait() // once no death comes any more: none may begin meanwhile but in one of them
	s.fs.linger.close()
	s.fs.hot.close()
	s.fs.leftovers.close()
	s.fs.close()
	unix.Close(s.fs.back.root)
	s.err = errors.Join(err, s.store.Close())
	close(s.done)
}

// Mountpoint returns where the mount is.
func (s *Server) Mountpoint() string { return s.mountpoint }

// Warnings returns what was found under the mount (M5) and what an ordinary
// user's mount lacks.
func (s *Server) Warnings() []string { return s.warnings }

// Transport names the way in which requests come.
func (s *Server) Transport() string { return s.transport.Name() }

// Wait returns when the mount is gone, by Shutdown or from outside.
func (s *Server) Wait() error {
	<-s.done
	return s.err
}

// Shutdown ends the mount (M4): no lock is granted any more, and when nobody
// uses the mount, or after the grace time, it is detached. In the latter case
// it returns [ErrDetached] and the mount is served until its last file is
// closed.
func (s *Server) Shutdown(ctx context.Context) error {
	s.fs.table.Freeze()
	s.fs.control.shutDown()
	deadline := time.NewTimer(s.fs.opts.Grace)
	defer deadline.Stop()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		err := s.unmount(false)
		if err == nil || errors.Is(err, ErrNoMount) {
			select {
			case <-s.done:
				return s.err
			case <-time.After(endTime): // it is seen at another place, too, or from inside
				return fmt.Errorf("%s: %w", s.mountpoint, ErrDetached)
			}
		}
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-again.C:
			continue
		case <-s.done:
			return s.err
		case <-ctx.Done():
		case <-deadline.C:
		}
		if err := s.unmount(true); err != nil {
			return err
		}
		return fmt.Errorf("%s: %w", s.mountpoint, ErrDetached)
	}
}

// Detach takes the mount away from its path at once, whoever uses it. It asks
// nothing of the mount itself. One that is gone is no error.
func (s *Server) Detach() error {
	if err := s.unmount(true); !errors.Is(err, ErrNoMount) {
		return err
	}
	return nil
}
