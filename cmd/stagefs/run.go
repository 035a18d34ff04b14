//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
)

// A command is one run of the program: its streams, and what it uses of the
// machine, which tests replace.
type command struct {
	args     []string // without the program's name
	quiet    bool     // called by mount(8)
	in       io.Reader
	out, err io.Writer
	mount    func(fs.Options) (server, error)
	unmount  func(mountpoint string, lazy bool) error
	mounts   func() ([]fs.MountEntry, error)
	find     func(path string) (mountpoint, rel string, err error)

	// Of a daemon that serves: made before it mounts.
	ignored []syscall.Signal // stop signals that do not stop it
	signals chan os.Signal   // the others come here; nil: nobody listens yet
	pauses  chan pause
	served  chan struct{} // closed when it does not any more
	log     *slog.Logger  // with --log
	logFile *os.File
	logTo   *logWriter // of either log, if it is a file

	quits func() // ends what endByQuit began

	program *os.File // of a supervisor: what its daemon has become by an upgrade; nil: nothing else
}

// A server is what the commands need of an [fs.Server].
type server interface {
	Mountpoint() string
	Warnings() []string
	Transport() string
	Wait() error
	Shutdown(context.Context) error
	Detach() error
}

// run is the whole program. It returns the exit status.
func run(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) int {
	c := &command{
		in: in, out: out, err: errs,
		mount: func(o fs.Options) (server, error) {
			// The daemon must not sit in what it covers, nor keep another
			// file system busy. All paths are absolute by now.
			if err := os.Chdir("/"); err != nil {
				return nil, err
			}
			s, err := fs.Mount(o)
			if err != nil {
				return nil, err
			}
			return s, nil
		},
		unmount: func(mountpoint string, lazy bool) error {
			// Called from inside, this process must not be what keeps it busy.
			if err := os.Chdir("/"); err != nil {
				return err
			}
			return fs.Unmount(mountpoint, lazy)
		},
		mounts: fs.Mounts,
		find:   fs.FindMount,
	}
	defer func() { c.logTo.flush() }()
	if len(args) > 0 {
		c.args = args[1:]
	}
	if len(args) > 0 && isMountHelper(args[0]) {
		if slices.ContainsFunc(c.args, func(a string) bool { return isOption(a) && isHelp(a) }) {
			fmt.Fprintln(out, helperUsage)
			return exitOK
		}
		var err error
		if c.args, err = helperArgs(c.mountCommand().Flags, c.args, servedWith); err != nil {
			status, text := explain(err)
			c.complain("%s", text)
			return status
		}
		if c.args == nil {
			return exitOK
		}
		c.quiet = true
	}
	return c.run(ctx)
}

func (c *command) run(ctx context.Context) int {
	h, inPlace := takenOver()
	if inPlace { // until then, a stop signal ends it at once
		c.ignored, c.signals = h.Ignored, make(chan os.Signal, 4)
		notifyStop(c.signals, c.ignored)
	}
	if path := os.Getenv(envAsk); path != "" && len(c.args) == 0 {
		return c.answerAsked(path)
	}
	c.quits = func() {}
	out := &output{Writer: c.out}
	c.out = out
	app := c.app()
	// A tenth of a millisecond a command: those that are not meant need no
	// preparation.
	if meant := slices.IndexFunc(c.args, func(a string) bool { return !isOption(a) }); meant >= 0 {
		if cmd := app.Command(c.args[meant]); cmd != nil {
			app.Commands = []*cli.Command{cmd}
			if cmd.Name != "mount" && !inPlace {
				c.quits = endByQuit()
				defer c.quits()
			}
		}
	}
	var args []string
	var err error
	if inPlace {
		err = c.takeOver(ctx, h)
	} else if args, err = normalize(app, c.args); err == nil {
		err = app.RunContext(ctx, append([]string{app.Name}, args...))
	}
	if out.failed != nil && (err == nil || errors.Is(err, out.failed)) {
		err = exitf(exitIO, "writing the output: %s", oneLine(out.failed))
	}
	if err == nil {
		return exitOK
	}
	status, text := explain(err)
	if text != "" {
		c.sayAt(slog.LevelError, "%s", text)
	}
	return status
}

// An output remembers why it could not be written: not everybody looks.
type output struct {
	io.Writer
	failed error // the first error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if o.failed == nil {
		o.failed = err
	}
	return n, err
}

func (c *command) app() *cli.App {
	app := &cli.App{
		Name:      "stagefs",
		HelpName:  "stagefs",
		Usage:     "make the locks of build tools binding in a static directory",
		UsageText: "stagefs COMMAND [options] [arguments]\nstagefs --help | --version",
		Description: "Mounts over a directory, in which each staging directory belongs to the process that made it\n" +
			"or its lock file; nobody else can change it until it is released. For instance:\n\n" +
			"stagefs mount -d /srv/static                      serve it in the background\n" +
			"stagefs locks /srv/static                         who has what\n" +
			"stagefs run /srv/static/board/v1 make install     build as the only one there\n" +
			"stagefs why /srv/static/board/v1/image            why can't I write this?\n" +
			"stagefs umount /srv/static\n\n" +
			"See stagefs COMMAND --help, and man stagefs.",
		Commands: []*cli.Command{
			c.mountCommand(), c.umountCommand(), c.locksCommand(), c.whyCommand(), c.eventsCommand(),
			c.runCommand(), c.acquireCommand(), c.renewCommand(), c.checkCommand(), c.waitCommand(),
			c.releaseCommand(), c.breakCommand(), c.quarantineCommand(), c.doctorCommand(), c.versionCommand(),
		},
		HideVersion:               true,
		DisableSliceFlagSeparator: true, // a lock name may hold a comma
		Reader:                    c.in,
		Writer:                    c.out,
		ErrWriter:                 c.err,
		// Errors are told, and turned into a status, in one place: run.
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   usageError,
		Action: func(ctx *cli.Context) error {
			cli.ShowAppHelp(ctx)
			return nil
		},
	}
	for _, cmd := range app.Commands {
		cmd.OnUsageError = usageError
		// Otherwise a directory called "help" could not be named.
		cmd.HideHelpCommand = true
		cmd.UsageText = strings.TrimSpace("stagefs " + cmd.Name + " " + cmd.ArgsUsage)
		for _, flag := range cmd.Flags {
			if b, ok := flag.(*cli.BoolFlag); ok {
				b.DisableDefaultText = true // always false
			}
		}
	}
	return app
}

// usageError takes what the flag parser says. It has no type of its own.
func usageError(_ *cli.Context, err error, _ bool) error {
	var exit *exitError
	if errors.As(err, &exit) {
		return err
	}
	return &exitError{exitUsage, err.Error()}
}

// exactArgs checks the number of a command's arguments.
func exactArgs(ctx *cli.Context, least, most int) error {
	switch n := ctx.NArg(); {
	case n < least:
		return usagef("%s: missing argument; usage: stagefs %s %s", ctx.Command.Name, ctx.Command.Name, ctx.Command.ArgsUsage)
	case n > most:
		return usagef("%s: too many arguments; usage: stagefs %s %s", ctx.Command.Name, ctx.Command.Name, ctx.Command.ArgsUsage)
	}
	for _, arg := range ctx.Args().Slice() {
		if arg == "" {
			return usagef("%s: an argument is empty", ctx.Command.Name)
		}
	}
	return nil
}
