//go:build linux

package main

import (
	"context"
	"time"
)

// A step measures one or more rows, on one instance in one state.
type step struct {
	rows     []string
	prepares bool // later steps of the work need what it leaves
	cleans   bool // removes what the earlier steps left
	states   bool // measured in all states
	narrow   bool // left out of narrow subjects
	long     bool // that too, and of the later rounds
	run      func(context.Context, *bout) ([]timing, error)
}

// A timing is one row's part of what a step found.
type timing struct {
	took time.Duration
	ops  int64
	best time.Duration // of one operation in the fastest stretch of a loop
}

// A work is steps on the same directory, in order.
type work struct {
	name  string
	steps []step
}

// A bout is a step on its way: where, and how much of it.
type bout struct {
	*instance
	state string
	kit   *kit
}

func works() []work {
	return []work{
		{"data", dataSteps()},
		{"calls", callSteps(1, "")},
		{"calls of four", callSteps(workers, " x4")},
		{"locks", lockSteps()},
		{"tree", treeSteps()},
		{"git", gitSteps()},
		{"build", buildSteps()},
	}
}

// needed are the steps of a work that rows ask for: those that measure one, and
// those that prepare for a later one that does.
func (w work) needed(wanted func(row string) bool) []step {
	var out []step
	last := -1
	for i, s := range w.steps {
		for _, row := range s.rows {
			if wanted(row) {
				last = i
			}
		}
	}
	for i, s := range w.steps {
		keep := last >= 0 && (s.cleans || s.prepares && i < last)
		for _, row := range s.rows {
			keep = keep || wanted(row)
		}
		if keep {
			out = append(out, s)
		}
	}
	return out
}

// hold is what a job must do about the lock in the bout's state.
func (b *bout) hold() string {
	if b.state == stateHeld || b.state == stateParent {
		return b.state
	}
	return ""
}

func one(d time.Duration, err error) ([]timing, error) { return []timing{{took: d, ops: 1}}, err }
