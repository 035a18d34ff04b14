package fs

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
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
}

// maxWrite is the size of the largest read and write requests, in bytes.
const maxWrite = 1 << 20

// Mount mounts o.Dir and returns when the mount answers. The caller goes on
// with [Server.Wait] and [Server.Shutdown].
func Mount(o Options) (_ *Server, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.setDefaults()
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
	seen := root
	if root, err = o.withAtimes(seen); err != nil {
		return nil, err
	}
	if root != seen {
		defer unix.Close(seen)
	}
	if s.mountpoint, s.deadAt, err = checkMountpoint(&o); err != nil {
		return nil, err
	}
	if dead := s.deadThere(); o.Successor && (dead == nil || dead.gone) {
		return nil, fmt.Errorf("%s: %w", s.mountpoint, ErrUnmounted)
	}
	if dead != nil && dead.why != nil && !dead.gone {
		s.warn(laidOpen, plain(dead.path), dead.why)
	}
	if err := claim(root, o.Dir); err != nil {
		return nil, err
	}
	var overlap *OverlapError
	if err := claimAlone(root, o.Dir); errors.As(err, &overlap) {
		return nil, err
	} else if err != nil {
		s.warn("it cannot be told whether another daemon serves what is in here, or around it: %v", err)
	}
	if s.world, err = world(); err != nil {
		return nil, err
	}
	if err := s.openStore(&o, root); err != nil {
		return nil, err
	}
	undo = append(undo, func() { s.store.CloseUnserved() })

	if err := s.lookUnder(&o, seen); err != nil {
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
	if !procs.KnowsExits() {
		s.warn("it cannot be learnt how processes end: what an owner leaves that changed nothing passes to its parent even if it was killed")
	}
	if transport.RequestTimeout() {
		s.warn("the kernel ends the mount when somebody waits for a lock for longer than fs.fuse.default_request_timeout or max_request_timeout; set both to 0 with sysctl, and mount again")
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
	if err := s.mount(&o); err != nil {
		return nil, err
	}
	s.store.Unload() // so that what changes now needs no copy
	for _, number := range over {
		s.store.Delete(number)
	}
	s.takeOver(left)
	s.fs.nodes.locksThere()
	go s.serve()
	close(s.ready)
	return s, nil
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
	covered := dead != nil && !dead.gone && dead.why == nil && s.store.Crashed() && !open
	if over, err = s.fs.restore(s.store, s.world, covered); err == nil {
		err = s.fs.restoreCandidates(s.store, s.world)
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
func (s *Server) takeOver(left []hotPlace) {
	fs := s.fs
	if fs.privileged {
		raisePriority()
	}
	if fs.privileged && !fs.opts.NoPassthrough && !fs.opts.Compat {
		if err := fs.tryPassthrough(); err != nil {
			fs.log.Info("no passthrough", "why", err)
		}
	}
	fs.linger.start(fs)
	if fs.privileged {
		fs.adopt(left)
	}
	fs.hot.found()
	fs.orphans.scan(fs, true)
	fs.clearings.Go(fs.emptyTrash)
}

// becomeDaemon makes this process fit to serve others.
func (s *Server) becomeDaemon() error {
	raiseProcs()
	raiseDescriptors()
	for _, left := range raiseLimits() {
		s.warn("%s", left)
	}
	unix.Umask(0) // modes come from the callers, with their umask applied
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
		LastToken: last, Reserve: s.store.Reserve, DenyUnlocked: o.DenyUnlocked, World: s.world, OnCrash: o.OnCrash,
		Claims: func(p *procid.Process, c lockstate.Claim) (holds, known bool) { return claims(procs, p, c) },
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
			fs.log.Info("who loses its parent before its first call is nobody's descendant here", "why", err)
		}
		s.store.Notify(func(err error) {
			if err != nil {
				reason := err.Error()
				fs.unkept.Store(&reason)
				o.Log.Error("locks are not kept for a restart until the state can be written again", "err", err)
			} else {
				fs.unkept.Store(nil)
				o.Log.Warn("locks are kept for a restart again")
			}
		})
	}
	s.fs.events = events
	s.fs.replacing.begin = s.replace
	return nil
}

// lookUnder warns of ways under the mount (M5). A dead mount has kept new ones
// away since another daemon did so, and everybody waits for this one.
func (s *Server) lookUnder(o *Options, root int) error {
	if s.dead != nil && !s.dead.cleared && !o.Strict {
		return nil
	}
	ways, err := waysUnder(root, o.Dir, s.dead)
	if err != nil {
		s.warn("cannot look for ways under the mount: %v", err)
	}
	if len(ways) > 0 && o.Strict {
		return fmt.Errorf("%s: %w: %s", o.Dir, ErrStrict, strings.Join(ways, "; "))
	}
	for _, w := range ways {
		s.warn("what is done through this is not seen: %s", w)
	}
	if dir, err := AbsoluteOf(o.Dir); err == nil && s.mountpoint != dir { // as was asked for: no reason to refuse
		s.warn("what is done in %s itself is not seen, only what is done in %s: leave the mountpoint out, to mount over it, or keep others out of it",
			plain(o.Dir), plain(s.mountpoint))
	}
	return nil
}

func (s *Server) warn(format string, args ...any) {
	s.warnings = append(s.warnings, fmt.Sprintf(format, args...))
}

// openStore takes the directory for this daemon (M1) and reads the state.
func (s *Server) openStore(o *Options, root int) error {
	dir := o.StateDir
	if dir == "" {
		var err error
		if dir, err = filestore.DefaultDir(); err != nil {
			return err
		}
	}
	store, err := openState(dir, o.Dir, root, s.servedBefore(o.Dir))
	if err != nil {
		return err
	}
	s.store = store
	s.warnings = append(s.warnings, store.Warnings()...)
	return nil
}

// claim takes the backing for this daemon (M1), wherever another one keeps its
// state. The kernel drops the lock when the daemon dies.
//
// A daemon whose mount is gone already is waited for: umount(8) returns before
// it has ended.
func claim(root int, dir string) error {
	err := unix.Flock(root, unix.LOCK_EX|unix.LOCK_NB)
	for end := time.Now().Add(endTime); err == unix.EWOULDBLOCK && time.Now().Before(end) && !isMounted(dir); {
		time.Sleep(5 * time.Millisecond)
		err = unix.Flock(root, unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == unix.EWOULDBLOCK {
		return &ServedError{Dir: dir, Pid: flockOwner(root)}
	}
	if err != nil {
		return fmt.Errorf("%s: flock: %w", dir, err)
	}
	return nil
}

// endTime is how long a daemon may take to end after its mount is gone.
const endTime = 10 * time.Second

// isMounted reports whether a static directory is served somewhere, by a daemon
// that lives or not.
func isMounted(dir string) bool {
	at, err := AbsoluteOf(dir)
	if err != nil {
		return true
	}
	mounts, err := Mounts()
	return err != nil || slices.ContainsFunc(mounts, func(m MountInfo) bool { return m.Source == dir || m.Source == at })
}

// ServedBy returns the process that has a static directory to itself, as a daemon
// does (M1), or 0 if none is seen. It does not look at what is mounted over the
// directory: the caller makes sure that nothing is.
func ServedBy(dir string) int {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return flockOwner(fd)
}

// flockOwner returns the process that has the lock in the way of claim, as
// proc_locks(5) shows it, or 0.
func flockOwner(fd int) int {
	var st unix.Statx_t
	b, err := os.ReadFile("/proc/locks")
	if err != nil || statAt(fd, "", &st) != nil {
		return 0
	}
	file := fmt.Sprintf("%02x:%02x:%d", st.Dev_major, st.Dev_minor, st.Ino)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 5 && f[1] == "FLOCK" && f[5] == file {
			pid, _ := strconv.Atoi(f[4])
			return pid
		}
	}
	return 0
}

// mount attaches the file system to the mountpoint.
func (s *Server) mount(o *Options) error {
	opts := s.fs.mountOptions()
	if unix.Geteuid() != 0 {
		s.warn("not root: only your own processes can use the mount, unless /etc/fuse.conf has user_allow_other")
	}
	note, err := s.connect(o, opts, o.Transport)
	if errors.Is(err, transport.ErrRefused) && o.Transport == transport.Auto {
		note = err.Error()
		_, err = s.connect(o, opts, transport.Threads)
	}
	switch {
	case errors.Is(err, transport.ErrGone):
		return fmt.Errorf("%s: %w", s.mountpoint, ErrUnmounted)
	case errors.Is(err, ErrUnmounted):
		return err
	case err == nil && note != "":
		o.Log.Info("a faster transport can't be had", "in use", s.transport.Name(), "why", note)
		return nil
	case err == nil, errors.Is(err, transport.ErrUnavailable), errors.Is(err, transport.ErrRefused), errors.Is(err, ErrNoFuse):
		return err
	}
	return fmt.Errorf("%s: %w: %w", s.mountpoint, ErrNoFuse, err)
}

// mountOptions says what is wanted of the kernel.
func (fs *FS) mountOptions() *fuse.MountOptions {
	o := &fs.opts
	opts := &fuse.MountOptions{
		Name: "stagefs", FsName: o.Dir,
		Options:                  []string{"default_permissions"},
		MaxWrite:                 maxWrite,
		MaxBackground:            64,
		EnableAcl:                true,
		EnableLocks:              !o.NoLocking,
		ExplicitDataCacheControl: true,
		EnableSymlinkCaching:     true,
		// The umask is the caller's and comes with the request.
		ExtraCapabilities: fuse.CAP_DONT_MASK | fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_READDIRPLUS_AUTO | fuse.CAP_HANDLE_KILLPRIV_V2 | fuse.CAP_EXPORT_SUPPORT,
		Debug:             o.Debug,
		Logger:            log.New(logWriter{o.Log}, "", 0),
	}
	if o.NoPassthrough || o.Compat || !fs.privileged {
		opts.DisabledCapabilities |= fuse.CAP_PASSTHROUGH
	}
	return opts
}

// transportOptions says what is served.
func (s *Server) transportOptions(opts *fuse.MountOptions) transport.Options {
	return transport.Options{
		FS: s.fs, Mount: opts, Attach: func(k transport.Kernel) { s.fs.kernel = k },
		Files: s.fs.knownFiles, Lines: s.fs.inLine, Hurry: s.fs.awaitsForget, Apart: firstFresh,
	}
}

// connect attaches the file system through a transport. note says why it is not
// a faster one.
func (s *Server) connect(o *Options, opts *fuse.MountOptions, want string) (note string, err error) {
	var fd int
	if unix.Geteuid() == 0 {
		fd, err = s.mountDirect(o, s.mountpoint, s.fs.back.root)
	} else {
		fd, err = mountAsUser(o, s.mountpoint)
	}
	if err != nil {
		return "", err
	}
	o.Mounted(true)
	s.fs.mountID, s.fs.mountDev = mountAt(s.mountpoint)
	to := s.transportOptions(opts)
	to.Want = want
	s.transport, note, err = transport.Start(fd, to)
	if err != nil {
		if !errors.Is(err, transport.ErrGone) {
			o.Mounted(false)
		}
		unix.Close(fd)
		_ = s.unmount(true) // not what else is there, if somebody has done it
	}
	return note, err
}

// userAllowOther reports whether fusermount3 lets ordinary users open their
// mounts to others.
func userAllowOther() bool {
	b, err := os.ReadFile("/etc/fuse.conf")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if strings.TrimSpace(line) == "user_allow_other" {
			return true
		}
	}
	return false
}

// deadThere returns the dead mount that this daemon has found at the mountpoint.
func (s *Server) deadThere() *deadMount {
	if s.dead != nil && s.dead.path == s.mountpoint {
		return s.dead
	}
	return s.deadAt
}

// servedBefore reports whether a static directory was served by a daemon that has left
// a dead mount.
func (s *Server) servedBefore(dir string) bool {
	at, err := AbsoluteOf(dir)
	return err == nil && slices.ContainsFunc([]*deadMount{s.dead, s.deadAt}, func(d *deadMount) bool {
		return d != nil && (d.entry.Source == dir || d.entry.Source == at)
	})
}

// mountDirect mounts as root, without a helper, and returns the descriptor of
// the connection. The mount behaves as the backing does: with its flags.
func (s *Server) mountDirect(o *Options, mountpoint string, root int) (int, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("/dev/fuse: %w: %w", ErrNoFuse, err)
	}
	if dead := s.deadThere(); dead != nil && !dead.cleared {
		err := dead.mountBeneath(o, fd, root)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, ErrUnmounted):
			unix.Close(fd)
			return -1, err
		}
		if err := dead.clear(); err != nil {
			unix.Close(fd)
			return -1, err
		}
		if dead.gone && o.Successor {
			unix.Close(fd)
			return -1, fmt.Errorf("%s: %w", mountpoint, ErrUnmounted)
		}
		s.warn(laidOpen, plain(mountpoint), fmt.Errorf("the new mount could not be made beneath the dead one: %w", err))
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read=%d", fd, maxWrite)
	if err := unix.Mount(o.Dir, mountpoint, "fuse.stagefs", o.mountFlags(root), data); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("mount %s: %w", mountpoint, err)
	}
	return fd, nil
}

