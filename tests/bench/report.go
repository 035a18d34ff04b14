//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// report writes the results as aligned text.
func report(w io.Writer, r *Results) error {
	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	m := r.Machine
	fmt.Fprintf(t, "%s on %s: %d cores (%s), %d MiB, Linux %s, %s\n", r.Version, m.Filesystem, m.Cores, m.CPU, m.MemoryMiB, m.Kernel, m.Go)
	fmt.Fprintf(t, "%s: profile %s, %d rounds, %v; load before %s, after %s\n", r.Began.Format(time.RFC3339), r.Profile, r.Rounds,
		r.Ended.Sub(r.Began), r.LoadThen, r.LoadNow)
	for _, s := range r.Subjects {
		if s.Transport != "" {
			fmt.Fprintf(t, "%s gets its requests by %s\n", s.Name, s.Transport)
		}
	}
	reportRatios(t, r)
	reportBest(t, r)
	reportRequests(t, r)
	reportSpent(t, r)
	reportStates(t, r)
	reportMemory(t, r)
	reportMissed(t, r)
	if len(r.Notes) > 0 {
		fmt.Fprintf(t, "\nNotes\n%s\n", strings.Join(r.Notes, "\n"))
	}
	return t.Flush()
}

func reportRatios(w io.Writer, r *Results) {
	if len(r.Samples) == 0 {
		return
	}
	fmt.Fprint(w, "\nTime relative to the bare directory: median (smallest–largest)\n\nROW\tBARE")
	r.heads(w, "\tGOAL\tAHEAD")
	for _, row := range r.rows() {
		fmt.Fprintf(w, "%s\t%s", row, seconds(spreadOf(perOp(r.Samples, row, side{bareName, stateFree})).Median))
		for _, s := range r.Subjects[1:] {
			x, _ := r.ratio(row, s.Name, stateFree)
			fmt.Fprintf(w, "\t%s", cell(x.Spread))
			if r.ours(s) {
				fmt.Fprintf(w, "\t%s\t%s", verdict(x.Spread.Median, x.Limit), r.ahead(row, s))
			}
		}
		fmt.Fprintln(w)
	}
}

// heads ends a table's first line with a column for each subject, and further ones for a
// stagefs.
func (r *Results) heads(w io.Writer, ours string) {
	for _, s := range r.Subjects[1:] {
		fmt.Fprintf(w, "\t%s", s.Name)
		if r.ours(s) {
			fmt.Fprint(w, ours)
		}
	}
	fmt.Fprintln(w)
}

// behind are the peers that count, and are faster than a stagefs in a row.
// known tells whether there was any such peer.
func (r *Results) behind(row string, s subject) (peers []string, known bool) {
	ours, ok := r.ratio(row, s.Name, stateFree)
	for _, likes := range aheadOf(s.Transport) {
		for _, peer := range likes {
			if p, there := r.ratio(row, peer, stateFree); ok && there {
				known = true
				if ours.Spread.Median > p.Spread.Median {
					peers = append(peers, peer)
				}
				break
			}
		}
	}
	return peers, known
}

func (r *Results) ahead(row string, s subject) string {
	switch peers, known := r.behind(row, s); {
	case len(peers) > 0:
		return "behind " + strings.Join(peers, ", ")
	case known:
		return "yes"
	}
	return ""
}

