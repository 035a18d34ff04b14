//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate"
	"github.com/stagefs/stagefs/lockstate/client"
)

// shownDenials is how many of the last refusals `why` shows.
const shownDenials = 10

func (c *command) whyCommand() *cli.Command {
	return &cli.Command{
		Name:      "why",
		Usage:     "tell who governs a path, and the last refusals there",
		ArgsUsage: "PATH",
		Action:    c.whyAction,
	}
}

func (c *command) whyAction(ctx *cli.Context) error {
	if err := exactArgs(ctx, 1, 1); err != nil {
		return err
	}
	path := ctx.Args().First()
	if err := awake(path, answerTime); err != nil {
		return err
	}
	mountpoint, rel, err := c.place(path)
	if err != nil {
		return err
	}
	listing, err := readListing(mountpoint)
	if err != nil {
		return err
	}
	denials, err := readControl(mountpoint, "denials")
	if err != nil {
		return err
	}
	rows := locksOf(listing, filepath.Join(mountpoint, rel), rel)
	if len(rows) == 0 && listing.Mode != "off" && !covers(fs.ControlDir, rel) {
		listing.Blockers = append(listing.Blockers, inTheWay(ctx.Context, filepath.Join(mountpoint, rel))...)
	}
	c.printWhy(rel, rows, listing, lastDenials(denials, rel))
	if len(rows) == 0 && !pathExists(filepath.Join(mountpoint, rel)) { // misspelt, perhaps
		fmt.Fprintf(c.out, "%s is missing\n", quote(rel))
	}
	return nil
}

// inTheWay are the files that are open for writing in a free directory, or those of them
// that keep this process from acquiring it.
func inTheWay(ctx context.Context, dir string) (all []lockstate.Blocker) {
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return nil
	}
	if held := heldNow(ctx, dir); held != nil {
		for _, b := range held.Blockers {
			all = append(all, lockstate.Blocker{Pid: b.Pid, Cmd: b.Cmd, Path: b.Path, PathBytes: b.PathBytes})
		}
	}
	return all
}

// heldNow returns what keeps this process from acquiring a directory, or nil.
func heldNow(ctx context.Context, dir string) (held *client.HeldError) {
	d, err := client.Find(dir)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 0) // it waits for nothing
	defer cancel()
	errors.As(d.Wait(ctx), &held)
	return held
}

// locksOf are the locks that govern a path, the one in force last. The daemon's
// own answer, an extended attribute, comes first: it knows hard links and the
// names that symlinks lead to. Paths that are missing, or can't be read, are
// judged by their names.
func locksOf(l lockstate.Listing, path, rel string) []lockstate.Row {
	value := make([]byte, 32)
	if n, err := unix.Lgetxattr(path, "user.stagefs.token", value); err == nil {
		token, _ := strconv.ParseUint(string(value[:n]), 10, 64)
		for _, row := range l.Locks {
			if row.Token == token {
				return governing(l.Locks, dirOf(row))
			}
		}
	}
	return governing(l.Locks, rel)
}

func (c *command) printWhy(rel string, rows []lockstate.Row, l lockstate.Listing, denials []lockstate.Denial) {
	title := "last refusals:"
	switch l.Mode {
	case "off":
		fmt.Fprintln(c.out, "locking is disabled: nothing is enforced")
	case "observe":
		fmt.Fprintln(c.out, "observing only: refusals are noted, not enforced")
		title = "last refusals, only noted:"
	}
	c.printGoverning(rel, rows, l.Unlocked)
	c.printInTheWay(rel, l)
	c.printDenials(title, denials)
}

// printGoverning tells who holds rel, by the locks that govern it.
func (c *command) printGoverning(rel string, rows []lockstate.Row, unlocked string) {
	switch {
	case len(rows) > 0:
	case covers(fs.ControlDir, rel):
		fmt.Fprintf(c.out, "%s: a control file; nobody writes there but by command\n", quote(rel))
	case unlocked == "deny":
		fmt.Fprintf(c.out, "%s: free, but writing needs a lock (--unlocked=deny)\n", quote(rel))
	default:
		fmt.Fprintf(c.out, "%s: free\n", quote(rel))
	}
	for i := len(rows) - 1; i >= 0; i-- {
		row := rows[i]
		if i == len(rows)-1 {
			fmt.Fprintf(c.out, "%s: held by %s\n", quote(rel), ownerOf(row))
		} else {
			fmt.Fprintf(c.out, "  then by %s\n", ownerOf(row))
		}
		fmt.Fprintf(c.out, "  lock on %s: %s (%s), token %d, since %s\n", quote(dirOf(row)), row.Kind, quote(row.Protocol), row.Token, clock(row.Since))
		if row.Why != "" {
			fmt.Fprintf(c.out, "  reason: %s\n", quote(row.Why))
		}
		if row.File != "" {
			fmt.Fprintf(c.out, "  lock file: %s\n", quote(bytesOf(row.File, row.FileBytes)))
		}
		if row.Client != "" {
			fmt.Fprintf(c.out, "  it ends in %.0f s, unless the client renews it\n", row.Deadline)
		}
		c.printBlockers("open for writing all the same:", row.Blockers)
	}
}

