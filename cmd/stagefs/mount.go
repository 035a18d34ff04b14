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
	"github.com/stagefs/stagefs/lockstate/filestore"
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

// awaitPaths waits for the daemons that the paths on the command line of `mount` lead to, as
// notStopped does. One that serves the directory already, and is dying, is helped to its end.
func awaitPaths(ctx *cli.Context) error {
	for _, dir := range ctx.Args().Slice() {
		if err := clearDying(dir); err != nil {
			return err
		}
	}
	for _, path := range append(ctx.Args().Slice(), ctx.String("state-dir"), ctx.String("log")) {
		if path == "" {
			continue
		}
		if err := notStopped(path); err != nil {
			return err
		}
	}
	return nil
}

// flagsGiven are the options for the mount, of each -o. Others may use root's mounts in
// any case.
func flagsGiven(ctx *cli.Context) []string {
	if !ctx.IsSet("options") {
		return nil
	}
	options := strings.Split(strings.Join(ctx.StringSlice("options"), ","), ",")
	return slices.DeleteFunc(options, func(o string) bool { return o == "allow_other" && os.Geteuid() == 0 })
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

// mountOptions turns the command line into options, with absolute paths: the
// daemon leaves the directory that it was started in.
func mountOptions(ctx *cli.Context) (fs.Options, error) {
	o := fs.Options{
		LockNames:     ctx.StringSlice("lock-name"),
		SharedNames:   ctx.StringSlice("shared-name"),
		Candidates:    ctx.StringSlice("candidate"),
		Owner:         ctx.String("owner"),
		NoLocking:     ctx.Bool("disable-locking"),
		Strict:        ctx.Bool("strict"),
		Compat:        ctx.Bool("compat"),
		Transport:     ctx.String("transport"),
		NoPassthrough: ctx.Bool("no-passthrough"),
		IDMap:         ctx.Bool("idmap"),
		OnCrash:       ctx.String("on-crash"),
		Debug:         ctx.Bool("debug"),
		Version:       versionText(),
	}
	var err error
	if flags := flagsGiven(ctx); len(flags) > 0 {
		if o.MountFlags, err = fs.ParseMountFlags(strings.Join(flags, ",")); err != nil {
			return o, err
		}
	}
	if o.Depth, err = numberOf(ctx, "depth"); err != nil {
		return o, err
	}
	if o.Depth == 0 {
		return o, usagef("option --depth 0: want 1 or more; the root is a container in any case")
	}
	if o.Grace, err = durationOf(ctx, "grace"); err != nil {
		return o, err
	}
	if o.Grace == 0 {
		return o, usagef("option --grace 0: want more than 0")
	}
	for _, name := range []string{"state-dir", "log", "owner", "on-crash", "transport"} {
		if ctx.IsSet(name) && ctx.String(name) == "" {
			return o, usagef("option --%s is empty; name one, or leave it out", name)
		}
	}
	switch v := ctx.String("unlocked"); v {
	case "allow":
	case "deny":
		o.DenyUnlocked = true
	default:
		return o, usagef("option --unlocked %s: want allow or deny", quote(v))
	}
	switch v := ctx.String("enforce"); v {
	case "all":
	case "observe":
		o.Observe = true
	default:
		return o, usagef("option --enforce %s: want all or observe", quote(v))
	}
	switch {
	case o.NoLocking && o.DenyUnlocked:
		return o, usagef("options --disable-locking and --unlocked=deny exclude each other: with no locks, nothing could be written")
	case o.NoLocking && o.Observe:
		return o, usagef("options --disable-locking and --enforce=observe exclude each other: with no locks, nothing would be refused")
	}
	for _, path := range []struct {
		given string
		to    *string
	}{
		{ctx.Args().Get(0), &o.Dir},
		{ctx.Args().Get(1), &o.Mountpoint},
		{ctx.String("state-dir"), &o.StateDir},
	} {
		if path.given == "" {
			continue
		}
		abs, err := placeOf(path.given)
		if err != nil {
			return o, err
		}
		*path.to = abs
	}
	if err := o.Validate(); err != nil {
		return o, err
	}
	return o, checkOutside(o, ctx.String("log"))
}

// placeOf returns the absolute path of a directory. One that leads by way of this process
// leads elsewhere for another daemon, or when this one has left its directory.
func placeOf(path string) (string, error) {
	abs, err := fs.Abs(path)
	for _, own := range []string{"/proc/self/", "/proc/thread-self/", "/dev/fd/"} {
		if err == nil && strings.HasPrefix(abs, own) {
			abs, err = fs.AbsoluteOf(abs)
		}
	}
	if err != nil {
		return "", fmt.Errorf("where is %s: %w", quote(path), err)
	}
	return abs, nil
}

// checkOutside refuses what the mount would cover and a daemon needs (S1): it would
// have to walk into its own mount (M4), and the next one into a dead one.
func checkOutside(o fs.Options, log string) error {
	state := o.StateDir
	if state == "" {
		var err error
		if state, err = filestore.DefaultDir(); err != nil {
			return usagef("%v; name one with --state-dir", err)
		}
	}
	dir, err := fs.AbsoluteOf(o.Dir)
	if err != nil {
		return err
	}
	at, err := fs.AbsoluteOf(target(o))
	if err != nil {
		return err
	}
	if dir == "/" {
		return usagef("/: %v, and whatever the daemon needs is in it; serve a directory in it", fs.ErrNeeded)
	}
	if at == "/" {
		at = dir // no mountpoint, as is said later
	}
	switch {
	case dir == at:
	case below(dir, at):
		return usagef("%s is inside of the mountpoint %s, which would cover it; choose another mountpoint", quote(dir), quote(at))
	case below(at, dir): // also one that is missing, and is not to be made
		return fmt.Errorf("%s: %w", quote(at), fs.ErrInside)
	}
	for _, dir := range []string{dir, at} {
		for _, kept := range []struct{ what, path, option string }{
			{"state directory", state, "--state-dir"},
			{"log file", log, "--log"},
		} {
			if kept.path == "" {
				continue
			}
			path, err := fs.AbsoluteOf(kept.path)
			if err != nil {
				return err
			}
			if below(path, dir) {
				return usagef("the %s %s is inside of %s; name one elsewhere with %s", kept.what, quote(path), quote(dir), kept.option)
			}
		}
	}
	return nil
}

// explainMount adds to the errors of mounting what their reader may not know.
func explainMount(o fs.Options, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist) && !pathExists(o.Dir):
		return exitf(exitNoInput, "%s: no such directory; make it first: mkdir -p %s", quote(o.Dir), shellWord(o.Dir))
	case errors.Is(err, fs.ErrNotExist) && o.Mountpoint != "" && !pathExists(o.Mountpoint):
		return exitf(exitCantCreate, "mountpoint %s: no such directory; make it first: mkdir -p %s", quote(o.Mountpoint), shellWord(o.Mountpoint))
	case errors.Is(err, fs.ErrNotDirectory) && o.Mountpoint != "" && isDirectory(o.Dir):
		return exitf(exitCantCreate, "mountpoint %s: is not a directory; choose another mountpoint", quote(o.Mountpoint))
	case o.Mountpoint != "" && isAbout(err, o.Mountpoint) && errnoStatus(err) == exitNoInput:
		return exitf(exitCantCreate, "mountpoint: %s; choose another mountpoint", oneLine(err))
	case errors.Is(err, fs.ErrStaleMount):
		return staleError(o)
	case errors.Is(err, unix.EMFILE):
		return exitf(exitOS, "%s: the daemon may not have enough files open (%s): ulimit -Hn %d or more; LimitNOFILE= in a systemd unit", quote(o.Dir), openFiles(), enoughFiles)
	case errors.Is(err, fs.ErrNoFuse) && os.Geteuid() != 0 && unix.Access(target(o), unix.W_OK) != nil:
		return exitf(exitNoPerm, "%s: ordinary users can only mount over directories that they may write; mount as root", quote(target(o)))
	}
	if mount := foreignDead(target(o)); mount != nil {
		return exitf(exitNoPerm, "%s: the dead mount at %s is the user %d's; only that one and root can take its place, or unmount it",
			quote(o.Dir), quote(mount.Path), mountedBy(mount))
	}
	return err
}

