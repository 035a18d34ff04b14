//go:build linux

package main

import (
	"cmp"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
)

// normalize puts the arguments into the one order that the parser reads in
// full: COMMAND, options, "--", the rest. Without it, the parser takes all that
// follows the first argument for arguments, and `stagefs mount DIR --depth 2`
// would serve with the default depth.
func normalize(app *cli.App, args []string) ([]string, error) {
	name := slices.IndexFunc(args, func(a string) bool { return !isOption(a) })
	if name < 0 {
		if slices.Contains(args, "--version") {
			return []string{"version"}, nil
		}
		if len(args) > 0 && !slices.ContainsFunc(args, isHelp) {
			return nil, usagef("unknown option %s; options follow a command, see stagefs --help", quote(args[0]))
		}
		if len(args) == 0 {
			return nil, usagef("which command? One of %s; see stagefs --help", strings.Join(commandNames(app), ", "))
		}
		return []string{"--help"}, nil
	}
	if args[name] == "help" || args[name] == "h" {
		about := slices.DeleteFunc(slices.Clone(args[name+1:]), isHelp)
		switch {
		case len(about) > 1:
			return nil, usagef("help: about one command at a time")
		case len(about) == 1 && app.Command(about[0]) == nil:
			return nil, unknownCommand(app, about[0])
		}
		return slices.Concat([]string{"help"}, about), nil
	}
	cmd := app.Command(args[name])
	switch {
	case cmd == nil && name == 0 && strings.HasPrefix(args[0], "/") && slices.Contains(args, "-o"): // mount.fuse(8), which mount(8) calls then
		return nil, usagef("mount(8) needs a link to this program: ln -s %s /sbin/mount.fuse.stagefs", shellWord(ownPath()))
	case cmd == nil && name > 0 && didYouMean(args[name], commandNames(app)) == "": // the value of an option
		return nil, usagef("%s is no command; options with a value follow the command, see stagefs --help", quote(args[name]))
	case cmd == nil:
		return nil, unknownCommand(app, args[name])
	}
	rest, err := reorder(cmd, slices.Concat(args[:name], args[name+1:]))
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(rest[:slices.Index(rest, "--")], isHelp) {
		return []string{"help", cmd.Name}, nil // whatever else is said
	}
	return append([]string{cmd.Name}, rest...), nil
}

func ownPath() string {
	path, err := os.Executable()
	if err != nil {
		return "/usr/local/bin/stagefs"
	}
	return path
}

func unknownCommand(app *cli.App, name string) error {
	return usagef("unknown command %s%s; see stagefs --help", quote(name), didYouMean(name, commandNames(app)))
}

// reorder moves the options of cmd to the front, each as one --name=value with the long
// name: the parser refuses an option that is given by both.
func reorder(cmd *cli.Command, args []string) ([]string, error) {
	takesValue := map[string]bool{"help": false, "h": false}
	long := make(map[string]string)
	var names []string
	for _, flag := range cmd.Flags {
		doc, ok := flag.(cli.DocGenerationFlag)
		for _, name := range flag.Names() {
			takesValue[name] = ok && doc.TakesValue()
			long[name] = flag.Names()[0]
			if len(name) > 1 {
				names = append(names, "--"+name)
			}
		}
	}

	var options, rest []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			rest = append(rest, args[i+1:]...)
			break
		}
		if !isOption(arg) {
			if cmd.Name == "run" { // the rest is a command with options of its own
				rest = append(rest, args[i:]...)
				break
			}
			rest = append(rest, arg)
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		needs, known := takesValue[name]
		if needsFirst, short := takesValue[name[:min(len(name), 1)]]; !known && short && arg[1] != '-' {
			// As for getopt(3): -w5, -ns.
			if needsFirst {
				name, value, hasValue, needs, known = arg[1:2], arg[2:], true, true, true
			} else {
				options = append(options, "--"+cmp.Or(long[arg[1:2]], arg[1:2]))
				args[i], i = "-"+arg[2:], i-1
				continue
			}
		}
		switch {
		case !known:
			given, _, _ := strings.Cut(arg, "=")
			return nil, usagef("%s: unknown option %s%s; see stagefs %s --help", cmd.Name, quote(given), didYouMean(given, names), cmd.Name)
		case needs && !hasValue:
			if i+1 == len(args) {
				return nil, usagef("%s: option %s needs a value", cmd.Name, arg)
			}
			i++
			value, hasValue = args[i], true
		case !needs && hasValue:
			if _, err := strconv.ParseBool(value); err != nil {
				return nil, usagef("%s: option %s takes no value", cmd.Name, strings.TrimSuffix(arg, "="+value))
			}
		}
		name = cmp.Or(long[name], name)
		if hasValue {
			options = append(options, "--"+name+"="+value)
		} else {
			options = append(options, "--"+name)
		}
	}
	return append(append(options, "--"), rest...), nil
}

func isOption(arg string) bool { return len(arg) > 1 && arg[0] == '-' }

func isHelp(arg string) bool {
	return strings.TrimLeft(arg, "-") == "help" || strings.TrimLeft(arg, "-") == "h"
}

func commandNames(app *cli.App) []string {
	var names []string
	for _, cmd := range app.Commands {
		names = append(names, cmd.Name)
	}
	return names
}

// didYouMean is a hint at the nearest of known, empty if none is near.
func didYouMean(given string, known []string) string {
	best, least := "", 3
	for _, name := range known {
		if d := distance(given, name); d < least {
			best, least = name, d
		}
	}
	if best == "" {
		return ""
	}
	return " (did you mean " + best + "?)"
}

// distance is the number of bytes to insert, delete or replace to get from a to b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
