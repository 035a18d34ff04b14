//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

// passing is how long a mount may be busy though nobody is seen inside, for sure. The
// kernel takes a closed file, or a process that ends, out of /proc a moment before
// it lets go of the mount: under load that moment was long enough to be hit.
const passing = 2 * time.Second

// minLooks is how often it is looked for them at the least: under load one look
// can take longer than that.
const minLooks = 3

func (c *command) umountCommand() *cli.Command {
	return &cli.Command{
		Name:      "umount",
		Aliases:   []string{"unmount"},
		Usage:     "unmount, or clear what a killed daemon left",
		ArgsUsage: "[--lazy] MOUNTPOINT",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "lazy", Aliases: []string{"l"}, Usage: "detach now also if someone is inside; they are served until they leave"},
		},
		Action: c.umountAction,
	}
}

func (c *command) umountAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 1, 1); err != nil {
		return err
	}
	path, mount, err := findExact(ctx.Args().First())
	if errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
		return fs.UnmountDead(path) // it hides /proc, where the mounts are listed
	}
	if err != nil {
		return err
	}
	if by := mountedBy(mount); by != unix.Geteuid() && unix.Geteuid() != 0 {
		return exitf(exitNoPerm, "%s was mounted by the user %d; only that one and root may unmount it", quote(path), by)
	}
	daemon := daemonOf(mount)
	who := daemon
	if who == 0 {
		who = suspect(mount)
	}
	if err := endDying(mount, who); err != nil {
		return err
	}
	lazy := ctx.Bool("lazy")
	err = c.unmount(path, lazy)
	var users []mountUser
	for end, looks := time.Now().Add(passing), 0; errors.Is(err, unix.EBUSY) && unix.Geteuid() == 0 && !slices.ContainsFunc(users, mountUser.wasSeen); looks++ {
		if looks >= minLooks && time.Now().After(end) {
			break
		}
		time.Sleep(5 * time.Millisecond)
		users = mountUsers(mount)
		err = c.unmount(path, lazy) // who was seen may have left: the look takes long
		users = slices.DeleteFunc(users, mountUser.hasEnded)
	}
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, fs.ErrMountpointBusy):
		if unix.Geteuid() != 0 {
			users = mountUsers(mount)
		}
		return exitf(exitHeld, "%s is in use%s\n  end that, or detach it with: stagefs umount --lazy %s", quote(path), whoIsInside(mount, users), shellWord(path))
	case errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "%s: only root and who mounted it may unmount it", quote(path))
	case err == nil:
		c.awaitEnd(mount, daemon, lazy)
	}
	return err
}

// mountedBy is the user who mounted.
func mountedBy(mount *fs.MountEntry) int {
	for option := range strings.SplitSeq(mount.FSOptions, ",") {
		if value, ok := strings.CutPrefix(option, "user_id="); ok {
			uid, _ := strconv.Atoi(value)
			return uid
		}
	}
	return 0
}

// findExact finds the stagefs mount at the given path, dead ones too. The path is
// returned also where the mount table cannot be read.
func findExact(given string) (path string, _ *fs.MountEntry, err error) {
	// Its daemon may be stopped, but not one that knows where the path leads.
	fs.LeadsThrough(given, func(mount *fs.MountEntry, ends bool) bool {
		if !ends {
			err = answers(mount, answerTime)
		}
		return err == nil
	})
	if err != nil {
		return "", nil, err
	}
	path, err = fs.AbsoluteOf(given)
	if err != nil {
		return "", nil, err
	}
	mounts, err := fs.ReadMounts()
	if err != nil {
		return path, nil, err
	}
	mount := fs.TopMount(mounts, path)
	if mount == nil || !mount.IsStagefs() {
		hint := ""
		if over := fs.MountOf(mounts, path); over.IsStagefs() {
			hint = "; it is inside the one at " + quote(over.Path)
		} else if at := pathInMount(path); at != "" {
			hint = ": it is served at " + quote(at) + "; name that"
		}
		return "", nil, exitf(exitUnavailable, "%s is no stagefs mount%s", quote(path), hint)
	}
	return path, mount, nil
}

// whoIsInside describes what keeps a mount busy: users were seen. Where its daemon does not
// answer, that may be what keeps them.
func whoIsInside(mount *fs.MountEntry, users []mountUser) string {
	const most = 10
	if len(users) == 0 && os.Geteuid() != 0 {
		return ", by processes that only root can see"
	}
	silent := errors.Is(ask(mount.Path, false, answerTime), errSilent)
	switch {
	case len(users) == 0 && silent:
		return ": " + silence(mount)
	case len(users) == 0:
		return ", by processes that are not seen: perhaps in another mount or PID namespace"
	}
	var b strings.Builder
	b.WriteString(" by:")
	for i, u := range users {
		if i == most {
			fmt.Fprintf(&b, "\n  and %d more", len(users)-most)
			break
		}
		fmt.Fprintf(&b, "\n  %s", u)
	}
	if silent {
		fmt.Fprintf(&b, "\n  %s", silence(mount))
	}
	return b.String()
}
