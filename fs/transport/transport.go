package transport

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A Transport serves one connection to the kernel.
type Transport interface {
	Kernel
	// Serve returns when the kernel has let go and everything is over.
	Serve()
	// Stop ends all threads. What was taken from the kernel and is not
	// answered is in the State; node is a regular file that the kernel knows
	// for sure. begun is called before anything is cancelled. ErrBusy comes with
	// a State, with which the transport has to resume, or else before begun.
	Stop(node uint64, begun func()) (*State, error)
	// Resume goes on after a Stop.
	Resume(*State)
}

// Kernel is the way to the kernel besides answering its requests.
type Kernel interface {
	// Name is the transport's.
	Name() string
	// InodeNotify makes the kernel forget an inode's attributes, and its
	// content from off on unless off is negative.
	InodeNotify(node uint64, off, length int64) fuse.Status
	// NotifyStore gives the kernel content of a file, at most 4 KiB, which makes it take
	// the file to be no shorter, until it asks for the attributes again. It waits for
	// reads of that page that are under way, and so for the daemon.
	NotifyStore(node uint64, off int64, content []byte)
	// DropPages makes the kernel forget so many bytes of a file from off on, soon; 0:
	// all that follow. It waits for reads of them that are under way, and so for the
	// daemon.
	DropPages(node uint64, off, length int64)
	// FlushPages makes the kernel write what mappings have changed, and forget all pages of
	// a file, before it returns. The caller's request is none that has pages locked. It
	// reports false where that has to wait, as the transport stops.
	FlushPages(node uint64) bool
	// ForgetNames makes the kernel ask again for each name that it knows, or
	// knows not to be there. Unlike news of a single name it waits for no
	// lock; but what is mounted on a directory is gone with its name, whatever the
	// answer. It does nothing where TellsNames is false.
	ForgetNames()
	// TellsNames reports whether ForgetNames can do that: from Linux 6.16 on.
	TellsNames() bool
	// RegisterBackingFd gives the kernel a file for passthrough.
	RegisterBackingFd(*fuse.BackingMap) (int32, syscall.Errno)
	UnregisterBackingFd(id int32) syscall.Errno
	// Stopping reports whether what waits is cancelled because the transport
	// stops, or as the kernel has let go: not by a signal to who waits.
	Stopping() bool
	// MapsIDs reports whether the IDs of a mount may be mapped. Then requests do not tell
	// who has sent them.
	MapsIDs() bool
	// Requests tells how many requests have begun to be carried out, by name;
	// nil: they are not counted.
	Requests() map[string]uint64
}

// The names of the transports.
const (
	Auto    = "auto"
	Uring   = "uring"
	Threads = "threads"
	Fuse    = "fuse"
)

// ErrUnavailable says that the transport that was asked for can't be had.
var ErrUnavailable = errors.New("is not available")

// ErrGone says that the kernel has let go of the connection already: somebody
// has unmounted it.
var ErrGone = errors.New("was unmounted before it was served")

// orGone is err, or ErrGone where that is what the kernel means by it.
func orGone(err error) error {
	for _, errno := range []syscall.Errno{syscall.ENODEV, syscall.ENOTCONN, syscall.ECONNABORTED, syscall.ENOENT} {
		if errors.Is(err, errno) {
			return ErrGone
		}
	}
	return err
}

// ErrRefused says that the kernel refused what it had offered. The connection
// is of no use any more; another one has to be made, for a lesser transport.
var ErrRefused = errors.New("was refused by the kernel")

// Options say what is served and how.
type Options struct {
	FS     fuse.RawFileSystem
	Mount  *fuse.MountOptions
	Want   string          // the name of a transport, or Auto
	Attach func(Kernel)    // is called before the first request
	Files  func() []uint64 // some regular files that the kernel may know
	Lines  func() uint64   // how many requests have begun to stand in line for a lock
	Hurry  func() bool     // whether news that something was forgotten must not be late
	// Apart is the first number of nodes that a read or write may wait in
	// without end; 0: there are none.
	Apart uint64
}

// Start agrees with the kernel on the protocol over fd, a descriptor of
// /dev/fuse that it takes over. note says why a better transport was not taken.
func Start(fd int, o Options) (t Transport, note string, err error) {
	if o.Want == Fuse {
		news, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, "", fmt.Errorf("fcntl: %w", err)
		}
		s, err := fuse.NewServer(o.FS, fmt.Sprintf("/dev/fd/%d", fd), o.Mount)
		if err != nil {
			unix.Close(news)
			return nil, "", err
		}
		t := goFuse{s, news, mapsIDs(o.Mount, s.KernelSettings())}
		o.Attach(t)
		return t, "", nil
	}
	return startOwn(fd, o)
}

