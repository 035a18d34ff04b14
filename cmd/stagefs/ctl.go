//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/lockstate/client"
)

func (c *command) releaseCommand() *cli.Command {
	return &cli.Command{
		Name:      "release",
		Usage:     "end a lock that this process, one of its ancestors or its client holds",
		ArgsUsage: "[--client ID | --client-file FILE] [--destroy | --failed] DIR",
		Flags: append(clientFlags(),
			&cli.BoolFlag{Name: "destroy", Usage: "remove the directory"},
			&cli.BoolFlag{Name: "failed", Usage: "treat the content as after a crash"},
		),
		Action: func(ctx *cli.Context) error {
			dir, id, err := dirAndClient(ctx)
			if err != nil {
				return err
			}
			options := ""
			if id != "" {
				options = "client=" + strconv.Quote(id)
			}
			switch {
			case ctx.Bool("destroy") && ctx.Bool("failed"):
				return usagef("release: --destroy and --failed exclude each other")
			case ctx.Bool("destroy"):
				options += " destroy"
			case ctx.Bool("failed"):
				options += " failed"
			}
			if err := c.control(dir, "release", strings.TrimSpace(options)); err != nil {
				return err
			}
			if id == "" && !ctx.Bool("destroy") {
				c.sayStillHeld(ctx.Context, dir)
			}
			return nil
		},
	}
}

// sayStillHeld tells of a further lock that the caller has on a directory: each
// acquisition wants a release of its own.
func (c *command) sayStillHeld(ctx context.Context, dir string) {
	if l, ok := c.heldOn(ctx, dir, ""); ok && l.Token != 0 {
		c.say("%s: still held by this process or one of its ancestors: %s, token %d", quote(dir), l.Kind, l.Token)
	}
}

// heldOn returns the lock on a directory itself by which this process, or a client if an
// ID is given, holds it.
func (c *command) heldOn(ctx context.Context, dir, id string) (l client.Status, ok bool) {
	_, rel, err := c.place(dir)
	if err != nil {
		return l, false
	}
	d, err := client.Find(dir)
	if err != nil {
		return l, false
	}
	l, err = d.Check(ctx, id)
	return l, err == nil && l.Dir == rel
}

func (c *command) breakCommand() *cli.Command {
	return &cli.Command{
		Name:      "break",
		Usage:     "end somebody else's lock, or remove an orphaned lock file; for root and who mounted",
		ArgsUsage: "--why TEXT DIR",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "why", Usage: "`TEXT` that is told to others and to the log as the reason"},
		},
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 1, 1); err != nil {
				return err
			}
			why := ctx.String("why")
			switch {
			case why == "":
				return usagef("break: say why: stagefs break --why TEXT DIR")
			case !printable(why):
				return usagef("break: the reason holds control characters: %s", quote(why))
			}
			if err := notStopped(ctx.Args().First()); err != nil {
				return err
			}
			return c.control(ctx.Args().First(), "break", why)
		},
	}
}

// control sends one command line to the daemon, whose answer is the errno
// of the write.
func (c *command) control(dir, verb, more string) error {
	mountpoint, rel, err := c.place(dir)
	if err != nil {
		return err
	}
	_, there := os.Lstat(filepath.Join(mountpoint, rel))
	if errors.Is(there, unix.ENAMETOOLONG) {
		return there
	}
	line := verb + " " + ctlWord(rel)
	if more != "" {
		line += " " + more
	}
	ctl, err := openCtl(mountpoint)
	if err != nil {
		return err
	}
	defer ctl.Close()
	answer, err := sendLine(ctl, line)
	if errors.Is(err, unix.EACCES) && len(answer.Permit) > 0 && client.Permit(mountpoint, string(answer.Permit)) {
		answer, err = sendLine(ctl, line)
	}
	text := harmless(answer.Message)
	switch {
	case err == nil && text != "":
		c.say("%s: %s", quote(dir), text)
		return nil
	case err == nil:
		return nil
	case text != "" && errors.Is(err, unix.EBUSY):
		return exitf(exitHeld, "%s: %s", quote(dir), text)
	case text != "" && answer.Held == nil && errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "%s: %s", quote(dir), text)
	case errors.Is(err, unix.ENOENT) && errors.Is(there, os.ErrNotExist):
		return exitf(exitNoInput, "%s is missing: there is no lock on it", quote(dir))
	case errors.Is(err, unix.ENOENT):
		return exitf(exitNoInput, "%s: there is no lock on it", quote(dir))
	case errors.Is(err, os.ErrPermission) && verb == "release":
		return exitf(exitNoPerm, "%s: held by somebody else; only a holder can release (see: stagefs why %s)", quote(dir), shellWord(dir))
	case errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "%s: only root and who mounted may break a lock", quote(dir))
	case errors.Is(err, unix.E2BIG):
		return usagef("%s: the line is too long; shorten the reason", verb)
	case errors.Is(err, unix.EINVAL):
		if text == "" {
			text = err.Error()
		}
		return usagef("%s: %s: %s", verb, quote(dir), text)
	case errors.Is(err, unix.EBUSY):
		return exitf(exitHeld, "%s: in use just now; try again", quote(dir))
	}
	return controlError(mountpoint, err)
}
