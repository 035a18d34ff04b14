//go:build linux

package main

import "testing"

// What is wrong with a command line is said, and how to mend it.
func TestCheckUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"check"}, 64, "", "missing argument")
	m.check(t, []string{"check", "a", "b"}, 64, "", "too many")
	m.check(t, []string{"check", "--client", "a", "--client-file", "b", m.dir}, 64, "", "exclude")
	m.check(t, []string{"check", m.dir}, 69, "", "stagefs mount")
}
