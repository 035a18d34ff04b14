//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// callSteps are single system calls, by several processes in a directory each.
func callSteps(procs int, suffix string) []step {
	s := func(kind string, after map[string]int, prepares bool, rows ...string) step {
		for i := range rows {
			rows[i] += suffix
		}
		return step{rows: rows, prepares: prepares, states: true, run: func(ctx context.Context, b *bout) ([]timing, error) {
			return b.loops(ctx, procs, kind, after)
		}}
	}
	keeps := func(prefix string) map[string]int { return map[string]int{prefix: 1} }
	gone := map[string]int{}
	return []step{
		s("create", keeps("f"), true, "create"),
		s("stat", keeps("f"), false, "stat warm"),
		s("missing", keeps("f"), false, "missing again"),
		s("statfs", keeps("f"), false, "statfs"),
		s("open", keeps("f"), false, "open+close"),
		s("chmod", keeps("f"), false, "chmod"),
		s("rename", keeps("g"), true, "rename"),
		s("unlink", gone, true, "unlink"),
		s("mkdir", gone, false, "mkdir", "rmdir"),
		s("write4k", keeps("w"), true, "create+write 4K"),
		s("read4k", keeps("w"), false, "open+read 4K"),
	}
}

// procPlaces are where several processes work.
func procPlaces(procs int) []string {
	var all []string
	for i := range procs {
		all = append(all, procPlace(procs, i))
	}
	return all
}

// procPlace is where one of several processes works.
func procPlace(procs, i int) string { return fmt.Sprintf("p%dof%d", i+1, procs) }

// lockSteps are acquisitions and releases on a directory that is free; which
// other state could there be.
func lockSteps() []step {
	s := func(kind, row string) step {
		return step{rows: []string{row}, run: func(ctx context.Context, b *bout) ([]timing, error) {
			return runLoops(ctx, b.kit.root, []job{{Kind: kind, Dir: b.path(b.state, "locks"), N: b.kit.size.cycles}})
		}}
	}
	return []step{
		s("excl", "lock O_EXCL"),
		s("link", "lock link"),
		s("lockdir", "lock mkdir"),
		s("flock", "lock flock"),
		s("fcntl", "lock fcntl"),
	}
}

// loops runs a loop in as many processes, and looks at what it left: as many
// names as it did calls for each prefix.
func (b *bout) loops(ctx context.Context, procs int, kind string, after map[string]int) ([]timing, error) {
	n := max(b.kit.size.calls/procs, 1)
	var jobs []job
	for i := range procs {
		jobs = append(jobs, job{Kind: kind, Dir: b.path(b.state, procPlace(procs, i)), N: n, Hold: b.hold()})
	}
	if procs == 1 { // of several nobody knows whose a request is
		jobs[0].Meter = b.meter()
	}
	t, err := runLoops(ctx, b.kit.root, jobs)
	if err != nil {
		return nil, err
	}
	for i := range procs {
		entries, err := os.ReadDir(b.under(b.state, procPlace(procs, i)))
		if err != nil {
			return nil, err
		}
		found := map[string]int{}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), lockName) {
				found[e.Name()[:1]]++
			}
		}
		for prefix, per := range after {
			if found[prefix] != per*n {
				return nil, fmt.Errorf("%s left %d names with %s, not %d", kind, found[prefix], prefix, per*n)
			}
			delete(found, prefix)
		}
		if len(found) > 0 {
			return nil, fmt.Errorf("%s left names that should be gone: %v", kind, found)
		}
	}
	return t, nil
}
