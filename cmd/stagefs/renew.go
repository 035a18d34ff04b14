//go:build linux

package main

import (
	"errors"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/lockstate/client"
)

// renewCommand gives a lease its whole time again (L1).
func (c *command) renewCommand() *cli.Command {
	return &cli.Command{
		Name:      "renew",
		Usage:     "make a lease last a full TTL from now, and print its token",
		ArgsUsage: "[--client ID | --client-file FILE] [--ttl DURATION] [--json] DIR",
		Flags: append(clientFlags(),
			&cli.StringFlag{Name: "ttl", Usage: "from now on the lease lasts for this `DURATION` without renewal"},
			&cli.BoolFlag{Name: "json", Usage: "print the lock as a JSON object"},
		),
		Action: func(ctx *cli.Context) error {
			dir, id, err := dirAndClient(ctx)
			if err != nil {
				return err
			}
			if id == "" {
				return usagef("renew: only a lease is renewed: say whose, with --client or --client-file")
			}
			ttl, err := durationOf(ctx, "ttl")
			if err != nil {
				return err
			}
			d, err := findDir(dir)
			if err != nil {
				return err
			}
			status, err := d.Renew(ctx.Context, id, ttl)
			if errors.Is(err, client.ErrNoLock) {
				how := "stagefs acquire"
				if ctx.IsSet("client") {
					how += " --client ID"
				} else if file := ctx.String("client-file"); file != "" {
					how = envClientFile + "=" + shellWord(file) + " " + how
				}
				return exitf(exitLost, "%s: the client has no lease on it (any more); take it again with: %s %s", quote(dir), how, shellWord(dir))
			}
			if err != nil {
				return lockError(dir, exitHeld, err)
			}
			return c.printStatus(ctx, d, status)
		},
	}
}
