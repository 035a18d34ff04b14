//go:build linux

package main

import (
	"errors"
	"os/exec"
	"slices"
	"syscall"
)

// statusPanic is what the Go runtime exits with when a program crashes.
const statusPanic = 2

// crashed reports whether a daemon ended in a way that it did not choose.
func crashed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && (exit.ExitCode() < 0 || exit.ExitCode() == statusPanic)
}

// byStop reports whether a stop signal ended a daemon that could not listen to it
// just then.
func byStop(err error) bool { return bySignal(err, stopSignals()...) }

// bySignal reports whether one of these signals ended a daemon.
func bySignal(err error, signals ...syscall.Signal) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	ws, ok := exit.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && slices.Contains(signals, ws.Signal())
}

// statusUnmounted is what a supervised daemon exits with that was unmounted
// before it served: whoever did that wants no other one.
const statusUnmounted = 3

func unmountedEarly(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == statusUnmounted
}

// supervisedEnd passes on how the daemon ended. Why was said.
func supervisedEnd(err error) error {
	var exit *exec.ExitError
	var own *exitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &own): // it could not be started
		return err
	case !errors.As(err, &exit):
		return exitf(exitOS, "waiting for the daemon: %v", err)
	case exit.ExitCode() < 0:
		return &exitError{exitSignal + int(exit.Sys().(syscall.WaitStatus).Signal()), ""}
	}
	return &exitError{exit.ExitCode(), ""}
}
