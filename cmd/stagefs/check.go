//go:build linux

package main

import (
	"errors"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/lockstate/client"
)

func (c *command) checkCommand() *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "tell whether the calling process, or a client, holds a directory: print the token, or exit with 1",
		ArgsUsage: "[--client ID | --client-file FILE] [--json] DIR",
		Flags: append(clientFlags(),
			&cli.BoolFlag{Name: "json", Usage: "print the lock as a JSON object"},
		),
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 1, 1); err != nil {
				return err
			}
			id, err := clientID(ctx)
			if err != nil {
				return err
			}
			dir := ctx.Args().First()
			d, err := client.Find(dir)
			if err != nil {
				return lockError(dir, exitHeld, err)
			}
			status, err := d.Check(ctx.Context, id)
			switch {
			case errors.Is(err, client.ErrNoLock), errors.Is(err, client.ErrNotHolder), errors.Is(err, client.ErrFailedToLock):
				return &exitError{exitNotHeld, ""} // the answer, not a failure
			case err != nil:
				return lockError(dir, exitHeld, err)
			}
			return c.printStatus(ctx, d, status)
		},
	}
}
