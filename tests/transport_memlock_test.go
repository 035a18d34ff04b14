//go:build linux

package tests

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

// TestTransportMemlock: where an ordinary user may lock little memory, which the rings take, a
// mount is served by another transport, if not by io_uring: who has waited for a lock gets it.
func TestTransportMemlock(t *testing.T) {
	need(t, "root", "fuse", "fusermount3")
	needTransport(t, "uring")
	for _, kib := range []int{16, 32} {
		t.Run(fmt.Sprint(kib), func(t *testing.T) {
			dir := staticDir(t)
			m := newMount(t, dir, dir)
			m.cmdBin = filepath.Join(tempDir(t), "limited")
			script := fmt.Sprintf("#!/bin/sh\nulimit -l %d && exec '%s' \"$@\"\n", kib, stagefsBin())
			writeProgram(t, m.cmdBin, []byte(script))
			m.serveUser()
			holder, waiter := lockerAs(t, nobody), lockerAs(t, nobody)
			for _, a := range []*Agent{holder, waiter} {
				a.must("open", "x", m.At("f"), "rdwr,creat")
			}
			holder.must("flock", "x", "ex")
			got := waiter.Start("flock", "x", "ex")
			time.Sleep(20 * time.Millisecond) // it waits
			holder.must("close", "x")
			if s := got(); s != "ok" {
				t.Errorf("who waited hears %s, want ok", s)
			}
		})
	}
}
