//go:build linux

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v2"

	"github.com/stagefs/stagefs/fs"
)

// versionNumber is that of this tree.
const versionNumber = "0.1.0"

func (c *command) versionCommand() *cli.Command {
	return &cli.Command{
		Name:      "version",
		Usage:     "print the version",
		ArgsUsage: "[--handover]",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "handover", Usage: "print the formats in which a running daemon can hand over to this program"},
		},
		Action: func(ctx *cli.Context) error {
			if err := exactArgs(ctx, 0, 0); err != nil {
				return err
			}
			if ctx.Bool("handover") {
				fmt.Fprintln(c.out, fs.HandoverFormat, fs.HandoverIDMap)
				return nil
			}
			fmt.Fprintf(c.out, "stagefs %s\n", versionText())
			return nil
		},
	}
}

// versionText is the number, the commit if the build recorded it, and the
// compiler.
func versionText() string {
	text := versionNumber
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && len(s.Value) >= 12:
				text += "+" + s.Value[:12]
			case s.Key == "vcs.modified" && s.Value == "true":
				text += "-modified"
			}
		}
	}
	return text + " " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
}
