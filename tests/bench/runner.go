//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A runner measures, and gathers what it finds.
type runner struct {
	o    options
	kit  *kit
	talk io.Writer
	res  *Results
}

// rounds does as many rounds as were asked for and fit into the time.
func (r *runner) rounds(ctx context.Context, subjects []subject) error {
	if !r.wants(func(step) bool { return true }) {
		return nil
	}
	began, longest := time.Now(), time.Duration(0)
	for round := range r.o.rounds {
		if round > 0 && time.Since(began)+longest > r.o.budget {
			r.note("only %d rounds of %d fitted into %v", round, r.o.rounds, r.o.budget)
			return nil
		}
		start := time.Now()
		if err := r.round(ctx, round, subjects); err != nil {
			return err
		}
		longest = max(longest, time.Since(start))
		r.res.Rounds = round + 1
	}
	return nil
}

func (r *runner) note(format string, args ...any) {
	note := strings.NewReplacer("\n", "; ", r.kit.root, "{dir}").Replace(fmt.Sprintf(format, args...))
	fmt.Fprintln(r.talk, note)
	r.res.Notes = append(r.res.Notes, note)
}

// round serves everything anew, does all works on it, and stops it.
func (r *runner) round(ctx context.Context, round int, subjects []subject) (err error) {
	var bouts []*bout
	dir := filepath.Join(r.kit.root, fmt.Sprintf("round%d", round))
	serve := func(s subject, name string, states ...string) *instance {
		in, bad := s.serve(ctx, r.kit.root, filepath.Join(dir, name))
		if bad != nil {
			if ctx.Err() == nil {
				r.note("round %d: %v", round+1, bad)
			}
			if in != nil {
				in.stop()
			}
			return nil
		}
		if s.ours {
			r.res.transport(s.Name, in.transport())
		}
		for _, state := range states {
			bouts = append(bouts, &bout{instance: in, state: state, kit: r.kit})
		}
		return in
	}
	defer func() {
		for _, b := range bouts {
			if b.state == stateFree || b.state == stateCrowd {
				err = errors.Join(err, b.stop())
			}
		}
	}()
	for i := range subjects {
		s := subjects[(i+round)%len(subjects)]
		states := []string{stateFree}
		if s.main && r.o.states {
			states = append(states, stateHeld, stateParent)
		}
		serve(s, fmt.Sprint(i), states...)
		if s.main && r.o.states && r.wants(func(s step) bool { return s.states }) {
			if in := serve(s, stateCrowd, stateCrowd); in != nil {
				if bad := in.pull(r.kit.root, r.kit.size.crowd); bad != nil {
					bouts = bouts[:len(bouts)-1]
					r.note("round %d: the crowd: %v", round+1, errors.Join(bad, in.stop()))
				}
			}
		}
	}
	for i, w := range works() {
		began := time.Now()
		for turn := range w.turns(r.kit.size) {
			if err := r.work(ctx, round, turn, i, w, bouts); err != nil {
				return err
			}
		}
		if len(w.needed(r.o.rows.MatchString)) > 0 {
			fmt.Fprintf(r.talk, "round %d of %d: %s, %.0f s\n", round+1, r.o.rounds, w.name, time.Since(began).Seconds())
		}
	}
	for _, b := range bouts {
		if b.crowd != nil {
			err = errors.Join(err, b.crowded(r.kit.size.crowd))
		}
	}
	return errors.Join(err, ctx.Err())
}

// wants tells whether any of the steps that will be done is such a one.
func (r *runner) wants(such func(step) bool) bool {
	for _, w := range works() {
		if slices.ContainsFunc(w.needed(r.o.rows.MatchString), such) {
			return true
		}
	}
	return false
}

// work does the steps of a work, each on all bouts before the next. A bout
// that fails in one is left out of the later ones, which build on it.
func (r *runner) work(ctx context.Context, round, turn, place int, w work, bouts []*bout) error {
	bouts = slices.DeleteFunc(slices.Clone(bouts), func(b *bout) bool { return b.calls && !w.calls })
	broken := map[*bout]bool{}
	fail := func(b *bout, rows []string, err error) {
		broken[b] = true
		r.note("round %d: %s, %s, %s %q: %v", round+1, b.Name, b.state, w.name, rows, err)
	}
	for i, s := range w.needed(r.o.rows.MatchString) {
		if s.long && round >= r.kit.size.long {
			continue
		}
		for k := range bouts {
			b := bouts[(k+round+turn+place+i)%len(bouts)]
			if broken[b] || !s.states && b.state != stateFree || (s.long || s.narrow) && b.narrow {
				continue
			}
			if err := settle(r.kit.root, s.memory(r.kit.size)); err != nil {
				return err
			}
			var found []timing
			var err error
			if s.before != nil {
				err = s.before(ctx, b)
			}
			before := b.meter().read()
			if err == nil {
				found, err = s.run(ctx, b)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				fail(b, s.rows, err)
				continue
			}
			spent := b.meter().read().since(before)
			for n, row := range s.rows {
				if len(s.rows) > 1 {
					spent = found[n].spent
				}
				if r.o.rows.MatchString(row) {
					r.res.Samples = append(r.res.Samples, Sample{
						Row: row, Subject: b.Name, State: b.state, Round: round, Turn: turn,
						Seconds: found[n].took.Seconds(), Ops: found[n].ops, Best: found[n].best.Seconds(),
						Spent: spent,
					})
				}
			}
		}
	}
	for _, b := range bouts {
		if err := w.clear(b); err != nil {
			fail(b, []string{"clearing"}, err)
		}
	}
	return nil
}
