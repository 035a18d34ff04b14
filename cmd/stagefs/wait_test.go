//go:build linux

package main

import "testing"

// flock(1) forms of the time to wait are understood.
func TestWaitUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"wait"}, 64, "", "missing argument")
	m.check(t, []string{"wait", "-w", "-1s", m.dir}, 64, "", "want seconds")
	m.check(t, []string{"wait", "-w5", m.dir}, 69, "", "stagefs mount")
}
