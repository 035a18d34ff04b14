//go:build linux

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/stagefs/stagefs/fs"
)

func (c *command) mountCommand() *cli.Command {
	return &cli.Command{
		Name:      "mount",
		Usage:     "serve a static directory, over itself or at another mountpoint",
		ArgsUsage: "[options] DIR [MOUNTPOINT]",
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "lock-name", Usage: "`NAME` or pattern of lock files, may be repeated (default: devserver, devserver.lock)"},
			&cli.StringSliceFlag{Name: "shared-name", Usage: "`NAME` or pattern of files that everyone may make and change in held directories, may be repeated"},
			&cli.StringSliceFlag{Name: "candidate", Usage: "further `PATTERN` of the temporary files that lock by link(2), may be repeated"},
			&cli.StringFlag{Name: "depth", Value: "1", Usage: "directories nearer than `N` levels to the root are containers, which mkdir does not lock"},
			&cli.StringFlag{Name: "owner", Value: "process", Usage: "`SCOPE` that owns a lock: process, group, session or cgroup"},
			&cli.StringFlag{Name: "unlocked", Value: "allow", Usage: "`MODE`: allow or deny writing where nobody has a lock"},
			&cli.StringFlag{Name: "enforce", Value: "all", Usage: "`MODE`: all, or observe, which only notes what would be refused"},
			&cli.BoolFlag{Name: "disable-locking", Usage: "pass everything through, with no locks at all"},
			&cli.StringFlag{Name: "state-dir", Usage: "keep what must outlive the daemon in `DIR` (default: /var/lib/stagefs, for ordinary users below XDG_STATE_HOME)"},
			&cli.BoolFlag{Name: "strict", Usage: "refuse to start if someone can get under the mount already"},
			&cli.StringFlag{Name: "on-crash", Value: "keep", Usage: "`POLICY` for the content if its owner crashes or fails: keep, destroy or quarantine"},
			&cli.StringFlag{Name: "grace", Value: "5s", Usage: "wait for a busy mount at the end for this `DURATION`: seconds, or like 1m30s"},
			&cli.BoolFlag{Name: "no-passthrough", Usage: "let all data go through the daemon"},
			&cli.BoolFlag{Name: "idmap", Usage: "let the IDs of the mount be mapped, as for containers with users of their own (Linux 6.12, root)"},
			&cli.StringFlag{Name: "transport", Value: "auto", Usage: "`WAY` in which the kernel's requests come: auto, the fastest there is, or uring, threads or fuse"},
			&cli.StringSliceFlag{Name: "options", Aliases: []string{"o"}, Usage: "`LIST` of mount(8)'s options ro, nosuid, nodev, noexec, nosymfollow, noatime, nodiratime, relatime and strictatime, and of their opposites (default: as DIR's file system is mounted); with remount, only change them"},
			&cli.BoolFlag{Name: "compat", Usage: "use only what Linux 5.10 offers"},
			&cli.BoolFlag{Name: "debug", Usage: "log every decision"},
			&cli.BoolFlag{Name: "daemon", Aliases: []string{"d"}, Usage: "return once the mount answers, and serve on in the background"},
			&cli.BoolFlag{Name: "supervise", Usage: "start another daemon at once if this one is killed"},
			&cli.BoolFlag{Name: "replace", Usage: "have the daemon of the mount at DIR go on as this program; nobody who uses the mount notices"},
			&cli.StringFlag{Name: "log", Usage: "append the log to `FILE` (default: standard error; with -d: nowhere)"},
		},
		Action: c.mountAction,
	}
}

