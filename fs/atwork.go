package fs

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Who reads or writes a file past the daemon may have the kernel keep its inode locked:
// with O_DIRECT, and on XFS always, until the memory that is read into is there, which
// may be that of another file system, and take long. A rename, a link and a removal wait
// for that; so that nobody waits behind them, it is done before.

// atWork are the files that were waited for.
type atWork []*node

// An atWorkError ends a try that is to be made again when a file has been waited for.
type atWorkError struct {
	back *backing
	fd   int
}

func (e *atWorkError) Unwrap() error { return unix.EBUSY }
func (e *atWorkError) Error() string { return "somebody is reading the file, or writing to it" }

// check returns an atWorkError if n, which may be nil, is one that passes and was not
// waited for.
func (a *atWork) check(fs *FS, n *node) error {
	if n == nil || slices.Contains(*a, n) {
		return nil
	}
	f := n.lockKnownFile()
	if f == nil {
		return nil
	}
	defer n.unlockFile(f)
	if f.passing == 0 || f.fd < 0 {
		return nil
	}
	fd, err := dup(f.fd)
	if err != nil {
		return nil
	}
	*a = append(*a, n)
	return &atWorkError{&fs.back, fd}
}

// afterWork tries again each time that a file has been waited for; briefly is for who keeps
// others waiting: what takes longer is given up.
func afterWork(briefly bool, try func() error) (err error) {
	var busy *atWorkError
	for err = try(); errors.As(err, &busy) && busy.await(briefly); err = try() {
	}
	return err
}

// await returns when the inode is nobody's for a moment. It reports whether it was in time.
func (e *atWorkError) await(briefly bool) bool {
	done := make(chan struct{})
	look := func() {
		e.back.awaitInode(e.fd)
		unix.Close(e.fd)
		close(done)
	}
	if !briefly {
		look()
		return true
	}
	go look()
	select {
	case <-done:
		return true
	case <-time.After(graceTime):
		return false
	}
}
