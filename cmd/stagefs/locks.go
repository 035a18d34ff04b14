//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate"
)

func (c *command) locksCommand() *cli.Command {
	return &cli.Command{
		Name:      "locks",
		Usage:     "list who holds what",
		ArgsUsage: "[--json] [--watch] [PATH]",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "json", Usage: "one JSON object a mount, on a line of its own"},
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "print again whenever it changes, until interrupted"},
		},
		Action: c.locksAction,
	}
}

func (c *command) locksAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 0, 1); err != nil {
		return err
	}
	mounts, err := c.chosenMounts(ctx.Args().First())
	if err != nil {
		return err
	}
	several := len(mounts) > 1
	mounts, silent := c.answering(mounts)
	mounts = c.visible(mounts)
	switch {
	case len(mounts) > 0:
	case silent != nil:
		return silent
	default:
		return &exitError{exitNoPerm, ""} // all is said
	}
	if ctx.Bool("watch") {
		err = c.watchLocks(ctx.Context, mounts, several, ctx.Bool("json"))
	} else {
		err = c.printLocks(mounts, several, ctx.Bool("json"))
	}
	if err != nil && silent != nil {
		c.say("%s", oneLine(silent))
	}
	if err == nil {
		err = silent
	}
	return err
}

// answering leaves out the mounts whose daemons do not answer, with an error for
// the last of them; it tells of the others.
func (c *command) answering(mountpoints []string) (answer []string, silent error) {
	table, err := fs.ReadMounts()
	if err != nil {
		return mountpoints, nil
	}
	errs := together(mountpoints, func(path string) error {
		if m := fs.TopMount(table, path); m != nil && m.IsStagefs() {
			return answers(m, answerTime)
		}
		return nil
	})
	for i, path := range mountpoints {
		if errs[i] == nil {
			answer = append(answer, path)
			continue
		}
		if silent != nil {
			c.say("%s", oneLine(silent))
		}
		silent = errs[i]
	}
	return answer, silent
}

// visible leaves out the mounts that are not for this user, and tells of them. Their
// daemons have answered.
func (c *command) visible(mountpoints []string) (seen []string) {
	for _, path := range mountpoints {
		if notOurs(path) {
			c.say("%s", oneLine(controlError(path, unix.EACCES)))
			continue
		}
		seen = append(seen, path)
	}
	return seen
}

// notOurs tells whether a mount that answers is for another user alone.
func notOurs(mountpoint string) bool {
	return unix.Access(mountpoint, unix.X_OK) == unix.EACCES
}

// chosenMounts are the mounts to list: the one that path is in; without a path,
// the one that the working directory is in; or else all.
func (c *command) chosenMounts(path string) ([]string, error) {
	if path != "" {
		if err := awake(path, answerTime); err != nil {
			return nil, err
		}
		mountpoint, _, err := c.place(path)
		return []string{mountpoint}, err
	}
	if wd, err := syscall.Getwd(); err == nil {
		if err := awake(wd, answerTime); err != nil {
			return nil, err
		}
		if mountpoint, _, err := c.find(wd); err == nil {
			return []string{mountpoint}, nil
		}
	}
	all, err := c.mounts()
	if err != nil {
		return nil, err
	}
	var mounts []string
	for _, m := range all {
		mounts = append(mounts, m.Path)
	}
	if len(mounts) == 0 {
		return nil, exitf(exitUnavailable, "there is no stagefs mount; make one with: stagefs mount DIR")
	}
	return mounts, nil
}

// printLocks prints all mounts that can be read, also if one of them can't. header: each
// under its mountpoint.
func (c *command) printLocks(mounts []string, header, asJSON bool) error {
	var failed error
	for i, m := range mounts {
		var err error
		if asJSON {
			err = c.printLocksJSON(m)
		} else {
			err = c.printLocksText(m, i, header)
		}
		if err != nil && failed != nil {
			_, text := explain(err)
			c.say("%s", text)
		} else if err != nil {
			failed = err
		}
	}
	return failed
}

func (c *command) printLocksText(mountpoint string, i int, header bool) error {
	text, err := readControl(mountpoint, "locks")
	if err != nil {
		return err
	}
	if header {
		if i > 0 {
			fmt.Fprintln(c.out)
		}
		fmt.Fprintf(c.out, "%s:\n", quote(mountpoint))
	}
	_, err = io.WriteString(c.out, harmless(string(text)))
	return err
}

// printLocksJSON adds the mountpoint and leaves the rest of locks.json alone,
// also what a newer daemon may have added.
func (c *command) printLocksJSON(mountpoint string) error {
	data, err := readControl(mountpoint, "locks.json")
	if err != nil {
		return err
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(data, &object); err != nil {
		return exitf(exitSoftware, "%s: locks.json: %v", quote(mountpoint), err)
	}
	if object["mountpoint"], err = json.Marshal(mountpoint); err != nil {
		return err
	}
	if !utf8.ValidString(mountpoint) {
		if object["mountpoint_bytes"], err = json.Marshal([]byte(mountpoint)); err != nil {
			return err
		}
	}
	return c.printJSON(object)
}

// printJSON prints a value on a line of its own, with names as they are.
func (c *command) printJSON(v any) error {
	w := json.NewEncoder(c.out)
	w.SetEscapeHTML(false)
	return w.Encode(v)
}

// watchPause is how long what happens at once is gathered.
const watchPause = 20 * time.Millisecond

// watchLocks prints the listing at each change until it is interrupted, or a
// mount is gone. It is the events that tell of changes.
func (c *command) watchLocks(ctx context.Context, mounts []string, header, asJSON bool) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	changed := make(chan struct{}, 1)
	gone := make(chan error, len(mounts))
	for _, m := range mounts {
		// Open before the first look, they tell of all that comes after it.
		events, err := openEvents(m)
		if err != nil {
			return err
		}
		// The end of the program ends a read that waits.
		go func() {
			defer events.Close()
			gone <- controlError(m, eachEvent(events, func([]byte, lockstate.Event) error {
				select {
				case changed <- struct{}{}:
				default: // it is known already
				}
				return nil
			}))
		}()
	}
	var last []byte
	for first := true; ; first = false {
		var now []byte
		for _, m := range mounts {
			data, err := readControl(m, "locks.json")
			if err != nil {
				return err
			}
			now = append(now, data...)
		}
		if first || !bytes.Equal(now, last) {
			switch {
			case asJSON:
			case isTerminal(c.out):
				fmt.Fprint(c.out, "\x1b[H\x1b[2J") // home, clear
			case !first:
				fmt.Fprintln(c.out)
			}
			if err := c.printLocks(mounts, header, asJSON); err != nil {
				return err
			}
			last = now
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-gone:
			if err == nil {
				err = exitf(exitUnavailable, "a mount that was watched is gone")
			}
			return err
		case <-changed:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchPause):
		}
	}
}

func isTerminal(w io.Writer) bool {
	if o, ok := w.(*output); ok {
		w = o.Writer
	}
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
