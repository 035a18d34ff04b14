package fs

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/filestore"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// A Server serves one mount.
type Server struct {
	fs         *FS
	store      *filestore.Store
	transport  transport.Transport
	mountpoint string
	dead       *deadMount // over the static directory
	deadAt     *deadMount // at the mountpoint, if that is another
	warnings   []string
	world      string        // see there
	ready      chan struct{} // closed when all of it is set up: the mount answers before
	done       chan struct{} // closed when the kernel has let go
	err        error         // of cleaning up; valid after done

	full          lineLimit    // lines of the log on locks for which there is no memory
	reserveLogged atomic.Int64 // when it was last logged that there are no tokens, in Unix seconds
}

// maxWrite is the size of the largest read and write requests, in bytes.
const maxWrite = 1 << 20

// Mount mounts o.Dir and returns when the mount answers. The caller goes on
// with [Server.Wait] and [Server.Shutdown].
func Mount(o Options) (_ *Server, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := CheckCalls(); err != nil {
		return nil, err
	}
	o.setDefaults()
	obeyMemoryLimit()
	unix.Umask(0) // modes come from the callers, with their umask applied; the state's are its own
	s := &Server{ready: make(chan struct{}), done: make(chan struct{})}
	var undo []func()
	defer func() {
		if err != nil {
			for i := len(undo) - 1; i >= 0; i-- {
				undo[i]()
			}
		}
	}()

	root, dead, err := openStatic(&o)
	if err != nil {
		return nil, err
	}
	s.dead = dead
	undo = append(undo, func() { unix.Close(root) })
	if err := dead.confirmSame(&o, root); err != nil {
		return nil, err
	}
	seen := root
	if root, err = o.withAtimes(seen); err != nil {
		return nil, err
	}
	if root != seen {
		defer unix.Close(seen)
	}
	if s.mountpoint, s.deadAt, err = checkMountpoint(&o, seen); err != nil {
		return nil, err
	}
	if dead := s.deadThere(); o.Successor && (dead == nil || dead.gone) {
		return nil, fmt.Errorf("%s: %w", s.mountpoint, ErrUnmounted)
	}
	if dead != nil && dead.why != nil && !dead.gone {
		s.warn(laidOpen, plain(dead.path), dead.why)
	}
	if dead := s.deadAt; dead != nil && !dead.gone && !dead.showed(o.Dir) {
		s.warn("the dead mount of %s, at %s, gives way: to have that served again, mount it elsewhere", plain(dead.entry.Source), plain(dead.path))
	}
	if err := s.claim(root, o.Dir); err != nil {
		return nil, err
	}
	if s.world, err = world(); err != nil {
		return nil, err
	}
	if err := s.openStore(&o, root); err != nil {
		return nil, err
	}
	undo = append(undo, func() { s.store.CloseUnserved() })

	if err := s.lookUnder(&o); err != nil {
		return nil, err
	}
	if err := s.lookInside(&o, root); err != nil {
		return nil, err
	}
	if err := s.becomeDaemon(); err != nil {
		return nil, err
	}
	procs, err := newResolver(&o)
	if err != nil {
		return nil, err
	}
	undo = append(undo, func() { procs.Close() })
	procs.KeepOn(o.Shelf, true)
	if !procs.KnowsExits() {
		s.warn("it cannot be learnt how processes end: what an owner leaves that changed nothing passes to its parent even if it was killed")
	}
	if transport.RequestTimeout() {
		s.warn("the kernel ends the mount when somebody waits for a lock, or for an event, for longer than fs.fuse.default_request_timeout or max_request_timeout; set both to 0 with sysctl, and mount again")
	}
	if err := s.newFS(o, root, procs); err != nil {
		return nil, err
	}
	s.fs.nodes.restoring(len(s.store.Load()))
	undo = append(undo, s.fs.nodes.locksThere)
	left, open := s.fs.leftHot(s.store)
	undo = append(undo, s.fs.hot.close)
	over, err := s.restore(open)
	if err != nil {
		return nil, err
	}
	if err := s.fs.expiry.start(s.fs); err != nil {
		return nil, err
	}
	undo = append(undo, s.fs.expiry.close)
	s.expectMount()
	if err := s.mount(&o); err != nil {
		return nil, err
	}
	s.store.Unload() // so that what changes now needs no copy
	for _, number := range over {
		s.store.Delete(number)
	}
	if err := s.takeOver(left); err != nil {
		return nil, err // and leaves a dead mount, at which nobody gets at anything
	}
	s.noteMount()
	s.fs.nodes.locksThere()
	if s.fs.privileged {
		raisePriority()
	}
	go s.serve()
	close(s.ready)
	return s, nil
}

// claim takes the static directory for this daemon, and what is in it or around it (M1).
func (s *Server) claim(root int, dir string) error {
	if err := claim(root, dir); err != nil {
		return err
	}
	doubts, err := claimAlone(root, dir)
	for _, why := range doubts {
		s.warn("%s", why)
	}
	var overlap *OverlapError
	if err != nil && !errors.As(err, &overlap) && !procid.IsShort(err) {
		s.warn("it cannot be told whether another daemon serves what is in here, or around it: %v", err)
		return nil
	}
	return err
}

