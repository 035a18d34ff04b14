//go:build linux

package client

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// controlDir is the control directory's name in the root of a mount.
const controlDir = ".stagefs"

// A place is a directory, which may not exist yet, on a mount.
type place struct {
	path string // absolute, without symlinks
	root string // of the mount
	rel  string // path relative to root; "." is the root
}

// find looks for the mount that a directory is on.
func find(dir string) (place, error) {
	path, existing, err := resolve(dir)
	if err != nil {
		return place{}, err
	}
	root, err := mountRoot(existing)
	if err != nil {
		return place{}, notAnswering(dir, err)
	}
	// Only stagefs and other FUSE mounts have this type, so that a plain
	// directory with such names in it is not taken for one.
	var st unix.Statfs_t
	switch err := unix.Statfs(root, &st); {
	case err != nil:
		return place{}, notAnswering(dir, err)
	case st.Type != unix.FUSE_SUPER_MAGIC:
		return place{}, fmt.Errorf("%s is %w; mount one with: stagefs mount DIR", dir, ErrNotStagefs)
	}
	rel := strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
	if rel == "" {
		rel = "."
	}
	return place{path: path, root: root, rel: rel}, nil
}

// resolve follows the symlinks of dir as far as it exists. existing is that
// part of the result.
func resolve(dir string) (path, existing string, err error) {
	if dir == "" {
		return "", "", fmt.Errorf("the directory is empty text: %w", unix.ENOENT)
	}
	abs, err := absolute(dir)
	if err != nil {
		return "", "", err
	}
	rest := ""
	for at := abs; ; {
		real, err := filepath.EvalSymlinks(at)
		switch {
		case err == nil:
			if path = filepath.Join(real, rest); len(path) >= unix.PathMax { // what is missing can't be made
				return "", "", fmt.Errorf("%s: %w", dir, unix.ENAMETOOLONG)
			}
			return path, real, nil
		case !errors.Is(err, os.ErrNotExist) && !errors.As(err, new(syscall.Errno)):
			return "", "", fmt.Errorf("%s: %w", dir, unix.ELOOP) // which EvalSymlinks gives no type
		case !errors.Is(err, os.ErrNotExist):
			if err == unix.ENOTDIR { // EvalSymlinks does not say of what
				err = fmt.Errorf("%s: %w", dir, err)
			}
			return "", "", dead(dir, err)
		case at == "/":
			return "", "", err
		}
		st, err := os.Lstat(at)
		if err == nil && st.Mode()&os.ModeSymlink == 0 {
			continue // somebody has made it since
		}
		// A dangling symlink is not a directory that could be made.
		if err == nil {
			return "", "", fmt.Errorf("%s is a symlink to nothing: %w", at, unix.ENOENT)
		}
		at, rest = filepath.Dir(at), filepath.Join(filepath.Base(at), rest)
	}
}

// absolute is filepath.Abs, but that a ".." behind a symlink, or in a working directory
// whose name has one, is the parent of where that leads: as for the kernel.
func absolute(dir string) (string, error) {
	up := strings.LastIndex("/"+dir+"/", "/../")
	if up < 0 {
		return filepath.Abs(dir)
	}
	up += len("..")
	parent := dir[:up]
	if !filepath.IsAbs(parent) {
		wd, err := os.Getwd()
		if err != nil {
			return "", err
		}
		parent = wd + "/" + parent
	}
	if real, err := filepath.EvalSymlinks(parent); err == nil {
		parent = real
	}
	return filepath.Join(parent, dir[up:]), nil
}

// mountRoot is the root of the mount that an existing path is on: the nearest
// directory at or above it that something is mounted on.
func mountRoot(path string) (string, error) {
	for at := path; ; at = filepath.Dir(at) {
		var st unix.Statx_t
		err := unix.Statx(unix.AT_FDCWD, at, unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
		if err == unix.ENOENT && at != "/" {
			continue // somebody has removed it since
		}
		if err != nil {
			return at, err
		}
		if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 || at == "/" {
			return at, nil
		}
	}
}

// notWhole is the failure where the root of a mount is not to be seen, as in a container
// that shows a part of one.
func notWhole(root string) error {
	return fmt.Errorf("%s is %w: it has no %s; in a container, the whole mount must be visible, not a part of it", root, ErrNotStagefs, controlDir)
}

// notAnswering is a failure to reach the control directory.
func notAnswering(dir string, err error) error {
	if daemonGone(err) {
		return dead(dir, err)
	}
	return fmt.Errorf("%s: %w", dir, err)
}

// dead makes sure that the error of a path whose daemon is dead says so, and names the
// mount.
func dead(dir string, err error) error {
	if !daemonGone(err) {
		return err
	}
	at, source := deadMount(dir)
	if at == "" {
		return fmt.Errorf("%s: the daemon of its mount is dead: %w", dir, unix.ENOTCONN)
	}
	mount := shellWord(at)
	if source != at {
		mount = shellWord(source) + " " + mount
	}
	return fmt.Errorf("%s: the daemon of %s is dead; start it again, with its options: stagefs mount %s (only to give it up: stagefs umount %s): %w",
		dir, word(at), mount, shellWord(at), unix.ENOTCONN)
}

// deadMount returns the mountpoint that a path leads into, and what is mounted there:
// the first one on the way. It enters none, as nothing in a dead one can be looked at.
func deadMount(dir string) (at, source string) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", ""
	}
	sources := make(map[string]string) // by mountpoint
	for line := range strings.Lines(string(table)) {
		before, after, _ := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if len(f) > 4 && len(g) > 1 && g[0] == "fuse.stagefs" {
			sources[octal.Replace(f[4])] = octal.Replace(g[1])
		}
	}
	if !filepath.IsAbs(dir) {
		wd, err := syscall.Getwd() // os.Getwd looks at the directory
		if err != nil {
			return "", ""
		}
		dir = wd + "/" + dir
	}
	const maxLinks = 40 // as in the kernel
	at = "/"
	for rest, links := strings.Split(dir, "/"), 0; len(rest) > 0; {
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		if source, ok := sources[next]; ok {
			return next, source
		}
		target, err := os.Readlink(next)
		if err != nil {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return "", ""
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return "", ""
}

// octal undoes the escapes of mountinfo, proc_pid_mountinfo(5).
var octal = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#")

// shellWord is a path as one word of a command that is to be typed.
func shellWord(path string) string {
	if word(path) == path {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}
