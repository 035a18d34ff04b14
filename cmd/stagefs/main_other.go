//go:build !linux

package main

import (
	"fmt"
	"os"
	"runtime"
)

// main says plainly that this is no place for stagefs.
func main() {
	// Who a process is, and FUSE's raw protocol: both are Linux's own here.
	fmt.Fprintf(os.Stderr, "stagefs: works on Linux only, this is %s\n", runtime.GOOS)
	os.Exit(69) // EX_UNAVAILABLE
}
