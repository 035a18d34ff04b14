package transport

import (
	"os"
	"strings"
	"testing"
)

// The runtime's thread is found, and rests for longer while there is enough for all.
func TestSysmon(t *testing.T) {
	s := findSysmon()
	if s.slack == "" {
		t.Fatal("the thread was not found")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	s.procs = 12
	for _, test := range []struct {
		threads int
		want    string
	}{
		{0, "5000000"},
		{12 - elsewhere, "5000000"},
		{12 - elsewhere + 1, "50000"},
		{1000, "50000"},
		{1, "5000000"},
	} {
		s.suit(test.threads)
		b, err := os.ReadFile(s.slack)
		if got := strings.TrimSpace(string(b)); err != nil || got != test.want {
			t.Errorf("with %d threads the slack is %q ns (%v), want %s", test.threads, got, err, test.want)
		}
	}
}
