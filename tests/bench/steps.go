//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
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

	before func(context.Context, *bout) error // fills or empties the caches; nil: nothing to do
	run    func(context.Context, *bout) ([]timing, error)
}

// A timing is one row's part of what a step found.
type timing struct {
	took time.Duration
	ops  int64
	best time.Duration // of one operation in the fastest stretch of a loop

	spent Spent // of the daemon, if a loop has read it
}

// A work is steps on the same directory, in order.
type work struct {
	name  string
	steps []step
	again []string // if any, its steps can be done again when these places are empty
	calls bool     // single calls on files
}

// turns is how often a work is done in a round. Single calls are over in an
// instant: whoever else has the disk in just that would have too much say.
func (w work) turns(z size) int {
	if w.again == nil {
		return 1
	}
	return z.turns
}

// clear empties the places of a work.
func (w work) clear(b *bout) error {
	for _, place := range w.again {
		dir := b.path(b.state, place)
		left, err := os.ReadDir(dir)
		for _, e := range left {
			// A dead client's lock file goes by itself.
			if bad := os.Remove(filepath.Join(dir, e.Name())); !errors.Is(bad, os.ErrNotExist) {
				err = errors.Join(err, bad)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// A bout is a step on its way: where, and how much of it.
type bout struct {
	*instance
	state string
	kit   *kit
}

func works() []work {
	return []work{
		{name: "data", steps: dataSteps()},
		{name: "calls", steps: callSteps(1, ""), again: procPlaces(1), calls: true},
		{name: "calls of four", steps: callSteps(workers, atOnce), again: procPlaces(workers), calls: true},
		{name: "locks", steps: lockSteps(), again: []string{"locks"}},
		{name: "tree", steps: treeSteps()},
		{name: "git", steps: gitSteps()},
		{name: "build", steps: buildSteps()},
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