func (c *command) mountAction(ctx *cli.Context) (err error) {
	if ctx.Bool("replace") {
		if n := ctx.NumFlags(); n > 1 {
			return usagef("option --replace: the daemon keeps its options; leave the others out")
		}
		if err := exactArgs(ctx, 1, 1); err != nil {
			return err
		}
		return c.replaceMount(ctx.Args().First())
	}
	if err := exactArgs(ctx, 1, 2); err != nil {
		return err
	}
	if options := flagsGiven(ctx); slices.Contains(options, "remount") {
		return c.remount(ctx, slices.DeleteFunc(options, func(s string) bool { return s == "remount" }))
	}
	starter := readyPipe()
	watched := supervised()
	defer func() { err = watched.failed(err) }()
	closeInherited(c.args) // some file system would stay busy, some reader of a pipe wait, while it serves
	if starter == nil && !watched.on {
		if err := awaitPaths(ctx); err != nil {
			return err
		}
	}
	o, err := mountOptions(ctx)
	if err != nil {
		return err
	}
	if ctx.Bool("daemon") && starter == nil && !watched.on {
		return c.startDaemon()
	}
	if err := c.openLog(ctx, &o, starter); err != nil {
		return err
	}
	if ctx.Bool("supervise") && !watched.on {
		return c.supervise(o, starter)
	}
	var null *os.File // from now on: when it is mounted there may be no descriptor left
	if starter != nil {
		if null, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
			return explainMount(o, err)
		}
	}
	o.Successor, o.Mounted, o.Shelf = watched.again, watched.mounted, watched.shelf
	c.ignored = ignoredStops()
	h := handover{Debug: o.Debug, Mountpoint: target(o), Ignored: c.ignored, Shelf: o.Shelf}
	h.Cwd, _ = syscall.Getwd() // os.Getwd looks at the directory
	o.Replace = c.replaceBy(h)

	err = explainMount(o, c.serve(ctx.Context, o, func(s server) error {
		watched.serves()
		o.Log.Info("serving", "dir", o.Dir, "mountpoint", s.Mountpoint(), "pid", os.Getpid(), "version", o.Version, "transport", s.Transport(), "args", c.args)
		for _, w := range s.Warnings() {
			c.complain("warning: %s", w)
		}
		how := "unmount with: stagefs umount " + shellWord(s.Mountpoint())
		if starter == nil && isTerminal(c.err) {
			how = "Ctrl-C unmounts"
		}
		if starter == nil || os.Getenv(envQuiet) == "" {
			c.say("serving %s (pid %d); %s", quote(s.Mountpoint()), os.Getpid(), how)
		}
		if err := notifyReady(); err != nil {
			c.complain("warning: the service manager can't be told that the mount answers: %v", err)
		}
		if starter == nil {
			return nil
		}
		return c.daemonReady(starter, null)
	}))
	if watched.on && errors.Is(err, fs.ErrUnmounted) {
		_, text := explain(err)
		return exitf(statusUnmounted, "%s", text)
	}
	return err
}

// remount changes flags of a mount that is there.
func (c *command) remount(ctx *cli.Context, options []string) error {
	for _, flag := range ctx.Command.Flags {
		if name := flag.Names()[0]; ctx.IsSet(name) && name != "options" && name != "daemon" {
			return usagef("option --%s: a mount keeps it; only its flags can be changed, such as with -o remount,ro", name)
		}
	}
	if len(options) == 0 {
		return usagef("option --options remount: say what is to change, such as with -o remount,ro")
	}
	f, err := fs.ParseMountFlags(strings.Join(options, ","))
	if err != nil {
		return err
	}
	path, _, err := findExact(ctx.Args().Get(ctx.NArg() - 1))
	if err != nil {
		return err
	}
	if err := awake(path, answerTime); err != nil {
		return err
	}
	switch err := fs.Remount(path, f); {
	case errors.Is(err, fs.ErrNoAtimes):
		return usagef("%s: a remount can't change when access times change; unmount, and mount again with -o %s", quote(path), strings.Join(options, ","))
	case isDead(err):
		return controlError(path, err)
	case errors.Is(err, os.ErrPermission):
		return exitf(exitNoPerm, "%s: only root may remount it", quote(path))
	default:
		return err
	}
}

// openLog has o log to where the command line says. starter: it is told what is wrong
// until the mount answers.
func (c *command) openLog(ctx *cli.Context, o *fs.Options, starter *os.File) error {
	level := logLevel(o.Debug)
	name := ctx.String("log")
	if name == "" {
		if starter != nil && !o.Debug {
			level = slog.LevelWarn // no more than that
		}
		o.Log = c.newLog(c.err, level)
		return nil
	}
	file, err := openAppend(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return exitf(exitCantCreate, "log file: %v; make its directory first, or name another file with --log", err)
	case err != nil:
		return exitf(exitCantCreate, "log file: %v", err)
	}
	o.Log = c.newLog(file, level)
	c.log, c.logFile = o.Log, file
	return nil
}

// openAppend opens a file to append to it, and makes it if it is missing. It does not
// wait for a FIFO's reader: nobody would know what for.
func openAppend(name string) (*os.File, error) {
	for {
		fd, err := unix.Open(name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o644)
		switch info, _ := os.Stat(name); {
		case err == unix.EINTR:
			continue
		case err == unix.ENXIO && info != nil && info.Mode()&os.ModeNamedPipe != 0:
			return nil, fmt.Errorf("nobody reads the FIFO %s; start its reader first", quote(name))
		case err != nil:
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
		unix.SetNonblock(fd, false) // what is logged is not to be lost
		return os.NewFile(uintptr(fd), name), nil
	}
}