// reportBest compares loops at their fastest: what to look at where the machine
// was not calm. The states are beside it.
func reportBest(w io.Writer, r *Results) {
	states := []string{stateHeld, stateParent, stateCrowd}
	lines := 0
	for _, row := range r.rows() {
		bare := bestOp(r.Samples, row, side{bareName, stateFree})
		if bare == 0 {
			continue
		}
		if lines++; lines == 1 {
			fmt.Fprint(w, "\nThe fastest stretch of the loops, relative to that on the bare directory; of states, to the free one\n\nROW\tBARE")
			for _, s := range r.Subjects[1:] {
				fmt.Fprintf(w, "\t%s", s.Name)
				if s.Name == oursName {
					fmt.Fprintf(w, "\tGOAL\tHELD\tPARENT\tCROWD")
				}
			}
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s\t%s", row, seconds(bare))
		for _, s := range r.Subjects[1:] {
			best := bestOp(r.Samples, row, side{s.Name, stateFree})
			fmt.Fprintf(w, "\t%s", known(best/bare))
			if s.Name == oursName {
				fmt.Fprintf(w, "\t%s", verdict(best/bare, r.limit(row, s.Name)))
				for _, state := range states {
					fmt.Fprintf(w, "\t%s", known(bestOp(r.Samples, row, side{s.Name, state})/max(best, 1e-12)))
				}
			}
		}
		fmt.Fprintln(w)
	}
}

func known(x float64) string {
	if x == 0 {
		return "-"
	}
	return short(x)
}

func cell(s Spread) string {
	if s.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%s (%s–%s)", short(s.Median), short(s.Min), short(s.Max))
}

// short has three digits or so.
func short(x float64) string {
	if x < 10 {
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.1f", x)
}

func seconds(s float64) string {
	switch {
	case s == 0:
		return "-"
	case s < 1e-3:
		return fmt.Sprintf("%.2f µs", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.1f ms", s*1e3)
	}
	return fmt.Sprintf("%.2f s", s)
}

func reportStates(w io.Writer, r *Results) {
	states := []string{stateHeld, stateParent, stateCrowd}
	lines := 0
	for _, row := range r.rows() {
		var cells []string
		found := false
		for _, state := range states {
			x, ok := r.ratio(row, oursName, state)
			found = found || ok
			cells = append(cells, cell(x.Spread), verdict(x.Spread.Median, x.Limit))
		}
		if !found {
			continue
		}
		if lines++; lines == 1 {
			fmt.Fprintf(w, "\nstagefs where locks are held, relative to stagefs on a free path\n\nROW\tHELD BY CALLER\t\tBY ITS PARENT\t\t%d OTHER LOCKS\n", profiles()[r.Profile].crowd)
		}
		fmt.Fprintf(w, "%s\t%s\n", row, strings.Join(cells, "\t"))
	}
}

func reportMemory(w io.Writer, r *Results) {
	if len(r.Memory) == 0 {
		return
	}
	fmt.Fprintf(w, "\nMemory (MiB) and descriptors of the daemon, %d files\n\nSUBJECT\tSTART\tWALKED\tPEAK\tFORGOT\tFDS\tWALKED\tFORGOT\tTIME\tGOAL\n", r.Memory[0].Files)
	mib := func(kib int64) float64 { return float64(kib) / 1024 }
	for _, m := range r.Memory {
		goal := ""
		if strings.HasPrefix(m.Subject, oursName) {
			goal = verdict(mib(m.Walked.RSS), memoryLimit)
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%d\t%d\t%d\t%s\t%s\n", m.Subject, mib(m.Start.RSS), mib(m.Walked.RSS), mib(m.Peak),
			mib(m.Forgot.RSS), m.Start.Descriptors, m.Walked.Descriptors, m.Forgot.Descriptors, m.WalkTook, goal)
	}
}

// reportMissed lists what missed its goal, worst first.
func reportMissed(w io.Writer, r *Results) {
	var missed []Ratio
	bounded := 0
	for _, x := range r.Ratios {
		if x.Limit == 0 {
			continue
		}
		bounded++
		if x.Spread.Median > x.Limit {
			missed = append(missed, x)
		}
	}
	if bounded == 0 {
		return
	}
	slices.SortStableFunc(missed, func(a, b Ratio) int {
		return cmp.Compare(b.Spread.Median/b.Limit, a.Spread.Median/a.Limit)
	})
	fmt.Fprintf(w, "\n%d of %d goals met; missed, worst first\n\n", bounded-len(missed), bounded)
	for _, x := range missed {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s of %s\tgoal %.3g\n", x.Row, x.Subject, x.State, cell(x.Spread), x.Base, x.Limit)
	}
}
