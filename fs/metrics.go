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
	gauge("handles", "Open files.", fs.handles.len())
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

	count := func(name, help string, v uint64) {
		head(name, "counter", help)
		fmt.Fprintf(&b, "stagefs_%s %d\n", name, v)
	}
	countBy := func(name, label, help string, of map[string]uint64) {
		head(name, "counter", help)
		for _, k := range slices.Sorted(maps.Keys(of)) {
			fmt.Fprintf(&b, "stagefs_%s{%s=%q} %d\n", name, label, k, of[k])
		}
	}
	ended := make(map[string]uint64)
	for reason, n := range s.Ended {
		ended[string(reason)] = n
	}
	fs.denials.mu.Lock()
	denied := maps.Clone(fs.denials.counts)
	fs.denials.mu.Unlock()
	countBy("acquisitions_total", "protocol", "Locks taken, by protocol.", s.Acquired)
	countBy("releases_total", "reason", "Locks ended, by reason.", ended)
	countBy("crashes_total", "policy", "Contents of crashed owners that were not kept, by what became of them.", s.Cleared)
	count("handovers_total", "Locks passed to the owner's parent.", s.HandedOver)
	countBy("denials_total", "op", "Requests refused, by operation.", denied)
	count("read_ahead_directories_total", "Directories read from a slow disk before somebody who walks a tree listed them.", fs.ahead.total.Load())
	countBy("requests_total", "op", "Requests of the kernel, by kind, since this daemon began.", fs.kernel.Requests())
	return b.Bytes()
}
