package fs

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// lookUnder warns of ways under the mount (M5). A dead mount has kept new ones
// away since another daemon did so, and everybody waits for this one.
func (s *Server) lookUnder(o *Options) error {
	if s.dead != nil && !s.dead.cleared && !o.Strict {
		return nil
	}
	ways, err := waysUnder(o.Dir, s.dead)
	if err != nil && o.Strict {
		return fmt.Errorf("%s: cannot look for ways under the mount: %w", o.Dir, err)
	}
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

// lookInside finds out what is mounted within the directory, and warns of what that means
// for the mount.
func (s *Server) lookInside(o *Options, root int) error {
	var inside []MountEntry
	var at string
	var err error
	if d := s.dead; d != nil && !d.cleared {
		at = d.path
		inside, err = mountsOn(d.on, at) // root is in a copy of these
	} else if at, err = pathOfFD(root); err == nil {
		inside, err = mountsOn(mountIDOf(root), at)
	}
	if err != nil {
		return err
	}
	for _, m := range inside {
		if byOpener(m.FSType) {
			s.warn("%s cannot be entered in the mount: there the kernel goes by the rights of who opens something, which would be the daemon's", plain(m.Path))
		}
	}
	if err := s.lookCase(o, root, at, inside); err != nil {
		return err
	}
	flags, where := restriction(inside)
	if unix.Geteuid() != 0 { // fusermount3's mounts have these in any case
		if o.mountFlags(root)&unix.MS_NOSYMFOLLOW != 0 {
			s.warn("symbolic links are followed: fusermount3 does not know the option nosymfollow")
		}
		return nil
	}
	has, _ := flagsOf(root)
	flags &^= has | o.MountFlags.Set | o.MountFlags.Clear
	o.MountFlags.Set |= flags
	for _, name := range []string{"nosuid", "nodev"} {
		if flags&flagOptions[name].Set != 0 {
			s.warn("all of the mount has the option %s, as %s has, which is mounted within; -o %s takes it off", name, plain(where[name]), strings.TrimPrefix(name, "no"))
		}
	}
	return nil
}

// lookCase warns where names in the directory, or in what is mounted within, are the same
// file's although they differ in case. The next daemon of a mount that is there starts all
// the same.
func (s *Server) lookCase(o *Options, root int, at string, inside []MountEntry) error {
	var all []string
	if foldsCase(root) {
		all = append(all, o.Dir)
	}
	for _, dir := range append(all, foldingWithin(root, at, inside)...) {
		if o.Strict && !o.Successor && !o.NoLocking {
			return fmt.Errorf("%s: %w: names in %s that differ in case alone are the same file's", o.Dir, ErrStrict, plain(dir))
		}
		s.warn("names in %s that differ in case alone are the same file's, but locks go by names as they are written: whoever writes one otherwise may get past a lock", plain(dir))
	}
	return nil
}
