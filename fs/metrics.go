package fs

import (
	"bytes"
	"fmt"
	"maps"
	"runtime"
	"slices"
)

// showMetrics tells the state in Prometheus' text format.
func (fs *FS) showMetrics() []byte {
	var b bytes.Buffer
	head := func(name, kind, help string) {
		fmt.Fprintf(&b, "# HELP stagefs_%s %s\n# TYPE stagefs_%s %s\n", name, help, name, kind)
	}
	gauge := func(name, help string, v int) {
		head(name, "gauge", help)
		fmt.Fprintf(&b, "stagefs_%s %d\n", name, v)
	}
	s := fs.table.Stats()
	gauge("locks", "Locks in the table.", fs.table.Len())
	gauge("waiters", "Requests that wait for a lock.", fs.waits.len())
	gauge("nodes", "Inodes that the kernel knows.", fs.nodes.len())
	gauge("handles", "Open files and directories.", fs.handles.len())
	gauge("lingering", "Closed files that may still be mapped writable.", fs.linger.len())
	yes := func(is bool) int {
		if is {
			return 1
		}
		return 0
	}
	gauge("passthrough", "Whether the kernel reads and writes files of the backing itself.", yes(fs.pass.on.Load()))
	gauge("state_writable", "Whether the state can be written: if not, new locks would not outlive the daemon, or none can be had.", yes(fs.unwritable() == nil))
	gauge("goroutines", "Goroutines of the daemon.", runtime.NumGoroutine())

	head("acquisitions_total", "counter", "Locks taken, by protocol.")
	for _, k := range slices.Sorted(maps.Keys(s.Acquired)) {
		fmt.Fprintf(&b, "stagefs_acquisitions_total{protocol=%q} %d\n", k, s.Acquired[k])
	}
	head("releases_total", "counter", "Locks ended, by reason.")
	for _, k := range slices.Sorted(maps.Keys(s.Ended)) {
		fmt.Fprintf(&b, "stagefs_releases_total{reason=%q} %d\n", string(k), s.Ended[k])
	}
	head("crashes_total", "counter", "Contents of crashed owners that were not kept, by what became of them.")
	for _, k := range slices.Sorted(maps.Keys(s.Cleared)) {
		fmt.Fprintf(&b, "stagefs_crashes_total{policy=%q} %d\n", k, s.Cleared[k])
	}
	head("handovers_total", "counter", "Locks passed to the owner's parent.")
	fmt.Fprintf(&b, "stagefs_handovers_total %d\n", s.HandedOver)

	fs.denials.mu.Lock()
	counts := maps.Clone(fs.denials.counts)
	fs.denials.mu.Unlock()
	head("denials_total", "counter", "Requests refused, by operation.")
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "stagefs_denials_total{op=%q} %d\n", k, counts[k])
	}

	head("read_ahead_directories_total", "counter", "Directories read from a slow disk before somebody who walks a tree listed them.")
	fmt.Fprintf(&b, "stagefs_read_ahead_directories_total %d\n", fs.ahead.total.Load())

	head("requests_total", "counter", "Requests of the kernel, by kind, since this daemon began.")
	requests := fs.kernel.Requests()
	for _, k := range slices.Sorted(maps.Keys(requests)) {
		fmt.Fprintf(&b, "stagefs_requests_total{op=%q} %d\n", k, requests[k])
	}
	return b.Bytes()
}
