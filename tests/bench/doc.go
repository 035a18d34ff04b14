//go:build linux

// Command bench measures what a stagefs mount costs, beside the bare directory
// and other FUSE filesystems.
//
// # Terms
//
//	subject   what serves the directory: bare, stagefs, loopback, bindfs …
//	state     who holds the directory that is worked in: free, held, parent, crowd
//	work      a sequence of steps on one directory, such as those on a tree
//	step      one run on one subject, which gives the samples of one or more rows
//	row       a line of the result, such as "create x4"
//	round     each step once on each subject, in an order that rotates
//
// # What is compared
//
// A ratio is the time on a subject over the time on the bare directory of the
// same round; what is told is the median over the rounds, with the smallest and
// the largest. Each round starts every subject anew on fresh directories of the
// same filesystem. What is dirty is synced before a step, never inside of the
// time taken, and memory is made ready (settle.go). The clients are the same
// processes for all subjects: tools are run by exec from a process that waits
// for its sign, so that no fork is measured, and the loops of single system
// calls make them raw.
//
// # What is checked
//
// Each step counts what it did: names, bytes, lines. One that did less fails,
// and has no sample.
//
// # What is left behind
//
// Nothing: a janitor, which outlives the benchmark also if that is killed,
// unmounts, kills and removes all that belongs to the run.
package main