// laidOpen says what happened to a path, and why.
const laidOpen = "%s could be written past the mount for a moment, because %v"

// serve answers requests until the kernel lets go.
func (s *Server) serve() {
	s.transport.Serve()
	s.fs.expiry.close()
	s.fs.orphans.close()
	s.fs.control.shutDown()
	s.fs.clearings.Wait()
	s.fs.linger.close()
	s.fs.hot.close()
	s.fs.stopRepresenting()
	err := s.fs.procs.Close()
	s.fs.leftovers.close() // no death comes any more
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
			return s.Wait()
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

// absolute returns path as the kernel shows it in its list of mounts.
func absolute(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(abs)
	if err != nil {
		return abs, err
	}
	return real, nil
}

// logWriter passes go-fuse's lines on.
type logWriter struct {
	log *slog.Logger
}

func (w logWriter) Write(p []byte) (int, error) {
	text := strings.TrimSpace(string(p))
	level := slog.LevelWarn
	if slices.ContainsFunc(traces, func(t string) bool { return strings.HasPrefix(text, t) }) {
		level = slog.LevelDebug
	}
	w.log.Log(context.Background(), level, "fuse", "msg", text)
	return len(p), nil
}

// traces are how the lines begin that are there for Options.Debug alone.
var traces = []string{"rx ", "tx ", "doBatchForget: ", "ioctl: ", "notify: ", "mountDirect: ", "callFusermount: ", "unmount: "}

// TryUring reports why a mount could not use io_uring, the kernel's switch
// aside.
func TryUring() error { return transport.TryUring() }
