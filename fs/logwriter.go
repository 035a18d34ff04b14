package fs

import (
	"context"
	"log/slog"
	"slices"
	"strings"
)

// logWriter passes go-fuse's lines on.
type logWriter struct {
	log *slog.Logger
}

func (w logWriter) Write(p []byte) (int, error) {
	text := strings.TrimSpace(string(p))
	level := slog.LevelWarn
	if slices.ContainsFunc(traces, func(t string) bool { return strings.HasPrefix(text, t) }) {
		level = slog.LevelDebug
	}
	w.log.Log(context.Background(), level, "fuse", "msg", text)
	return len(p), nil
}

// traces are how the lines begin that are there for Options.Debug alone.
var traces = []string{"rx ", "tx ", "doBatchForget: ", "ioctl: ", "notify: ", "mountDirect: ", "callFusermount: ", "unmount: "}
