package fs

import (
	"errors"
	"fmt"
	"log"
	"slices"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs/transport"
)

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
	if err == nil && o.IDMap && !s.fs.idmap {
		s.warn("the kernel maps no IDs of FUSE mounts, as Linux does from 6.12 on: --idmap has no effect")
	}
	switch {
	case errors.Is(err, transport.ErrGone):
		return fmt.Errorf("%s: %w", s.mountpoint, ErrUnmounted)
	case errors.Is(err, ErrUnmounted), errors.Is(err, ErrNotTaken), errors.Is(err, ErrMoved), errors.Is(err, ErrHelperKilled):
		return err
	case err == nil && note != "":
		o.Log.Info("a faster transport can't be had", "transport", s.transport.Name(), "err", note)
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
	if o.IDMap {
		opts.IDMappedMount = true
		opts.ExtraCapabilities |= fuse.CAP_SETXATTR_EXT // see SetXAttr
	}
	if o.NoPassthrough || o.Compat || !fs.privileged {
		opts.DisabledCapabilities |= fuse.CAP_PASSTHROUGH
	}
	return opts
}

// transportOptions says what is served.
func (s *Server) transportOptions(opts *fuse.MountOptions) transport.Options {
	return transport.Options{
		FS: s.fs, Mount: opts, Attach: s.fs.attach,
		Files: s.fs.knownFiles, Lines: s.fs.inLine, Hurry: s.fs.awaitsForget, Apart: firstFresh,
	}
}

// connect attaches the file system through a transport. note says why it is not
// a faster one.
func (s *Server) connect(o *Options, opts *fuse.MountOptions, want string) (note string, err error) {
	var fd int
	if unix.Geteuid() == 0 {
		fd, err = s.mountDirect(o)
	} else {
		fd, err = mountAsUser(o, s.mountpoint, o.mountFlags(s.fs.back.root))
	}
	if err != nil {
		return "", err
	}
	o.Mounted(true)
	to := s.transportOptions(opts)
	to.Want = want
	if s.fs.mountID, s.fs.mountDev, err = mountAt(s.mountpoint); err == nil {
		s.transport, note, err = transport.Start(fd, to)
	}
	if err != nil {
		unix.Close(fd)
		s.abandon(o, errors.Is(err, transport.ErrGone))
	}
	return note, err
}

// abandon gives up a mount that can't be served; gone: somebody has unmounted it. Threads that
// were to serve it may still keep its connection, by which nobody is answered: that is ended.
// Where it has taken a dead mount's place it stays as another one, or the backing would lie
// open, behind locks that are restored already.
func (s *Server) abandon(o *Options, gone bool) {
	d := s.deadThere()
	taken := d != nil && d.taken
	if !gone && !taken {
		o.Mounted(false)
	}
	ended := false
	if mounts, err := ReadMounts(); err == nil && unix.Geteuid() == 0 {
		m := mountByID(mounts, s.fs.mountID)
		ended = m != nil && Abort(m.Connection()) == nil
	}
	switch {
	case !taken:
		_ = s.unmount(true) // not what else is there, if somebody has done it
	case ended:
		if again, err := findDead(s.mountpoint); err == nil && again != nil {
			again.tucks = d.tucks
			*d = *again
		}
	}
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
	return slices.ContainsFunc([]*deadMount{s.dead, s.deadAt}, func(d *deadMount) bool { return d != nil && d.showed(dir) })
}

// mountDirect mounts as root, without a helper, and returns the descriptor of
// the connection. The mount behaves as the backing does: with its flags.
func (s *Server) mountDirect(o *Options) (int, error) {
	mountpoint, root := s.mountpoint, s.fs.back.root
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("/dev/fuse: %w: %w", ErrNoFuse, err)
	}
	if dead := s.deadThere(); dead != nil && !dead.cleared {
		err := dead.mountBeneath(o, fd, root)
		if err == nil {
			return fd, nil
		}
		unix.Close(fd)
		if !errors.Is(err, ErrUnmounted) {
			// To clear it would lay the backing open, behind locks that are restored already.
			err = fmt.Errorf("%s: %w: %w", mountpoint, ErrNotTaken, err)
		}
		return -1, err
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read=%d", fd, maxWrite)
	if err := s.mountOver(o, root, data); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// mountOver mounts on the mountpoint, and on nothing else that whoever may write in a
// directory above it puts in its place meanwhile.
func (s *Server) mountOver(o *Options, root int, data string) error {
	place, err := openPlace(s.mountpoint)
	if err != nil {
		return fmt.Errorf("%s: %w", s.mountpoint, err)
	}
	defer unix.Close(place)
	dir, err := AbsoluteOf(o.Dir)
	if over := o.Mountpoint == "" || err == nil && dir == s.mountpoint; over && !sameFile(place, root) {
		return fmt.Errorf("%s: %w", s.mountpoint, ErrMoved)
	}
	if err := unix.Mount(o.Dir, procPath(place), mountType, o.mountFlags(root), data); err != nil {
		return fmt.Errorf("mount %s: %w", s.mountpoint, err)
	}
	if at, err := pathOfFD(place); err != nil {
		return err
	} else if at != s.mountpoint { // the directory is somewhere else by now, with the mount
		_ = detach(at, true)
		return fmt.Errorf("%s: %w", s.mountpoint, ErrMoved)
	}
	return nil
}

func sameFile(a, b int) bool {
	var x, y unix.Statx_t
	return statAt(a, "", &x) == nil && statAt(b, "", &y) == nil && x.Ino == y.Ino && devName(&x) == devName(&y)
}

// openPlace opens an absolute path without symlinks, to mount there.
func openPlace(at string) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat2(unix.AT_FDCWD, at, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err == unix.ENOSYS || err == unix.EPERM { // forbidden, as in old containers
		fd, err = unix.Open(at, flags, 0)
	}
	if err == unix.ELOOP || err == unix.ENOENT || err == unix.ENOTDIR {
		err = ErrMoved
	}
	return fd, err
}
