//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
)

// An event is one line of the control directory's events file.
type event struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"`
	Dir      string    `json:"dir"`
	DirBytes []byte    `json:"dir_bytes"`
	Token    uint64    `json:"token"`
	Pid      int       `json:"pid"`
	Client   string    `json:"client"`
	Kind     string    `json:"kind"`
	Protocol string    `json:"protocol"`
	Reason   string    `json:"reason"`
	By       int       `json:"by"`
	Why      string    `json:"why"`
	Count    int       `json:"count"` // of events that were missed
}

func (c *command) eventsCommand() *cli.Command {
	return &cli.Command{
		Name:      "events",
		Usage:     "print what happens to the locks at and below a directory, until interrupted",
		ArgsUsage: "[--json] DIR",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "as JSON, a line an event"},
		},
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 1, 1); err != nil {
				return err
			}
			mountpoint, rel, err := c.place(ctx.Args().First())
			if err != nil {
				return err
			}
			return readEvents(mountpoint, func(line []byte, e event) error {
				return c.printEvent(line, e, rel, ctx.Bool("json"))
			})
		},
	}
}

// readEvents calls f for each event of a mount from now on, until f fails or
// the mount is gone.
func readEvents(mountpoint string, f func(line []byte, e event) error) error {
	file, err := os.Open(filepath.Join(mountpoint, fs.ControlDir, "events"))
	if err != nil {
		return controlError(mountpoint, err)
	}
	defer file.Close()
	return eachEvent(file, func(line []byte, e event) error {
		return controlError(mountpoint, f(line, e))
	})
}

func eachEvent(r io.Reader, f func(line []byte, e event) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return exitf(exitSoftware, "events: %v", err)
		}
		if err := f(lines.Bytes(), e); err != nil {
			return err
		}
	}
	return lines.Err()
}

// printEvent prints an event if it is at rel, beneath it, or on what it is in.
func (c *command) printEvent(line []byte, e event, rel string, asJSON bool) error {
	dir := e.Dir
	if len(e.DirBytes) > 0 {
		dir = string(e.DirBytes)
	}
	if dir != "" && !covers(rel, dir) && !covers(dir, rel) {
		return nil
	}
	var err error
	if asJSON {
		_, err = fmt.Fprintf(c.out, "%s\n", line)
	} else {
		_, err = fmt.Fprintln(c.out, e.text(dir))
	}
	if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

func (e event) text(dir string) string {
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
		fmt.Fprintf(&b, ": %s", quote(e.Why))
	}
	return b.String()
}
