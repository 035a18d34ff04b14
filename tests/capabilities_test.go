//go:build linux

package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// lacking returns a program that is stagefs without a capability.
func lacking(t *testing.T, capability string) string {
	t.Helper()
	path := filepath.Join(tempDir(t), "stagefs")
	mustDo(t, os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\nexec setpriv --bounding-set=-%s %s \"$@\"\n", capability, stagefsBin()), 0o755))
	return path
}

// TestW3Capabilities: a daemon that lacks a capability, as in most containers, knows of
// other users' files whether they are open for writing, also after a crash.
func TestW3Capabilities(t *testing.T) {
	need(t, "root", "fuse", "setpriv")
	for _, capability := range []string{"lease", "fowner"} {
		t.Run(capability, func(t *testing.T) {
			dir := staticDir(t)
			openDir(t, dir+"/D")
			m := newMount(t, dir, dir+".mnt")
			m.cmdBin = lacking(t, capability)
			m.serve()
			locker, b := agent(t), stranger(t)
			lock := []string{"creat", m.At("D/devserver"), "wronly,creat,excl"}
			b.must("put", m.At("D/f"), "content", "creat")
			b.must("open", "h", m.At("D/f"), "rdwr")
			locker.want("EEXIST", lock...)
			b.must("close", "h")
			eventually(t, "the directory is free when all is closed", func() bool { return locker.Try(lock...) == "ok" })
			locker.must("unlink", m.At("D/devserver"))

			b.must("open", "h", m.At("D/f"), "rdwr")
			m.restart(nil)
			if locker.Try(lock...) == "ok" && b.Try("write", "h", "evil") == "ok" {
				t.Errorf("a descriptor from before the crash has changed a held file: %q", locker.Get("read", m.At("D/f")))
			}
		})
	}
}
