//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate"
)

// readControl reads one file of a mount's control directory.
func readControl(mountpoint, name string) ([]byte, error) {
	data, err := os.ReadFile(filepath.Join(mountpoint, fs.ControlDir, name))
	return data, controlError(mountpoint, err)
}

// servedBy returns the process that serves a mount, as that tells.
func servedBy(mountpoint string) (pid int, err error) {
	d, err := daemonSays(mountpoint)
	if err == nil && d.pid == 0 {
		err = exitf(exitSoftware, "%s: its version tells no pid", quote(mountpoint))
	}
	return d.pid, err
}

func readListing(mountpoint string) (lockstate.Listing, error) {
	var l lockstate.Listing
	data, err := readControl(mountpoint, "locks.json")
	if err != nil {
		return l, err
	}
	if err := json.Unmarshal(data, &l); err != nil {
		return l, exitf(exitSoftware, "%s: locks.json: %v", quote(mountpoint), err)
	}
	return l, nil
}

// openCtl opens the file of a mount that takes commands.
func openCtl(mountpoint string) (*os.File, error) {
	ctl, err := os.OpenFile(filepath.Join(mountpoint, fs.ControlDir, "ctl"), os.O_RDWR, 0)
	return ctl, controlError(mountpoint, err)
}

// sendLine has the daemon carry out a command. It may have more to say of that, also if it
// succeeds; the error is the errno of the write.
func sendLine(ctl *os.File, line string) (lockstate.Answer, error) {
	_, err := ctl.WriteAt([]byte(line+"\n"), 0)
	return readAnswer(ctl), err
}

// readAnswer returns what the daemon says of the last command. It begins at 0, wherever
// the command was written.
func readAnswer(ctl io.ReaderAt) (answer lockstate.Answer) {
	if data, err := io.ReadAll(io.NewSectionReader(ctl, 0, 64<<10)); err == nil {
		_ = json.Unmarshal(data, &answer) // an older daemon says nothing
	}
	return answer
}

// controlError says what a failed access to the control directory means.
func controlError(mountpoint string, err error) error {
	switch {
	case err == nil:
		return nil
	case isDead(err):
		mount := &fs.MountEntry{Path: mountpoint, Source: mountpoint}
		if m := fs.LeadsTo(mountpoint); m != nil {
			mount = m
		}
		return exitf(exitUnavailable, "the daemon of %s is dead; %s", quote(mountpoint), startAgain(mount))
	case errors.Is(err, os.ErrNotExist):
		return exitf(exitUnavailable, "%s has no control directory; is it a stagefs mount?", quote(mountpoint))
	case errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "%s: not allowed; an ordinary user's mount is for that user alone", quote(mountpoint))
	case errors.Is(err, unix.EROFS):
		return readOnly(mountpoint)
	}
	return err
}

// readOnly is the failure of a command beneath a mount that is read-only.
func readOnly(dir string) error {
	at := "MOUNTPOINT"
	if mount := fs.LeadsTo(dir); mount != nil {
		at = shellWord(mount.Path)
	}
	return exitf(exitOS, "%s: the mount is read-only, and takes no commands; for root: stagefs mount -o remount,rw %s", quote(dir), at)
}

// place finds the mount that path is on, and path relative to its root. Names
// that do not exist (any more) are fine.
func (c *command) place(path string) (mountpoint, rel string, err error) {
	real, err := resolve(path)
	if err != nil {
		return "", "", err
	}
	mountpoint, rel, err = c.find(real)
	if errors.Is(err, fs.ErrNoMount) {
		return "", "", noMount(path)
	}
	return mountpoint, rel, err
}

// noMount is the failure of a command about a path that is in no mount.
func noMount(path string) error {
	if at := pathInMount(path); at != "" {
		return exitf(exitUnavailable, "%s is in no stagefs mount: it is served at %s; name that", quote(path), quote(at))
	}
	return exitf(exitUnavailable, "%s is in no stagefs mount; mount one with: stagefs mount DIR", quote(path))
}

// resolve follows symlinks, in the last element too, as far as names exist.
func resolve(path string) (string, error) {
	abs, err := fs.Abs(path)
	if err != nil {
		return "", err
	}
	rest := ""
	for dir := abs; ; dir = filepath.Dir(dir) {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return filepath.Join(real, rest), nil
		}
		if dir == "/" {
			return abs, nil
		}
		rest = filepath.Join(filepath.Base(dir), rest)
	}
}

// bytesOf is a name as the bytes it is: JSON has those too where they are not
// valid UTF-8.
func bytesOf(text string, bytes []byte) string {
	if len(bytes) > 0 {
		return string(bytes)
	}
	return text
}

// dirOf is the directory of a lock.
func dirOf(row lockstate.Row) string { return bytesOf(row.Dir, row.DirBytes) }

func pathOf(b lockstate.Blocker) string { return bytesOf(b.Path, b.PathBytes) }

// governing are the locks on the nearest locked directory at or above rel (C2),
// the one in force last.
func governing(rows []lockstate.Row, rel string) []lockstate.Row {
	var nearest []lockstate.Row
	for _, row := range rows {
		dir := dirOf(row)
		if !covers(dir, rel) {
			continue
		}
		switch {
		case len(nearest) == 0 || depth(dir) > depth(dirOf(nearest[0])):
			nearest = []lockstate.Row{row}
		case dir == dirOf(nearest[0]):
			nearest = append(nearest, row)
		}
	}
	return nearest
}

// covers reports whether the relative path rel is dir or beneath it.
func covers(dir, rel string) bool {
	return dir == "." || rel == dir || strings.HasPrefix(rel, dir+"/")
}

func depth(dir string) int {
	if dir == "." {
		return 0
	}
	return 1 + strings.Count(dir, "/")
}
