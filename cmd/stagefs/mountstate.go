//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// A daemonInfo is what a live mount says of its daemon.
type daemonInfo struct {
	pid        int
	transport  string // how the requests come
	unwritable string // why its state can't be written, if that is so
	stateDir   string // "" if it is too old to tell
}

func daemonSays(mountpoint string) (d daemonInfo, err error) {
	b, err := readControl(mountpoint, "version")
	for line := range strings.Lines(string(b)) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key {
		case "pid":
			d.pid, _ = strconv.Atoi(value)
		case "transport":
			d.transport = " (" + value + ")"
		case "unwritable":
			d.unwritable = value
		case "state":
			if d.stateDir = value; strings.HasPrefix(value, `"`) {
				d.stateDir, _ = strconv.Unquote(value)
			}
		}
	}
	return d, err
}

// checkMounts looks for mounts whose daemon is gone, or does not answer.
func checkMounts() finding {
	mounts, err := fs.Mounts()
	if err != nil {
		return finding{"mounts", statusWarn, err.Error(), ""}
	}
	var live, bad, fixes []string
	type found struct{ state, fix string }
	states := together(mounts, func(e fs.MountEntry) (f found) {
		f.state, f.fix = mountState(&e)
		return f
	})
	for i, e := range mounts {
		if f := states[i]; f.state == "" {
			d, _ := daemonSays(e.Path) // another user's is not to be read
			if d.unwritable == "" {
				live = append(live, quote(e.Path)+d.transport)
				continue
			}
			bad = append(bad, quote(e.Path)+d.transport+" cannot write its state, so new locks would not outlive the daemon, if any can be had: "+d.unwritable)
			fixes = append(fixes, "make room for the state of "+quote(e.Path)+", or make it writable; its daemon goes on by itself")
		} else {
			bad = append(bad, quote(e.Path)+" "+f.state)
			fixes = append(fixes, f.fix)
		}
	}
	switch {
	case len(bad) > 0:
		return finding{"mounts", statusWarn, strings.Join(bad, "; "), strings.Join(fixes, "; ")}
	case len(live) > 0:
		return finding{"mounts", statusOK, "live: " + strings.Join(live, ", "), ""}
	}
	return finding{"mounts", statusOK, "no stagefs mount", ""}
}

// checkTables asks the daemon to verify its tables; only an admin may.
func checkTables(path string) error {
	ctl, err := os.OpenFile(filepath.Join(path, fs.ControlDir, "ctl"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer ctl.Close()
	_, err = ctl.WriteString("check\n")
	return err
}

// restartTime is how long a supervisor may take to start a daemon again.
const restartTime = 500 * time.Millisecond

// mountState is empty for a mount that answers, and otherwise says what is
// wrong, and what helps.
func mountState(mount *fs.MountEntry) (state, fix string) {
	err := ask(mount.Path, true, answerTime)
	for end := time.Now().Add(restartTime); isDead(err) && time.Now().Before(end); err = ask(mount.Path, true, answerTime) {
		time.Sleep(50 * time.Millisecond)
	}
	switch {
	case errors.Is(err, errSilent):
		return "does not answer", silence(mount)
	case isDead(err):
		return "is dead", startAgain(mount)
	case errors.Is(err, unix.EIO):
		return "has damaged tables: its log says which; report it", ""
	}
	return "", ""
}

// isDead tells the kernel's answer for a mount without a daemon.
func isDead(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECANCELED)
}

// startAgain says how to go on with a dead mount. To unmount it would open the
// directory to everybody; the next daemon takes its place.
func startAgain(mount *fs.MountEntry) string {
	line := "stagefs mount " + shellWord(mount.Source)
	if mount.Source != mount.Path {
		line += " " + shellWord(mount.Path)
	}
	return "start it again, with its options: " + line + "; only to give it up: stagefs umount " + shellWord(mount.Path)
}

// mountAt returns the stagefs mount at a path, nil if there is none.
func mountAt(path string) *fs.MountEntry {
	mounts, _ := fs.ReadMounts()
	at, err := fs.AbsoluteOf(path)
	if m := fs.TopMount(mounts, at); err == nil && m != nil && m.IsStagefs() {
		return m
	}
	return nil
}
