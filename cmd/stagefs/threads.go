//go:build linux

package main

import (
	"runtime"
	"sync"
)

// keepThreads has this process, which has next to nothing to do, get by with few threads,
// and makes them now. The runtime ends the process if it gets none when it needs one: as
// where a build has made all the processes that a container, or a unit, may have.
func keepThreads() {
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), 2))
	spareThreads(8)
}

// spareThreads sees to it that this process has n threads that it does not need now, which
// the runtime keeps.
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
