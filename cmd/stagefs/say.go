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
	priority := ""
	if isJournal(c.err) {
		priority = priorityOf(level)
	}
	fmt.Fprintf(c.err, "%sstagefs: %s\n", priority, harmless(text))
}

// envJournal tells which stream leads to systemd's journal (systemd.exec(5)). There a line
// may begin with its priority (sd-daemon(3)).
const envJournal = "JOURNAL_STREAM"

// isJournal tells whether a stream is that one.
func isJournal(stream any) bool {
	f, ok := stream.(*os.File)
	var st unix.Stat_t
	return ok && unix.Fstat(int(f.Fd()), &st) == nil && os.Getenv(envJournal) == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// priorityOf is what a line of that level begins with in the journal.
func priorityOf(level slog.Level) string {
	switch {
	case level >= slog.LevelError:
		return "<3>"
	case level >= slog.LevelWarn:
		return "<4>"
	case level >= slog.LevelInfo:
		return "<6>"
	}
	return "<7>"
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
