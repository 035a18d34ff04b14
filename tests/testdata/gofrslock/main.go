//go:build linux

// Gofrslock takes a lock with github.com/gofrs/flock, for the tests.
//
//	gofrslock try|wait|rtry|rwait FILE
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/gofrs/flock"
)

func main() {
	l := flock.New(os.Args[2])
	ok, err := true, error(nil)
	switch os.Args[1] {
	case "try":
		ok, err = l.TryLock()
	case "wait":
		err = l.Lock()
	case "rtry":
		ok, err = l.TryRLock()
	case "rwait":
		err = l.RLock()
	}
	if err != nil || !ok {
		fmt.Println("locked:", ok, err)
		os.Exit(1)
	}
	fmt.Println("acquired")
	io.Copy(io.Discard, os.Stdin)
	if err := l.Unlock(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("released")
}
