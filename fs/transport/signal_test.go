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

// A signal to a process of several threads is its first thread's, unless that blocks it.
func TestSharedSignal(t *testing.T) {
	status := func(pid, shared, blocked string) procid.Status {
		return procid.Status("Name:\tx\nTgid:\t7\nPid:\t" + pid + "\nThreads:\t2\nSigPnd:\t0000000000000000\nShdPnd:\t" + shared + "\nSigBlk:\t" + blocked + "\n")
	}
	for _, tt := range []struct {
		name   string
		status procid.Status
		want   bool
	}{
		{"none", status("7", "0000000000000000", "0000000000000000"), false},
		{"first thread", status("7", "0000000000002000", "0000000000000000"), true},
		{"first thread, blocked", status("7", "0000000000002000", "0000000000002000"), false},
		{"another thread", status("8", "0000000000002000", "0000000000000000"), false},
		{"a child's end", status("7", "0000000000010000", "0000000000000000"), false},
		{"gone", "", false},
	} {
		if got := shared(tt.status); got != tt.want {
			t.Errorf("%s: shared = %v, want %v", tt.name, got, tt.want)
		}
	}
}