// foreignDead returns the dead mount that a path leads into, if another user made it
// and this one is not root.
func foreignDead(path string) *fs.MountEntry {
	mount := fs.LeadsTo(path)
	if mount == nil || os.Geteuid() == 0 || os.Geteuid() == mountedBy(mount) || !isDead(ask(mount.Path, false, answerTime)) {
		return nil
	}
	return mount
}

// staleError tells of a dead mount in whose place no new one can be made: it is
// not stagefs's, or not at the directory itself.
func staleError(o fs.Options) error {
	mounts, _ := fs.ReadMounts()
	for _, dir := range []string{o.Dir, target(o)} {
		if mount := fs.LeadsTo(dir); mount != nil {
			return exitf(exitCantCreate, "%s is in the mount at %s, whose daemon is dead; %s", quote(dir), quote(mount.Path), startAgain(mount))
		}
		if path, err := fs.AbsoluteOf(dir); err == nil {
			if mount := fs.MountOf(mounts, path); strings.HasPrefix(mount.FSType, "fuse") {
				return exitf(exitCantCreate, "%s: a dead mount of %s, at %s, is in the way; clear it with: umount -l %s",
					quote(dir), quote(mount.FSType), quote(mount.Path), shellWord(mount.Path))
			}
		}
	}
	return exitf(exitCantCreate, "%s: a dead mount is in the way; clear it with: umount -l MOUNTPOINT", quote(o.Dir))
}

// openFiles tells how many this process may have.
func openFiles() string {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d are allowed", lim.Max)
}

// isAbout reports whether an error is that of a system call with a path.
func isAbout(err error, path string) bool {
	var p *os.PathError
	return errors.As(err, &p) && p.Path == path
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func pathExists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}