// printInTheWay tells what stands in the way of whoever wants to lock rel (C3).
func (c *command) printInTheWay(rel string, l lockstate.Listing) {
	var beneath []lockstate.Row
	for _, row := range l.Locks {
		if dir := dirOf(row); dir != rel && covers(rel, dir) {
			beneath = append(beneath, row)
		}
	}
	if len(beneath) > 0 {
		fmt.Fprintln(c.out, "locks beneath:")
		for _, row := range beneath {
			fmt.Fprintf(c.out, "  %s: %s\n", quote(dirOf(row)), ownerOf(row))
		}
	}
	var open []lockstate.Blocker
	said := make(map[string]bool)
	for _, b := range l.Blockers {
		path := pathOf(b)
		if who := fmt.Sprint(b.Pid, path); (covers(rel, path) || covers(path, rel)) && !said[who] {
			said[who] = true
			open = append(open, b)
		}
	}
	c.printBlockers("open for writing, in the way of the next lock:", open)
	for _, o := range l.Orphans {
		path := bytesOf(o.Path, o.PathBytes)
		if covers(rel, path) || filepath.Dir(path) == rel {
			fmt.Fprintf(c.out, "orphan: %s is a lock file without a lock; stagefs break removes it\n", quote(path))
		}
	}
}

func (c *command) printDenials(title string, denials []lockstate.Denial) {
	if len(denials) > 0 {
		fmt.Fprintln(c.out, title)
	}
	for _, d := range denials {
		why := d.Reason
		if why == "" {
			why = fmt.Sprintf("lock on %s of process %d", quote(d.Lock), d.LockPid)
		}
		again := ""
		if d.Times > 1 {
			again = fmt.Sprintf(" (%d times)", d.Times)
		}
		fmt.Fprintf(c.out, "  %s %s %s by process %d (%s), uid %d: %s, %s%s\n",
			clock(d.Time), quote(d.Op), quote(d.Path), d.Pid, brief(d.Cmd), d.UID, quote(d.Errno), harmless(why), again)
	}
}

// ownerOf says whose a lock is. A lease is its client's, whatever became of the
// process that took it.
func ownerOf(row lockstate.Row) string {
	if row.Client != "" {
		return fmt.Sprintf("client %s, uid %d", quote(row.Client), row.UID)
	}
	return fmt.Sprintf("process %d (%s), uid %d", row.Pid, brief(row.Cmd), row.UID)
}

func (c *command) printBlockers(title string, blockers []lockstate.Blocker) {
	if len(blockers) == 0 {
		return
	}
	fmt.Fprintln(c.out, title)
	for _, b := range blockers {
		who := fmt.Sprintf("process %d (%s)", b.Pid, brief(b.Cmd))
		if b.Pid == 0 {
			who = "a process that is not known: from before this daemon's start, or outside of its PID namespace"
		}
		fmt.Fprintf(c.out, "  %s: %s\n", quote(pathOf(b)), who)
	}
}

// lastDenials are the latest refusals at rel, beneath it, or because of a lock
// on it.
func lastDenials(data []byte, rel string) []lockstate.Denial {
	var last []lockstate.Denial
	for line := range bytes.Lines(data) {
		var d lockstate.Denial
		if json.Unmarshal(line, &d) != nil {
			continue
		}
		d.Path, d.Lock = bytesOf(d.Path, d.PathBytes), bytesOf(d.Lock, d.LockBytes)
		if covers(rel, strings.TrimPrefix(d.Path, "/")) || d.Lock == rel {
			last = append(last, d)
		}
	}
	return last[max(0, len(last)-shownDenials):]
}

// brief is a command line that leaves room for more on its own line.
func brief(cmd string) string {
	const most = 60
	if r := []rune(cmd); len(r) > most {
		cmd = string(r[:most-1]) + "…"
	}
	return quote(cmd)
}

// clock is a time as the table of locks has it.
func clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }
