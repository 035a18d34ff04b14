//go:build linux

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/client"
)

// These variables give scripts and their children what they hold, and what
// they hold it as (L2).
const (
	envClient     = "STAGEFS_CLIENT"
	envClientFile = "STAGEFS_CLIENT_FILE"
	envLock       = "STAGEFS_LOCK"
	envToken      = "STAGEFS_TOKEN"
)

// clientFlags are those of all commands that speak for a lease.
func clientFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "client", Usage: "act for the client of a lease with this `ID` (default: STAGEFS_CLIENT, if it is set)"},
		&cli.StringFlag{Name: "client-file", Usage: "the client's ID is in `FILE`, which acquire makes (default: STAGEFS_CLIENT_FILE, if it is set)"},
	}
}

// takeFlags are those of the commands that take locks.
func takeFlags() []cli.Flag {
	return append(clientFlags(),
		&cli.BoolFlag{Name: "nonblock", Aliases: []string{"n"}, Usage: "fail at once if somebody else has it"},
		&cli.StringFlag{Name: "wait", Aliases: []string{"w"}, Usage: "fail if somebody else still has it after `DURATION`: seconds, or like 1m30s"},
		&cli.BoolFlag{Name: "shared", Aliases: []string{"s"}, Usage: "take a shared lock: nobody writes while it lasts"},
		&cli.StringFlag{Name: "ttl", Usage: "the lease lasts for this `DURATION` without renewal (default: 16s)"},
		&cli.StringFlag{Name: "owner", Usage: "`SCOPE` that owns the lock: process, group, session or cgroup (default: the mount's)"},
		&cli.StringFlag{Name: "on-crash", Usage: "`POLICY` for the content if its owner crashes or fails: keep, destroy or quarantine (default: the mount's)"},
		&cli.StringFlag{Name: "why", Usage: "`TEXT` that is shown to others as the reason"},
	)
}

// takeOptions reads takeFlags, for a client if id is not empty. The context ends when the waiting is to end.
func takeOptions(ctx *cli.Context, id string) (client.Options, context.Context, context.CancelFunc, error) {
	var o client.Options
	none := func(err error) (client.Options, context.Context, context.CancelFunc, error) { return o, nil, nil, err }
	name := ctx.Command.Name
	if ctx.Bool("nonblock") && ctx.IsSet("wait") {
		return none(usagef("%s: -n and -w exclude each other", name))
	}
	o = client.Options{
		Client: id, Shared: ctx.Bool("shared"), Why: ctx.String("why"), Wait: !ctx.Bool("nonblock"),
		Owner: client.Owner(ctx.String("owner")), OnCrash: client.Crash(ctx.String("on-crash")),
	}
	for _, option := range []string{"owner", "on-crash"} {
		if ctx.IsSet(option) && ctx.String(option) == "" {
			return none(usagef("%s: --%s is empty; name one, or leave it out", name, option))
		}
	}
	switch {
	case !oneOf(ctx.String("owner"), "", "process", "group", "session", "cgroup"):
		return none(usagef("%s: --owner %s: want process, group, session or cgroup", name, quote(ctx.String("owner"))))
	case !oneOf(ctx.String("on-crash"), "", "keep", "destroy", "quarantine"):
		return none(usagef("%s: --on-crash %s: want keep, destroy or quarantine", name, quote(ctx.String("on-crash"))))
	case !printable(o.Why):
		return none(usagef("%s: the reason holds control characters: %s", name, quote(o.Why)))
	case id == "" && ctx.IsSet("ttl"):
		return none(usagef("%s: --ttl is for a lease: give its --client too", name))
	case id != "" && o.Owner != "":
		return none(usagef("%s: --owner is for a lock of processes; this one is the client's", name))
	}
	ttl, err := durationOf(ctx, "ttl")
	if err != nil {
		return none(err)
	}
	o.TTL = ttl
	wait, err := durationOf(ctx, "wait")
	if err != nil {
		return none(err)
	}
	if !ctx.IsSet("wait") {
		return o, ctx.Context, func() {}, nil
	}
	if wait == 0 {
		o.Wait = false
		return o, ctx.Context, func() {}, nil
	}
	until, cancel := context.WithTimeout(ctx.Context, wait)
	return o, until, cancel, nil
}

// waitTime is how long a command waits without a word.
const waitTime = time.Second

// sayWait says whom a command waits for that may wait for ever: it could be one that waits
// for this command. stop is to be called when the wait is over.
func (c *command) sayWait(ctx context.Context, dir string, o client.Options) (stop func()) {
	if _, ends := ctx.Deadline(); ends || !o.Wait {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	t := time.AfterFunc(waitTime, func() {
		if held := heldNow(ctx, dir); held != nil && ctx.Err() == nil {
			c.say("waiting: %s (see: stagefs why %s)", oneLine(held), shellWord(dir))
		}
	})
	return func() { t.Stop(); cancel() }
}

func oneOf(s string, known ...string) bool { return slices.Contains(known, s) }

// durationOf reads a flag that is a time: its default, or 0, if it is not set.
func durationOf(ctx *cli.Context, flag string) (time.Duration, error) {
	text := ctx.String(flag)
	if text == "" && !ctx.IsSet(flag) {
		return 0, nil
	}
	d, err := fs.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, usagef("%s: --%s %s: want seconds, or a duration like 1m30s", ctx.Command.Name, flag, quote(text))
	}
	if flag == "ttl" {
		if err := fs.CheckTTL(d); err != nil {
			return 0, usagef("%s: --ttl %s: %v", ctx.Command.Name, quote(text), err)
		}
	}
	return d, nil
}

// numberOf reads a flag that is a whole number.
func numberOf(ctx *cli.Context, flag string) (int, error) {
	n, err := strconv.Atoi(ctx.String(flag))
	if err != nil {
		return 0, usagef("%s: --%s %s: want a whole number", ctx.Command.Name, flag, quote(ctx.String(flag)))
	}
	return n, nil
}

// leastAnswerTime is what a daemon is given to answer in any case: the machine
// may be busy.
const leastAnswerTime = time.Second

// awakeInTime makes sure that a command does not wait for a daemon that is stopped,
// nor longer than it was told to for one that does not answer.
func awakeInTime(ctx *cli.Context, dir string) error {
	if !ctx.IsSet("wait") {
		return notStopped(dir)
	}
	wait, err := durationOf(ctx, "wait")
	if err != nil {
		return err
	}
	return awake(dir, max(wait, leastAnswerTime))
}

// dirAndClient returns the one directory that the command is about, and whom it
// speaks for. The daemon is not stopped.
func dirAndClient(ctx *cli.Context) (dir, id string, err error) {
	if err = exactArgs(ctx, 1, 1); err == nil {
		id, err = clientID(ctx)
	}
	if err == nil {
		err = notStopped(ctx.Args().First())
	}
	return ctx.Args().First(), id, err
}

// findDir finds the mount that a directory is in.
func findDir(dir string) (*client.Dir, error) {
	d, err := client.Find(dir)
	if err != nil {
		return nil, lockError(dir, exitHeld, err)
	}
	return d, nil
}

// clientID is whom the command speaks for, empty for this process.
func clientID(ctx *cli.Context) (string, error) {
	id, file, err := givenClient(ctx)
	in := ""
	if file != "" {
		in = " in " + quote(file)
	}
	switch {
	case err != nil:
		return "", err
	case len(id) > fs.MaxClient:
		return "", usagef("%s: the client ID%s has %d bytes; %d are the most", ctx.Command.Name, in, len(id), fs.MaxClient)
	case !printable(id):
		return "", usagef("%s: the client ID %s%s holds what is no UTF-8 or cannot be printed", ctx.Command.Name, quote(id), in)
	case strings.TrimSpace(id) != id:
		return "", usagef("%s: the client ID %q%s begins or ends with a blank", ctx.Command.Name, id, in)
	}
	return id, nil
}

// givenClient returns the ID as it is given, and the file that it is from.
func givenClient(ctx *cli.Context) (id, file string, err error) {
	if ctx.IsSet("client") && ctx.IsSet("client-file") {
		return "", "", usagef("%s: --client and --client-file exclude each other", ctx.Command.Name)
	}
	if ctx.IsSet("client") {
		if id = ctx.String("client"); id == "" {
			err = usagef("%s: the client ID is empty", ctx.Command.Name)
		}
		return id, "", err
	}
	if ctx.IsSet("client-file") {
		file = ctx.String("client-file")
		if err = notStopped(file); err == nil {
			id, err = readClientFile(file)
		}
		return id, file, err
	}
	if id, ok := os.LookupEnv(envClient); ok {
		if id == "" {
			err = usagef("%s: %s is set, and empty; set it to the client's ID, or unset it", ctx.Command.Name, envClient)
		}
		return id, "", err
	}
	if file = os.Getenv(envClientFile); file == "" {
		return "", "", nil
	}
	if err := notStopped(file); err != nil {
		return "", "", err
	}
	if !pathExists(file) {
		return "", "", exitf(exitNoInput, "%s, which %s names, is missing; make it with: stagefs acquire --client-file %s DIR", quote(file), envClientFile, shellWord(file))
	}
	id, err = readClientFile(file)
	return id, file, err
}

func readClientFile(file string) (string, error) {
	var data []byte
	f, err := os.Open(file)
	if err == nil {
		defer f.Close()
		data, err = io.ReadAll(io.LimitReader(f, maxClientFile+1))
	}
	id := strings.TrimSuffix(string(data), "\n")
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", exitf(exitNoInput, "the client's file %s is missing; make it with: stagefs acquire --client-file %s DIR", quote(file), shellWord(file))
	case err != nil:
		return "", exitf(exitNoInput, "the client's file: %s", oneLine(err))
	case id == "":
		return "", exitf(exitNoInput, "the client's file %s is empty", quote(file))
	case len(data) > maxClientFile:
		return "", exitf(exitNoInput, "%s is no client's file: it is too long", quote(file))
	}
	return id, nil
}

// maxClientFile is more than an ID can have, which the daemon checks.
const maxClientFile = 4096

// reserved tells whether a path has the reserved name in it.
func reserved(dir string) bool {
	return slices.Contains(strings.Split(filepath.Clean(dir), "/"), fs.ControlDir)
}

// lockError is what a failure of the client package means to a user.
func lockError(dir string, held int, err error) error {
	switch {
	case err == nil:
		return nil
	case noDirectory(err):
		return err // explain says so
	case errors.Is(err, client.ErrFailedToLock), errors.Is(err, context.DeadlineExceeded):
		return exitf(held, "%s (see: stagefs why %s)", oneLine(err), shellWord(dir))
	case errors.Is(err, client.ErrNotStagefs) && pathInMount(dir) != "":
		return noMount(dir)
	case errors.Is(err, client.ErrNotStagefs), errors.Is(err, unix.ENOTCONN):
		return exitf(exitUnavailable, "%s", strings.TrimSuffix(oneLine(err), ": "+unix.ENOTCONN.Error())) // which the rest says better
	case errors.Is(err, client.ErrRoot), errors.Is(err, client.ErrLockName):
		return usagef("%s", oneLine(err))
	case errors.Is(err, client.ErrEmptyClientID), errors.Is(err, unix.EINVAL):
		return usagef("%s", strings.TrimSuffix(oneLine(err), ": "+unix.EINVAL.Error())) // which the rest says better
	case errors.Is(err, unix.E2BIG):
		return usagef("%s: the reason or the directory's name is too long", quote(dir))
	case errors.Is(err, client.ErrNotHolder):
		return exitf(exitNoPerm, "%s", oneLine(err))
	case errors.Is(err, client.ErrNoLock):
		return exitf(exitNoInput, "%s: there is no lock on it", quote(dir))
	case errors.Is(err, os.ErrExist):
		return exitf(exitCantCreate, "%s exists already", quote(dir))
	case errors.Is(err, unix.EROFS):
		return readOnly(dir)
	case errors.Is(err, unix.EACCES):
		if mount := fs.LeadsTo(dir); mount != nil && notOurs(mount.Path) {
			return controlError(mount.Path, err)
		}
	case errors.Is(err, unix.ENOTDIR):
		return exitf(exitNoInput, "%s: not a directory, or beneath none", quote(dir))
	case errors.Is(err, unix.ENOENT):
		if reserved(dir) {
			return exitf(exitNoInput, "%s: no such directory; %s is a reserved name in the root of a mount", quote(dir), fs.ControlDir)
		}
		if to, err := os.Readlink(dir); err == nil {
			return exitf(exitNoInput, "%s: a symlink to nothing; make what it names first: %s", quote(dir), quote(to))
		}
		return exitf(exitNoInput, "%s: no such directory; make it first", quote(dir))
	}
	return err
}
