//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxKept bounds what is kept of a log that nobody takes off, in bytes.
	maxKept = 1 << 20
	// flushTime is how long the end of the program waits for it.
	flushTime = time.Second
)

// A logWriter is where a daemon logs to. Requests log while they hold what others wait
// for: so where nobody takes the log off, as with a pipe whose reader has stopped, it is
// kept, and what is too much is counted.
type logWriter struct {
	to      *os.File
	journal bool // see isJournal

	mu   sync.Mutex
	kept []byte
	lost int           // lines
	done chan struct{} // closed when no more is kept; nil: nothing is
}

// newLog returns a log that goes to w.
func (c *command) newLog(w io.Writer, level slog.Level) *slog.Logger {
	if f, ok := w.(*os.File); ok {
		c.logTo = &logWriter{to: f, journal: isJournal(f)}
		w = c.logTo
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level}))
}

func (w *logWriter) Write(line []byte) (int, error) {
	if w.journal {
		var level slog.Level
		_, after, _ := bytes.Cut(line, []byte("level="))
		name, _, _ := bytes.Cut(after, []byte(" "))
		_ = level.UnmarshalText(name)
		line = append([]byte(priorityOf(level)), line...)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.done == nil && w.takes(len(line)):
		return w.to.Write(line)
	case len(w.kept)+len(line) > maxKept:
		w.lost++
	default:
		w.kept = append(w.kept, line...)
	}
	if w.done == nil {
		w.done = make(chan struct{})
		go w.writeKept()
	}
	return len(line), nil
}

// takes reports whether n bytes can be written without a wait.
func (w *logWriter) takes(n int) bool {
	var st unix.Stat_t
	if fd := int(w.to.Fd()); unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, err := unix.Poll(p, 0)
		// A pipe that can be written to has room for a page (pipe(7)).
		return err == nil && p[0].Revents&unix.POLLOUT != 0 && n <= os.Getpagesize()
	}
	return true
}

// writeKept writes what is kept until nothing is.
func (w *logWriter) writeKept() {
	for {
		w.mu.Lock()
		kept := w.kept
		if w.lost > 0 {
			if w.journal {
				kept = append(kept, priorityOf(slog.LevelWarn)...)
			}
			kept = fmt.Appendf(kept, "time=%s level=WARN msg=\"the log was not taken off in time\" lost=%d\n", time.Now().UTC().Format(time.RFC3339Nano), w.lost)
		}
		w.kept, w.lost = nil, 0
		if kept == nil {
			close(w.done)
			w.done = nil
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		w.to.Write(kept)
	}
}

// flush waits for what is kept to be written, but not for long.
func (w *logWriter) flush() {
	if w == nil {
		return
	}
	w.mu.Lock()
	done := w.done
	w.mu.Unlock()
	if done == nil {
		return
	}
	select {
	case <-done:
	case <-time.After(flushTime):
	}
}
