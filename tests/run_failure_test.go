//go:build linux

package tests

import (
	"os"
	"strings"
	"testing"
)

// TestR7Run: what `run` made is kept on success, and on failure, or when run is
// killed, treated as was said; what was there before stays.
func TestR7Run(t *testing.T) {
	m := mount(t)
	content := func(dir string) string {
		entries, _ := os.ReadDir(m.Back(dir))
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " ")
	}
	there := func(dir string) bool { return exists(m.Back(dir)) }
	script := func(status string) []string {
		return []string{"sh", "-c", `touch "$STAGEFS_LOCK/made"; exit ` + status}
	}
	openDir(t, m.Back("old"))
	mustDo(t, os.WriteFile(m.Back("old/before"), nil, 0o666))

	m.wantStatus(0, "", append([]string{"run", "--destroy-on-failure", m.At("old")}, script("0")...)...)
	if got := content("old"); got != "before made" {
		t.Errorf("after a success: %q, want all of it", got)
	}
	m.wantStatus(0, "", "run", m.At("old"), "rm", m.At("old/made"))
	m.wantStatus(3, "", append([]string{"run", m.At("old")}, script("3")...)...)
	if got := content("old"); got != "before made" {
		t.Errorf("after a failure without an option: %q, want all of it", got)
	}
	m.wantStatus(0, "", "run", m.At("old"), "rm", m.At("old/made"))
	m.wantStatus(3, "", append([]string{"run", "--destroy-on-failure", m.At("old")}, script("3")...)...)
	if got := content("old"); got != "before" {
		t.Errorf("after a failure with --destroy-on-failure: %q, want what was there before", got)
	}
	m.wantStatus(3, "", append([]string{"run", "--destroy-on-failure", m.At("new/v1")}, script("3")...)...)
	if there("new/v1") {
		t.Errorf("a new directory is left after the failure, with %q", content("new/v1"))
	}
	m.wantStatus(143, "", "run", "--on-crash=quarantine", m.At("new/v2"), "sh", "-c", `touch "$STAGEFS_LOCK/made"; kill -TERM $$`)
	if there("new/v2/made") {
		t.Error("what was to be quarantined is there")
	}

	// A retry finds the way free, and its success is kept.
	m.wantStatus(0, "", append([]string{"run", "-n", "--create-once", "--destroy-on-failure", m.At("new/v1")}, script("0")...)...)
	if got := content("new/v1"); got != "made" {
		t.Errorf("after the retry: %q", got)
	}

	// kill -9 of run itself.
	a, p := m.runAgent("--destroy-on-failure", m.At("new/v3"))
	a.must("put", m.At("new/v3/made"), "", "creat")
	p.Kill()
	eventually(t, "the content is destroyed", func() bool { return !there("new/v3") })

	// Released and destroyed by command, and by the Go client.
	b := agent(t)
	b.must("mkdir", m.At("new/v4"))
	b.must("put", m.At("new/v4/made"), "", "creat")
	b.must("sh", stagefsBin()+" release --destroy "+m.At("new/v4"))
	b.client("", "", "acquire", "l", m.At("new/v5"), "A", "", "make")
	b.must("put", m.At("new/v5/made"), "", "creat")
	b.client("ok", "", "release", "l", "destroy")
	for _, dir := range []string{"new/v4", "new/v5"} {
		if there(dir) {
			t.Errorf("%s is left after its destruction, with %q", dir, content(dir))
		}
	}
}
