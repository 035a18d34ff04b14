//go:build linux

package main

import (
	"errors"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/lockstate/client"
)

// checkCommand tells by its status whether the caller, or its client, holds a
// directory.
func (c *command) checkCommand() *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "tell whether the calling process, or a client, holds a directory: print the token, or exit with 1",
		ArgsUsage: "[--client ID | --client-file FILE] [--json] DIR",
		Flags: append(clientFlags(),
			&cli.BoolFlag{Name: "json", Usage: "print the lock as a JSON object"},
		),
		Action: func(ctx *cli.Context) error {
			dir, id, err := dirAndClient(ctx)
			if err != nil {
				return err
			}
			d, err := findDir(dir)
			if err != nil {
				return err
			}
			status, err := d.Check(ctx.Context, id)
			switch {
			case errors.Is(err, client.ErrNoLock), errors.Is(err, client.ErrNotHolder), errors.Is(err, client.ErrFailedToLock):
				if !pathExists(d.Path()) { // misspelt, perhaps
					c.say("%s is missing", quote(dir))
				}
				return &exitError{exitNotHeld, ""} // the answer, not a failure
			case err != nil:
				return lockError(dir, exitHeld, err)
			}
			return c.printStatus(ctx, d, status)
		},
	}
}