// goFuse is go-fuse's own server.
type goFuse struct {
	*fuse.Server
	news int  // a descriptor for what it has no message for; lasts as long as the process
	ids  bool // see MapsIDs
}

func (goFuse) Name() string { return Fuse }

func (g goFuse) NotifyStore(node uint64, off int64, content []byte) {
	g.InodeNotifyStoreCache(node, off, content)
}

func (g goFuse) DropPages(node uint64, off, length int64) { go g.InodeNotify(node, off, length) }

func (g goFuse) FlushPages(node uint64) bool {
	g.InodeNotify(node, 0, 0)
	return true
}

func (goFuse) Stop(uint64, func()) (*State, error) {
	return nil, fmt.Errorf("transport %s cannot be handed over; unmount, and mount with another --transport: %w", Fuse, syscall.EOPNOTSUPP)
}

func (goFuse) Resume(*State) {}

func (g goFuse) ForgetNames()     { _, _ = unix.Write(g.news, notification(notifyIncEpoch, nil)) }
func (g goFuse) TellsNames() bool { return tellsNames(g.KernelSettings().Minor) }

func (g goFuse) MapsIDs() bool { return g.ids }

func (goFuse) Stopping() bool { return false }

func (goFuse) Requests() map[string]uint64 { return nil }

// own is served by threads of this package.
type own struct {
	*conn
	loops *loops
	uring *uring // nil: only the loops

	parked  []*Parked // by another process; for Serve,
	dropped []uint64  // and see State.Drop
}

func (o *own) Name() string {
	if o.uring != nil {
		return Uring
	}
	return Threads
}

func startOwn(fd int, opts Options) (Transport, string, error) {
	o, want := *opts.Mount, opts.Want
	c := newConn(fd, &o, &opts)
	init, req, err := c.readInit()
	if err != nil {
		return nil, "", orGone(err)
	}
	c.init = req
	var u *uring
	var entries []*entry
	threads, start := 0, make(chan bool)
	if want != Threads {
		if init.Flags64()&fuse.CAP_OVER_IO_URING == 0 {
			err = errors.New("the kernel does not offer it")
		} else {
			u = &uring{conn: c, room: max(o.MaxWrite, minRead)}
			entries, threads, err = u.prepare(start)
		}
		if err != nil && want == Uring {
			close(start)
			return nil, "", fmt.Errorf("transport %s %w: %w", Uring, ErrUnavailable, err)
		}
	}
	note := ""
	if err != nil {
		note = err.Error()
		close(start)
		u, c.watch.crews, c.keepers = nil, nil, nil
	} else if u != nil {
		o.ExtraCapabilities |= fuse.CAP_OVER_IO_URING
	}
	c.proto, c.served = fuse.NewProtocolServer(opts.FS, &o), opts.FS
	t := &own{conn: c, uring: u}
	c.redo = t.replayLate
	opts.Attach(t)
	if err := c.answerInit(req); err != nil {
		if u != nil {
			close(start)
		}
		return nil, "", orGone(err)
	}
	if u == nil {
		t.loops = c.newLoops(newGathering())
		return t, note, nil
	}
	for range threads {
		start <- true
	}
	err = u.registered(entries)
	if err == nil {
		t.loops = c.newLoops(&gathering{least: 1})
		t.loops.lazy = opts.Hurry != nil
		if err = u.grow(); err != nil {
			err = fmt.Errorf("transport %s %w: %w", Uring, ErrRefused, err)
		}
	}
	if err != nil {
		c.giveUp()
		if errors.Is(err, syscall.ENOTCONN) {
			err = ErrGone
		}
		return nil, "", err
	}
	return t, note, nil
}

// registered waits until the kernel has taken all entries, or refused one.
func (u *uring) registered(entries []*entry) (err error) {
	for _, e := range entries {
		if e := <-e.registered; e != nil {
			err = fmt.Errorf("transport %s %w: %w", Uring, ErrRefused, e)
		}
	}
	return err
}

// grow gives each queue in use its further entries.
func (u *uring) grow() error {
	for _, q := range u.queues {
		if q.online.Load() {
			if err := u.growQueue(q, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o *own) Serve() {
	c := o.conn
	close(c.serving)
	c.threads.Add(1)
	go func() {
		defer c.threads.Done()
		c.watch.run()
	}()
	o.run(o.parked)
	o.parked = nil
	c.threads.Wait()
	c.close()
}
