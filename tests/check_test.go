package tests

import "testing"

// The tables' invariants can be checked on a live mount, by an admin.
func TestCheck(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	a, b := agent(t), stranger(t)
	a.must("creat", m.At("D/devserver"), "wronly,creat,excl")
	a.must("mkdir", m.At("E"))
	a.must("put", m.control("ctl"), "check\n", "wronly")
	b.want("EPERM", "put", m.control("ctl"), "check\n", "wronly")
	a.want("EINVAL", "put", m.control("ctl"), "check E all\n", "wronly")
}
