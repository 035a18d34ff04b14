package transport

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The runtime's thread is found, and it alone rests for longer while there is enough for all.
func TestSysmon(t *testing.T) {
	var s sysmon
	for try := 0; s.tid == ""; try++ {
		if s.find(); try == 1000 {
			t.Fatal("the thread was not found")
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	s.procs = 12
	for _, test := range []struct {
		threads int
		want    string
	}{
		{0, slackCalm},
		{12 - elsewhere, slackCalm},
		{12 - elsewhere + 1, slackUsual},
		{1000, slackUsual},
		{1, slackCalm},
	} {
		s.suit(test.threads)
		b, err := os.ReadFile(slackFile(s.tid))
		if got := strings.TrimSpace(string(b)); err != nil || got != test.want {
			t.Errorf("with %d threads the slack is %q ns (%v), want %s", test.threads, got, err, test.want)
		}
	}
	// A thread that it has made rests as it does.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := strconv.Itoa(unix.Gettid())
	if err := setSlack(own, slackCalm); err != nil {
		t.Fatal(err)
	}
	s.made = 0
	s.suit(1)
	for tid, want := range map[string]string{own: slackUsual, s.tid: slackCalm} {
		if b, err := os.ReadFile(slackFile(tid)); err != nil || strings.TrimSpace(string(b)) != want {
			t.Errorf("then the slack of thread %s is %q ns (%v), want %s", tid, b, err, want)
		}
	}
}