// restore takes up the locks and candidates that the state has, and returns the
// numbers of those that are over. open: a daemon before has let everybody do what
// they liked where these locks are.
func (s *Server) restore(open bool) (over []uint64, err error) {
	if s.fs.opts.NoLocking {
		return nil, s.layOpen()
	}
	s.fs.tidyQuarantine()
	dead := s.deadThere()
	covered := dead != nil && !dead.gone && dead.why == nil && s.store.Crashed() && !open && !s.store.Another()
	if over, err = s.fs.restore(s.store, s.world, covered); err == nil {
		err = s.fs.restoreCandidates(s.store, s.world, covered)
	}
	if err != nil {
		return nil, fmt.Errorf("%s.*: %w", s.store.Path(), err)
	}
	return over, nil
}

// layOpen prepares for a time without locks, of which the next daemon with them must
// know: it takes what is in a locked directory for its owner's else (R7).
func (s *Server) layOpen() error {
	for token := range s.store.Load() {
		if token < lockstate.MemberBase {
			if err := s.fs.hot.layOpen(); err != nil {
				return fmt.Errorf("%s.*: writing down that locks are not enforced: %w", s.store.Path(), err)
			}
			return nil
		}
	}
	return nil
}

// takeOver deals with what an earlier daemon has left, when the mount is there: what
// it had open is in left.
func (s *Server) takeOver(left []hotPlace) error {
	fs := s.fs
	if fs.privileged {
		raisePriority()
	}
	if fs.privileged && !fs.opts.NoPassthrough && !fs.opts.Compat {
		if err := fs.tryPassthrough(); err != nil {
			fs.log.Info("no passthrough", "err", err)
		}
	}
	fs.linger.start(fs)
	if fs.privileged {
		if err := fs.adopt(left); err != nil {
			return err
		}
	}
	fs.hot.found()
	fs.orphans.scan(fs, true)
	fs.clearings.Go(fs.emptyTrash)
	return nil
}

// becomeDaemon makes this process fit to serve others.
func (s *Server) becomeDaemon() error {
	raiseProcs()
	raiseDescriptors()
	for _, left := range raiseLimits() {
		s.warn("%s", left)
	}
	// Nobody gets at the backing through /proc/PID/fd.
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

func newResolver(o *Options) (*procid.Resolver, error) {
	return procid.NewResolver(procid.Options{Compat: o.Compat, Threads: min(dirCacheLimit(), 1024)})
}

// newFS makes the file system, with an empty table.
func (s *Server) newFS(o Options, root int, procs *procid.Resolver) (err error) {
	events := new(eventLog)
	last := s.store.Tokens()
	for token := range s.store.Load() {
		if token < lockstate.MemberBase {
			last = max(last, token) // whatever became of the mark
		}
	}
	table := lockstate.Options{
		LastToken: last, Reserve: s.reserve, Room: s.room, DenyUnlocked: o.DenyUnlocked, World: s.world, OnCrash: o.OnCrash,
		Claims: func(p *procid.Process, c lockstate.Claim) (bool, error) { return claims(procs, p, c) },
		Gone:   func(id procid.ID) bool { return unix.Kill(id.Pid, 0) == unix.ESRCH },
		Notify: events.add,
	}
	if !o.NoLocking {
		table.Store = s.store
	}
	if s.fs, err = newFS(o, root, lockstate.New(table), procs); err != nil {
		return err
	}
	if fs := s.fs; !o.NoLocking {
		if err := procs.FollowBirths(); err != nil {
			fs.log.Info("who loses its parent before its first call is nobody's descendant here", "err", err)
		}
		s.store.Notify(func(err error) {
			if err != nil {
				reason := err.Error()
				fs.storeErr.Store(&reason)
				o.Log.Error("locks are not kept for a restart until the state can be written again", "err", err)
			} else {
				fs.storeErr.Store(nil)
				o.Log.Warn("locks are kept for a restart again")
			}
		})
	}
	s.fs.events = events
	s.fs.replacing.begin = s.replace
	return nil
}

// reserve has tokens reserved. Without any nobody gets a lock (ENOLCK): the reason is
// not the directory's.
func (s *Server) reserve(upTo uint64) error {
	err := s.store.Reserve(upTo)
	if err == nil {
		s.fs.reserveErr.Store(nil)
		return nil
	}
	reason := "reserving tokens, without which no lock can be had: " + err.Error()
	s.fs.reserveErr.Store(&reason)
	if now := time.Now().Unix(); s.reserveLogged.Swap(now) < now { // at most once a second
		s.fs.log.Error("no lock can be had until the state can be written again", "err", err)
	}
	return fmt.Errorf("%w: %v", unix.ENOLCK, err)
}

func (s *Server) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// openStore opens the state of the directory, which is this daemon's by now (M1).
func (s *Server) openStore(o *Options, root int) error {
	dir, err := o.stateDir()
	if err != nil {
		return err
	}
	store, err := openState(dir, o.Dir, root, s.deadThere(), s.servedBefore(o.Dir), o.Successor)
	if err != nil {
		return err
	}
	s.store = store
	s.warnings = append(s.warnings, store.Warnings()...)
	if store.Another() {
		s.warn("%s was served since with another state than that in %s: the locks of then are not known here; name the same state directory each time",
			plain(o.Dir), plain(dir))
	}
	return nil
}

// stateDir is where the state is.
func (o *Options) stateDir() (string, error) {
	if o.StateDir != "" {
		return o.StateDir, nil
	}
	return filestore.DefaultDir()
}

// endTime is how long a daemon may take to end after its mount is gone.
const endTime = 10 * time.Second

// laidOpen says what happened to a path, and why.
const laidOpen = "%s could be written past the mount for a moment, because %v"

// TryUring reports why a mount could not use io_uring, the kernel's switch
// aside.
func TryUring() error { return transport.TryUring() }
