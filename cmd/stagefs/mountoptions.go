//go:build linux

package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/filestore"
)

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
