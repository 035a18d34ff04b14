//go:build linux

package main

import (
	"runtime"
	"sync"
)

// spareThreads sees to it that this process has n threads that it does not need now. The
// runtime keeps them for when it needs one, and ends the process if it gets none then:
// as where a build has made all the processes that a container, or a unit, may have.
func spareThreads(n int) {
	var made, over sync.WaitGroup
	release := make(chan struct{})
	made.Add(n)
	for range n {
		over.Go(func() {
			runtime.LockOSThread() // so each waits in one of its own
			defer runtime.UnlockOSThread()
			made.Done()
			<-release
		})
	}
	made.Wait()
	close(release)
	over.Wait()
}
