package transport

import (
	"testing"

	"github.com/stagefs/stagefs/lockstate/procid"
)

// A signal counts that would end the wait of this thread, and no other.
func TestPendingSignal(t *testing.T) {
	status := func(threads, own, shared, blocked string) procid.Status {
		return procid.Status("Name:\tx\nThreads:\t" + threads + "\nSigQ:\t1/9\nSigPnd:\t" + own + "\nShdPnd:\t" + shared + "\nSigBlk:\t" + blocked + "\n")
	}
	for _, tt := range []struct {
		name   string
		status procid.Status
		want   bool
	}{
		{"none", status("1", "0000000000000000", "0000000000000000", "0000000000000000"), false},
		{"killed", status("4", "0000000000000100", "0000000000000000", "0000000000000000"), true},
		{"killed process", status("4", "0000000000000000", "0000000000000100", "0000000000000000"), true},
		{"alarm", status("1", "0000000000000000", "0000000000002000", "0000000000000000"), true},
		{"alarm, blocked", status("1", "0000000000000000", "0000000000002000", "0000000000002000"), false},
		{"alarm of another thread", status("2", "0000000000000000", "0000000000002000", "0000000000000000"), false},
		{"own signal", status("2", "0000000000002000", "0000000000000000", "0000000000000000"), true},
		{"gone", "", false},
	} {
		if got := pending(tt.status); got != tt.want {
			t.Errorf("%s: pending = %v, want %v", tt.name, got, tt.want)
		}
	}
}
