//go:build linux

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
	"github.com/stagefs/stagefs/lockstate/procid"
)

// envQuiet tells a daemon that mount(8) started it: it says only what is wrong.
const envQuiet = "STAGEFS_QUIET"

// isMountHelper reports whether the program was called by the name under which mount(8)
// looks for what mounts a type of file system, such as /sbin/mount.fuse.stagefs.
func isMountHelper(program string) bool {
	name := filepath.Base(program)
	return name == "mount.stagefs" || name == "mount.fuse.stagefs"
}

const helperUsage = "usage: mount -t fuse.stagefs [-o OPTIONS] DIR MOUNTPOINT, both the same to mount over it"

// A helperCall is what mount(8) calls a helper with, which is
//
//	DIR MOUNTPOINT [-sfnv] [-N namespace] [-o options] [-t type]
type helperCall struct {
	places, options []string
	fake, sloppy    bool
}

func parseHelperCall(given []string) (call helperCall, err error) {
	for i := 0; i < len(given); i++ {
		arg := given[i]
		if len(arg) < 2 || arg[0] != '-' {
			call.places = append(call.places, arg)
			continue
		}
		for letters := arg[1:]; letters != ""; {
			letter := letters[0]
			letters = letters[1:]
			switch letter {
			case 's':
				call.sloppy = true
			case 'f':
				call.fake = true
			case 'n', 'v', 'w': // no mtab; no more to be said; what it does
			case 'o', 't', 'N':
				value := letters
				if letters = ""; value == "" {
					if i++; i == len(given) {
						return call, usagef("option -%c lacks its value", letter)
					}
					value = given[i]
				}
				switch letter {
				case 'o':
					call.options = append(call.options, strings.Split(value, ",")...)
				case 'N':
					return call, usagef("option -N: run mount in that namespace instead, with nsenter(1)")
				}
			case '-':
				return call, usagef("unknown option %s; %s", quote(arg), helperUsage)
			default:
				return call, usagef("unknown option -%c; %s", letter, helperUsage)
			}
		}
	}
	switch places := call.places; {
	case len(places) != 2:
		return call, usagef("%s", helperUsage)
	case !strings.Contains(places[0], "/") && !pathExists(places[0]): // no name of a file system goes there
		return call, usagef("%s is no directory, which comes first; %s", quote(places[0]), helperUsage)
	}
	return call, nil
}

// helperArgs turns what mount(8) calls a helper with into the command line of
// `stagefs mount`. Nothing is to be done if args is nil. servedWith returns the command
// line of a mountpoint's daemon, nil if it is not known.
func helperArgs(flags []cli.Flag, given []string, servedWith func(mountpoint string) []string) (args []string, err error) {
	call, err := parseHelperCall(given)
	if err != nil {
		return nil, err
	}
	args = []string{"mount", "--daemon"}
	var ofMount []string
	// mount(8) adds to a remount what fstab(5) has, or else what the mount table has.
	remount := slices.Contains(call.options, "remount")
	fromTable := slices.ContainsFunc(call.options, ofKernel)
	var has []string
	if remount {
		has = servedWith(call.places[1])
	}
	for _, option := range call.options {
		if fs.IsFlagOption(option) || option == "remount" {
			ofMount = append(ofMount, option)
			continue
		}
		arg, err := helperOption(flags, option)
		switch {
		case err != nil && remount && ofKernel(option):
		case err != nil && call.sloppy:
		case err != nil:
			return nil, err
		case arg != "" && remount && (isGiven(has, arg) || has == nil && !fromTable): // from fstab, as it was mounted with
		case arg != "":
			args = append(args, arg)
		}
	}
	if call.fake {
		return nil, nil
	}
	if len(ofMount) > 0 && !slices.Equal(ofMount, []string{"rw"}) { // which it always says
		args = append(args, "--options="+strings.Join(ofMount, ","))
	}
	args = append(args, "--", call.places[0])
	if filepath.Clean(call.places[0]) != filepath.Clean(call.places[1]) {
		args = append(args, call.places[1])
	}
	return args, nil
}

// servedWith returns the command line of the daemon whose mount is at a path, nil if it
// can't be seen.
func servedWith(mountpoint string) []string {
	mount := fs.LeadsTo(mountpoint)
	if mount == nil {
		return nil
	}
	pid := daemonOf(mount)
	if pid == 0 {
		return nil
	}
	args, _ := procid.Within(insideTime, func() []string { return commandLine("/proc/" + strconv.Itoa(pid)) })
	return args
}

// isGiven reports whether an option, as helperOption returns it, is on a command line: by
// hand its value may be an argument of its own.
func isGiven(args []string, option string) bool {
	name, value, _ := strings.Cut(option, "=")
	for i, arg := range args {
		if arg == option || arg == name && i+1 < len(args) && args[i+1] == value {
			return true
		}
	}
	return false
}

// helperOption turns an option for mount(8) into one of `stagefs mount`, "" for none.
func helperOption(flags []cli.Flag, option string) (arg string, err error) {
	name, _, hasValue := strings.Cut(option, "=")
	switch option { // for others than who mounts, or what happens anyway
	case "defaults", "auto", "noauto", "nofail", "_netdev", "nouser", "users", "nousers", "owner", "group", "async":
		return "", nil
	}
	if name == "" || name == "user" || name == "comment" || strings.HasPrefix(name, "x-") {
		return "", nil
	}
	if name != "replace" && name != "daemon" {
		for _, flag := range flags {
			doc := flag.(cli.DocGenerationFlag)
			switch {
			case doc.Names()[0] != name:
			case doc.TakesValue() && !hasValue:
				return "", usagef("mount option %s lacks its value: %s=…", quote(name), name)
			case !doc.TakesValue() && hasValue:
				return "", usagef("mount option %s takes no value", quote(name))
			default:
				return "--" + option, nil
			}
		}
	}
	switch name {
	case "allow_other":
		if os.Geteuid() == 0 {
			return "", nil // which root's mounts have in any case
		}
		return "", usagef("mount option allow_other: leave it out; others may use an ordinary user's mount where /etc/fuse.conf says user_allow_other")
	case "daemon":
		return "", usagef("mount option daemon is not for mount(8): leave it out; it is served in the background in any case")
	case "replace":
		return "", usagef("mount option replace is not for mount(8): call stagefs mount --replace DIR")
	case "sync", "dirsync":
		return "", usagef("mount option %s: set it where the file system of the directory is mounted", name)
	}
	return "", usagef("unknown mount option %s; those of stagefs are the long options of stagefs mount, see stagefs mount --help", quote(option))
}

// ofKernel reports whether an option is one that the kernel shows of a FUSE mount.
func ofKernel(option string) bool {
	name, _, _ := strings.Cut(option, "=")
	return slices.Contains([]string{"user_id", "group_id", "default_permissions", "allow_other", "max_read", "blksize"}, name)
}
