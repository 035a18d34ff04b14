//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate"
)

func (c *command) eventsCommand() *cli.Command {
	return &cli.Command{
		Name:      "events",
		Usage:     "print what happens to the locks at, above and below a directory, until interrupted",
		ArgsUsage: "[--json] DIR",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "as JSON, a line an event"},
		},
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 1, 1); err != nil {
				return err
			}
			if err := notStopped(ctx.Args().First()); err != nil {
				return err
			}
			mountpoint, rel, err := c.place(ctx.Args().First())
			if err != nil {
				return err
			}
			file, err := openEvents(mountpoint)
			if err != nil {
				return err
			}
			defer file.Close()
			if !pathExists(filepath.Join(mountpoint, rel)) { // misspelt, perhaps
				c.say("%s is missing; its events follow when it is there", quote(ctx.Args().First()))
			}
			return controlError(mountpoint, eachEvent(file, func(line []byte, e lockstate.Event) error {
				return c.printEvent(line, e, rel, ctx.Bool("json"))
			}))
		},
	}
}

// openEvents opens a mount's events, which begin with the next one.
func openEvents(mountpoint string) (*os.File, error) {
	f, err := os.Open(filepath.Join(mountpoint, fs.ControlDir, "events"))
	return f, controlError(mountpoint, err)
}

// eachEvent calls f for each event until f fails or there are no more: the
// mount is gone then.
func eachEvent(r io.Reader, f func(line []byte, e lockstate.Event) error) error {
	for lines := bufio.NewReader(r); ; {
		line, err := lines.ReadBytes('\n') // a path may be of any length
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var e lockstate.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return exitf(exitSoftware, "events: %v", err)
		}
		if err := f(line, e); err != nil {
			return err
		}
	}
}

// printEvent prints an event if it is at rel, beneath it, or on what it is in.
func (c *command) printEvent(line []byte, e lockstate.Event, rel string, asJSON bool) error {
	dir := bytesOf(e.Dir, e.DirBytes)
	if dir != "" && !covers(rel, dir) && !covers(dir, rel) {
		return nil
	}
	var err error
	if asJSON {
		_, err = c.out.Write(line)
	} else {
		_, err = fmt.Fprintln(c.out, eventText(e, dir))
	}
	return err
}

func eventText(e lockstate.Event, dir string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", clock(e.Time), quote(e.Event))
	if e.Count > 0 {
		fmt.Fprintf(&b, " %d", e.Count)
	}
	if dir != "" {
		fmt.Fprintf(&b, " %s", quote(dir))
	}
	if e.Token != 0 {
		fmt.Fprintf(&b, " token %d", e.Token)
	}
	if e.Client != "" {
		fmt.Fprintf(&b, " client %s", quote(e.Client))
	} else if e.Pid != 0 {
		fmt.Fprintf(&b, " process %d", e.Pid)
	}
	if e.Kind != "" {
		fmt.Fprintf(&b, " %s", quote(e.Kind))
	}
	if e.Protocol != "" {
		fmt.Fprintf(&b, " (%s)", quote(e.Protocol))
	}
	if e.Reason != "" {
		fmt.Fprintf(&b, ": %s", quote(e.Reason))
	}
	if e.By != 0 {
		fmt.Fprintf(&b, " by process %d", e.By)
	}
	if e.Why != "" {
		why := e.Why
		if !printable(why) {
			why = quote(why)
		}
		fmt.Fprintf(&b, ": %s", why) // the names in it are quoted
	}
	return b.String()
}
