//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate"
)

func (c *command) quarantineCommand() *cli.Command {
	return &cli.Command{
		Name:      "quarantine",
		Usage:     "list what was put aside when its owner crashed; restore or delete it",
		ArgsUsage: "[--json | --restore ID | --delete ID | --delete-older DURATION] DIR",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "a line of JSON for each"},
			&cli.StringFlag{Name: "restore", Usage: "put the content with this `ID` back: at DIR, or where it was if DIR is the root of the mount"},
			&cli.StringFlag{Name: "delete", Usage: "delete the content with this `ID`"},
			&cli.StringFlag{Name: "delete-older", Usage: "delete what is from DIR or beneath it and older than `DURATION`, such as 72h: 0s for everything"},
		},
		Action: c.quarantineAction,
	}
}

func (c *command) quarantineAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 1, 1); err != nil {
		return err
	}
	said := 0
	for _, f := range []string{"json", "restore", "delete", "delete-older"} {
		if ctx.IsSet(f) {
			said++
		}
	}
	if said > 1 {
		return usagef("quarantine: --json, --restore, --delete and --delete-older exclude each other")
	}
	dir := ctx.Args().First()
	if err := notStopped(dir); err != nil {
		return err
	}
	mountpoint, rel, err := c.place(dir)
	if err != nil {
		return err
	}
	if ctx.IsSet("delete-older") {
		// No bare number, which is one of seconds elsewhere: who means days would lose all.
		older, err := time.ParseDuration(ctx.String("delete-older"))
		if err != nil || older < 0 {
			return usagef("quarantine: --delete-older %s: want a duration with its unit, like 72h", quote(ctx.String("delete-older")))
		}
		return c.quarantineControl(mountpoint, "discard "+ctlWord(rel)+" older="+older.String(), "")
	}
	all, err := readQuarantine(mountpoint)
	if err != nil {
		return err
	}
	id := ctx.String("restore") + ctx.String("delete") // one of them
	put := slices.IndexFunc(all, func(q lockstate.Quarantined) bool { return q.ID == id })
	switch {
	case !ctx.IsSet("restore") && !ctx.IsSet("delete"):
		if !pathExists(filepath.Join(mountpoint, rel)) && !slices.ContainsFunc(all, func(q lockstate.Quarantined) bool { return covers(rel, string(q.Dir)) }) {
			c.say("%s is missing, and nothing was put aside there", quote(dir)) // misspelt, perhaps
		}
		return c.printQuarantine(all, rel, ctx.Bool("json"))
	case put < 0:
		return notThere(id, mountpoint)
	case ctx.IsSet("delete"):
		return c.quarantineControl(mountpoint, "discard . id="+id, id)
	case rel == ".":
		rel = string(all[put].Dir)
	}
	switch {
	case rel == "":
		return exitf(exitNoInput, "%s: where it was is not known; name a directory", id)
	case covers(fs.ControlDir, rel):
		return exitf(exitNoInput, "%s: %s is a reserved name in the root of a mount; restore to another directory", quote(dir), fs.ControlDir)
	}
	return c.quarantineControl(mountpoint, "restore "+ctlWord(rel)+" id="+id, id)
}

func notThere(id, mountpoint string) error {
	return exitf(exitNoInput, "%s: nothing in quarantine has this ID; list it with: stagefs quarantine %s", quote(id), shellWord(mountpoint))
}

// readQuarantine lists what is in quarantine on a mount.
func readQuarantine(mountpoint string) ([]lockstate.Quarantined, error) {
	data, err := readControl(mountpoint, "quarantine")
	if err != nil {
		return nil, err
	}
	var all []lockstate.Quarantined
	for line := range bytes.Lines(data) {
		var q lockstate.Quarantined
		if err := json.Unmarshal(line, &q); err != nil {
			return nil, exitf(exitSoftware, "%s: quarantine: %v", quote(mountpoint), err)
		}
		all = append(all, q)
	}
	return all, nil
}

// printQuarantine prints what was put aside at rel or beneath it.
func (c *command) printQuarantine(all []lockstate.Quarantined, rel string, asJSON bool) error {
	w := tabwriter.NewWriter(c.out, 0, 8, 2, ' ', 0)
	if !asJSON {
		fmt.Fprintln(w, "ID\tTIME\tOWNER\tREASON\tDIRECTORY")
	}
	for _, q := range all {
		if !covers(rel, string(q.Dir)) && q.Dir != "" {
			continue
		}
		if asJSON {
			if err := c.printJSON(q); err != nil {
				return err
			}
			continue
		}
		owner := fmt.Sprintf("pid %d", q.Pid)
		if q.Client != "" {
			owner = "client " + quote(q.Client)
		}
		reason := q.Reason
		if q.Reason == string(lockstate.Exited) && q.Why != "" {
			reason += ": " + quote(q.Why)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", q.ID, clock(q.Time), owner, reason, quote(string(q.Dir)))
	}
	if asJSON {
		return nil
	}
	return w.Flush()
}

// quarantineControl sends a command about something in quarantine.
func (c *command) quarantineControl(mountpoint, line, id string) error {
	ctl, err := openCtl(mountpoint)
	if err != nil {
		return err
	}
	defer ctl.Close()
	answer, err := sendLine(ctl, line)
	if err == nil {
		return nil
	}
	what := quote(answer.Dir)
	if answer.Message != "" {
		what += ": " + answer.Message
	}
	switch {
	case errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "only root and who mounted may touch what is in quarantine")
	case errors.Is(err, unix.EEXIST):
		return exitf(exitCantCreate, "%s; move it away, or restore to another directory", what)
	case errors.Is(err, unix.EBUSY):
		return exitf(exitHeld, "%s; try again when it is free", what)
	case errors.Is(err, unix.EXDEV):
		return exitf(exitCantCreate, "%s; some of it may be back: for the rest unmount that, or restore to another directory", what)
	case errors.Is(err, unix.ENOENT) && strings.HasPrefix(line, "restore"):
		return exitf(exitNoInput, "%s: the directory that it belongs in is not there; make it first, or restore to another directory", what)
	case errors.Is(err, unix.ENOENT):
		return notThere(id, mountpoint)
	case errors.Is(err, unix.EINVAL):
		return usagef("quarantine: %s", what)
	}
	return controlError(mountpoint, err)
}
