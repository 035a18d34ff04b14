package fs

import "golang.org/x/sys/unix"

// The daemon of an ordinary user may do no more than its user. A stager who makes
// its tree read-only in the end (chmod -R a-w) so takes from the daemon what that
// needs to clear up after it (R4, R7). As the user could, the daemon gives it back
// to itself for as long as one change takes.

// asOwner calls f, which changes entries of dirs, or moves a directory among them
// elsewhere. The caller keeps others from seeing the modes meanwhile.
func (b *backing) asOwner(f func() error, dirs ...place) error {
	err := f()
	if err != unix.EACCES {
		return err
	}
	permitted := false
	for _, d := range dirs {
		if undo := b.permit(d); undo != nil {
			defer undo()
			permitted = true
		}
	}
	if !permitted {
		return err
	}
	return f()
}

// permit gives the daemon all rights to a directory of its user's, wherever that is
// moved, until undo. It is nil if there is nothing to give.
func (b *backing) permit(d place) (undo func()) {
	var st unix.Statx_t
	if d.stat(&st) != nil || !isDirectory(&st) || int(st.Uid) != unix.Geteuid() {
		return nil
	}
	mode := uint32(st.Mode) & 0o7777
	if mode&0o700 == 0o700 || mode&unix.S_ISGID != 0 && int(st.Gid) != unix.Getegid() {
		return nil // chmod(2) by one who is not of the group would take the setgid bit away
	}
	fd, err := d.openAgain()
	if err != nil {
		return nil
	}
	if b.chmod(place{fd: fd}, mode|0o700) != nil {
		unix.Close(fd)
		return nil
	}
	return func() {
		_ = b.chmod(place{fd: fd}, mode)
		unix.Close(fd)
	}
}

// openAgain returns a descriptor of a directory that permits nothing but to name it.
func (p place) openAgain() (fd int, err error) {
	if p.name != "" {
		return openAt(p.fd, p.name, unix.O_PATH|unix.O_DIRECTORY, 0)
	}
	return dup(p.fd)
}

// unlink is unlinkat(2), as the owner of dir.
func (b *backing) unlink(dir int, name string, flags int) error {
	return b.asOwner(func() error { return unix.Unlinkat(dir, name, flags) }, place{fd: dir})
}

// move is renameat2(2) to a name that is not there, as the owner of both directories,
// and of name itself: a directory that gets another parent is written to.
func (b *backing) move(dir int, name string, to int, as string) error {
	return b.asOwner(func() error { return unix.Renameat2(dir, name, to, as, unix.RENAME_NOREPLACE) },
		place{fd: dir}, place{fd: to}, place{fd: dir, name: name})
}
