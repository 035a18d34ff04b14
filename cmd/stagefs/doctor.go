//go:build linux

package main

import (
	"fmt"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
)

func (c *command) doctorCommand() *cli.Command {
	return &cli.Command{
		Name:      "doctor",
		Usage:     "tell what on this machine would stop or slow a mount, and the fix",
		ArgsUsage: "[options] [DIR]",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "one JSON object"},
			&cli.StringFlag{Name: "state-dir", Usage: "the mount would keep its state in this `DIR`"},
		},
		Action: c.doctorAction,
	}
}

// How much a finding matters.
const (
	statusOK   = "ok"
	statusNote = "note" // worth knowing
	statusWarn = "warn" // a mount works, but less well
	statusFail = "fail" // no mount works
)

// A finding is what doctor has to say of one thing.
type finding struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"`
}

func (c *command) doctorAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 0, 1); err != nil {
		return err
	}
	if ctx.IsSet("state-dir") && ctx.String("state-dir") == "" {
		return usagef("doctor: --state-dir is empty; name one, or leave it out")
	}
	m := machine{euid: os.Geteuid(), dir: ctx.Args().Present()}
	all := m.examine()
	state := ctx.String("state-dir")
	backing := ctx.Args().First()
	about := checkWay(backing)
	switch {
	case len(about) > 0:
		backing = "" // nobody can tell where that is
	case backing != "":
		abs, err := fs.Abs(backing)
		if err != nil {
			return err
		}
		var served *fs.MountEntry
		about, served = checkDirectory(abs)
		ours := served != nil && (m.euid == 0 || m.euid == mountedBy(served)) // or who asks may not even look into it
		if ours && state == "" && about[0].Status == statusOK {
			d, _ := daemonSays(served.Path)
			state = d.stateDir
		}
	}
	all = append(all, m.checkStateDir(state, backing))
	all = append(all, about...)

	failed := 0
	for _, f := range all {
		if f.Status == statusFail {
			failed++
		}
	}
	if ctx.Bool("json") {
		if err := c.printJSON(struct {
			OK     bool      `json:"ok"`
			Checks []finding `json:"checks"`
		}{failed == 0, all}); err != nil {
			return err
		}
	} else {
		for _, f := range all {
			fmt.Fprintf(c.out, "%-5s %-15s %s\n", f.Status, f.Name, harmless(f.Detail))
			if f.Fix != "" {
				fmt.Fprintf(c.out, "%-21s fix: %s\n", "", harmless(f.Fix))
			}
		}
	}
	if failed > 0 {
		return exitf(exitUnavailable, "%d of %d checks failed: no mount can work here", failed, len(all))
	}
	return nil
}
