//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/client"
)

func (c *command) runCommand() *cli.Command {
	return &cli.Command{
		Name:      "run",
		Usage:     "take a directory, run a command as its holder, release it",
		ArgsUsage: "[options] DIR [--] COMMAND [ARGUMENT…]",
		Flags: append(takeFlags(),
			&cli.StringFlag{Name: "conflict-exit-code", Aliases: []string{"E"}, Value: strconv.Itoa(exitHeld), Usage: "exit with status `N` if somebody else has it"},
			&cli.BoolFlag{Name: "create-once", Usage: "make DIR, and fail if it is there"},
			&cli.BoolFlag{Name: "destroy-on-failure", Usage: "if COMMAND fails, remove what it made (--on-crash=destroy)"},
			&cli.StringFlag{Name: "kill-after", Value: "5s", Usage: "if the lock is lost, COMMAND has this `DURATION` from SIGTERM to SIGKILL"},
		),
		Action: c.runAction,
	}
}

func (c *command) runAction(ctx *cli.Context) error {
	args := ctx.Args().Slice()
	if len(args) > 1 && args[1] == "--" {
		args = slices.Delete(args, 1, 2)
	}
	switch {
	case len(args) == 0 || args[0] == "":
		return usagef("run: which directory? usage: stagefs run %s", ctx.Command.ArgsUsage)
	case len(args) == 1 || args[1] == "":
		return usagef("run: which command? usage: stagefs run %s", ctx.Command.ArgsUsage)
	case strings.HasPrefix(args[1], "-") && ctx.Args().Get(1) != "--":
		return usagef("run: %s: options come before DIR; if it is a command, write -- before it", quote(args[1]))
	}
	dir := args[0]
	id, err := clientID(ctx)
	if err != nil {
		return err
	}
	opts, until, cancel, err := takeOptions(ctx, id)
	if err != nil {
		return err
	}
	defer cancel()
	opts.MakeParents, opts.MustBeNew = true, ctx.Bool("create-once")
	if ctx.Bool("destroy-on-failure") {
		if opts.OnCrash != "" && opts.OnCrash != client.Destroy {
			return usagef("run: --destroy-on-failure and --on-crash=%s exclude each other", opts.OnCrash)
		}
		opts.OnCrash = client.Destroy
	}
	held, err := numberOf(ctx, "conflict-exit-code")
	if err != nil || held < 0 || held > 255 {
		return usagef("run: --conflict-exit-code %s: want 0 to 255", quote(ctx.String("conflict-exit-code")))
	}
	killAfter, err := durationOf(ctx, "kill-after")
	if err != nil {
		return err
	}
	if err := awakeInTime(ctx, dir); err != nil {
		return err
	}
	ch := &child{argv: args[1:], killAfter: killAfter, listens: c.quits}
	// What can't be found is known before anything is locked or made. A path
	// may lead into what is not there yet.
	if ch.path, err = lookPath(args[1]); err != nil && !strings.Contains(args[1], "/") {
		return commandError(args[1], err)
	}

	lock, within, err := c.acquireToRun(until, dir, opts)
	if errors.Is(err, unix.ENOENT) && !errors.Is(err, client.ErrNoLock) && !reserved(dir) && !noDirectory(err) {
		return exitf(exitNoInput, "%s", oneLine(err)) // it was to be made: why it could not
	}
	if err != nil {
		return lockError(dir, held, err)
	}
	if ch.path == "" {
		if ch.path, err = lookPath(args[1]); err != nil {
			release(lock, within, false)
			return commandError(args[1], err)
		}
	}
	ch.env = childEnv(lock, opts.Client)
	return c.runChild(lock, ch, within)
}

// acquireToRun acquires a directory. within: the lock was there already, the client's or
// the session's, which they keep.
func (c *command) acquireToRun(until context.Context, dir string, opts client.Options) (lock *client.Lock, within bool, err error) {
	var had client.Status
	if !opts.MustBeNew {
		had, within = c.heldOn(until, dir, opts.Client)
	}
	if within && opts.Client != "" {
		if opts.OnCrash != "" {
			c.say("%s: the client has it already: what --on-crash says counts for nothing", quote(dir))
		}
		// As it is: who took it renews it in time for that TTL, and has made things under it.
		opts.TTL, opts.OnCrash, opts.Why = 0, "", ""
	}
	stop := c.sayWait(until, dir, opts)
	lock, err = client.Acquire(until, dir, opts)
	stop()
	return lock, within && err == nil && lock.Token() == had.Token, err
}

// childEnv is the environment of what runs under a lock.
func childEnv(lock *client.Lock, id string) []string {
	set := []string{envLock + "=" + lock.Dir(), envToken + "=" + strconv.FormatUint(lock.Token(), 10)}
	if id != "" {
		set = append(set, envClient+"="+id)
	}
	env := slices.DeleteFunc(os.Environ(), func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return slices.ContainsFunc(set, func(s string) bool { return strings.HasPrefix(s, name+"=") })
	})
	return append(env, set...)
}

// runChild runs the child, and ends the lock when it ends.
func (c *command) runChild(lock *client.Lock, ch *child, within bool) error {
	status, err := ch.run(lock.Lost(), func() bool { return isLoss(lock.Err()) })
	if err != nil {
		release(lock, within, false)
		return commandError(ch.argv[0], err)
	}
	if c.awaitAwake(lock, within) {
		err = release(lock, within, status.ExitStatus() == 0)
	}
	if isLoss(err) || isLoss(lock.Err()) {
		if err == nil {
			err = lock.Err()
		}
		return exitf(exitLost, "%s", oneLine(err))
	}
	if err != nil && !errors.Is(err, client.ErrLost) {
		c.say("the lock can't be released: %s", oneLine(err))
	}
	switch {
	case status.Signaled():
		// As if there were nothing in between: who waits for this process
		// sees what became of the command.
		dieBy(status.Signal())
		return &exitError{exitSignal + int(status.Signal()), ""}
	case status.ExitStatus() != 0:
		return &exitError{status.ExitStatus(), ""}
	}
	return nil
}

// awaitAwake waits while the daemon is stopped, and says so. A signal ends the wait: then
// it reports false, and the lock is left to end with this process, which exits as the
// command did, so that the content is treated as its success or failure wants it.
//
// It does not ask the daemon: the child that would do so closes its copies of what is
// open there, and waits for the daemon in that.
func (c *command) awaitAwake(lock *client.Lock, within bool) bool {
	mount := fs.LeadsTo(lock.Dir())
	if within || mount == nil {
		return true
	}
	pid := suspect(mount)
	if pid == 0 || !stopped(pid) {
		return true
	}
	signals := make(chan os.Signal, 4)
	notifyUnignored(signals, append(stopSignals(), syscall.SIGQUIT)...)
	defer signal.Stop(signals)
	c.complain("the command has ended, and its lock can't be released: %s", silence(mount))
	for stopped(pid) {
		if told(signals, heedTime) {
			end := "ends with its owner, which is this process unless --owner says otherwise"
			if lock.TTL() != 0 {
				end = "ends when its time is over"
			}
			c.complain("the lock on %s was not released: it %s", quote(lock.Dir()), end)
			return false
		}
	}
	return true
}

// heedTime is how soon it is seen that a daemon goes on.
const heedTime = 100 * time.Millisecond

// release ends the lock as the command's success or failure wants it.
func release(lock *client.Lock, within, succeeded bool) error {
	switch {
	case within:
		return nil
	case succeeded:
		return lock.Release(false)
	}
	return lock.Fail()
}

// isLoss tells whether a lock was taken from its holders. What they ended
// themselves was not: the command may release or remove its directory.
func isLoss(err error) bool {
	var lost *client.LostError
	if !errors.As(err, &lost) {
		return false
	}
	switch lost.Reason {
	case "released", "failed", "removed", "unlinked", "unlocked", "replaced", "narrowed":
		return false
	case "unknown":
		_, err := os.Lstat(lost.Dir)
		return !errors.Is(err, os.ErrNotExist)
	}
	return true
}

// commandError is the failure to start a command, with the status that
// POSIX's env and the shells give it.
func commandError(name string, err error) error {
	status := 126
	if errors.Is(err, unix.ENOENT) {
		status = 127
	}
	return exitf(status, "%s: %s", quote(name), oneLine(err))
}

// lookPath finds a command as execvp(3) does.
func lookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, executable(name)
	}
	path, ok := os.LookupEnv("PATH")
	if !ok {
		path = "/bin:/usr/bin"
	}
	var found error = unix.ENOENT
	for _, dir := range strings.Split(path, ":") {
		if dir == "" {
			dir = "."
		}
		file := dir + "/" + name
		switch err := executable(file); {
		case err == nil:
			return file, nil
		case errors.Is(err, unix.EACCES):
			found = err // there is one, but
		}
	}
	return "", fmt.Errorf("no such command: %w", found)
}

func executable(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EACCES
	}
	return unix.Faccessat(unix.AT_FDCWD, file, unix.X_OK, unix.AT_EACCESS)
}
