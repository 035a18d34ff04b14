//go:build linux

package main

import "testing"

// Only a lease can be renewed: the client must be named.
func TestRenewUsage(t *testing.T) {
	m := newFakeMount(t, nil)
	m.check(t, []string{"renew", "--client=c"}, 64, "", "missing argument")
	m.check(t, []string{"renew", m.dir}, 64, "", "say whose")
	m.check(t, []string{"renew", "--client=c", "--ttl=x", m.dir}, 64, "", "want seconds")
	m.check(t, []string{"renew", "--client-file=/no/such/file", m.dir}, 66, "", "is missing; make it with")
	m.check(t, []string{"renew", "--client=c", m.dir}, 69, "", "stagefs mount")
	t.Setenv(envClient, "c")
	m.check(t, []string{"renew", m.dir}, 69, "", "stagefs mount")
	t.Setenv(envClient, "")
	m.check(t, []string{"renew", m.dir}, 64, "", envClient)
}
