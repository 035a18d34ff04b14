//go:build linux

package main

import (
	"context"
	"os"
)

// main is in run: it can be tested.
func main() {
	os.Exit(run(context.Background(), os.Args, os.Stdin, os.Stdout, os.Stderr))
}
