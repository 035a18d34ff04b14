//go:build linux

// Command bench measures what a stagefs mount costs, beside the bare directory
// and other FUSE filesystems.
//
// # Terms
//
//	subject   what serves the directory: bare, stagefs, loopback, bindfs …
//	state     who holds the directory of the work: nobody (free), the caller (held),
//	          the caller's parent (parent), or nobody, while others hold 100,000
//	          other directories (crowd)
//	work      a sequence of steps on one directory, such as those on a tree
//	step      one run on one subject, which gives the samples of one or more rows
//	row       a line of the result, such as "create x4"
//	turn      each step of a work once on each subject, in an order that rotates
//	round     a turn of each work, or some of those with single calls
//
// # What is compared
//
// A ratio is the time on a subject over the time on the bare directory of the
// same turn; the report has the median of all turns, with the smallest and the
// largest. Each round mounts every subject anew on fresh directories of the
// same filesystem. Dirty pages are synced before a step, never within the time
// that is taken, and memory is made ready (settle.go). The clients are the same
// programs for all subjects: tools are started by exec in a process that waits
// for a signal to begin, so that no fork is measured, and loops of single system
// calls make raw ones.
//
// # What is checked
//
// Each step counts what it did: names, bytes, lines. One that did less than it
// should fails, and gives no sample.
//
// # What is left behind
//
// Nothing: a janitor, which outlives the benchmark also if that is killed,
// unmounts, kills and removes all that belongs to the run.
package main
