//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// explainMount adds to the errors of mounting what their reader may not know.
func explainMount(o fs.Options, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist) && !pathExists(o.Dir):
		return exitf(exitNoInput, "%s: no such directory; make it first: mkdir -p %s", quote(o.Dir), shellWord(o.Dir))
	case errors.Is(err, fs.ErrNotExist) && o.Mountpoint != "" && !pathExists(o.Mountpoint):
		return exitf(exitCantCreate, "mountpoint %s: no such directory; make it first: mkdir -p %s", quote(o.Mountpoint), shellWord(o.Mountpoint))
	case errors.Is(err, fs.ErrNotDirectory) && o.Mountpoint != "" && isDirectory(o.Dir):
		return exitf(exitCantCreate, "mountpoint %s: is not a directory; choose another mountpoint", quote(o.Mountpoint))
	case o.Mountpoint != "" && isAbout(err, o.Mountpoint) && errnoStatus(err) == exitNoInput:
		return exitf(exitCantCreate, "mountpoint: %s; choose another mountpoint", oneLine(err))
	case errors.Is(err, fs.ErrStaleMount):
		return staleError(o)
	case errors.Is(err, unix.EMFILE):
		return exitf(exitOS, "%s: the daemon may not have enough files open (%s): ulimit -Hn %d or more; LimitNOFILE= in a systemd unit", quote(o.Dir), openFiles(), enoughFiles)
	case errors.Is(err, fs.ErrNoFuse) && os.Geteuid() != 0 && unix.Access(target(o), unix.W_OK) != nil:
		return exitf(exitNoPerm, "%s: ordinary users can only mount over directories that they may write; mount as root", quote(target(o)))
	}
	if mount := foreignDead(target(o)); mount != nil {
		return exitf(exitNoPerm, "%s: the dead mount at %s is the user %d's; only that one and root can take its place, or unmount it",
			quote(o.Dir), quote(mount.Path), mountedBy(mount))
	}
	return err
}

// foreignDead returns the dead mount that a path leads into, if another user made it
// and this one is not root.
func foreignDead(path string) *fs.MountEntry {
	mount := fs.LeadsTo(path)
	if mount == nil || os.Geteuid() == 0 || os.Geteuid() == mountedBy(mount) || !isDead(ask(mount.Path, false, answerTime)) {
		return nil
	}
	return mount
}

// staleError tells of a dead mount in whose place no new one can be made: it is
// not stagefs's, or not at the directory itself.
func staleError(o fs.Options) error {
	mounts, _ := fs.ReadMounts()
	for _, dir := range []string{o.Dir, target(o)} {
		if mount := fs.LeadsTo(dir); mount != nil {
			return exitf(exitCantCreate, "%s is in the mount at %s, whose daemon is dead; %s", quote(dir), quote(mount.Path), startAgain(mount))
		}
		if path, err := fs.AbsoluteOf(dir); err == nil {
			if mount := fs.MountOf(mounts, path); strings.HasPrefix(mount.FSType, "fuse") {
				return exitf(exitCantCreate, "%s: a dead mount of %s, at %s, is in the way; clear it with: umount -l %s",
					quote(dir), quote(mount.FSType), quote(mount.Path), shellWord(mount.Path))
			}
		}
	}
	return exitf(exitCantCreate, "%s: a dead mount is in the way; clear it with: umount -l MOUNTPOINT", quote(o.Dir))
}

// openFiles tells how many this process may have.
func openFiles() string {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d are allowed", lim.Max)
}

// isAbout reports whether an error is that of a system call with a path.
func isAbout(err error, path string) bool {
	var p *os.PathError
	return errors.As(err, &p) && p.Path == path
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func pathExists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}
