//go:build linux

package main

import (
	"context"
	"errors"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/client"
)

// waitCommand waits until a directory could be taken, and does not take it.
func (c *command) waitCommand() *cli.Command {
	return &cli.Command{
		Name:      "wait",
		Usage:     "wait until a directory could be taken, without taking it",
		ArgsUsage: "[-w DURATION] DIR",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "wait", Aliases: []string{"w"}, Usage: "give up after `DURATION`: seconds, or like 1m30s"},
		},
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 1, 1); err != nil {
				return err
			}
			limit, err := durationOf(ctx, "wait")
			if err != nil {
				return err
			}
			until := ctx.Context
			if ctx.IsSet("wait") {
				var cancel context.CancelFunc
				until, cancel = context.WithTimeout(until, limit)
				defer cancel()
			}
			dir := ctx.Args().First()
			if err := awakeInTime(ctx, dir); err != nil {
				return err
			}
			d, err := findDir(dir)
			if err != nil {
				return err
			}
			err = d.Wait(until)
			var held *client.HeldError
			switch {
			case err == nil:
			case ctx.IsSet("wait") && errors.As(err, &held):
				return exitf(exitHeld, "still held after %v: %s (see: stagefs why %s)", limit, oneLine(held), shellWord(dir))
			default:
				return lockError(dir, exitHeld, err)
			}
			if mount := fs.LeadsTo(d.Path()); mount != nil && removed(mount.Path) {
				return exitf(exitNoInput, "%s was removed", quote(mount.Path))
			}
			if !pathExists(d.Path()) { // misspelt, perhaps
				c.say("%s is missing; stagefs run could make and take it", quote(dir))
			}
			return nil
		},
	}
}

// removed tells whether the directory that is mounted at path was removed below: nothing
// can be made there any more. The kernel asks its daemon, whatever it has in mind.
func removed(path string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_FORCE_SYNC, unix.STATX_NLINK, &st)
	return err == nil && st.Nlink == 0
}
