//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// say prints to standard error. A daemon's log has it too, with the time.
func (c *command) say(format string, args ...any) { c.sayAt(slog.LevelInfo, format, args...) }

// complain is say, of what went wrong.
func (c *command) complain(format string, args ...any) { c.sayAt(slog.LevelWarn, format, args...) }

func (c *command) sayAt(level slog.Level, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c.log != nil {
		c.log.Log(context.Background(), level, harmless(text))
		if sameFile(c.err, c.logFile) {
			return // it has left its terminal
		}
	}
	fmt.Fprintf(c.err, "stagefs: %s\n", harmless(text))
}

// sameFile tells whether a stream is that file.
func sameFile(stream any, file *os.File) bool {
	f, ok := stream.(*os.File)
	if !ok || file == nil {
		return false
	}
	var a, b unix.Stat_t
	return unix.Fstat(int(f.Fd()), &a) == nil && unix.Fstat(int(file.Fd()), &b) == nil && a.Dev == b.Dev && a.Ino == b.Ino
}
