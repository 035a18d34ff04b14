//go:build linux

package tests

import (
	"strconv"
	"testing"
)

// TestH1: all threads of the owner hold; the listing names the process.
func TestH1(t *testing.T) {
	m := mount(t)
	a := agent(t)
	a.must("thread", "mkdir", m.At("D"))
	m.wantOwner("D", a.Pid)
	for _, by := range [][]string{nil, {"thread"}} {
		for i := range 3 {
			a.must(append(by, "put", m.At("D", strconv.Itoa(i)+"file"), "x", "creat")...)
		}
	}
	a.must("thread", "creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("unlink", m.At("D/devserver"))
	m.wantFree("D")
}

// TestH2: descendants hold, also those that lost their parents after they were
// seen.
func TestH2(t *testing.T) {
	m := mount(t)
	a := agent(t)
	child := a.Child("setsid")
	grandchild := child.Child("setsid")
	a.must("mkdir", m.At("D"))
	grandchild.must("creat", m.At("D/1"), "wronly,creat")
	child.Kill()
	grandchild.must("creat", m.At("D/2"), "wronly,creat")
	grandchild.must("thread", "creat", m.At("D/3"), "wronly,creat")
	a.Kill()
	m.awaitFree("D")
	b := agent(t)
	b.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	grandchild.want("EBUSY", "creat", m.At("D/5"), "wronly,creat")
}
