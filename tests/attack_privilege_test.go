//go:build linux

package tests

import (
	"os"
	"testing"
)

// TestL3AttackPrivileges attacks L3: ftruncate(2) through a handle that was revoked
// takes no privileges away from the file.
func TestL3AttackPrivileges(t *testing.T) {
	m := mount(t)
	openDir(t, m.Back("D"))
	openFile(t, m.Back("D/tool"), "text")
	mustDo(t, os.Chmod(m.Back("D/tool"), 0o777|os.ModeSetuid|os.ModeSetgid))
	client, next := stranger(t), agent(t)
	client.mustCommand(m, "acquire D client=x ttl=1h")
	client.must("open", "w", m.At("D/tool"), "wronly")
	if s := m.Ctl("break D for the test"); s != "ok" {
		t.Fatal(s)
	}
	next.mustCommand(m, "acquire D client=y ttl=1h")
	before := digest(t, m.Back("D"))
	client.want("EBUSY", "ftruncate", "w", "0")
	client.want("EBUSY", "pwrite", "w", "x", "1", "0")
	if after := digest(t, m.Back("D")); after != before {
		t.Errorf("changed through a revoked handle:\n%s", diff(before, after))
	}
}
